"""A folder of wheels, exactly those of the locks for one kind of host, for hosts without a way out.

`platform_of` looks at a host's interpreter; `build` runs on the control node and downloads with pip, in portions:
after an interruption the portions that arrived are not asked for again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from dataclasses import dataclass

from .errors import RolloutError
from .files import read_json, write_json

MANIFEST = "wheelhouse.json"
PORTION = 12  # requirements a call of pip; it keeps a portion only when all of it is there
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
_ASK = (
    "import json, platform, sys;"
    "print(json.dumps(['%d.%d' % sys.version_info[:2], platform.machine(), platform.libc_ver()]))"
)


@dataclass(frozen=True)
class Platform:
    """What decides which wheels fit: Python as `3.11`, machine as `x86_64`, minor version of glibc 2."""

    python: str
    machine: str
    glibc: int

    @property
    def key(self) -> str:
        """As in the names of wheels: cp311-manylinux_2_36_x86_64."""
        return f"cp{self.python.replace('.', '')}-manylinux_2_{self.glibc}_{self.machine}"

    def tags(self) -> list[str]:
        """Platform tags of wheels that run here, the newest first."""
        new = [f"manylinux_2_{minor}_{self.machine}" for minor in range(self.glibc, 4, -1)]
        old = [f"{name}_{self.machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
        return [*new, *old, f"linux_{self.machine}"]


def platform_called(key: str) -> Platform:
    """The platform of a `key`, for a machine that can't reach the hosts. Raises RolloutError for what is none."""
    found = re.fullmatch(r"cp3(\d+)-manylinux_2_(\d+)_(\w+)", key)
    if found is None:
        raise RolloutError(
            "vllm_wheelhouse_kind names no kind of host",
            found=key,
            expected="its Python, glibc and machine, as cp311-manylinux_2_36_x86_64",
            remedy="take it from what preflight says without it",
        )
    return judged(key, f"3.{found[1]}", found[3], ["glibc", f"2.{found[2]}"])


def platform_of(python: str) -> Platform:
    """Ask an interpreter. Raises RolloutError where it can't be run or no lock fits it."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=30, check=True
        )
        version, machine, libc = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise RolloutError(
            f"{python} can't be asked what it is",
            found=str(error),
            remedy="set vllm_python to the distribution's python3",
        ) from error
    return judged(python, version, machine, libc)


def judged(python: str, version: str, machine: str, libc: list[str]) -> Platform:
    """The platform from an interpreter's answer. Raises RolloutError where no lock fits it."""
    glibc = re.match(r"2\.(\d+)", libc[1]) if libc[0] == "glibc" else None
    if version not in PYTHONS or machine not in ("x86_64", "aarch64") or glibc is None:
        raise RolloutError(
            f"There are no wheels for {python}",
            found=f"Python {version}, {machine}, {' '.join(libc).strip() or 'no glibc'}",
            expected=f"Python {PYTHONS[0]} to {PYTHONS[-1]} on x86_64 or aarch64 with glibc",
            remedy="set vllm_python to another interpreter",
        )
    return Platform(version, machine, int(glibc[1]))


def build(
    folder: str, locks: list[str], platform: Platform, *, uv: str, python: str, environment: dict[str, str]
) -> bool:
    """Fill `folder` with the wheels of `locks` for one platform. True when something had to be done.

    `uv` and `python` (with pip) are the control node's own. Raises RolloutError.
    """
    wanted = lacking(folder, locks)
    if not wanted:
        return False
    os.makedirs(folder, exist_ok=True)
    for lock in wanted:
        requirements = narrowed(lock, platform, uv, environment)
        for start in range(0, len(requirements), PORTION):
            _download(folder, requirements[start : start + PORTION], platform, python, environment)
    files = {
        name: os.path.getsize(os.path.join(folder, name))
        for name in sorted(os.listdir(folder))
        if name != MANIFEST
    }
    digests = sorted({*_held(folder), *map(_digest, wanted)})
    write_json(os.path.join(folder, MANIFEST), {"platform": platform.key, "locks": digests, "files": files})
    return True


def lacking(folder: str, locks: list[str]) -> list[str]:
    """Those of `locks` whose wheels `folder` does not have: a later uv, or a swarm's libtorrent, makes it incomplete."""
    held = _held(folder)
    return [lock for lock in locks if _digest(lock) not in held]


def _held(folder: str) -> list[str]:
    return (read_json(os.path.join(folder, MANIFEST)) or {}).get("locks", [])


def _digest(lock: str) -> str:
    return hashlib.sha256(lock.encode()).hexdigest()


def narrowed(lock: str, platform: Platform, uv: str, environment: dict[str, str]) -> list[str]:
    """The requirements of a universal lock that one platform needs, each with its hashes, on one line each.

    uv says which; the hashes are the lock's own, whatever the index says, and it may say none.
    """
    command = [uv, "--no-config", "pip", "compile", "--quiet", "--no-deps", "--no-header", "--no-annotate"]
    command += [f"--python-version={platform.python}"]
    command += [f"--python-platform={platform.machine}-manylinux_2_{min(platform.glibc, 40)}", "-"]
    done = subprocess.run(
        command, input=lock, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    if done.returncode:
        raise RolloutError("uv can't read the lock for this platform", found=_tail(done.stderr))
    hashes = {}
    for line in lock.replace("\\\n", " ").splitlines():
        name, *options = line.partition("#")[0].replace(";", " ").split() or [""]
        hashes[name] = [option for option in options if option.startswith("--hash=")]
    lines = [
        line.split(";")[0].strip() for line in done.stdout.splitlines() if line[:1] not in ("", "#", "-")
    ]
    try:
        return [" ".join([name, *hashes[name]]) for name in lines]
    except KeyError as error:
        raise RolloutError("uv names a requirement that is not in the lock", found=str(error)) from error


def _download(
    folder: str, requirements: list[str], platform: Platform, python: str, environment: dict[str, str]
) -> None:
    command = [
        python,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
    ]
    command += [
        "--no-cache-dir",
        f"--dest={folder}",
        "--implementation=cp",
        f"--python-version={platform.python}",
    ]
    command += [f"--abi={abi}" for abi in (f"cp{platform.python.replace('.', '')}", "abi3", "none")]
    command += [f"--platform={tag}" for tag in platform.tags()]
    done = subprocess.run(
        [*command, "--requirement=/dev/stdin"],
        input="\n".join(requirements) + "\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", **environment},
        check=False,
    )
    if done.returncode:
        raise RolloutError(
            f"Wheels for {platform.key} can't be downloaded",
            found=_tail(done.stderr),
            remedy="see vllm_index_url and the network of the control node; run again, what arrived stays",
        )


def _tail(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return re.sub(r"(?<=://)[^/\s@]+@", "", " / ".join(lines[-4:]))[-600:]
