"""The verbs of the program: what each hands over to, and what none may cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_rollout import program

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import PROFILE_27B, QWEN3_6_27B, drafter_shapes, write_sparse
from test_drafter_config import EXPECTED_27B

PACKAGE = Path(program.__file__).parent

LOADED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from dflash_rollout.program import main
status = main()
print(status, sorted(name.partition(".")[2] for name in sys.modules if name.startswith("dflash_rollout.")))
"""


@pytest.fixture
def drafter(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "target/config.json").write_text(json.dumps(QWEN3_6_27B))
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE_27B))
    write_sparse(tmp_path / "model.safetensors", drafter_shapes())
    return tmp_path


def test_inspect(drafter, capsys):
    assert program.main(["inspect", str(drafter / "model.safetensors")]) == 0
    assert "a plain DFlash drafter" in capsys.readouterr().out


def test_render(drafter, capsys):
    arguments = [str(drafter / "model.safetensors"), "--target", str(drafter / "target")]
    assert program.main(["render", *arguments, "--profile", str(drafter / "profile.json")]) == 0
    assert json.loads(capsys.readouterr().out) == EXPECTED_27B


def test_a_refused_drafter_is_status_1_in_words(tmp_path, capsys):
    assert program.main(["inspect", str(tmp_path / "none.safetensors")]) == 1
    assert "What to do:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["dance"], ["switch", "now"], ["may-start"], ["may-start", "a", "b"], ["probe"]]
)
def test_what_is_no_verb_shows_the_verbs(words, capsys):
    assert program.main(words) == 2
    shown = capsys.readouterr().err
    for verb in (
        "switch ",
        "may-start UNIT",
        "serve-boot ",
        "status ",
        "prove ",
        "probe FILE",
        "inspect FILE",
        "render FILE",
    ):
        assert f"\n{verb}" in shown


def test_may_start_loads_nothing_but_the_gate(tmp_path):
    folders = ["--state", tmp_path, "--run", tmp_path]
    done = subprocess.run(
        [sys.executable, "-IB", "-c", LOADED, PACKAGE.parent, *folders, "may-start", "sglang.service"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "0 ['gate', 'program']"


def test_rollback_without_a_server_before_is_refused_in_words(tmp_path, capsys):
    place = ["--state", str(tmp_path), "--run", str(tmp_path / "run")]
    assert program.main([*place, "rollback"]) == program.EXIT_REFUSED
    assert "no server to go back to. Found: no confirmed switch" in capsys.readouterr().err
    (tmp_path / "serving.json").write_text(
        json.dumps({"serving": {"unit": "sglang.service"}, "previous": None, "switch_id": "x"})
    )
    assert program.main([*place, "rollback"]) == program.EXIT_REFUSED
    assert "Found: sglang.service serves, and none before it" in capsys.readouterr().err


def test_rollback_orders_the_way_back_and_ends_as_it_does(tmp_path, capsys, monkeypatch):
    state = {"serving": {"unit": "new.service"}, "previous": {"unit": "old.service"}, "switch_id": "x"}
    (tmp_path / "serving.json").write_text(json.dumps(state))
    asked = {}

    def order_switch(**order):
        asked.update(order)
        return True, {"outcome": "ROLLED_BACK", "msg": "new.service serves again"}

    monkeypatch.setattr("dflash_rollout.orders.order_switch", order_switch)
    monkeypatch.setattr("dflash_rollout.servers.startable", lambda server: None)
    assert program.main(["--state", str(tmp_path), "rollback"]) == program.EXIT_ROLLED_BACK
    assert (asked["old"], asked["new"]) == (state["serving"], state["previous"])
    assert asked["settings"]["accept_unproven_old"] is True
    assert "new.service serves again" in capsys.readouterr().out
    asked.clear()
    monkeypatch.setattr("dflash_rollout.servers.startable", lambda server: f"{server['unit']} is masked.")
    assert program.main(["--state", str(tmp_path), "rollback"]) == program.EXIT_REFUSED
    assert "old.service is masked" in capsys.readouterr().err
    assert asked == {}


def test_a_state_directory_that_cannot_be_written_is_refused_and_no_crash_loop(tmp_path, capsys):
    switch = tmp_path / "state/switch"
    switch.mkdir(parents=True)
    (switch / "history").write_text("in the way of the folder, as a read-only disk is")
    order = {"id": "x", "old": None, "new": {"unit": "new.service", "port": 1}, "settings": {}}
    (switch / "pending.json").write_text(json.dumps(order))
    options = ["--state", str(tmp_path / "state"), "--run", str(tmp_path / "run")]
    assert program.main([*options, "switch"]) == program.EXIT_REFUSED
    assert "history" in json.loads((switch / "record.json").read_text())["cause"]
    assert not (switch / "pending.json").exists()
