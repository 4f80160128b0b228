#!/usr/bin/env python3
"""3.3 GB to one host over a cable without a limit: MB/s, and CPU seconds on both sides.

    .venv/bin/python bench/one_host.py [--size MB] [--runs 1]

The role's transports and ansible.builtin.copy beside what they are made of: rsync by itself, and ssh that carries
the file into a file, with AES-GCM and with its default cipher. On one machine both sides share its cores, so MB/s is
what these cores can carry; CPU seconds are the number to keep. "transfer" runs from the task that begins it until the
host holds the verified file; the bare commands verify nothing.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import subprocess
import time

from common import Bed, save, table
from transfers import COPIES, DRAFTERS, Drafter, clear, make_drafter, measure, role_transports, transfer_bed

GCM = "-c aes128-gcm@openssh.com"


def bare(bed: Bed, drafter: Drafter) -> dict[str, str]:
    """What the role's transports are made of, as shell commands of the control node."""
    ssh = f"ssh -F {bed.bed.run / 'ssh_config'}"
    host, source, target = bed.hosts[0], shlex.quote(str(drafter.path)), f"{DRAFTERS}/bare"
    into = f"{host} 'sudo sh -c \"cat > {target}\"' < {source}"
    return {
        "ssh, AES-GCM": f"{ssh} {GCM} {into}",
        "ssh, default cipher": f"{ssh} {into}",
        "ssh -C": f"{ssh} -C {into}",
        "rsync": f"rsync -W --inplace -e '{ssh} {GCM}' --rsync-path 'sudo rsync' {source} {host}:{target}",
    }


def measure_bare(bed: Bed, drafter: Drafter, name: str, command: str) -> dict:
    """One bare transfer; the file's length is compared afterwards."""
    clear(bed, bed.hosts)
    bed.inside(bed.hosts[0], f"mkdir -p {DRAFTERS}")
    before = bed.cpu("control"), bed.cpu(*bed.hosts)
    start = time.monotonic()
    subprocess.run(bed.control(["sh", "-c", command]), check=True)
    seconds = time.monotonic() - start
    after = bed.cpu("control"), bed.cpu(*bed.hosts)
    size = int(bed.inside(bed.hosts[0], f"stat -c %s {DRAFTERS}/bare"))
    if size != drafter.size:
        raise SystemExit(f"{name}: {size} bytes arrived of {drafter.size}")
    return {"name": name, "transfer": seconds, "control": after[0] - before[0], "hosts": after[1] - before[1]}


def measure_play(bed: Bed, drafter: Drafter, transport: str) -> dict:
    """One transfer by a play."""
    found = measure(bed, bed.hosts, transport, drafter)
    name = f"role, {transport}" if transport not in COPIES else f"ansible {transport}"
    return {
        "name": name,
        "transfer": found.all_hold,
        "play": found.play,
        "control": found.control_cpu,
        "hosts": found.host_cpu,
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bed", default="bench-one", help="name of the bed (default: %(default)s)")
    parser.add_argument("--size", type=int, help="of the file in MB (default: the real drafter's, 3460)")
    parser.add_argument("--runs", type=int, default=1, help="of each, for medians (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the bed up")
    args = parser.parse_args()
    drafter = make_drafter("--size", str(args.size)) if args.size else make_drafter("--full-size")
    found = []
    with transfer_bed(args.bed, 1, keep=args.keep) as bed:
        for _ in range(args.runs):
            found += [measure_bare(bed, drafter, *item) for item in bare(bed, drafter).items()]
            found += [measure_play(bed, drafter, name) for name in [*role_transports(), *COPIES]]
    rows: list[list[object]] = []
    for name in dict.fromkeys(one["name"] for one in found):
        same = [one for one in found if one["name"] == name]
        transfer, control, hosts = (
            statistics.median(one[key] for one in same) for key in ("transfer", "control", "hosts")
        )
        whole = statistics.median(one["play"] for one in same) if "play" in same[0] else None
        rows.append([name, drafter.size / transfer / 1e6, transfer, whole, control, hosts])
    head = ["", "MB/s", "transfer s", "whole play s", "CPU s control node", "CPU s host"]
    save(
        "one_host",
        f"{drafter.size:,} bytes to one host, cable without a limit, median of {args.runs}.\n\n{table(head, rows)}",
        size=drafter.size,
        transfers=found,
    )


if __name__ == "__main__":
    main()
