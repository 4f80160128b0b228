#!/usr/bin/env python3
"""One file to N hosts over rate-limited cables: seconds until all hold it, and what the control node sent.

    .venv/bin/python bench/distribution.py [--hosts 1,2,4,8,16] [--rate 50mbit] [--size 160] [--transports …]

Each booted host has a cable of the given rate each way, and so has the control node: a network namespace with one
uplink, in which ansible-playbook runs. The file can't be compressed. Every transfer goes through the role `drafter`,
or through a play with ansible.builtin.copy. S is the file, B the rate: S/B is the time to send it once.

Seconds run from the task that begins the transfer to the moment when the last host has the file, verified, under
its final name. After each transfer the bytes on every host are compared. "sent" counts every packet's headers.
"""

from __future__ import annotations

import argparse

from common import network, save, table
from transfers import COPIES, Measured, make_drafter, measure, role_transports, transfer_bed


def pivot(measured: list[Measured], bound: float) -> str:
    """Seconds until all hosts hold the file, a column for each number of hosts, and what was sent at the most."""
    counts = sorted({one.hosts for one in measured})
    rows: list[list[object]] = [["S/B, the bound", *[bound for _ in counts], 1.0]]
    for transport in dict.fromkeys(one.transport for one in measured):
        found = {one.hosts: one for one in measured if one.transport == transport}
        sent = max(one.sent / one.size for one in found.values())
        rows.append([transport, *[found[n].all_hold if n in found else None for n in counts], sent])
    return table(["seconds until all hold it", *[f"N={n}" for n in counts], "sent × file, at most"], rows)


def details(measured: list[Measured], bound: float) -> str:
    """A line for each transfer."""
    rows = [
        [
            one.transport,
            one.hosts,
            one.all_hold,
            one.all_hold / bound,
            one.all_hold / bound / one.hosts,
            one.play,
            one.sent / one.size,
            one.control_cpu,
            one.host_cpu,
        ]
        for one in measured
    ]
    head = ["transport", "N", "all hold s", "× S/B", "× N·S/B", "whole play s", "sent × file"]
    return table([*head, "CPU s control node", "CPU s hosts"], rows)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bed", default="bench-dist", help="name of the bed (default: %(default)s)")
    parser.add_argument("--hosts", default="1,2,4,8,16", help="(default: %(default)s)")
    parser.add_argument("--rate", default="50mbit", help="of each cable, each way (default: %(default)s)")
    parser.add_argument("--size", type=int, default=160, help="of the file in MB (default: %(default)s)")
    transports = [*role_transports(), *COPIES]
    parser.add_argument(
        "--transports", default=";".join(transports), help="with ; between (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="leave the bed up")
    args = parser.parse_args()
    counts = sorted(map(int, args.hosts.split(",")))
    wanted = args.transports.split(";")
    if unknown := set(wanted) - set(transports):
        parser.error(f"no such transport: {', '.join(unknown)}; there are: {'; '.join(transports)}")
    drafter = make_drafter("--size", str(args.size))
    bound = drafter.size * 8 / network.bits_per_second(args.rate)
    print(f"S = {drafter.size:,} bytes, B = {args.rate}, S/B = {bound:.1f} s", flush=True)
    measured = []
    swarm = "swarm" in wanted
    with transfer_bed(args.bed, counts[-1], rate=args.rate, swarm=swarm, keep=args.keep) as bed:
        for count in counts:
            # Side by side: the machine is as busy for one as for the other.
            for transport in wanted:
                measured.append(measure(bed, bed.hosts[:count], transport, drafter))
                print(details(measured[-1:], bound).splitlines()[-1], flush=True)
    save(
        f"distribution-{args.rate}",
        f"S = {drafter.size:,} bytes, B = {args.rate} for every cable.\n\n"
        f"{pivot(measured, bound)}\n\n{details(measured, bound)}",
        rate=args.rate,
        size=drafter.size,
        bound_s=bound,
        transfers=[one.data() for one in measured],
    )


if __name__ == "__main__":
    main()
