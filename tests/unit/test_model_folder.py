"""Model folders: who can change them, what is in them, where their links lead."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import jinja2
import pytest
import yaml
from dflash_rollout import model_folder
from dflash_rollout.model_folder import bound, check_pins, look

ROLES = Path(__file__).parents[2] / "roles"


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir(mode=0o755)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    for name in ("config.json", "model.safetensors"):
        (path / name).chmod(0o644)
    return path


root_only = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.mark.parametrize(
    ("target", "binds"),
    [
        ("/root/models/Q", "/root/models/Q"),
        ("/root/hub/models--a--Q/snapshots/0a1b/", "/root/hub/models--a--Q"),
        ("/root/hub/models--a--Q/snapshots/0a1b", "/root/hub/models--a--Q"),
        ("/srv/snapshots/Q", "/srv/snapshots/Q"),
    ],
)
def test_preflight_and_the_unit_mean_the_same_folder(target, binds):
    """The role binds what preflight looked at: its one line of Jinja, and `bound`."""
    role = yaml.safe_load((ROLES / "vllm_service/vars/main.yml").read_text())
    environment = jinja2.Environment()  # noqa: S701, no HTML
    environment.filters["regex_replace"] = lambda text, pattern, to: re.sub(pattern, to, text)
    rendered = environment.from_string(role["__vllm_service_target_bind"]).render(vllm_service_target=target)
    assert rendered == bound(target) == binds


@root_only
def test_a_good_folder(folder):
    assert look(str(folder), 4711, (4711,)) == model_folder.Folder()


@root_only
def test_who_can_write(folder):
    (folder / "config.json").chmod(0o666)
    os.chown(folder / "model.safetensors", 4711, 0)
    (folder / "sub").mkdir()
    os.chown(folder / "sub", 1000, 1000)
    seen = look(str(folder), 4711, (4711,))
    assert (seen.open, seen.service, seen.shared) == (["config.json"], ["model.safetensors"], ["sub"])
    folder.chmod(0o775)
    os.chown(folder, 0, 4711)
    assert "." in look(str(folder), 4711, (4711,)).service
    assert "." in look(str(folder), None).shared


def test_code(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "modeling_x.py").touch()
    assert look(str(folder), None).code == ["sub/modeling_x.py"]


def test_links_into_homes(tmp_path, monkeypatch):
    """A hub-cache snapshot may lead to the blobs beside it, nothing may lead into a home elsewhere."""
    home = tmp_path / "home"
    monkeypatch.setattr(model_folder, "HOMES", (str(home),))
    blobs = home / "hub/models--a--Q/blobs"
    snapshot = home / "hub/models--a--Q/snapshots/0a1b"
    for path in (blobs, snapshot, home / "other"):
        path.mkdir(parents=True)
    (blobs / "beef").write_bytes(b"weights")
    (snapshot / "model.safetensors").symlink_to("../../blobs/beef")
    assert look(str(snapshot), None).hidden == {}
    (home / "other/x").touch()
    (snapshot / "tokenizer.json").symlink_to(home / "other/x")
    assert look(str(snapshot), None).hidden == {"tokenizer.json": str(home / "other/x")}


def test_pins(folder, tmp_path):
    stamps = str(tmp_path / "stamps")
    right = hashlib.sha256(b"weights").hexdigest()
    assert check_pins(str(folder), {"model.safetensors": right.upper()}, stamps) == []
    assert len(os.listdir(stamps)) == 1
    faults = check_pins(
        str(folder),
        {"model.safetensors": "0" * 64, "absent": right, "../model/config.json": right, "../x": right},
        stamps,
    )
    assert len(faults) == 4
    assert any("../x is no file of" in fault for fault in faults)
    assert check_pins(str(folder), {"model.safetensors": right}, stamps) == []


def test_a_second_look_reads_nothing(folder, tmp_path, monkeypatch):
    pins = {"model.safetensors": hashlib.sha256(b"weights").hexdigest()}
    os.utime(folder / "model.safetensors", (1, 1))
    read = []
    real = model_folder.model_file.inspect
    monkeypatch.setattr(
        model_folder.model_file,
        "inspect",
        lambda *a, **k: read.append(real(*a, **k).read_bytes) or real(*a, **k),
    )
    import time

    time.sleep(0.1)  # a stamp of a file as young as the clock's tick proves nothing
    check_pins(str(folder), pins, str(tmp_path / "stamps"))
    check_pins(str(folder), pins, str(tmp_path / "stamps"))
    assert read == [7, 0]
