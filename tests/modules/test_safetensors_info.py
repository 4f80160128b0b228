"""safetensors_info as a process."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import as_json, drafter_shapes, encode, write_sparse
from ranges import serving


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


HEADER = {"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
CONTENT = encode(HEADER, b"abc")
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def test_by_url(run_module, tmp_path):
    absent = tmp_path / "model.safetensors"
    with serving(CONTENT) as server:
        args = {
            "path": str(absent),
            "url": f"{server.url}?x=hunter2",
            "headers": {"Authorization": "Bearer hunter2"},
        }
        result = run_module(
            "safetensors_info", {**args, "sha256": DIGEST, "cache_dir": str(tmp_path / "cache")}
        )
        assert result["tensors"] == {"a": {"dtype": "U8", "shape": [3]}}
        assert (result["files"], result["file_bytes"]) == ([server.url], len(CONTENT))
        assert server.asked[0]["authorization"] == "Bearer hunter2"
        assert list(tmp_path.iterdir()) == [], "what is at a URL may be another file tomorrow"

        server.statuses = [403]
        result = run_module("safetensors_info", args)
        assert result["failed"]
        assert f"{server.url} is refused. Found: HTTP 403 Forbidden." in result["msg"]
        args["headers"] = {"Authorization": "Bearer hunter2\n"}
        refused = run_module("safetensors_info", args)
        assert "'Authorization' can't be sent" in refused["msg"]
        assert "hunter2" not in result["msg"] + refused["msg"]

        asked = len(server.asked)
        absent.write_bytes(CONTENT)
        assert run_module("safetensors_info", args)["files"] == [str(absent)], (
            "here already: the URL isn't read"
        )
        assert len(server.asked) == asked


def test_a_header_is_kept_once_its_file_is_verified(run_module, tmp_path):
    """Else the header of a wrong file would be kept under the right digest, and outlive the file."""
    path, cache = tmp_path / "model.safetensors", tmp_path / "cache"
    args = {"path": str(path), "sha256": DIGEST.upper(), "cache_dir": str(cache)}
    other = encode({"b": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"abc")
    path.write_bytes(other)
    assert list(run_module("safetensors_info", args)["tensors"]) == ["b"]
    path.write_bytes(CONTENT)
    assert list(run_module("safetensors_info", args)["tensors"]) == ["a"]
    assert not cache.exists()

    files = {"files": [{"path": str(path), "sha256": DIGEST}], "stamp_dir": str(cache)}
    assert run_module("model_files", files)["missing"] == []
    kept = cache / f"{DIGEST}.header.json"
    run_module("safetensors_info", args, check=True)
    assert not kept.exists()
    first = run_module("safetensors_info", args)
    assert kept.exists()
    path.write_bytes(b"garbage")
    assert run_module("safetensors_info", args)["tensors"] == first["tensors"], "known by its digest"
