#!/usr/bin/python3 -IS
"""Observer of a fault test: writes down, ten times a second, what can be seen on the host. It judges nothing.

Standard library only; runs on the host as root, as a unit of its own outside of the servers' control groups,
and is started again at boot, where it goes on with the same log. One JSON object a line:

sample  boot, t (CLOCK_BOOTTIME), wall, procs {pid: [start ticks, unit, command line]} of every process in a unit
        that is watched or that holds GPU memory, holds [[pid, gpu, MiB]], used {gpu: MiB}, listen [pids],
        record, gate, serving, pending: the switch's own files, as short as they can be told
models  what /v1/models answered (asked once a second), and which process listened then
note    written by the test, through `observer.py note TEXT`
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import urllib.request

LOG = "/var/log/faults-observer.jsonl"
STATE, RUN = "/var/lib/vllm-dflash", "/run/vllm-dflash"
HOLDS = "/run/simulated-gpu/holds"
UNSEEN = "/run/simulated-gpu/unseen"
PORT = 30000
WATCHED = (
    "sglang.service",
    "vllm-dflash@",
    "llm-switchover.service",
    "faults-",
    "systemd-logind.service",
    "dbus.service",
)
PERIOD_S = 0.1


def read(path: str) -> str | None:
    """The text of a file; None when it is gone or can't be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return None


def document(path: str) -> object:
    """A JSON file: its value, None when it isn't there, "broken" when it is no JSON."""
    text = read(path)
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError:
        return "broken"


def unit_of(pid: int) -> str:
    """The unit in whose control group a process is, or that group."""
    for line in (read(f"/proc/{pid}/cgroup") or "").splitlines():
        if line.startswith(("0::", "1:name=systemd:")) or ":name=systemd:" in line:
            path = line.split(":", 2)[2]
            for part in path.split("/"):
                if part.endswith(".service"):
                    return part
            return path
    return ""


def processes(holding: set[int], known: dict[int, tuple[str, float]]) -> dict[int, list]:
    """Those that matter: in a watched unit, or holding GPU memory. `known`: units of processes, good for a second."""
    found = {}
    now = time.monotonic()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        pid = int(name)
        unit, until = known.get(pid, ("", 0.0))
        if now > until:
            unit = unit_of(pid)
            # A process that is just being started is not in its unit yet.
            if unit.endswith(".service"):
                known[pid] = (unit, now + 1.0)
        if pid not in holding and not unit.startswith(WATCHED):
            continue
        fields = (read(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if not fields or fields[0] in "ZX":
            known.pop(pid, None)
            continue
        command = (read(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
        found[pid] = [int(fields[19]), unit, command[:200]]
    return found


def holds() -> list[list[int]]:
    """[pid, GPU, MiB] as the simulated driver has them; a dead process holds nothing."""
    found = []
    for name in sorted(os.listdir(HOLDS)) if os.path.isdir(HOLDS) else []:
        if name.isdigit() and os.path.exists(f"/proc/{name}"):
            fields = (read(f"/proc/{name}/stat") or "").rpartition(")")[2].split()
            if not fields or fields[0] in "ZX":
                continue
            for line in (read(f"{HOLDS}/{name}") or "").splitlines():
                index, mib = line.split()
                found.append([int(name), int(index), int(mib)])
    return found


def used(held: list[list[int]]) -> dict[str, int]:
    """MiB by GPU, memory without a process included."""
    total: dict[str, int] = {}
    unseen = [line.split() for line in (read(UNSEEN) or "").splitlines()]
    for index, mib in [*((i, m) for _, i, m in held), *((int(i), int(m)) for i, m in unseen)]:
        total[str(index)] = total.get(str(index), 0) + mib
    return total


def listening(pids: list[int]) -> list[int]:
    """Which of these processes listen on the port."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        for line in (read(f"/proc/net/{name}") or "").splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == PORT:
                inodes.add(f"socket:[{fields[9]}]")
    found = []
    for pid in pids if inodes else []:
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                if os.readlink(f"/proc/{pid}/fd/{descriptor}") in inodes:
                    found.append(pid)
                    break
            except OSError:
                continue
    return found


def switch_files() -> dict:
    """The switch's files, short: which record in which state, what may start, what serves."""
    fallback, record = document(f"{RUN}/record.json"), document(f"{STATE}/switch/record.json")
    newest = fallback or record
    gate, serving = document(f"{RUN}/gate.json"), document(f"{STATE}/serving.json")
    return {
        "record": newest if not isinstance(newest, dict) else {"id": newest["id"], "state": newest["state"]},
        "record_on_run": fallback is not None,
        "gate": gate if not isinstance(gate, dict) else {"may_start": gate["may_start"]},
        "serving": serving
        if not isinstance(serving, dict)
        else {
            "unit": serving["serving"]["unit"],
            "previous": (serving["previous"] or {}).get("unit"),
            "switch_id": serving["switch_id"],
        },
        "pending": os.path.exists(f"{STATE}/switch/pending.json"),
    }


class Log:
    """One line at a time, whole, at the end of the file."""

    def __init__(self) -> None:
        self.descriptor = os.open(LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.boot = (read("/proc/sys/kernel/random/boot_id") or "").strip()

    def write(self, kind: str, **values: object) -> None:
        entry = {
            "kind": kind,
            "boot": self.boot,
            "t": round(time.clock_gettime(time.CLOCK_BOOTTIME), 3),
            "wall": round(time.time(), 3),
            **values,
        }
        os.write(self.descriptor, json.dumps(entry, separators=(",", ":")).encode() + b"\n")


def ask_models(log: Log) -> None:
    """Once a second, in a thread of its own: a server that hangs must not hang the samples."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with opener.open(f"http://127.0.0.1:{PORT}/v1/models", timeout=2) as answer:
                ids = [model["id"] for model in json.loads(answer.read(65536))["data"]]
                log.write("models", ids=ids)
        except Exception as error:
            log.write("models", ids=[], error=f"{type(error).__name__}: {error}"[:200])
        time.sleep(1.0)


def main() -> None:
    log = Log()
    if sys.argv[1:2] == ["note"]:
        log.write("note", **json.loads(sys.argv[2]))
        return
    threading.Thread(target=ask_models, args=(log,), daemon=True).start()
    following = time.monotonic()
    known: dict[int, tuple[str, float]] = {}
    while True:
        held = holds()
        procs = processes({pid for pid, _, _ in held}, known)
        log.write(
            "sample",
            procs=procs,
            holds=held,
            used=used(held),
            listen=listening([pid for pid, values in procs.items()]),
            **switch_files(),
        )
        following = max(following + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, following - time.monotonic()))


if __name__ == "__main__":
    main()
