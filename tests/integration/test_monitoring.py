"""The alert rules through Prometheus' own promtool, from Debian's package; without it the test skips, in CI it fails."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from .conftest import ROOT

RULES = ROOT / "examples/monitoring/vllm-dflash.rules.yml"
TESTS = ROOT / "tests/monitoring/vllm-dflash.test.yml"


def fetch(folder: Path) -> Path:
    """promtool out of Debian's package, which is not installed. apt checks it against the archive's signed index."""
    folder.mkdir(parents=True, exist_ok=True)
    download = ["apt-get", "-q", "download", "prometheus"]
    if subprocess.run(download, cwd=folder, capture_output=True, check=False).returncode:
        subprocess.run(["apt-get", "-q", "update"], capture_output=True, check=True, timeout=300)
        subprocess.run(download, cwd=folder, capture_output=True, check=True, timeout=300)
    (package,) = folder.glob("prometheus_*.deb")
    content = subprocess.run(["dpkg-deb", "--fsys-tarfile", package], capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", folder, "./usr/bin/promtool"], input=content.stdout, check=True)
    return folder / "usr/bin/promtool"


@pytest.fixture(scope="module")
def promtool(tmp_path_factory) -> str:
    """The program; 5 s where it has to be fetched."""
    found = shutil.which("promtool")
    if found:
        return found
    try:
        return str(fetch(tmp_path_factory.mktemp("prometheus")))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        reason = f"no promtool here, and Debian's package prometheus can't be had: {error}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


def said(promtool: str, *arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_rules_and_scrape_config_are_what_prometheus_reads(promtool):
    status, text = said(promtool, "check", "rules", RULES)
    assert status == 0, text
    status, text = said(promtool, "check", "config", RULES.with_name("prometheus.yml"))
    assert status == 0, text


def test_every_alert_fires_when_it_should_and_not_otherwise(promtool):
    status, text = said(promtool, "test", "rules", TESTS)
    assert status == 0, text
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    firing = {
        case["alertname"]
        for test in yaml.safe_load(TESTS.read_text())["tests"]
        for case in test.get("alert_rule_test", [])
        if case["exp_alerts"]
    }
    assert firing == {rule["alert"] for rule in rules if "alert" in rule}


@pytest.mark.parametrize(
    "alert", [rule["alert"] for rule in yaml.safe_load(RULES.read_text())["groups"][1]["rules"]]
)
def test_a_rule_that_never_fires_fails_its_test(promtool, tmp_path, alert):
    rules = yaml.safe_load(RULES.read_text())
    (rule,) = [rule for rule in rules["groups"][1]["rules"] if rule["alert"] == alert]
    rule["expr"] = f"({rule['expr']}) and vector(1) == 2"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))
    tests = {**yaml.safe_load(TESTS.read_text()), "rule_files": ["rules.yml"]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(tests))
    status, text = said(promtool, "test", "rules", tmp_path / "test.yml")
    assert status != 0
    assert alert in text
