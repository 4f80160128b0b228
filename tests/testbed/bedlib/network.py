"""The network of a bed: one bridge, one /24 of its own, and (unless told otherwise) a way out."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import re
from pathlib import Path

from .machine import RUN, BedError, program, run

_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_FORWARD_BEFORE = RUN / "ip_forward.before"


def pick_subnet(name: str, taken: list[str]) -> str:
    """A free /24 for the bed `name`: the same one every time unless a route or another bed has it.

    `taken` are subnets of beds that have no bridge yet. Call under the lock of all beds.
    """
    # "default" parses as no network; a default route clashes with nothing.
    used = [ipaddress.ip_network(net) for net in taken]
    for route in json.loads(run("ip", "-j", "-4", "route", "show", "table", "all") or "[]"):
        with contextlib.suppress(ValueError):
            used.append(ipaddress.ip_network(route["dst"], strict=False))
    start = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    for step in range(1 << 14):
        # 10.64.0.0 to 10.127.255.0: away from the low 10.x that people and VPNs like.
        number = (start + step) % (1 << 14)
        subnet = ipaddress.ip_network(f"10.{64 + number // 256}.{number % 256}.0/24")
        if not any(subnet.overlaps(net) for net in used if net.prefixlen > 1):
            return str(subnet)
    raise BedError("every /24 of 10.64.0.0/10 clashes with a route of this machine")


def raise_bridge(bridge: str, subnet: str) -> None:
    """Make the bridge with the first address of its subnet; fine if it is there already."""
    if not Path("/sys/class/net", bridge).exists():
        run("ip", "link", "add", bridge, "type", "bridge", "forward_delay", "0", "stp_state", "0")
    gateway = next(ipaddress.ip_network(subnet).hosts())
    run("ip", "address", "replace", f"{gateway}/24", "dev", bridge)
    run("ip", "link", "set", bridge, "up")


def open_outside(bridge: str, subnet: str) -> None:
    """Let the bed's hosts out: forwarding, masquerade. Call under the lock of all beds."""
    if _FORWARD.read_text().strip() == "0":
        _FORWARD_BEFORE.write_text("0")
        _FORWARD.write_text("1")
    table = _table(bridge)
    rules = f"""
        add table ip {table}
        delete table ip {table}
        table ip {table} {{
            chain postrouting {{
                type nat hook postrouting priority 100;
                ip saddr {subnet} ip daddr != {subnet} masquerade
            }}
        }}
    """
    run("nft", "-f", "-", text_in=rules)
    # Docker and ufw set the FORWARD policy to DROP, which an accept in a table of ours can't undo.
    if program("iptables") and "-P FORWARD DROP" in run("iptables", "-S", "FORWARD"):
        for rule in _forward_rules(bridge):
            run("iptables", "-w", "-D", "FORWARD", *rule, check=False)  # there already, if the bed is up
            run("iptables", "-w", "-I", "FORWARD", *rule)


def close_outside(bridge: str, *, last: bool) -> None:
    """Undo open_outside; `last`: no other bed needs forwarding, so the machine's own setting comes back."""
    table = _table(bridge)
    run("nft", "-f", "-", text_in=f"add table ip {table}\ndelete table ip {table}\n")
    if program("iptables") and bridge in run("iptables", "-S", "FORWARD"):
        for rule in _forward_rules(bridge):
            run("iptables", "-w", "-D", "FORWARD", *rule, check=False)
    if last and _FORWARD_BEFORE.exists():
        _FORWARD.write_text(_FORWARD_BEFORE.read_text())
        _FORWARD_BEFORE.unlink()


def remove_bridge(bridge: str) -> None:
    """Remove the bridge; fine if it is gone."""
    if Path("/sys/class/net", bridge).exists():
        run("ip", "link", "del", bridge)


def set_link(interface: str, state: str) -> None:
    """Set an interface "up" or "down" if it exists."""
    if Path("/sys/class/net", interface).exists():
        run("ip", "link", "set", interface, state)


# --- rates -------------------------------------------------------------------------------------------

_UNITS = {"kbit": 1_000, "mbit": 1_000_000, "gbit": 1_000_000_000}


def bits_per_second(rate: str) -> int:
    """A rate as tc writes it, whole numbers only: "200mbit" → 200000000."""
    match = re.fullmatch(r"([1-9][0-9]*)(kbit|mbit|gbit)", rate)
    if match is None:
        raise BedError(f"rate {rate!r}: expected for example 200mbit, with one of {', '.join(_UNITS)}")
    return int(match[1]) * _UNITS[match[2]]


def shape(device: str, rate: str, *, inside: str = "") -> None:
    """Let no more than `rate` out of a device, "" for no limit; `inside`: the network namespace it is in.

    A token bucket limits what leaves a device: a cable has one at each end. 10 ms of tokens, because the kernel
    refills by its timer, and a queue of 50 ms.
    """
    enter = ["nsenter", f"--net={inside}"] if inside else []
    if not rate:
        run(*enter, "tc", "qdisc", "del", "dev", device, "root", check=False)  # there may be none
        return
    burst = max(bits_per_second(rate) // 8 // 100, 16 << 10)
    bucket = ("tbf", "rate", rate, "burst", f"{burst}b", "latency", "50ms")
    run(*enter, "tc", "qdisc", "replace", "dev", device, "root", *bucket)


def sent(device: str, *, inside: str) -> int:
    """Bytes that a shaped device let out since it was made, the headers of every packet included."""
    (bucket,) = json.loads(
        run("nsenter", f"--net={inside}", "tc", "-s", "-j", "qdisc", "show", "dev", device)
    )
    return bucket["bytes"]


def raise_control(namespace: str, bridge: str, subnet: str) -> None:
    """A network namespace with one cable to the bridge, and the subnet's second address; fine if it is there."""
    if namespace_path(namespace).exists():
        return
    outer, inner, address = f"vb-{namespace}", "uplink", ipaddress.ip_network(subnet).network_address + 2
    run("ip", "netns", "add", namespace)
    run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
    run("ip", "link", "set", outer, "master", bridge, "up")
    run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", inner)
    run("ip", "-n", namespace, "link", "set", inner, "up")
    run("ip", "-n", namespace, "link", "set", "lo", "up")


def remove_control(namespace: str) -> None:
    """Remove the namespace, and with it its cable; fine if it is gone. Nothing may run in it any more."""
    if namespace_path(namespace).exists():
        run("ip", "netns", "del", namespace)
    run("ip", "link", "del", f"vb-{namespace}", check=False)  # gone with its other end, if there was one


def namespace_path(namespace: str) -> Path:
    """The file that stands for a named network namespace."""
    return Path("/run/netns", namespace)


def nameservers() -> list[str]:
    """The machine's name servers that a guest with a network of its own can reach."""
    for path in (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")):
        if path.exists():
            words = [line.split() for line in path.read_text().splitlines()]
            servers = [w[1] for w in words if len(w) > 1 and w[0] == "nameserver"]
            # 127.0.0.53 and its like are the machine's own loopback, nothing to a guest.
            reachable = [s for s in servers if not s.startswith("127.") and ":" not in s]
            if reachable:
                return reachable
    return []


def _table(bridge: str) -> str:
    return "testbed_" + bridge.replace("-", "_")


def _forward_rules(bridge: str) -> list[list[str]]:
    out = ["-i", bridge, "-j", "ACCEPT"]
    back = ["-o", bridge, "-m", "conntrack", "--ctstate", "RELATED,ESTABLISHED", "-j", "ACCEPT"]
    return [out, back]
