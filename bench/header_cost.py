#!/usr/bin/env python3
"""What reading a drafter's header costs: time, bytes, and pages of the file touched.

    .venv/bin/python bench/header_cost.py [FILE]       without FILE: a generated drafter of 3.46 GB (made of holes)

The file's pages are dropped from the cache before each run (posix_fadvise), and counted after it with
mincore(2): an mmap that touches the payload shows there, and not in /proc/self/io. Compared with the
safetensors library, in a fresh process each, since importing is part of the cost. The targets: under 50 ms
from header to config, under 1 MiB read.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, save, table
from page_cache import PAGE, drop, resident

sys.path[:0] = [str(ROOT / "module_utils"), str(ROOT / "tests")]

RUNS = 7

HEADER = """
from dflash_rollout.safetensors import read_header
read_header(PATH)
"""
CONFIG = """
from dflash_rollout.drafter_config import render
from dflash_rollout.safetensors import read_header
render(read_header(PATH).tensors, TARGET, PROFILE)
"""
LIBRARY = """
from safetensors import safe_open
with safe_open(PATH, framework="np") as opened:
    {name: (opened.get_slice(name).get_dtype(), opened.get_slice(name).get_shape()) for name in opened.keys()}
"""
TIMED = """
import sys, time
sys.path[:0] = {paths!r}
from drafters import PROFILE_27B as PROFILE, QWEN3_6_27B as TARGET
PATH = {path!r}
start = time.perf_counter()
{body}
print(time.perf_counter() - start)
start = time.perf_counter()
{body}
print(time.perf_counter() - start)
"""


def measure(path: str, body: str, bytecode: str) -> tuple[float, float, int]:
    """Median seconds in a fresh process (with imports) and again, and pages resident after a cold run.

    `bytecode`: a folder for it, so that an uncounted first run compiles and no other does.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    cold, warm, pages = [], [], 0
    for _ in range(RUNS + 1):
        drop(path)
        before = resident(path)
        code = TIMED.format(paths=sys.path[:2], path=path, body=body)
        output = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
        )
        first, second = output.stdout.split()
        cold.append(float(first))
        warm.append(float(second))
        pages = resident(path) - before
    return statistics.median(cold[1:]), statistics.median(warm[1:]), pages


def main() -> None:
    """Measure the file named, or a generated one."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        if len(sys.argv) > 1:
            path = sys.argv[1]
        else:
            from drafters import drafter_shapes, write_sparse

            path = str(write_sparse(Path(folder) / "model.safetensors", drafter_shapes()).resolve())
        rows = []
        for name, body in (
            ("header", HEADER),
            ("header and config", CONFIG),
            ("the safetensors library (numpy)", LIBRARY),
        ):
            first, again, pages = measure(path, body, os.path.join(folder, "bytecode"))
            rows.append([name, first * 1000, again * 1000, pages, pages * PAGE // 1024])
        head = ["", "first, ms", "again, ms", "pages", "KiB of file"]
        save(
            "header_cost",
            f"{os.path.getsize(path):,} bytes, {RUNS} runs each, page cache dropped before each.\n\n{table(head, rows)}",
            size=os.path.getsize(path),
            rows=[dict(zip(["name", *head[1:]], row, strict=True)) for row in rows],
        )


if __name__ == "__main__":
    main()
