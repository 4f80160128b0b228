"""The module model_file as Ansible runs it."""

from __future__ import annotations

import hashlib

CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_absent(run_module, tmp_path):
    path = str(tmp_path / "model.safetensors")
    result = run_module("model_file", {"path": path})
    assert (result["exists"], result["sha256"], result["changed"]) == (False, None, False)


def test_put_in_place_then_nothing_to_do(run_module, tmp_path):
    incoming, path = tmp_path / "incoming", tmp_path / "model.safetensors"
    incoming.write_bytes(CONTENT)
    args = {"path": str(path), "incoming": str(incoming), "sha256": DIGEST}

    planned = run_module("model_file", args, check=True)
    assert planned["changed"]
    assert not path.exists()

    first = run_module("model_file", args)
    assert (first["changed"], first["read_bytes"], first["size"]) == (True, 7000, 7000)
    assert path.read_bytes() == CONTENT

    second = run_module("model_file", args)
    assert (second["changed"], second["read_bytes"], second["sha256"]) == (False, 0, DIGEST)

    full = run_module("model_file", {**args, "verify": "full"})
    assert (full["changed"], full["read_bytes"]) == (False, 7000)


def test_neither_there(run_module, tmp_path):
    args = {"path": str(tmp_path / "a"), "incoming": str(tmp_path / "b")}
    assert run_module("model_file", args, check=True)["exists"] is False
    result = run_module("model_file", args)
    assert result["failed"]
    assert "transfer the file first" in result["msg"]


def test_wrong_digest(run_module, tmp_path):
    incoming, path = tmp_path / "incoming", tmp_path / "model.safetensors"
    incoming.write_bytes(CONTENT)
    result = run_module(
        "model_file", {"path": str(path), "incoming": str(incoming), "sha256": "0" * 64}, check=False
    )
    assert result["failed"]
    assert (
        f"Found: {DIGEST} (7000 bytes). Expected: {'0' * 64}. What to do: get the file again" in result["msg"]
    )
    assert not path.exists()
    assert incoming.exists()


def test_stamp_dir(run_module, tmp_path):
    path, stamps = tmp_path / "model.safetensors", tmp_path / "stamps"
    path.write_bytes(CONTENT)
    args = {"path": str(path), "stamp_dir": str(stamps)}
    assert run_module("model_file", args, check=True)["read_bytes"] == 7000
    assert not stamps.exists()
    assert run_module("model_file", args)["changed"] is False
    assert run_module("model_file", args)["read_bytes"] == 0
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".stamp"] == []
