"""The locks of vLLM: every requirement pinned with a sha256. That they are closed is asked of the index by `make lock-check`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("lock", ROOT / "tools/lock.py")
lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(lock)
LOCKS = sorted((ROOT / "roles/vllm/files/locks").glob("*.txt"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_every_requirement_is_pinned_and_hashed(path):
    text = path.read_text()
    assert lock.without_hash(text) == []
    assert f"vllm=={path.stem.removeprefix('vllm-')}" in lock.pins(text)
    requirements = [line for line in text.splitlines() if line and line[0] not in "# "]
    assert len(lock.pins(text)) == len(requirements) > 150
    assert lock.until(text) > "2026-05-01"


def test_there_is_one_that_honours_windows():
    assert {path.stem for path in LOCKS} >= {"vllm-0.20.1", "vllm-0.26.0"}


def test_a_missing_hash_is_found():
    assert lock.without_hash("a==1 \\\n    --hash=sha256:" + "0" * 64 + "\nb==2\n") == ["b==2"]


def test_markers_belong_to_pins():
    text = "a==1 ; sys_platform == 'linux' \\\n    --hash=sha256:00\nb==2 \\\n    --hash=sha256:00\n"
    assert lock.pins(text) == ["a==1 ; sys_platform == 'linux'", "b==2"]
