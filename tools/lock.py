#!/usr/bin/env python3
"""Writes and checks the locks of vLLM: every artefact of every supported Python with its sha256.

lock.py write VERSION [--until DATE]   resolve vllm==VERSION as of that day into roles/vllm/files/locks/
lock.py check [VERSION …]              is each lock complete and closed; reads metadata, downloads no wheel

Needs uv on PATH. Give the day after the version's newest wheel was uploaded: what came later was not there when it
was released and tested. A lock that is there already is written again as of its own day.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

LOCKS = Path(__file__).resolve().parent.parent / "roles/vllm/files/locks"
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORM = "x86_64-manylinux_2_35"
HEAD = "# Written by `make lock-vllm VERSION={version}`: universal for Python 3.10 to 3.13, resolved as of {until}.\n"


def uv(*arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run uv without any configuration of this machine; its output is captured."""
    done = subprocess.run(
        ["uv", "--no-config", "pip", *arguments], capture_output=True, text=True, check=False
    )
    if check and done.returncode:
        sys.exit(done.stderr.strip() or f"uv pip {arguments[0]} ended with {done.returncode}")
    return done


def write(version: str, until: str) -> Path:
    """Resolve one version into its lock; returns the path."""
    path = LOCKS / f"vllm-{version}.txt"
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vllm.in").write_text(f"vllm=={version}\n")
        resolved = uv(
            "compile",
            "--universal",
            f"--python-version={PYTHONS[0]}",
            f"--exclude-newer={until}",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
            str(Path(folder, "vllm.in")),
        ).stdout
    path.write_text(HEAD.format(version=version, until=until) + resolved)
    return path


def pins(lock: str) -> list[str]:
    """The requirements of a lock, `name==version` with its marker, without hashes."""
    return re.findall(r"^([a-z0-9][^\s;]*==[^\s;\\]+(?: ; [^\\\n]+?)?)(?: \\)?$", lock, re.MULTILINE)


def until(lock: str) -> str:
    """The day that a lock was resolved as of, from its first line."""
    found = re.match(r"# Written by .* as of (\d{4}-\d{2}-\d{2})\.\n", lock)
    if not found:
        sys.exit("A lock doesn't say in its first line as of when it was resolved. Write it again.")
    return found[1]


def without_hash(lock: str) -> list[str]:
    """Requirements that no sha256 follows."""
    blocks = re.split(r"^(?=[a-z0-9])", lock, flags=re.MULTILINE)[1:]
    return [block.split()[0] for block in blocks if not re.search(r"--hash=sha256:[0-9a-f]{64}", block)]


def faults(lock: str, python: str) -> list[str]:
    """Why a lock is not complete for one Python; empty when it is.

    It is closed when resolving its own pins, with all that these require, names nothing else: so an install
    without dependencies is an install with all of them.
    """
    wanted = [f"--python-version={python}", f"--python-platform={PLATFORM}", f"--exclude-newer={until(lock)}"]
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "extra": "",
    }
    alone = {
        str(requirement.name) + str(requirement.specifier)
        for requirement in map(Requirement, pins(lock))
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "lock.txt")
        listed.write_text("\n".join(pins(lock)) + "\n")
        closed = uv("compile", "--quiet", "--no-header", "--no-annotate", *wanted, str(listed), check=False)
    if closed.returncode:
        return [f"Python {python}: {closed.stderr.strip()}"]
    missing = set(pins(closed.stdout)) - alone
    return [f"Python {python}: {name} is required and not locked" for name in sorted(missing)]


def check(version: str) -> list[str]:
    """All faults of one lock."""
    lock = (LOCKS / f"vllm-{version}.txt").read_text()
    found = [f"{name} has no sha256" for name in without_hash(lock)]
    if f"vllm=={version}" not in pins(lock):
        found.append(f"vllm=={version} is not in it")
    with ThreadPoolExecutor() as pool:  # most of it is waiting for the index
        found += chain.from_iterable(pool.map(partial(faults, lock), PYTHONS))
    return found


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("write")
    one.add_argument("version")
    one.add_argument("--until", help="resolve as of this day, YYYY-MM-DD")
    several = verbs.add_parser("check")
    several.add_argument("versions", nargs="*")
    args = parser.parse_args()
    if args.verb == "write":
        path = LOCKS / f"vllm-{args.version}.txt"
        if not args.until and not path.exists():
            parser.error(
                f"There is no {path.name} yet: give --until, the day after vLLM {args.version} was released."
            )
        print(write(args.version, args.until or until(path.read_text())))
        return 0
    status = 0
    versions = args.versions or sorted(p.stem.removeprefix("vllm-") for p in LOCKS.glob("vllm-*.txt"))
    for version in versions:
        found = check(version)
        print(f"vLLM {version}: " + ("; ".join(found) or f"complete for Python {', '.join(PYTHONS)}"))
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
