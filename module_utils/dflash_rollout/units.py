"""systemd units, their log, their processes, and who listens on a port: thin functions around systemctl,
journalctl and /proc. They decide nothing."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import RolloutError
from .gpus import process_details

# systemctl and journalctl answer at once; a manager that doesn't is hung, and says so.
TIMEOUT_S = 30.0

_PROPERTIES = {
    "LoadState": "load_state",
    "ActiveState": "active_state",
    "SubState": "sub_state",
    "MainPID": "main_pid",
    "NRestarts": "restarts",
    "ControlGroup": "control_group",
    "InvocationID": "invocation_id",
    "Result": "result",
    "UnitFileState": "enabled",
    "Job": "job",
    "ExecCondition": "guarded",
    "ExecStart": "program",
    "RootDirectory": "root_directory",
    "RootImage": "root_image",
}


def systemd_version() -> int | None:
    """The version of systemd's tools (`systemd 252 (252.39-1)` → 252), or None where there are none or no number."""
    try:
        done = subprocess.run(
            ["systemctl", "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
        return int(done.stdout.split()[1])
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None


@dataclass(frozen=True)
class Unit:
    """What systemd says of a unit, or a container engine of a container in the same words (see containers.py).

    `job` is the id of a queued start or stop, 0 where there is none. `guarded`: its ExecCondition= asks the
    program whether it may start. `published`: the ports of the host that the engine forwards into a container,
    `forwarders` the units whose processes do that. `program`: the file that ExecStart= runs, "" where that is not
    a file of this root.
    """

    unit: str
    load_state: str
    active_state: str
    sub_state: str
    main_pid: int
    restarts: int
    control_group: str
    invocation_id: str
    result: str
    enabled: str
    job: int
    guarded: bool
    published: tuple[int, ...] = ()
    forwarders: tuple[str, ...] = ()
    program: str = ""

    def forwards(self, listener: Listener) -> bool:
        """Whether that listener is the engine's, for a port that this container publishes."""
        return listener.port in self.published and listener.unit in self.forwarders

    @property
    def running(self) -> bool:
        """Whether it has processes, or will have: a start is queued, or a restart is waited for."""
        return self.active_state not in ("inactive", "failed") or self.job != 0


@dataclass(frozen=True)
class Process:
    """A process, told from a later one with the same pid by its start time (clock ticks since boot)."""

    pid: int
    start_ticks: int
    user: str | None = None
    command: str | None = None


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket. The pid is None when the socket belongs to no process that we can see."""

    address: str
    port: int
    pid: int | None
    user: str | None
    command: str | None
    unit: str | None


def run(command: list[str], timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C", "SYSTEMD_COLORS": "0"},
        )
    except FileNotFoundError as error:
        raise RolloutError(
            f"{command[0]} is missing", expected="a host that systemd booted", remedy="this roll-out needs it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise RolloutError(
            f"{command[0]} doesn't answer",
            found=f"no answer within {timeout:g} s to {' '.join(command)}",
            remedy="look whether PID 1 is well (systemctl status, dmesg)",
        ) from error


def systemctl(*arguments: str, timeout: float = TIMEOUT_S) -> str:
    done = run(["systemctl", *arguments], timeout)
    if done.returncode != 0:
        raise RolloutError(
            f"systemctl {' '.join(arguments)} failed with exit status {done.returncode}",
            found=" ".join((done.stderr or done.stdout).split()) or "no output",
        )
    return done.stdout


def parse_show(text: str) -> dict[str, str]:
    """Read what `systemctl show` prints of one unit: property → value. Of several lines for one property the last counts."""
    parts = (line.partition("=") for line in text.splitlines())
    return {key: value.strip() for key, _, value in parts}


def parse_unit(name: str, text: str) -> Unit:
    """Read what `systemctl show` prints for the properties of _PROPERTIES; unset numbers are 0."""
    shown = parse_show(text)
    values = {field: shown.get(key, "") for key, field in _PROPERTIES.items()}
    numbers = {key: int(values.pop(key) or 0) for key in ("main_pid", "restarts", "job")}
    guarded = " may-start " in values.pop("guarded")
    path = re.match(r"\{ path=(/.*?) ; argv", values.pop("program"))
    other_root = values.pop("root_directory") or values.pop("root_image")
    values.pop("root_image", None)
    program = path[1] if path and not other_root else ""
    return Unit(unit=name, **values, **numbers, guarded=guarded, program=program)


def show(unit: str) -> Unit:
    """The state of a unit. One that does not exist has load_state "not-found"; that is no error."""
    return parse_unit(unit, systemctl("show", f"--property={','.join(_PROPERTIES)}", "--", unit))


def loaded(pattern: str) -> list[str]:
    """Names of the units that systemd has in memory: running, failed, or on their way."""
    listed = systemctl("list-units", "--all", "--plain", "--no-legend", "--no-pager", pattern)
    return [line.split()[0] for line in listed.splitlines() if line.split()]


def start(unit: str) -> None:
    """Queue the start of a unit, with the failures of earlier attempts forgotten. Doesn't wait."""
    # Fails only for a unit that isn't loaded, which the start says better.
    run(["systemctl", "reset-failed", "--", unit])
    systemctl("start", "--no-block", "--", unit)


def stop(unit: str) -> None:
    """Queue the stop of a unit: SIGTERM first, as its unit file says. Doesn't wait."""
    systemctl("stop", "--no-block", "--", unit)


def kill_group(unit: str) -> None:
    """SIGKILL to every process of the unit's control group; nothing when it has none."""
    run(["systemctl", "kill", "--signal=SIGKILL", "--", unit])


def journal_cursor() -> str | None:
    """Where the journal ends now, or None for an empty one. Unlike a time it doesn't mind a clock jump."""
    done = run(["journalctl", "--lines=0", "--show-cursor", "--quiet", "--no-pager"])
    for line in done.stdout.splitlines():
        if line.startswith("-- cursor: "):
            return line.removeprefix("-- cursor: ").strip()
    return None


def journal_tail(unit: str, cursor: str | None = None, lines: int = 30) -> list[str]:
    """The unit's last log lines of this boot, after `cursor` when there is one."""
    # With a cursor --lines= counts from there: the first lines, where the last are wanted (seen with systemd 252).
    since = [f"--after-cursor={cursor}"] if cursor else ["--boot", f"--lines={lines}"]
    command = ["journalctl", "--no-pager", "--quiet", "--output=short-iso", f"--unit={unit}", *since]
    return [line.rstrip() for line in run(command).stdout.splitlines() if line.strip()][-lines:]


def boot_seconds() -> float:
    """Seconds since boot. It counts a suspend and doesn't know of clock jumps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """The kernel's id of this boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
        return stream.read().strip()


def _stat_fields(pid: int) -> list[str] | None:
    """/proc/PID/stat from the process's state on (proc_pid_stat(5)); None when it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            # The name in parentheses may hold anything, so count from the last parenthesis.
            return stream.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time in ticks) of a living process; None when it ended or is a zombie."""
    fields = _stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def age_s(pid: int) -> float | None:
    """Seconds since a process was started, None when it has ended."""
    found = _stat(pid)
    if found is None:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - found[1] / os.sysconf("SC_CLK_TCK")


def parent_of(pid: int) -> int | None:
    """The parent of a process, None when it has ended."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[1])


def is_alive(process: Process) -> bool:
    """Whether that very process still lives, and not another one under its pid."""
    found = _stat(process.pid)
    return found is not None and found[1] == process.start_ticks


def _in_group(cgroup: str | None, control_group: str) -> bool:
    # The control group of a unit that never ran is "": nothing is in it.
    return bool(control_group) and cgroup is not None and f"{cgroup}/".startswith(f"{control_group}/")


def members(control_groups: Iterable[str], recorded: Iterable[Process] = ()) -> list[Process]:
    """The living processes of units' control groups or among `recorded`, and all their descendants.

    A descendant in another group (a login session, a scope) still belongs to the server that forked it.
    """
    stats = {int(name): stat for name in os.listdir("/proc") if name.isdigit() and (stat := _stat(int(name)))}
    details = {pid: process_details(pid) for pid in stats}
    groups = list(control_groups)
    found = {pid for pid in stats if any(_in_group(details[pid]["cgroup"], group) for group in groups)}
    found |= {process.pid for process in recorded if stats.get(process.pid, (0, 0))[1] == process.start_ticks}
    children: dict[int, list[int]] = {}
    for pid, (parent, _) in stats.items():
        children.setdefault(parent, []).append(pid)
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), []):
            if child not in found:
                found.add(child)
                waiting.append(child)
    return [
        Process(pid, stats[pid][1], details[pid]["user"], details[pid]["command"]) for pid in sorted(found)
    ]


def send_signal(process: Process, number: signal.Signals) -> bool:
    """Send a signal to that very process; False when it is gone.

    Through a pidfd: between the look at its start time and the signal, the pid can't become another's.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        if not is_alive(process):
            return False
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def _address(hexadecimal: str) -> str:
    import ipaddress  # only where a listener was found

    raw = bytes.fromhex(hexadecimal)
    # The kernel prints each 32-bit word in the machine's byte order (little endian on every GPU host).
    words = b"".join(raw[offset : offset + 4][::-1] for offset in range(0, len(raw), 4))
    return str(ipaddress.ip_address(words))


def parse_listeners(text: str, port: int | None = None) -> list[tuple[str, int, str]]:
    """(address, port, inode) of the sockets that listen, on `port` where given, from /proc/net/tcp or tcp6."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        address, _, number = fields[1].partition(":")
        if fields[3] == "0A" and port in (None, int(number, 16)):
            found.append((_address(address), int(number, 16), fields[9]))
    return found


def _sockets(folder: str, port: int | None = None) -> list[tuple[str, int, str]]:
    found = []
    for name in ("tcp", "tcp6"):
        # No tcp6 where IPv6 is switched off; no folder where the process has ended.
        with (
            contextlib.suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError),
            open(f"{folder}/{name}", encoding="ascii") as stream,
        ):
            found += parse_listeners(stream.read(), port)
    return found


def listens_at(processes: Iterable[Process]) -> list[str]:
    """Where these processes listen ("127.0.0.1:30000", "[::]:30000"), each in its own network namespace."""
    found = set()
    for process in processes:
        sockets = _sockets(f"/proc/{process.pid}/net")
        own = _socket_owners({inode for _, _, inode in sockets}, [str(process.pid)])
        found |= {
            f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
            for address, port, inode in sockets
            if inode in own
        }
    return sorted(found)


def listeners(port: int) -> list[Listener]:
    """Who listens on a TCP port at whatever address, IPv4 and IPv6. As root, each with its process."""
    sockets = _sockets("/proc/net", port)
    owners = _socket_owners({inode for _, _, inode in sockets}) if sockets else {}
    found = []
    for address, _, inode in sockets:
        # A socket inherited by workers has several owners: each is listed.
        for pid in owners.get(inode) or [None]:
            details = process_details(pid) if pid else {"user": None, "command": None, "unit": None}
            found.append(Listener(address, port, pid, details["user"], details["command"], details["unit"]))
    return found


def _socket_owners(inodes: set[str], pids: Iterable[str] | None = None) -> dict[str, list[int]]:
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    owners: dict[str, list[int]] = {}
    for name in pids or filter(str.isdigit, os.listdir("/proc")):
        # A process may end, or be another user's when we aren't root, while we look.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for descriptor in os.listdir(f"/proc/{name}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    inode = wanted.get(os.readlink(f"/proc/{name}/fd/{descriptor}"))
                    if inode and int(name) not in owners.setdefault(inode, []):
                        owners[inode].append(int(name))
    return owners
