#!/usr/bin/env python3
"""Runs the fault cells on booted hosts, prints a line for each and writes docs/faults.md. Root, and the virtual
environment on PATH. The raw logs, facts and verdicts stay below --results.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import checker
from cells import CELLS, Cell
from table import table

from bench import HERE, ROOT, Bench, NotSo, Site, beds

BED = [sys.executable, str(ROOT / "tests/testbed/bed.py")]
ATTEMPTS = 3
# What a server that never comes up costs a cell.
SITE = {"vllm_service_ready_timeout": 90, "sglang_ready_timeout": 25}


def judged(bench: Bench, cell: Cell, results: Path) -> dict:
    """One cell, tried up to three times when the fault did not come where it should; its row of the table."""
    begin = time.monotonic()
    for _ in range(ATTEMPTS):
        try:
            log, facts = bench.carry_out(cell)
        except (NotSo, subprocess.TimeoutExpired, beds.BedError) as problem:
            wrong, facts, log = [f"not carried out: {problem}"], None, []
        else:
            wrong = checker.check(cell.as_dict(), log, facts)
        missed = facts is None or (cell.state is not None and facts["injected"] != cell.state)
        bench.end_play()
        bench.play = None
        if not missed:
            break
    folder = results / re.sub(r"[^a-z0-9+-]+", "_", cell.name.lower())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    (folder / "facts.json").write_text(
        json.dumps({"cell": cell.as_dict(), "facts": facts, "wrong": wrong}, indent=1)
    )
    record = (facts or {}).get("end", {}).get("record") or {}
    seen = "not carried out" if facts is None else (facts["answer"].get("outcome") or record.get("state"))
    row = {
        "name": cell.name,
        "row": cell.row,
        "state": cell.state or "from the start",
        "expected": " or ".join(cell.ends),
        "seen": seen,
        "seconds": round(time.monotonic() - begin, 1),
        "outage_s": record.get("outage_s"),
        "dark_s": checker.dark_seconds(log) if log else None,
        "wrong": wrong,
        "through": cell.through,
        "note": cell.note,
        "cause": record.get("cause"),
    }
    (folder / "row.json").write_text(json.dumps(row, indent=1))
    mark = "ok  " if not wrong else "FAIL"
    print(f"{mark} {row['seconds']:6.1f} s  {row['seen'] or '-':<12} {cell.name}", flush=True)
    for sentence in wrong:
        print(f"       {sentence}"[:600], flush=True)
    return row


def bed(*arguments: str) -> str:
    return subprocess.run(
        [*BED, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=1800
    ).stdout


def library(scratch: Path) -> bytes:
    """The fake clock, compiled."""
    target = scratch / "fake_clock.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-o", str(target), str(HERE / "host/fake_clock.c")], check=True
    )
    return target.read_bytes()


def run_fast(cells: list[Cell], name: str, count: int, scratch: Path, results: Path) -> list[dict]:
    """The cells on hosts that are used again and again, several at a time."""
    bed("up", name, "--hosts", str(count), "--small")
    inventory = beds.require(name).run / "inventory.yml"
    done = subprocess.run(
        ["ansible-playbook", "-i", str(inventory), "tests/faults/prepare.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"tests/faults/prepare.yml failed:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
    waiting: queue.Queue[Cell] = queue.Queue()
    for cell in cells:
        waiting.put(cell)
    clock = library(scratch)

    def work(number: int) -> list[dict]:
        bench = Bench(name, f"{name}-gpu{number}", scratch)
        bench.install(clock, held=True)
        rows = []
        while True:
            try:
                cell = waiting.get_nowait()
            except queue.Empty:
                return rows
            rows.append(judged(bench, cell, results))

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return [row for rows in pool.map(work, range(1, count + 1)) for row in rows]


def run_site(cells: list[Cell], name: str, scratch: Path, results: Path) -> list[dict]:
    """The cells with the real wheel, each on a host that was booted for it."""
    drafter = scratch / "model.safetensors"
    subprocess.run(
        [sys.executable, str(ROOT / "tests/testbed/make_drafter.py"), str(drafter), "--small"], check=True
    )
    rows = []
    for cell in cells:
        bed("down", name)
        bed("up", name, "--hosts", "1", "--layer", "--small")
        bench = Site(name, f"{name}-gpu1", scratch)
        bench.site_arguments = [
            "site.yml",
            "-e",
            json.dumps(SITE | {"drafter_source": str(drafter)}),
        ]
        bench.install(library(scratch), held=False)
        rows.append(judged(bench, cell, results))
        bed("down", name)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
    )
    parser.add_argument("--ci", action="store_true", help="the subset that takes less than 10 minutes")
    parser.add_argument("--only", default="", help="cells whose row or name matches")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--bed", default="faults")
    parser.add_argument("--no-site", action="store_true", help="leave the cells with the real wheel out")
    parser.add_argument("--keep", action="store_true", help="leave the hosts up")
    parser.add_argument(
        "--results", type=Path, default=ROOT / ".cache/faults", help="raw logs and facts of each cell"
    )
    parser.add_argument("--docs", action="store_true", help="write docs/faults.md")
    parser.add_argument(
        "--merge", action="store_true", help="keep the rows of an earlier run for cells left out now"
    )
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    chosen = [
        cell
        for cell in CELLS
        if (cell.ci or not args.ci) and re.search(args.only, f"{cell.row}: {cell.name}")
    ]
    if args.list:
        for cell in chosen:
            print(f"{cell.row}: {cell.name} -> {' or '.join(cell.ends)}{' [ci]' if cell.ci else ''}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left behind
    begin = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="faults-"))
    fast = [cell for cell in chosen if cell.through != "site"]
    site = [cell for cell in chosen if cell.through == "site" and not args.no_site]
    rows: list[dict] = []
    try:
        if fast:
            rows += run_fast(fast, args.bed, args.hosts, scratch, args.results)
        if site:
            rows += run_site(site, f"{args.bed}-site", scratch, args.results)
    finally:
        for bench in Bench.all:
            bench.end_play()
        shutil.rmtree(scratch, ignore_errors=True)
        if not args.keep:
            bed("down", args.bed)
            bed("down", f"{args.bed}-site")
    if args.merge:
        ran = {row["name"] for row in rows}
        kept = [json.loads(path.read_text()) for path in sorted(args.results.glob("*/row.json"))]
        rows += [row for row in kept if row["name"] in {cell.name for cell in CELLS} - ran]
    (args.results / "rows.json").write_text(json.dumps(rows, indent=1))
    wrong = [row for row in rows if row["wrong"]]
    print(f"{len(rows) - len(wrong)} of {len(rows)} cells are right, {time.monotonic() - begin:.0f} s")
    if args.docs:
        (ROOT / "docs/faults.md").write_text(table(rows))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
