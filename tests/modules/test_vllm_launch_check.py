"""The module around the launch check, with a shell script in the place of a venv's Python."""

from __future__ import annotations

import json
import sys

import pytest


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "vllm.yaml"
    path.write_text('model: "/x"\n')
    return str(path)


@pytest.fixture
def simulated_python(tmp_path):
    """Answers whatever it is given, as the probe would."""

    def make(answer: dict) -> str:
        path = tmp_path / "python"
        text = f"<<<launch-probe {json.dumps(answer)} launch-probe>>>"
        path.write_text(f"#!/bin/sh\ncat > /dev/null\necho 'INFO simulated'\necho '{text}'\n")
        path.chmod(0o755)
        return str(path)

    return make


@pytest.mark.parametrize("check", [False, True])
def test_accepted(run_module, simulated_python, config, check):
    python = simulated_python({"ok": True, "scheduled_tokens": 8224, "tensors_loaded": 58})
    result = run_module("vllm_launch_check", {"python": python, "config": config}, check=check)
    assert result["checked"] is True
    assert result["changed"] is False
    assert (result["scheduled_tokens"], result["tensors_loaded"]) == (8224, 58)


@pytest.mark.parametrize("check", [False, True])
def test_refused(run_module, simulated_python, config, check):
    python = simulated_python({"ok": False, "phase": "weights", "error": "no place for x.weight"})
    result = run_module("vllm_launch_check", {"python": python, "config": config}, check=check)
    assert result["failed"]
    assert result["msg"] == "vLLM refuses this launch (weights): no place for x.weight."
    assert (result["phase"], result["log_tail"]) == ("weights", ["INFO simulated"])


def test_nothing_to_check_yet(run_module, config, tmp_path):
    """In check mode on a fresh host: never "passed"; outside check mode it is a failure."""
    absent = str(tmp_path / "absent")
    for python, config_path, reason in (
        (absent, f"{absent}/vllm.yaml", "no release yet"),
        (absent, config, "no venv yet"),
        (sys.executable, absent, "no config yet"),
    ):
        arguments = {"python": python, "config": config_path}
        result = run_module("vllm_launch_check", arguments, check=True)
        assert (result["checked"], result["reason"]) == (False, f"not checked ({reason})")
    result = run_module("vllm_launch_check", {"python": absent, "config": config})
    assert result["failed"]
    assert "can't be run" in result["msg"]
    assert result["phase"] == "start"


def test_probe_travels_with_the_module(run_module, config):
    """The real probe in a Python without vLLM: its source must have got there, and say what is missing."""
    result = run_module("vllm_launch_check", {"python": sys.executable, "config": config})
    assert result["failed"]
    assert result["phase"] == "import"
