"""The module page_cache as Ansible runs it: in a process of its own, whose priority it lowers."""

from __future__ import annotations

import os


def test_it_reads_and_says_so(run_module, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(5 << 20))
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    arguments = {"paths": [str(tmp_path)], "reserve_mib": 0}
    looked = run_module("page_cache", arguments, check=True)
    assert looked["read_bytes"] == 0
    result = run_module("page_cache", arguments)
    assert result["read_bytes"] == result["total_bytes"] - looked["resident_bytes"]
    assert result["resident_bytes"] == result["total_bytes"] == 5 << 20
    assert result["finished"]
    assert not result["changed"]
    assert result["reason"] == ""


def test_what_prevents_it_is_no_failure(run_module, tmp_path):
    result = run_module("page_cache", {"paths": [str(tmp_path / "gone")]})
    assert result["finished"]
    assert "gone" in result["msg"]
    assert not result["changed"]
