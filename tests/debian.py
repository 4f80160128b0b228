"""Programs that a test needs and this machine lacks: Debian's packages, unpacked into the test bed's cache, not installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest


def program(name: str, libraries: str = "") -> tuple[str, dict[str, str]]:
    """(path, environment) of a program, from PATH or from the package of the same name.

    `libraries`: a regular expression of the packages it depends on that a machine may lack. Where it can't be had the
    test skips with the reason; in CI it fails.
    """
    if found := shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin"):
        return found, dict(os.environ)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-dflash-testbed"
    cache = caches / name
    if not cache.exists():
        partial = caches / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        tree = ["apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-conflicts"]
        try:
            listed = subprocess.run([*tree, name], capture_output=True, text=True, check=True).stdout.split()
            wanted = {name, *(found for found in listed if libraries and re.fullmatch(libraries, found))}
            subprocess.run(
                ["apt-get", "-q", "download", *sorted(wanted)], cwd=partial, check=True, capture_output=True
            )
            for package in partial.glob("*.deb"):
                subprocess.run(["dpkg", "-x", package, partial], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = f"{name} is neither here nor to be had from apt: {error}"
            if os.environ.get("CI") == "true":
                pytest.fail(reason)
            pytest.skip(reason)
        partial.rename(cache)
    found = str(next(cache.glob(f"usr/sbin/{name}")))
    folders = ":".join(sorted({str(path.parent) for path in cache.glob("usr/lib/*/*.so.*")}))
    return found, {**os.environ, "LD_LIBRARY_PATH": folders}
