"""switchover with a simulated systemctl, whose start of the program writes a simulated record."""

from __future__ import annotations

import json
import os
import sys

import pytest

OLD = {"name": "old", "unit": "sglang.service", "port": 9}
NEW = {"name": "new", "unit": "vllm-dflash@a.service", "port": 9}

SYSTEMCTL = """#!{python}
import json, os, sys
arguments, state = sys.argv[1:], {state!r}
program = arguments[-1] == "llm-switchover.service"
if arguments[0] == "show":
    print("LoadState={load}")
    print("ActiveState=" + ("inactive" if program else "active"))
elif arguments[0] == "start" and program and {end!r}:
    pending = os.path.join(state, "switch", "pending.json")
    order = json.load(open(pending))
    states = [{{"state": "PREPARED", "at": "noon", "boot_s": 0}}]
    states.append({{"state": {end!r}, "at": "noon", "boot_s": 1}})
    record = {{**order, "state": {end!r}, "states": states,
              "cause": "In NEW_STARTED: it exited.", "remedy": "mend it", "log_tail": ["simulated log line"],
              "outage_s": 12.5, "old_class": "proved", "killed": []}}
    json.dump(record, open(os.path.join(state, "switch", "record.json"), "w"))
    os.unlink(pending)
"""


@pytest.fixture
def host(tmp_path):
    """host(end of the simulated switch) -> (arguments for the module, environment, state directory)."""

    def prepare(end=None, load="loaded"):
        state = tmp_path / "state"
        for name, text in (
            ("systemctl", SYSTEMCTL.format(python=sys.executable, state=str(state), end=end, load=load)),
            ("journalctl", "#!/bin/sh\necho loading weights\n"),
            ("nvidia-smi", "#!/bin/sh\nexit 9\n"),
        ):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        arguments = {"old": OLD, "new": NEW, "state_dir": str(state), "id": "order-1"}
        return arguments, {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, state

    return prepare


def test_confirmed(run_module, host):
    arguments, env, state = host("CONFIRMED")
    result = run_module("switchover", arguments, env=env)
    assert result["outcome"] == "CONFIRMED"
    assert result["finished"] is True
    assert result["changed"] is True
    assert result["outage_s"] == 12.5
    assert [(row["state"], row["seconds"]) for row in result["states"]] == [
        ("PREPARED", 1.0),
        ("CONFIRMED", None),
    ]
    order = result["record"]
    assert order["new"] == {
        "api_key_file": None,
        **NEW, "host": "127.0.0.1", "model_id": None, "metrics": False, "chat": False, "tools": False,
        "ready_timeout_s": 1200, "stop_timeout_s": 180, "release": None, "runtime": "systemd", "restart_policy": None,
    }  # fmt: skip
    # The same order again, as after a lost connection: its outcome, and nothing is handed over.
    (state / "switch" / "record.json").touch()
    again = run_module("switchover", arguments, env=host()[1])
    assert again["outcome"] == "CONFIRMED"
    assert not (state / "switch" / "pending.json").exists()


def test_an_order_that_ended_and_could_not_be_taken_away_is_no_obstacle(run_module, host):
    arguments, env, state = host("CONFIRMED")
    run_module("switchover", arguments, env=env)
    record = json.loads((state / "switch" / "record.json").read_text())
    (state / "switch" / "pending.json").write_text(json.dumps(record))
    again = run_module("switchover", {**arguments, "id": "order-2"}, env=env)
    assert (again["outcome"], again["id"]) == ("CONFIRMED", "order-2")


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("ROLLED_BACK", ["rolled back", "sglang.service serves again, proved", "12.5 s", "it exited"]),
        ("STRANDED", ["STRANDED", "it exited", "mend it"]),
        ("REFUSED", ["refused, nothing was stopped", "it exited"]),
    ],
)
def test_an_end_that_is_no_success_fails(run_module, host, end, words):
    arguments, env, _ = host(end)
    result = run_module("switchover", arguments, env=env)
    assert result["failed"]
    assert result["outcome"] == end
    for word in words:
        assert word in result["msg"]
    assert ("simulated log line" in result["msg"]) is (end != "REFUSED")
    assert result["changed"] is (end != "REFUSED")


def test_the_order_is_complete_and_followed_for_a_while(run_module, host):
    arguments, env, state = host()
    result = run_module("switchover", {**arguments, "follow_timeout": 1}, env=env)
    assert result["finished"] is False
    assert result["outcome"] == "NOT_BEGUN"
    order = json.loads((state / "switch" / "pending.json").read_text())
    assert order["settings"] == {
        "accept_unproven_old": False, "gpus": None, "gpu_free_mib": 500, "gpu_free_stable_s": 2.0,
        "gpu_free_timeout_s": 120.0, "leftover_grace_s": 10.0, "proof_completions": 3,
        "proof_timeout_s": 120.0,
    }  # fmt: skip
    # Another order is refused with who and since when; one for the same server is followed.
    other = {**arguments, "id": "order-2", "new": {**NEW, "unit": "vllm-dflash@b.service"}}
    refused = run_module("switchover", other, env=env)
    assert refused["failed"]
    assert "order-1" in refused["msg"]
    assert order["requested_at"] in refused["msg"]
    assert order["requested_by"] in refused["msg"]
    followed = run_module("switchover", {**arguments, "id": "order-3", "follow_timeout": 0}, env=env)
    assert followed["id"] == "order-1"


def test_progress_shows_the_state_and_the_last_log_line(run_module, host):
    arguments, env, state = host()
    run_module("switchover", {**arguments, "follow_timeout": 0}, env=env)
    record = {
        "id": "order-1", "state": "NEW_STARTED", "old": None, "new": NEW, "outage_s": None,
        "states": [{"state": "NEW_STARTED", "at": "noon", "boot_s": 1.0}],
    }  # fmt: skip
    (state / "switch" / "record.json").write_text(json.dumps(record))
    result = run_module("switchover", {**arguments, "follow_timeout": 0}, env=env)
    assert result["outcome"] == "NEW_STARTED"
    assert result["last_log_line"] == "loading weights"
    assert result["states"][0]["seconds"] > 0


def test_check_mode_writes_nothing(run_module, host):
    arguments, env, state = host(load="not-found")
    result = run_module("switchover", arguments, check=True, diff=True, env=env)
    assert result["changed"] is True
    assert result["would"] == "switch from sglang.service to vllm-dflash@a.service"
    assert "LoadState=not-found" in result["would_refuse"]
    assert result["old_class"] is None
    assert "sglang.service" in result["diff"]["before"]
    assert not state.exists()


def test_without_the_program_nothing_is_handed_over(run_module, host):
    arguments, env, state = host(load="not-found")
    result = run_module("switchover", arguments, env=env)
    assert result["failed"]
    assert "llm-switchover.service is not installed" in result["msg"]
    assert not state.exists()


def test_a_misspelt_setting_is_refused(run_module, host):
    arguments, env, _ = host()
    result = run_module("switchover", {**arguments, "settings": {"gpu_free_mb": 1}}, env=env)
    assert result["failed"]
    assert "gpu_free_mb" in result["msg"]
