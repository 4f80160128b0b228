"""Which wheels a host takes, and that they are downloaded once."""

from __future__ import annotations

import json
import shlex
import sys

import pytest
from dflash_rollout import wheelhouse
from dflash_rollout.errors import RolloutError
from dflash_rollout.wheelhouse import (
    MANIFEST,
    Platform,
    build,
    judged,
    lacking,
    narrowed,
    platform_called,
    platform_of,
)

DEBIAN = Platform("3.11", "x86_64", 36)


def test_tags():
    tags = DEBIAN.tags()
    assert DEBIAN.key == "cp311-manylinux_2_36_x86_64"
    assert tags[0] == "manylinux_2_36_x86_64"
    assert "manylinux2014_x86_64" in tags
    assert "manylinux_2_37_x86_64" not in tags


@pytest.mark.parametrize(
    "answer",
    [
        ("3.9", "x86_64", ["glibc", "2.31"]),
        ("3.14", "x86_64", ["glibc", "2.41"]),
        ("3.11", "riscv64", ["glibc", "2.36"]),
        ("3.11", "x86_64", ["", ""]),
    ],
)
def test_a_host_that_no_lock_fits(answer):
    with pytest.raises(RolloutError, match="no wheels") as caught:
        judged("/usr/bin/python3", *answer)
    assert answer[0] in caught.value.found
    assert "vllm_python" in caught.value.remedy


def test_a_kind_that_is_named_is_the_one_that_was_seen():
    for platform in (DEBIAN, Platform("3.13", "aarch64", 41)):
        assert platform_called(platform.key) == platform
    for key in ("cp311", "cp311-win_amd64", "cp39-manylinux_2_36_x86_64", "cp311-manylinux_2_36_riscv64"):
        with pytest.raises(RolloutError) as caught:
            platform_called(key)
        assert "Python" in caught.value.expected


def test_this_interpreter():
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if version not in wheelhouse.PYTHONS:
        pytest.skip(f"no lock for Python {version}")
    assert platform_of(sys.executable).python == version
    with pytest.raises(RolloutError, match="can't be asked"):
        platform_of("/nonexistent/python")


def test_build_in_portions_and_once(tmp_path, monkeypatch):
    portions = []
    monkeypatch.setattr(
        wheelhouse,
        "narrowed",
        lambda lock, *_: [f"{lock}{number}==1" for number in range(wheelhouse.PORTION + 1)],
    )

    def download(folder, requirements, platform, python, environment):
        if len(portions) == 3:
            portions.append(None)
            raise RolloutError("the network went away")
        portions.append(requirements)
        for requirement in requirements:
            (tmp_path / "w" / f"{requirement}.whl").write_text("wheel")

    monkeypatch.setattr(wheelhouse, "_download", download)
    arguments = (str(tmp_path / "w"), ["a", "b"], DEBIAN)
    options = {"uv": "uv", "python": sys.executable, "environment": {}}
    with pytest.raises(RolloutError, match="went away"):
        build(*arguments, **options)
    assert not (tmp_path / "w" / MANIFEST).exists()
    assert build(*arguments, **options) is True
    assert build(*arguments, **options) is False
    manifest = json.loads((tmp_path / "w" / MANIFEST).read_text())
    assert manifest["platform"] == DEBIAN.key
    assert len(manifest["files"]) == 2 * (wheelhouse.PORTION + 1)


def test_a_lock_that_joins_later_makes_it_incomplete(tmp_path, monkeypatch):
    """A new uv, or the libtorrent of a swarm: only that is downloaded, and what was there still counts."""
    asked = []
    monkeypatch.setattr(wheelhouse, "narrowed", lambda lock, *_: [lock])
    monkeypatch.setattr(wheelhouse, "_download", lambda folder, requirements, *_: asked.extend(requirements))
    folder = str(tmp_path / "w")
    options = {"uv": "uv", "python": sys.executable, "environment": {}}
    assert build(folder, ["vllm"], DEBIAN, **options) is True
    assert lacking(folder, ["vllm", "libtorrent"]) == ["libtorrent"]
    assert build(folder, ["vllm", "libtorrent"], DEBIAN, **options) is True
    assert asked == ["vllm", "libtorrent"]
    assert build(folder, ["vllm"], DEBIAN, **options) is False
    assert lacking(folder, ["vllm", "libtorrent"]) == []


def test_hashes_are_those_of_the_lock(tmp_path):
    """What the index says of hashes does not count."""
    lock = (
        "# a lock\na==1 \\\n    --hash=sha256:aa \\\n    --hash=sha256:ab\n"
        "b==2 ; sys_platform == 'win32' \\\n    --hash=sha256:bb\n"
        "c==3 ; python_version < '3.12' \\\n    --hash=sha256:cc\n"
    )
    uv = tmp_path / "uv"

    def simulate(said: str) -> None:
        uv.write_text(
            f"#!/bin/sh\ncat > {shlex.quote(str(tmp_path / 'read'))}; printf %s {shlex.quote(said)}\n"
        )
        uv.chmod(0o755)

    simulate("a==1\nc==3\n")
    assert narrowed(lock, DEBIAN, str(uv), {}) == [
        "a==1 --hash=sha256:aa --hash=sha256:ab",
        "c==3 --hash=sha256:cc",
    ]
    assert (tmp_path / "read").read_text() == lock
    simulate("a==2\n")
    with pytest.raises(RolloutError, match="not in the lock"):
        narrowed(lock, DEBIAN, str(uv), {})
