#!/usr/bin/env python3
"""What reading weights into the page cache before a switch is worth: a load from the disk, and one from memory.

    .venv/bin/python bench/page_cache.py [--file FILE] [--python PATH] [--runs 3]

Without --file a drafter of 3.46 GB is made (random bytes in the published shapes). Each run drops its pages from the
page cache, loads all tensors, drops them again, reads them as the roles do (idle priority), and loads once more.
A load is a fresh process; its imports don't count. Where PATH, by default this interpreter, has torch, it is the
safetensors library that loads, as vLLM does on local disks; else each tensor is copied out of a memory map, which is what the
library does with the file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "module_utils"))

from dflash_rollout.page_cache import PAGE, residency  # noqa: E402, F401 - after its path; PAGE is for who counts

LOAD = """
import sys, time
path, modules = sys.argv[1:]
sys.path.insert(0, modules)
try:
    import torch
    from safetensors import safe_open
except ImportError:
    from dflash_rollout.safetensors import read_header
    import mmap
    how = "memory map"
    begin = time.perf_counter()
    lengths = [tensor.nbytes for tensor in read_header(path).tensors.values()]
    with open(path, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        end = len(mapped)
        for length in lengths:
            mapped[end - length : end]
            end -= length
else:
    how = "safetensors, torch " + torch.__version__
    begin = time.perf_counter()
    with safe_open(path, framework="pt") as opened:
        for name in opened.keys():
            opened.get_tensor(name).clone()
print(time.perf_counter() - begin, how)
"""
WARM = """
import json, sys, time
path, modules = sys.argv[1:]
sys.path.insert(0, modules)
from dflash_rollout import page_cache
begin = time.perf_counter()
page_cache.look(path)
looked = time.perf_counter() - begin
result = page_cache.warm([path], reserve=0, limit_s=3600)
print(json.dumps({**result, "look_s": looked, "seconds": time.perf_counter() - begin - looked}))
"""


def drop(path: str) -> None:
    """Drop the file's clean pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: str) -> int:
    """Pages of the file in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return sum(residency(descriptor, os.fstat(descriptor).st_size))
    finally:
        os.close(descriptor)


def child(python: str, code: str, path: str) -> str:
    """What a fresh process prints."""
    argv = [python, "-c", code, path, str(ROOT / "module_utils")]
    return subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True).stdout


def load(python: str, path: str) -> tuple[float, str]:
    """Seconds to load all tensors, and how."""
    seconds, _, how = child(python, LOAD, path).strip().partition(" ")
    return float(seconds), how


def emptied(path: str) -> None:
    """No page of the file is in the page cache. Raises SystemExit where that can't be had."""
    drop(path)
    if left := resident(path):
        raise SystemExit(
            f"{left} pages of {path} stay in the page cache: is it on a tmpfs, or does somebody map it?"
        )


def measure(python: str, path: str, runs: int) -> dict:
    """Seconds of each kind, a list each."""
    found: dict = {"cold_s": [], "warming_s": [], "warm_s": [], "look_s": []}
    for number in range(runs):
        emptied(path)
        cold, found["how"] = load(python, path)
        emptied(path)
        warmed = json.loads(child(sys.executable, WARM, path))
        if warmed["reason"]:
            raise SystemExit(f"it can't be warmed: {warmed['reason']}")
        warm, _ = load(python, path)
        for key, value in (("cold_s", cold), ("warming_s", warmed["seconds"]), ("warm_s", warm)):
            found[key].append(round(value, 3))
        found["look_s"].append(round(warmed["look_s"], 4))
        print(
            f"{number + 1}: cold {cold:.2f} s, warming {warmed['seconds']:.2f} s, warm {warm:.2f} s",
            flush=True,
        )
    return found


def report(path: str, found: dict) -> None:
    """Print the table and keep the numbers."""
    from common import save, table

    size = os.path.getsize(path)
    rows = []
    for name, key in (
        ("load, nothing in the page cache", "cold_s"),
        ("reading it before the switch, idle priority", "warming_s"),
        ("load, all of it in the page cache", "warm_s"),
    ):
        seconds = statistics.median(found[key])
        rows.append([name, seconds, min(found[key]), max(found[key]), round(size / seconds / 1e6)])
    text = (
        f"{size:,} bytes, {len(found['cold_s'])} runs, loaded by {found['how']}; knowing what is resident takes"
        f" {1000 * statistics.median(found['look_s']):.1f} ms:\n\n"
        + table(["", "median s", "least s", "most s", "MB/s"], rows)
    )
    save("page_cache", text, bytes=size, **found)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a safetensors file, in the place of the one that is made")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that loads")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if args.file:
        path = str(args.file.resolve())
        report(path, measure(args.python, path, args.runs))
        return
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = str(Path(folder, "model.safetensors").resolve())
        maker = ROOT / "tests/testbed/make_drafter.py"
        subprocess.run([sys.executable, str(maker), path, "--full-size"], check=True)
        report(path, measure(args.python, path, args.runs))


if __name__ == "__main__":
    main()
