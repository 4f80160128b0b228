#!/usr/bin/env python3
"""What a transfer costs when something goes wrong, for each transport of the role.

    .venv/bin/python bench/transfer_faults.py [--only resume,flip,orphans,uneven] [--rate 50mbit] [--size 80] …

resume   SIGKILL to everything that runs as the control node when 60 % are sent; again: bytes sent by the second run
flip     one byte flipped under the final name, mtime put back; again with drafter_verify=full: bytes sent
orphans  the control node gone in mid-transfer: seconds until none of its processes and no listening port of it is left
         on any host. Killed; or cut off, then killed: then sshd's own end when TCP does, and only what they ran counts
uneven   one host loses its power in mid-transfer, one has a tenth of the rate: when the others hold the file, against
         a run with all hosts well

resume and flip have one host, a bigger file and a faster cable than the others (--big, --fast): what Ansible itself sends
to a host is over 1 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import subprocess
import time
from pathlib import Path

from common import Bed, Running, bedhosts, machine, network, save, table
from common import bed as bed_verb
from transfers import (
    Drafter,
    clear,
    held_at,
    holds,
    make_drafter,
    measure,
    role_transports,
    start,
    transfer_bed,
    transfer_start,
)

RESENT_LIMIT = 0.45
REPAIR_LIMIT = 0.01


def wait_sent(bed: Bed, run: Running, before: int, wanted: float) -> None:
    """Wait until the control node has sent `wanted` bytes more than `before`."""
    while bed.sent() - before < wanted:
        if not run.alive():
            raise SystemExit(
                f"the play ended before {wanted:.0f} bytes were sent\n{run.wait(check=False).output[-3000:]}"
            )
        time.sleep(0.1)


def resume(bed: Bed, transport: str, drafter: Drafter, _: argparse.Namespace) -> dict:
    """Killed at 60 %, run again."""
    host = bed.hosts[:1]
    clear(bed, host)
    before = bed.sent()
    run = start(bed, host, transport, drafter)
    wait_sent(bed, run, before, 0.6 * drafter.size)
    bed.kill_control()
    run.wait(check=False)
    killed = bed.sent()
    again = start(bed, host, transport, drafter).wait(check=False)
    resent = (bed.sent() - killed) / drafter.size
    good = again.status == 0 and holds(bed, host[0], drafter)
    return {
        "case": "killed at 60 %, again",
        "found": f"{(killed - before) / drafter.size:.2f} × file sent, then {resent:.3f} × file",
        "limit": f"≤ {RESENT_LIMIT}",
        "right": good and resent <= RESENT_LIMIT,
        "resent": resent,
        "failed": "" if good else again.output[-1500:],
    }


FLIP = """
import os, sys
path, status = sys.argv[1], os.stat(sys.argv[1])
with open(path, "r+b") as stream:
    stream.seek(status.st_size // 2)
    byte = stream.read(1)[0]
    stream.seek(status.st_size // 2)
    stream.write(bytes([byte ^ 1]))
os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
"""


def flip(bed: Bed, transport: str, drafter: Drafter, _: argparse.Namespace) -> dict:
    """One byte flipped under the final name, with the mtime that it had."""
    host = bed.hosts[:1]
    measure(bed, host, transport, drafter)
    Path(bed.upper(host[0]), "root/flip.py").write_text(FLIP)
    bed.inside(host[0], f"python3 /root/flip.py {drafter.on_host}")
    if holds(bed, host[0], drafter):
        raise SystemExit("the byte wasn't flipped")
    before = bed.sent()
    run = start(bed, host, transport, drafter, {"drafter_verify": "full"}).wait(check=False)
    sent = (bed.sent() - before) / drafter.size
    good = run.status == 0 and holds(bed, host[0], drafter)
    return {
        "case": "one byte flipped, drafter_verify=full",
        "found": f"{'repaired' if good else 'not repaired'}, {sent:.4f} × file sent, {run.seconds:.1f} s",
        "limit": f"≤ {REPAIR_LIMIT}",
        "right": good and sent <= REPAIR_LIMIT,
        "sent": sent,
        "failed": "" if good else run.output[-1500:],
    }


def running(bed: Bed, host: str) -> set[str]:
    """How the host's processes were called, and its listening ports, seen from outside."""
    found = set()
    for pid in machine.cgroup_pids(bed.name, host):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            found.add(b" ".join(words[:4]).decode(errors="replace").strip()[:60])
    init = bedhosts.guest_init(bed.bed, bed.bed.host(host))
    listening = subprocess.run(
        ["nsenter", f"--net=/proc/{init}/ns/net", "ss", "-H", "-l", "-n", "-t", "-u"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    found |= {f"port {line.split()[0]} {line.split()[4]}" for line in listening.splitlines()}
    return found


def waits(process: str) -> bool:
    """Whether this is a login whose other end can't be heard: sshd's, or a module that sshd was still to bring to it."""
    return process.startswith(("sshd: ", "/bin/sh -c", "sudo -H -S -n")) or process == "/usr/bin/python3"


def orphans(bed: Bed, transport: str, drafter: Drafter, args: argparse.Namespace) -> list[dict]:
    """The control node gone in mid-transfer."""
    cases = []
    for cut in (False, True):
        hosts = bed.hosts[:2]
        clear(bed, hosts)
        time.sleep(15)  # systemd keeps a session's manager for 10 s
        quiet = {host: running(bed, host) for host in hosts}
        run = start(bed, hosts, transport, drafter, {"transfer_limit": args.patience // 2})
        wait_sent(bed, run, bed.sent(), 0.3 * drafter.size)
        if cut:
            bed.cable("down")
        bed.kill_control()
        run.wait(check=False)
        gone = time.monotonic()
        seconds, left, logins = 0.0, {"not looked yet"}, set()
        while left and seconds < args.patience:
            time.sleep(1)
            seconds = time.monotonic() - gone
            more = {host: running(bed, host) - quiet[host] for host in hosts}
            logins = {one for found in more.values() for one in found if cut and waits(one)}
            left = set().union(*more.values()) - logins
        bed.cable("up")
        for host in hosts if left or logins else []:  # not to be taken for quiet later
            bed_verb("power-cut", bed.name, host)
            bed_verb("power-on", bed.name, host)
        how = "cut off and killed" if cut else "killed"
        cases.append(
            {
                "case": f"control node {how} in mid-transfer, transfer_limit {args.patience // 2} s",
                "found": (
                    f"after {seconds:.0f} s left: {'; '.join(sorted(left))}"
                    if left
                    else f"nothing left on {len(hosts)} hosts after {seconds:.0f} s"
                )
                + (" but logins that wait for TCP to give up" if logins else ""),
                "limit": f"≤ {args.patience} s",
                "right": not left,
                "seconds": seconds,
            }
        )
    return cases


def uneven(bed: Bed, transport: str, drafter: Drafter, args: argparse.Namespace) -> dict:
    """One host dead, one slow."""
    hosts = bed.hosts[:4]
    dead, slow, *others = hosts
    well = measure(bed, hosts, transport, drafter)
    clear(bed, hosts)
    tenth = f"{network.bits_per_second(args.rate) // 10_000}kbit"
    bed_verb("rate", bed.name, slow, tenth)
    before = bed.sent()
    run = start(bed, hosts, transport, drafter)
    try:
        wait_sent(bed, run, before, 0.3 * drafter.size)
        bed_verb("power-cut", bed.name, dead)
        try:
            done = run.wait(
                check=False,
                timeout=args.patience + 10 * drafter.size * 8 / network.bits_per_second(args.rate),
            )
        except subprocess.TimeoutExpired:
            bed.kill_control()
            done = run.wait(check=False)
    finally:
        bed_verb("power-on", bed.name, dead)
        bed_verb("rate", bed.name, slow, args.rate)
    begin = transfer_start(done) if done.batches else done.start
    seconds = {host: moment - begin for host in hosts if (moment := held_at(bed, host, drafter))}
    worst = max(seconds.get(host, float("inf")) for host in others)
    healthy = max(well.held.values())
    shown = ", ".join(
        f"{host.rpartition('-')[2]} {seconds[host]:.0f} s" if host in seconds else f"{host} never"
        for host in hosts
    )
    return {
        "case": f"{dead.rpartition('-')[2]} dead, {slow.rpartition('-')[2]} slow",
        "found": f"{shown}; all well: {healthy:.0f} s",
        "limit": "the others in their own time",
        "right": all(host in seconds and holds(bed, host, drafter) for host in others)
        and worst <= 1.3 * healthy,
        "seconds": seconds,
        "well": well.held,
    }


CASES = {"resume": resume, "flip": flip, "orphans": orphans, "uneven": uneven}


def main() -> None:
    """Break things, print, keep; exit status 1 if a figure is over its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bed", default="bench-faults", help="begin of the names of the beds (default: %(default)s)"
    )
    parser.add_argument("--rate", default="50mbit", help="of each cable, each way (default: %(default)s)")
    parser.add_argument("--size", type=int, default=80, help="of the file in MB (default: %(default)s)")
    parser.add_argument("--only", default=",".join(CASES), help="(default: %(default)s)")
    parser.add_argument("--transports", default=",".join(role_transports()), help="(default: %(default)s)")
    parser.add_argument(
        "--patience",
        type=int,
        default=120,
        help="seconds until hosts must be clean; transfers may last half of that (default: %(default)s)",
    )
    parser.add_argument("--big", type=int, default=400, help="MB, for resume and flip (default: %(default)s)")
    parser.add_argument("--fast", default="200mbit", help="rate for resume and flip (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave the bed up")
    args = parser.parse_args()
    found = []
    swarm = "swarm" in args.transports.split(",")
    sizes = []
    for cases, hosts, rate, size in (
        (("resume", "flip"), 1, args.fast, args.big),
        (("orphans", "uneven"), 4, args.rate, args.size),
    ):
        mine = [name for name in cases if name in args.only.split(",")]
        if not mine:
            continue
        drafter = make_drafter("--size", str(size))
        sizes.append((rate, drafter.size))
        with transfer_bed(f"{args.bed}{hosts}", hosts, rate=rate, swarm=swarm, keep=args.keep) as bed:
            for name, transport in itertools.product(mine, args.transports.split(",")):
                result = CASES[name](bed, transport, drafter, args)
                for case in result if isinstance(result, list) else [result]:
                    found.append({"transport": transport, **case})
                    print(f"{transport}: {case['case']}: {case['found']}", flush=True)
                    if case.get("failed"):
                        print(case["failed"])
    rows = [
        [one["transport"], one["case"], one["found"], one["limit"], "yes" if one["right"] else "NO"]
        for one in found
    ]
    head = ["transport", "what", "found", "limit", "within"]
    save(
        "transfer_faults",
        "; ".join(f"{size:,} bytes over cables of {rate}" for rate, size in sizes)
        + f".\n\n{table(head, rows)}",
        sizes=sizes,
        cases=found,
    )
    if not all(one["right"] for one in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
