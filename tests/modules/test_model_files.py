"""The module model_files as Ansible runs it: verified, receiving, placed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def model_files(run_module, tmp_path):
    """`model_files(files, check=False, **options)`: the module for this user."""

    def run(files, check=False, **options):
        owner = {"owner": os.getuid()} if options.get("state") == "receiving" else {}
        return run_module("model_files", {"files": files, **owner, **options}, check=check)

    return run


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "drafters" / DIGEST / "model.safetensors"


@pytest.fixture
def wanted(path) -> dict:
    return {
        "path": str(path),
        "sha256": DIGEST,
        "size": 7000,
        "source": "/s/model.safetensors",
    }


@pytest.fixture
def in_place(model_files, wanted, path):
    """A file that a transfer brought."""
    ready = model_files([wanted], state="receiving")
    Path(f"{path}.incoming").write_bytes(CONTENT)
    return model_files(ready["missing"], state="placed")


def flip(path: Path) -> None:
    """One byte, with the mtime put back."""
    before = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(4000)
        stream.write(b"\0")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_way_of_a_file(model_files, wanted, path, tmp_path):
    looked = model_files([wanted])
    assert (looked["changed"], looked["read_bytes"]) == (False, 0)
    assert looked["msg"] == "1 file to bring (model.safetensors), 0.00 GB"
    assert looked["missing"] == looked["files"]
    assert looked["missing"][0] == {
        **wanted, "state": "missing", "incoming": f"{path}.incoming", "here": 0, "ranges": None, "read_bytes": 0,
        "stamp_dir": "",
    }  # fmt: skip
    assert tree(tmp_path) == {}

    planned = model_files(looked["missing"], state="receiving", check=True)
    assert planned["changed"]
    assert tree(tmp_path) == {}
    ready = model_files(looked["missing"], state="receiving")
    assert ready["changed"]
    assert ready["missing"] == looked["missing"] == planned["missing"]
    assert isinstance(ready["aes"], bool)
    assert ready["rsync"] == "" or os.access(ready["rsync"], os.X_OK)
    assert tree(tmp_path) == {f"drafters/{DIGEST}/model.safetensors.incoming": b""}

    Path(f"{path}.incoming").write_bytes(CONTENT)
    planned = model_files(ready["missing"], state="placed", check=True)
    assert planned["changed"]
    assert not path.exists()
    placed = model_files(ready["missing"], state="placed")
    assert (placed["changed"], placed["read_bytes"], placed["missing"]) == (True, 7000, [])
    assert placed["msg"] == "all files are here, verified"
    assert path.read_bytes() == CONTENT

    again = model_files(ready["missing"], state="placed")
    assert (again["changed"], again["read_bytes"]) == (False, 0), "asked again after a lost connection"

    last = model_files([wanted])
    assert (last["changed"], last["read_bytes"], last["missing"]) == (False, 0, [])
    assert last["files"][0]["state"] == "verified"
    assert model_files([wanted], verify="full")["read_bytes"] == 7000
    assert model_files([], state="receiving")["changed"] is False


def test_a_part_is_told(model_files, wanted, path):
    path.parent.mkdir(parents=True)
    Path(f"{path}.incoming").write_bytes(CONTENT[:4000])
    assert model_files([wanted])["missing"][0]["here"] == 4000
    model_files([wanted], state="receiving")
    assert Path(f"{path}.incoming").read_bytes() == CONTENT[:4000]


def test_damage_is_found_and_copied_to_be_mended(in_place, model_files, wanted, path):
    flip(path)
    damaged = path.read_bytes()
    looked = model_files([wanted])
    assert (looked["missing"][0]["state"], looked["read_bytes"]) == ("damaged", 7000)
    assert "1 damaged" in looked["msg"]
    for _ in "twice":
        ready = model_files(looked["missing"], state="receiving")
        assert ready["missing"][0]["ranges"] == [[0, 7000]]
        assert Path(f"{path}.incoming").read_bytes() == damaged == path.read_bytes()
    Path(f"{path}.incoming").write_bytes(CONTENT)
    assert model_files(ready["missing"], state="placed")["changed"]
    assert model_files([wanted], verify="full")["missing"] == []


def test_another_file_is_refused(model_files, wanted, tmp_path):
    mine = tmp_path / "mine.safetensors"
    mine.write_bytes(b"mine")
    result = model_files([{**wanted, "path": str(mine)}])
    assert result["failed"]
    assert f"{mine} has the wrong SHA-256. Found: " in result["msg"]
    assert tree(tmp_path) == {"mine.safetensors": b"mine"}


def test_wrong_digest(model_files, wanted, path):
    path.parent.mkdir(parents=True)
    incoming = Path(f"{path}.incoming")
    incoming.write_bytes(b"wrong")
    for options, remedy, kept in (
        ({}, "get the file again", True),
        ({"check": True, "discard": True}, "get the file again", True),
        ({"discard": True}, "what arrived was removed", False),
    ):
        result = model_files([wanted], state="placed", **options)
        assert result["failed"]
        assert f"{incoming} has the wrong SHA-256" in result["msg"]
        assert f"Expected: {DIGEST}. What to do: {remedy}" in result["msg"]
        assert (incoming.exists(), path.exists()) == (kept, False)


def test_superseded(model_files, wanted, path, tmp_path):
    old = tmp_path / "drafters" / "old" / "model.safetensors.incoming"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"half")
    path.parent.mkdir()
    Path(f"{path}.incoming").write_bytes(CONTENT)
    options = {"state": "placed", "superseded": [f"{tmp_path}/drafters/*/model.safetensors.incoming"]}
    assert model_files([wanted], check=True, **options)["changed"]
    assert old.exists()
    assert model_files([wanted], **options)["changed"]
    assert not old.parent.exists()
    assert path.read_bytes() == CONTENT


def test_too_little_space(model_files, wanted, tmp_path):
    for check in (True, False):
        result = model_files([{**wanted, "size": 1 << 60}], state="receiving", check=check)
        assert result["failed"]
        assert "has too little space for what is to be brought" in result["msg"]
        assert "What to do: make room" in result["msg"]
    assert list(tmp_path.iterdir()) == []


def test_stamp_dir(model_files, wanted, tmp_path):
    share, stamps = tmp_path / "share" / "model.safetensors", tmp_path / "stamps"
    share.parent.mkdir()
    share.write_bytes(CONTENT)
    files, options = [{**wanted, "path": str(share)}], {"stamp_dir": str(stamps)}
    assert model_files(files, check=True, **options)["read_bytes"] == 7000
    assert not stamps.exists()
    assert model_files(files, **options)["changed"] is False
    assert model_files(files, **options)["read_bytes"] == 0
    assert [path.name for path in share.parent.iterdir()] == ["model.safetensors"]


def test_ranges_that_are_none(model_files, wanted):
    result = model_files([{**wanted, "ranges": "all"}], state="receiving")
    assert result["failed"]
    assert "ranges are no byte ranges" in result["msg"]
