"""inventory_check with specs from files."""

from __future__ import annotations

import pytest

SPEC = """
argument_specs:
  main:
    options:
      drafter_source: {type: path, required: true, description: The weights.}
      drafter_verify: {type: str, choices: [stamp, full]}
"""


@pytest.fixture
def specs(tmp_path):
    for role, text in (("drafter", SPEC), ("rollout", "argument_specs: {main: {options: {}}}")):
        meta = tmp_path / "roles" / role / "meta"
        meta.mkdir(parents=True)
        (meta / "argument_specs.yml").write_text(text)
    return [str(tmp_path / "roles/*/meta/argument_specs.yml")]


def test_right(run_module, specs):
    values = {"drafter_source": "/m", "drafter_verify": "full"}
    args = {"group": "g", "hosts": {"a": values, "b": values}, "specs": specs}
    args["names"] = {host: list(values) for host in ("a", "b")}
    for check in (False, True):
        result = run_module("inventory_check", args, check=check)
        assert result["changed"] is False
        assert result["hosts_checked"] == 2
        assert result["variables_known"] == 2


def test_all_faults_in_one_message(run_module, specs):
    hosts = {"a": {"drafter_verify": "ful"}, "b": {"drafter_source": "/m", "rollout_x": 1}}
    names = {host: list(values) for host, values in hosts.items()}
    result = run_module(
        "inventory_check", {"group": "g", "hosts": hosts, "names": names, "specs": specs}, check=True
    )
    assert result["failed"]
    lines = result["msg"].splitlines()
    assert lines[0] == "The inventory has 3 faults; no host was touched."
    assert len(lines) == 4
    assert lines[-1].startswith("- b: rollout_x is not a variable of this roll-out.")


@pytest.mark.parametrize("text", ["- not\n- specs\n", "a: [", "{}", ""])
def test_a_spec_that_can_not_be_read_is_named(run_module, tmp_path, specs, text):
    broken = tmp_path / "roles/drafter/meta/argument_specs.yml"
    broken.write_text(text)
    result = run_module("inventory_check", {"group": "g", "hosts": {}, "names": {}, "specs": specs})
    assert result["failed"]
    assert str(broken) in result["msg"]


def test_a_pattern_that_matches_nothing_is_named(run_module, tmp_path):
    pattern = str(tmp_path / "nowhere/*/meta/argument_specs.yml")
    result = run_module("inventory_check", {"group": "g", "hosts": {}, "names": {}, "specs": [pattern]})
    assert result["failed"]
    assert pattern in result["msg"]
