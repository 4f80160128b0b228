#!/usr/bin/env python3
"""What a second run of site.yml costs, where nothing is to be done.

    .venv/bin/python bench/second_run.py [--hosts 8] [--profile] [--keep]

Booted hosts (real systemd, ssh and vLLM wheel; GPUs, SGLang and the engine are simulated) are taken to vLLM
first. Then runs of site.yml alternate with runs of an empty play: as many tasks of each kind on the same hosts
in the same batches, each doing the least that its kind can do. The kinds are counted in a run of site.yml:

- host: ran a module on a host; empty: ping
- local: ran a module on the control node for a host; empty: ping there
- control: only the control node's own processes (set_fact, assert, include); empty: a true assert
- skipped; empty: ping with a condition that is false

The model files are dropped from the page cache before each run of site.yml, and the pages that are there after it
are counted. `--keep` leaves the bed up: the next call measures at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

from common import ROOT, Bed, Play, booted, machine, play, save, table
from page_cache import PAGE, drop, resident

RUNS = 3
#: A drafter's header and what the kernel reads ahead of it. More than that means that weights were read.
HEADER_BYTES = 1 << 20


def empty_tasks(task: dict, hosts: list[str]) -> list[dict]:
    """What stands for one task in the empty play: one task, or one per kind where hosts differ in kind."""
    kinds = defaultdict(list)
    for host, result in task["hosts"].items():
        kinds[result["kind"]].append(host)
    # A skipped host needs no task of its own where another kind's task can skip it.
    working = {kind: names for kind, names in kinds.items() if kind != "skipped"}
    tasks = []
    for kind, names in (working or kinds).items():
        made: dict = {"name": f"{kind}: {task['name']}"}
        if kind == "control":
            made["ansible.builtin.assert"] = {"that": [True], "quiet": True}
        else:
            made["ansible.builtin.ping"] = {}
        if kind == "local":
            made |= {"delegate_to": "localhost", "become": False}
        if task["run_once"]:
            made["run_once"] = True
        if kind == "skipped":
            made["when"] = False
        elif not task["run_once"] and set(names) != set(hosts):
            made["when"] = f"inventory_hostname in {json.dumps(names)}"
        tasks.append(made)
    return tasks


def empty_plays(batches: list[dict]) -> list[dict]:
    """A playbook with as many tasks of each kind, on the same hosts, as a run that the tally wrote down had."""
    plays = []
    for batch in batches:
        hosts = list(dict.fromkeys(host for task in batch["tasks"] for host in task["hosts"]))
        if not hosts:
            continue
        made = {"name": batch["play"], "hosts": ",".join(hosts), "gather_facts": False}
        if hosts == ["localhost"]:
            made["connection"] = "local"
        made["tasks"] = [empty for task in batch["tasks"] for empty in empty_tasks(task, hosts)]
        plays.append(made)
    return plays


def count(batches: list[dict]) -> Counter[str]:
    """Task results by kind; a task on eight hosts is eight, one with a loop counts once per host."""
    return Counter(
        result["kind"] for batch in batches for task in batch["tasks"] for result in task["hosts"].values()
    )


def model_files(bed: Bed, drafter: Path) -> list[Path]:
    """The drafter on the control node, and every model file on the hosts' own disks."""
    found = [drafter]
    for host in bed.hosts:
        for folder in ("opt/vllm-dflash/drafters", "root/models"):
            found += sorted(
                path
                for path in (bed.upper(host) / folder).rglob("*.safetensors")
                if path.is_file() and not path.is_symlink()
            )
    return found


def profile(run: Play, top: int = 30) -> str:
    """The tasks that took longest, added up over batches: wall seconds, and of the slowest host's task alone."""
    wall: Counter[tuple[str, str]] = Counter()
    slowest: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    kinds: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for batch, task, seconds in run.tasks():
        key = batch["play"], task["name"]
        wall[key] += seconds
        slowest[key] += max((result["seconds"] for result in task["hosts"].values()), default=0.0)
        times[key] += 1
        kinds[key].update(result["kind"] for result in task["hosts"].values())
    rows = [
        [
            seconds,
            slowest[key],
            times[key],
            ", ".join(f"{number} {kind}" for kind, number in kinds[key].items()),
            *key,
        ]
        for key, seconds in wall.most_common(top)
    ]
    return table(["wall s", "slowest host s", "times", "results", "play", "task"], rows)


def phases(run: Play) -> str:
    """Wall seconds of each play of a run; what comes before the first is reading the playbook."""
    rows: list[list[object]] = [["(start of ansible-playbook)", None, run.batches[0]["start"] - run.start]]
    ends = [batch["start"] for batch in run.batches[1:]] + [run.end]
    for batch, end in zip(run.batches, ends, strict=True):
        if rows[-1][0] == batch["play"]:
            rows[-1][1] += len(batch["tasks"])
            rows[-1][2] += end - batch["start"]
        else:
            rows.append([batch["play"], len(batch["tasks"]), end - batch["start"]])
    return table(["play", "tasks", "wall s"], rows)


def make_drafter() -> Path:
    """The simulated pair's small drafter, in the test bed's cache; larger than what the kernel reads ahead."""
    path = machine.CACHE / "drafter" / "small.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        maker = ROOT / "tests/testbed/make_drafter.py"
        subprocess.run([sys.executable, str(maker), str(path), "--small"], check=True)
    return path


def roll_out(bed: Bed, variables: dict) -> Play:
    """Take the hosts to vLLM; a run after that is uncounted, and the one that the empty play is made from."""
    if not any(bed.upper(host).joinpath("opt/vllm-dflash/releases").is_dir() for host in bed.hosts):
        for host in bed.hosts:
            bed.inside(
                host, "until curl -sf -o /dev/null http://127.0.0.1:30000/v1/models; do sleep 0.5; done"
            )
        # All at once, since how they get there isn't what is measured.
        first = play(bed, "site.yml", variables={**variables, "rollout_serial": len(bed.hosts)})
        print(f"roll-out: {first.seconds:.0f} s", flush=True)
    return play(bed, "site.yml", variables=variables)


def measured(bed: Bed, variables: dict, files: list[Path]) -> tuple[Play, dict[str, int]]:
    """One run of site.yml on a cold page cache, and the bytes of each model file that it brought there."""
    for path in files:
        drop(str(path))
    before = {path: resident(str(path)) for path in files}
    run = play(bed, "site.yml", variables=variables)
    if run.changed():
        raise SystemExit(f"a second run changed something: {', '.join(run.changed())}")
    return run, {str(path): (resident(str(path)) - before[path]) * PAGE for path in files}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bed", default="bench-second", help="name of the bed (default: %(default)s)")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--runs", type=int, default=RUNS, help="of each of the two (default: %(default)s)")
    parser.add_argument("--profile", action="store_true", help="the tasks that take longest")
    parser.add_argument("--keep", action="store_true", help="leave the bed up")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        booted(args.bed, args.hosts, "--layer", "--small", keep=args.keep) as bed,
    ):
        drafter = make_drafter()
        variables = {"drafter_source": str(drafter)}
        counted = roll_out(bed, variables)
        kinds = count(counted.batches)
        empty = Path(folder) / "empty.yml"
        empty.write_text(json.dumps(empty_plays(counted.batches), indent=1))
        files = model_files(bed, drafter)
        runs, empties, read = [], [], {}
        for number in range(args.runs):
            run, bytes_read = measured(bed, variables, files)
            runs.append(run)
            read = {path: max(bytes_read[path], read.get(path, 0)) for path in bytes_read}
            empties.append(play(bed, empty))
            if not count(empties[-1].batches) == count(run.batches) == kinds:
                raise SystemExit(
                    f"not as many tasks: {kinds}, {count(run.batches)}, {count(empties[-1].batches)}"
                )
            print(
                f"{number + 1}: site.yml {run.seconds:.2f} s, empty {empties[-1].seconds:.2f} s", flush=True
            )
    report(args, runs, empties, kinds, read, drafter)


def report(
    args: argparse.Namespace,
    runs: list[Play],
    empties: list[Play],
    kinds: Counter[str],
    read: dict[str, int],
    drafter: Path,
) -> None:
    """Print the tables and keep the numbers."""

    def medians(plays: list[Play]) -> list[float]:
        return [
            statistics.median(getattr(run, name) for run in plays)
            for name in ("seconds", "control_cpu", "host_cpu")
        ]

    ours, least = medians(runs), medians(empties)
    ratio = ours[0] / least[0]
    rows = [
        ["site.yml", *ours],
        ["empty play", *least],
        ["ratio", *(a / b for a, b in zip(ours, least, strict=True))],
    ]
    median = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    hosts_read = {path: size for path, size in read.items() if path != str(drafter)}
    parts = [
        f"Second run of site.yml on {args.hosts} hosts, median of {args.runs}, changed=0:\n\n"
        + table(["", "wall s", "CPU s of the control node", "CPU s of the hosts"], rows),
        f"Task results in both: {', '.join(f'{number} {kind}' for kind, number in sorted(kinds.items()))}.\n"
        f"Brought into the page cache: {read[str(drafter)]:,} bytes of the drafter on the control node,"
        f" {sum(hosts_read.values()):,} bytes of {len(hosts_read)} model files on the hosts (headers).",
        phases(median),
    ]
    if args.profile:
        parts.append(profile(median))
    save(
        "second_run",
        "\n\n".join(parts),
        hosts=args.hosts,
        site_s=[run.seconds for run in runs],
        empty_s=[run.seconds for run in empties],
        ratio=ratio,
        control_cpu_s=ours[1],
        host_cpu_s=ours[2],
        results=kinds,
        bytes_read_control=read[str(drafter)],
        bytes_read_hosts=sum(hosts_read.values()),
    )
    too_much = {path: size for path, size in read.items() if size > HEADER_BYTES}
    if too_much:
        raise SystemExit(f"weights were read: {too_much}")


if __name__ == "__main__":
    main()
