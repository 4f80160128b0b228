"""What serves and what to do about it, from what was seen."""

from __future__ import annotations

import json

import pytest
from dflash_rollout import detection, serving
from dflash_rollout.containers import EngineSilent
from dflash_rollout.detection import Found
from dflash_rollout.errors import RolloutError
from dflash_rollout.store import Store

UNIT = {"unit": "sglang.service", "runtime": "systemd", "host": "127.0.0.1"}
BOX = {"unit": "sglang", "runtime": "docker", "host": "127.0.0.1"}


def row(own, pid=7):
    return {"pid": pid, "user": "bob", "command": "nc -l", "own": own}


@pytest.mark.parametrize(
    ("server", "rows", "listens_at", "words", "restart"),
    [
        (
            UNIT,
            [],
            ["0.0.0.0:31000"],
            ["nobody listens at 127.0.0.1:30000", "0.0.0.0:31000", "rollout_port"],
            None,
        ),
        (
            UNIT,
            [],
            [],
            ["listens nowhere", "journalctl -u sglang.service"],
            "systemctl restart sglang.service",
        ),
        (BOX, [], [], ["listens nowhere", "docker logs sglang"], "docker restart sglang"),
        (
            UNIT,
            [row(True)],
            ["127.0.0.1:30000"],
            ["does not serve: it is wrong"],
            "systemctl restart sglang.service",
        ),
        (UNIT, [row(False)], ["127.0.0.1:31000"], ["port 30000 is answered by pid 7 (bob: nc -l)"], None),
    ],
    ids=["wrong port", "not yet", "a container, not yet", "no completions", "a stranger"],
)
def test_a_restart_is_advised_only_where_it_may_help(server, rows, listens_at, words, restart):
    text = serving._unproved(server, 30000, "it is wrong", rows, listens_at)
    for word in words:
        assert word in text
    assert (restart or "systemctl") in text if restart else " restart sglang" not in text


def test_a_release_that_the_gate_rejected_is_no_way_back(tmp_path, monkeypatch):
    monkeypatch.setattr(serving.servers, "startable", lambda server: None)
    store = Store(str(tmp_path))
    assert serving.way_back(store) is None
    state = {
        "serving": UNIT,
        "previous": {"unit": "vllm-dflash@r1.service", "release": "r1"},
        "switch_id": "x",
    }
    (tmp_path / "serving.json").write_text(json.dumps(state))
    assert serving.way_back(store) == {"unit": "vllm-dflash@r1.service", "problem": None}
    (tmp_path / "acceptance").mkdir()
    record = {
        "mode": "enforce",
        "verdict": "below",
        "way_back": UNIT["unit"],
        "text": "acceptance length 2.73",
    }
    (tmp_path / "acceptance/r1.json").write_text(json.dumps(record))
    assert "acceptance length 2.73" in serving.way_back(store)["problem"]


def test_what_is_named_is_not_looked_for(monkeypatch):
    monkeypatch.setattr(detection, "detect", None)
    assert serving._look("x.service", "systemd", 30000).server == {
        "unit": "x.service",
        "runtime": "systemd",
    }
    assert serving._look(None, "systemd", None).server is None


def test_what_is_not_named_is_found(monkeypatch):
    found = Found(refusal="no")
    monkeypatch.setattr(detection, "detect", lambda port: found)
    assert serving._look(None, "systemd", 30000) is found


def test_a_container_that_can_not_be_switched_is_refused_before_the_order(monkeypatch):
    def check(server):
        raise RolloutError("it is removed as soon as it stops")

    monkeypatch.setattr(serving.servers, "check_container", check)
    found = serving._look("sglang", "docker", 30000)
    assert found.server == {"unit": "sglang", "runtime": "docker"}
    assert "removed" in found.refusal

    def silent(server):
        raise EngineSilent("docker doesn't answer")

    monkeypatch.setattr(serving.servers, "check_container", silent)
    with pytest.raises(EngineSilent):
        serving._look("sglang", "docker", 30000)


@pytest.mark.parametrize(
    ("chosen", "done"),
    [
        (None, "nothing was chosen"),
        ({"unit": "sglang.service"}, "not ours to start"),
        ({"unit": "sglang", "runtime": "docker", "restart_policy": "always"}, "not ours to start"),
        ({"unit": "vllm-dflash@a.service"}, "start of vllm-dflash@a.service queued"),
    ],
)
def test_at_boot_only_a_release_is_started(tmp_path, monkeypatch, chosen, done):
    """A container starts by the policy that its commit gave back; starting it here would race with the engine."""
    started = []
    monkeypatch.setattr(serving.units, "start", started.append)
    store = Store(str(tmp_path), str(tmp_path))
    if chosen:
        store.confirm({"id": "1", "new": chosen, "old": None})
    assert done in serving.start_at_boot(store)
    assert started == ([chosen["unit"]] if "queued" in done else [])


def test_a_server_on_trial_leads_back_to_what_served_before_all_trials(tmp_path):
    store = Store(str(tmp_path), str(tmp_path / "run"))
    before, first, second = ({"unit": f"{name}.service"} for name in ("sglang", "first", "second"))
    store.confirm({"id": "1", "old": before, "new": first, "way_back": before})
    store.confirm({"id": "2", "old": first, "new": second, "way_back": before})
    assert store.serving() == {"serving": second, "previous": before, "switch_id": "2"}
    # back, to where nothing was before it
    store.confirm({"id": "3", "old": second, "new": before, "way_back": before})
    assert store.serving() == {"serving": before, "previous": None, "switch_id": "3"}
