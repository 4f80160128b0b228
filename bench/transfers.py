"""Bringing one drafter to hosts through the role, or by `copy`, and measuring that: what several benchmarks share."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml
from common import BENCH, ROOT, Bed, Play, Running, booted, machine, play

DRAFTERS = "/opt/vllm-dflash/drafters"
#: What Ansible gives ssh where nobody tells it otherwise: with compression.
DEFAULT_SSH_ARGS = {"ANSIBLE_SSH_ARGS": "-C -o ControlMaster=auto -o ControlPersist=60s"}
COPIES = {"copy": DEFAULT_SSH_ARGS, "copy, our ssh": {}}


def role_transports() -> list[str]:
    """Transports of the role `drafter` that bring a file from the control node."""
    spec = yaml.safe_load((ROOT / "roles/drafter/meta/argument_specs.yml").read_text())
    offered = spec["argument_specs"]["main"]["options"]["drafter_transport"]["choices"]
    return [name for name in offered if name not in ("url", "present")]


@contextlib.contextmanager
def transfer_bed(
    name: str, count: int, *, rate: str = "", swarm: bool = True, keep: bool = False
) -> Iterator[Bed]:
    """Booted hosts for transfers. With `swarm` they have its libtorrent already: what it takes to install is no transfer."""
    options = ["--small", "--no-sglang", *(["--rate", rate] if rate else [])]
    with booted(name, count, *options, keep=keep) as bed:
        if swarm:
            play(bed, BENCH / "plays/swarm.yml")
        yield bed


@dataclass(frozen=True)
class Drafter:
    """A generated file that can't be compressed."""

    path: Path
    size: int
    sha256: str

    @property
    def on_host(self) -> str:
        """Where the role puts it."""
        return f"{DRAFTERS}/{self.sha256}/model.safetensors"


def make_drafter(*size: str) -> Drafter:
    """A drafter made with an option of make_drafter.py, kept in the test bed's cache, with a valid header."""
    name = "model" if size == ("--full-size",) else "".join(size).lstrip("-")
    path = machine.CACHE / "drafter" / f"{name}.safetensors"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, str(ROOT / "tests/testbed/make_drafter.py"), str(path), *size], check=True
        )
    return Drafter(path, path.stat().st_size, sha256(path))


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def start(
    bed: Bed, hosts: Sequence[str], transport: str, drafter: Drafter, variables: dict | None = None
) -> Running:
    """Start the play that brings the drafter: of the role, or one with `copy`."""
    limit = f"--limit={','.join(hosts)}"
    given = {"drafter_source": str(drafter.path), **(variables or {})}
    if transport in COPIES:
        given["bench_weights"] = drafter.on_host
        return Running(bed, BENCH / "plays/copy.yml", limit, variables=given, env=COPIES[transport])
    given["drafter_transport"] = transport
    return Running(bed, BENCH / "plays/drafter.yml", limit, variables=given)


def clear(bed: Bed, hosts: Sequence[str]) -> None:
    """No host has anything of a drafter, nothing waits to be written, no connection of the control node is open."""
    bed.kill_control()
    bed.everywhere(hosts, f"rm -rf {DRAFTERS}")
    subprocess.run(["sync"], check=True)


def transfer_start(run: Play) -> float:
    """When the transfer began: the first task after the role has looked on the hosts, or the copy itself."""
    found = False
    for _, task, _ in run.tasks():
        if found or task["name"] == "Copy the drafter":
            return task["start"]
        found = task["action"].rpartition(".")[2] == "model_files" and any(
            result["kind"] == "host" for result in task["hosts"].values()
        )
    names = [task["name"] for _, task, _ in run.tasks()]
    raise SystemExit(f"no task of this play begins the transfer: {names}\n{run.output[-3000:]}")


def held_at(bed: Bed, host: str, drafter: Drafter) -> float | None:
    """When the host got the file under its final name (the rename sets ctime; the hosts share our clock)."""
    path = bed.upper(host) / drafter.on_host.lstrip("/")
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_ctime if status.st_size == drafter.size else None


def holds(bed: Bed, host: str, drafter: Drafter) -> bool:
    """The host's file has every byte, read here and now."""
    path = bed.upper(host) / drafter.on_host.lstrip("/")
    return path.exists() and sha256(path) == drafter.sha256


@dataclass
class Measured:
    """One transfer to several hosts. Seconds; `sent` in bytes, headers of packets included, None without a cable."""

    transport: str
    hosts: int
    size: int
    all_hold: float
    play: float
    sent: int | None
    control_cpu: float
    host_cpu: float
    held: dict[str, float]

    def data(self) -> dict:
        """For the JSON file."""
        return asdict(self)


def measure(
    bed: Bed, hosts: Sequence[str], transport: str, drafter: Drafter, variables: dict | None = None
) -> Measured:
    """Bring the drafter to hosts that have nothing of it. Raises SystemExit where one then holds other bytes."""
    clear(bed, hosts)
    before = bed.sent() if bed.bed.rate else None
    run = start(bed, hosts, transport, drafter, variables).wait()
    sent = None if before is None else bed.sent() - before
    begin = transfer_start(run)
    held = {}
    for host in hosts:
        moment = held_at(bed, host, drafter)
        if moment is None or not holds(bed, host, drafter):
            raise SystemExit(f"{transport}: {host} doesn't hold the file\n{run.output[-3000:]}")
        held[host] = moment - begin
    return Measured(
        transport,
        len(hosts),
        drafter.size,
        max(held.values()),
        run.seconds,
        sent,
        run.control_cpu,
        run.host_cpu,
        held,
    )
