"""Could a server be started: by its unit, and by the files that its start needs."""

from __future__ import annotations

import dataclasses
import os

import pytest
from dflash_rollout import containers, servers
from dflash_rollout.errors import RolloutError
from dflash_rollout.units import Unit

SGLANG = {"unit": "sglang.service"}
RELEASE = {"unit": "vllm-dflash@abc.service", "release": "abc"}
UNIT = Unit("x", "loaded", "inactive", "dead", 0, 0, "", "", "success", "disabled", 0, True)


@pytest.fixture
def release(tmp_path):
    """A complete release, and the unit that starts it."""
    folder = tmp_path / "releases" / "abc"
    for name in ("venv/bin/vllm", "vllm.yaml", "environment", "drafter/config.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (tmp_path / "weights").write_text("x")
    (folder / "drafter/model.safetensors").symlink_to(tmp_path / "weights")
    return folder, dataclasses.replace(UNIT, program=str(folder / "venv/bin/vllm"))


def problem(monkeypatch, server, unit):
    monkeypatch.setattr(servers, "show", lambda _: unit)
    return servers.startable(server)


def test_what_is_complete_can_be_started(monkeypatch, release):
    assert problem(monkeypatch, RELEASE, release[1]) is None
    assert problem(monkeypatch, SGLANG, UNIT) is None


@pytest.mark.parametrize(
    "name", ["venv/bin/vllm", "vllm.yaml", "environment", "drafter/config.json", "drafter/model.safetensors"]
)
def test_a_release_that_lost_a_file_is_named_before_anything_is_stopped(monkeypatch, release, name):
    folder, unit = release
    os.unlink(folder / name)
    text = problem(monkeypatch, RELEASE, unit)
    assert f"no {folder / name}" in text
    assert "playbooks/stage.yml" in text


def test_weights_that_a_link_leads_to(monkeypatch, release):
    folder, unit = release
    os.unlink(os.path.realpath(folder / "drafter/model.safetensors"))
    assert "drafter/model.safetensors" in problem(monkeypatch, RELEASE, unit)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_state": "masked"}, "LoadState=masked"),
        ({"guarded": False}, "no ExecCondition="),
        ({"program": "/nowhere/python"}, "no /nowhere/python"),
    ],
)
def test_units_that_can_not_be_gone_back_to(monkeypatch, change, words):
    assert words in problem(monkeypatch, SGLANG, dataclasses.replace(UNIT, **change))


def test_containers_are_asked_of_their_engine(monkeypatch):
    def check(engine, name):
        raise RolloutError(f"The container {name} of {engine} does not exist")

    monkeypatch.setattr(containers, "check", check)
    assert "The container sg of docker does not exist" in servers.startable(
        {"unit": "sg", "runtime": "docker"}
    )

    def silent(engine, name):
        raise containers.EngineSilent("no answer")

    monkeypatch.setattr(containers, "check", silent)
    assert "no answer" in servers.startable({"unit": "sg", "runtime": "docker"})
