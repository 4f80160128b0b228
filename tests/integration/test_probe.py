"""The host's probe on a booted host: its timer, its sandbox, a dead engine behind a health page, and its end.

The engine is simulated; its death is the fault `completions_500`, which leaves /health as it was.
"""

from __future__ import annotations

import json
import re

import pytest

from .conftest import RUN, WORKER, Fleet, fresh_hosts

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

FILE = "/var/lib/prometheus/node-exporter/llm_probe.prom"
KEY = "marker-probe-4e1b"
PROBED = {"switchover_probe_interval": "1s", "vllm_service_api_key": KEY}


@pytest.fixture(scope="module")
def fleet(bootable, small_drafter):
    """One fresh host for the whole file: its tests are the steps of one story, in order."""
    with fresh_hosts(f"probe{WORKER}", 1, "--layer", "--small") as hosts:
        yield Fleet(hosts, small_drafter)


def metrics(host) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in re.findall(r"^(\w+)\{.*\} (\S+)$", host.run(f"cat {FILE}"), re.MULTILINE)
    }


def test_the_timer_asks_with_the_key_and_the_page_is_written(fleet):
    (host,) = fleet.hosts
    play = fleet.play(**PROBED)
    assert play.status == 0, play.output
    host.wait(f"grep -q 'llm_probe_success.* 1$' {FILE}", 30)
    found = metrics(host)
    assert (found["llm_probe_health"], found["llm_probe_switching"]) == (1, 0)
    assert host.run(f"stat -c '%a %U' {FILE}") == "644 root"
    before = found["llm_probe_time_seconds"]
    host.wait(f"! grep -q 'time_seconds.* {before}$' {FILE}", 30)
    records = RUN / fleet.hosts[0].bed / "records"
    record = json.loads((records / f"{host.name}.json").read_text())
    assert record["drafter"]["provenance"].keys() >= {"hidden_size", "block_size"}
    (page,) = records.glob("roll-out-*.html")
    text = page.read_text()
    assert str(page) in " ".join(play.output.split())
    for wanted in (
        host.name,
        record["new"]["unit"],
        f"{record['acceptance']['sets']['short']['length']:.2f}",
    ):
        assert wanted in text
    assert KEY not in text


def test_the_second_run_changes_nothing(fleet):
    play = fleet.play(**PROBED)
    assert play.status == 0, play.output
    assert {host: counts["changed"] for host, counts in play.recap.items() if counts["changed"]} == {}, (
        play.output
    )
    assert len(list((RUN / fleet.hosts[0].bed / "records").glob("*.html"))) == 1


def test_a_dead_engine_behind_a_health_page_is_seen(fleet):
    (host,) = fleet.hosts
    host.put(json.dumps({"engine": {"completions_500": True}}), "/etc/simulated-gpu/faults.json")
    host.wait(f"grep -q 'llm_probe_success.* 0$' {FILE}", 30)
    assert metrics(host)["llm_probe_health"] == 1
    log = host.run("journalctl -u llm-probe --no-pager -o cat")
    assert "does not serve: /v1/completions answered 500" in log
    assert KEY not in log
    host.run("rm /etc/simulated-gpu/faults.json")
    host.wait(f"grep -q 'llm_probe_success.* 1$' {FILE}", 30)


def test_it_can_do_nothing_but_write_its_file(fleet):
    (host,) = fleet.hosts
    level = host.run("systemd-analyze security llm-probe.service | tail -n 1")
    assert float(re.search(r": ([\d.]+) ", level)[1]) <= 2.5, level
    assert host.run("ls -A /var/lib/prometheus/node-exporter") == "llm_probe.prom", (
        "no temporary file is left"
    )


def test_without_an_interval_it_ends(fleet):
    (host,) = fleet.hosts
    play = fleet.play("playbooks/stage.yml", vllm_service_api_key=KEY)
    assert play.status == 0, play.output
    assert host.show("llm-probe.timer", "ActiveState") == "inactive"
    assert host.run("ls /etc/systemd/system/timers.target.wants | grep -c llm-probe", check=False) == "0"
