"""safetensors_info as a process."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import as_json, drafter_shapes, write_sparse


def test_full_size_drafter(run_module, tmp_path):
    path = write_sparse(tmp_path / "model.safetensors", drafter_shapes())
    for check in (False, True):
        result = run_module("safetensors_info", {"path": str(path)}, check=check)
        assert result["changed"] is False
        assert result["tensors"] == as_json(drafter_shapes())
        assert result["payload_bytes"] == 3460426240
        assert result["metadata"] == {}
        assert result["files"] == [str(path)]


def test_damage_is_a_message_not_a_traceback(run_module, tmp_path):
    path = write_sparse(tmp_path / "model.safetensors", drafter_shapes())
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size - 1)
    result = run_module("safetensors_info", {"path": str(path)})
    assert result["failed"] is True
    assert f"{path} is cut short: 1 byte missing at its end. Found: 3,460," in result["msg"]
    assert "What to do: the transfer did not finish" in result["msg"]
