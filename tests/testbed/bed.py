#!/usr/bin/env python3
"""Booted test hosts: Debian or Ubuntu guests with systemd and sshd, and a simulated GPU pair in each.

Standard library only; run as root. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bedlib import base, hosts, layer, machine


def prepare(_: argparse.Namespace) -> int:
    """Install missing system packages, build base image and simulated driver."""
    machine.install_packages()
    print(base.ensure_base())
    base.ensure_driver()
    layer.prune()
    return 0


def up(args: argparse.Namespace) -> int:
    """Boot a bed; prints the path of its inventory."""
    if args.bed == layer.BUILDER:
        raise machine.BedError(f"{args.bed} is the name of the bed that builds the release layer")
    machine.install_packages()
    begin = time.monotonic()

    def images() -> list[Path]:
        return layer.ensure_layer(args.command) if args.layer else [base.ensure_base()]

    with hosts.bed_lock(args.bed):
        bed = hosts.up(
            args.bed,
            args.hosts,
            images,
            layer=args.layer,
            sglang=args.sglang,
            outside=args.outside,
            small=args.small,
            rate=args.rate,
        )
    machine.log(f"bed {args.bed} is up ({time.monotonic() - begin:.1f} s): {bed.run / 'inventory.yml'}")
    print(bed.run / "inventory.yml")
    return 0


def down(args: argparse.Namespace) -> int:
    """Remove a bed, or all of them."""
    if args.all:
        layer.down_all()
        return 0
    if not args.bed:
        raise machine.BedError("which bed? name it, or say --all")
    begin = time.monotonic()
    with hosts.bed_lock(args.bed):
        hosts.down(args.bed)
    machine.log(f"bed {args.bed} is down ({time.monotonic() - begin:.1f} s)")
    return 0


def status(_: argparse.Namespace) -> int:
    """All beds as JSON."""
    print(json.dumps(hosts.status(), indent=2))
    return 0


def ssh(args: argparse.Namespace) -> int:
    """Log in as ops, or run a command there."""
    bed = hosts.require(args.bed)
    command = ["ssh", "-F", str(bed.run / "ssh_config"), bed.host(args.host).name, *args.remote]
    os.execvp(command[0], command)  # noqa: S606


def power_cut(args: argparse.Namespace) -> int:
    """The host is off at once; its peers see silence."""
    with hosts.bed_lock(args.bed):
        bed = hosts.require(args.bed)
        hosts.power_cut(bed, bed.host(args.host))
    return 0


def power_on(args: argparse.Namespace) -> int:
    """Boot a host that is off, from its disk as it is."""
    with hosts.bed_lock(args.bed):
        bed = hosts.require(args.bed)
        hosts.power_on(bed, bed.host(args.host))
    return 0


def rate(args: argparse.Namespace) -> int:
    """Limit the cable of a host, or of the control node, each way."""
    with hosts.bed_lock(args.bed):
        bed = hosts.require(args.bed)
        hosts.set_rate(bed, None if args.host == "control" else bed.host(args.host), args.rate)
    return 0


def control(args: argparse.Namespace) -> int:
    """Run a command on the control node's own cable, in a bed that is up with --rate."""
    bed = hosts.require(args.bed)
    if not bed.rate:
        raise machine.BedError(f"bed {bed.name} is up without --rate")
    command = ["nsenter", f"--net=/run/netns/{bed.control}", *args.remote]
    os.execvp(command[0], command)  # noqa: S606


def build_layer(args: argparse.Namespace) -> int:
    """Build the release layer if there is none yet; prints its path."""
    machine.install_packages()
    print(layer.ensure_layer(args.command)[0])
    layer.prune()
    return 0


def can_boot(_: argparse.Namespace) -> int:
    """Exit 0 if this machine can boot hosts, else 1 and one sentence why."""
    reason = machine.why_not_bootable()
    if reason:
        print(reason)
    return 1 if reason else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bed.py", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)

    def verb(name: str, function: object) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=function.__doc__, description=function.__doc__)
        made.set_defaults(function=function)
        return made

    command = {"default": layer.COMMAND, "help": "what installs the release; default: %(default)s"}
    verb("can-boot", can_boot)
    verb("prepare", prepare)
    parts = verb("layer", build_layer)
    parts.add_argument("--command", **command)
    parts = verb("up", up)
    parts.add_argument("bed")
    parts.add_argument("--hosts", type=int, choices=range(1, 65), metavar="N", default=1)
    parts.add_argument("--layer", action="store_true", help="with the release layer under every host")
    parts.add_argument("--command", **command)
    parts.add_argument("--no-sglang", dest="sglang", action="store_false", help="don't enable sglang.service")
    parts.add_argument("--small", action="store_true", help="the narrow target, for make_drafter.py --small")
    parts.add_argument("--no-outside", dest="outside", action="store_false", help="no route out of the bed")
    parts.add_argument("--rate", default="", help="limit every cable each way, for example 200mbit")
    parts = verb("down", down)
    parts.add_argument("bed", nargs="?")
    parts.add_argument("--all", action="store_true")
    verb("status", status)
    for name, function in (("power-cut", power_cut), ("power-on", power_on), ("ssh", ssh)):
        parts = verb(name, function)
        parts.add_argument("bed")
        parts.add_argument("host", help="gpu1, or with the bed's name: BED-gpu1")
        if function is ssh:
            parts.add_argument("remote", nargs=argparse.REMAINDER, metavar="command")
    parts = verb("rate", rate)
    parts.add_argument("bed")
    parts.add_argument("host", help="gpu1, or control")
    parts.add_argument("rate", help="for example 20mbit")
    parts = verb("control", control)
    parts.add_argument("bed")
    parts.add_argument("remote", nargs=argparse.REMAINDER, metavar="command")
    return parser


def main() -> int:
    """Parse, run, and turn what a person can act on into one message."""
    args = _parser().parse_args()
    os.umask(0o022)
    try:
        if args.verb != "can-boot" and os.geteuid() != 0:
            raise machine.BedError(f"needs root: sudo {shlex.join(sys.argv)}")
        return args.function(args)
    except machine.BedError as error:
        machine.log(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        machine.log("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
