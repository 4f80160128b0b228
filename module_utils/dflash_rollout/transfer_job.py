"""One transfer on a host as a transient systemd unit: started, followed, stopped (the module `transfer_job`).

The program in the unit reads its configuration from `$CREDENTIALS_DIRECTORY/config.json` and writes
`$RUNTIME_DIRECTORY/progress.json` by atomic renames, see PROGRESS. It runs as a user that can write the files it
brings and nothing else, and systemd ends it after its limit whatever became of the control node.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import json
import os
import pwd
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from . import units
from .errors import RolloutError
from .files import read_json, write_json

RUN_DIR = "/run/vllm-dflash-transfer"
POLL_S = 0.25
#: To ask systemd costs two processes a hundred times what it costs to read the progress.
ASK_S = 2.0
STOP_S = 10
MEMORY_MAX = "1G"
MAX_PROGRESS_BYTES = 64 * 1024

# What a program writes. All bytes are of the file; sent and received may be more, where parts travel twice.
PROGRESS = {
    "state": "starting",  # checking: reads what an earlier run left; running; complete; failed
    "bytes_done": 0,
    "bytes_total": 0,
    "bytes_sent": 0,
    "bytes_received": 0,
    "peers": 0,
    "seconds": 0.0,  # from its start; stays as it is from `complete` on
    "error": "",  # for people, cause and remedy; only with `failed`
}
STATES = ("starting", "checking", "running", "complete", "failed")


@dataclass(frozen=True)
class Job:
    """What is to run. `config` may hold secrets: it reaches the program as a credential and nothing else."""

    name: str
    argv: list[str]
    user: str
    limit_s: int
    config: dict = field(default_factory=dict, repr=False)
    write_paths: list[str] = field(default_factory=list)
    allow_addresses: list[str] = field(default_factory=list)

    def digest(self) -> str:
        """The same for the same job; it is kept where only root reads, since secrets are in it."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def unit_name(name: str) -> str:
    """The unit of a transfer. Raises RolloutError for a name that systemd would escape."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name):
        raise RolloutError(
            "A transfer can't have this name",
            found=repr(name),
            expected="letters, digits, dot, dash, underscore",
        )
    return f"vllm-dflash-transfer-{name}.service"


def unit_properties(job: Job) -> list[str]:
    """The sandbox: its own files are all that it can write, its peers all that it can talk to.

    Raises RolloutError for an address that is none.
    """
    at_home = any(
        path.startswith(("/home/", "/root/", "/run/user/")) for path in [*job.argv, *job.write_paths]
    )
    properties = [
        f"User={job.user}",
        f"RuntimeMaxSec={job.limit_s}",
        f"TimeoutStopSec={STOP_S}",
        f"LoadCredential=config.json:{RUN_DIR}/{job.name}.config",
        f"RuntimeDirectory={os.path.basename(RUN_DIR)}/{job.name}",
        "RuntimeDirectoryMode=0700",
        "RuntimeDirectoryPreserve=yes",
        # The unit is forgotten when it ends; this is how it ended.
        f"ExecStopPost=/bin/sh -c 'echo $SERVICE_RESULT $EXIT_CODE $EXIT_STATUS >{RUN_DIR}/{job.name}/ended'",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "AmbientCapabilities=",
        "ProtectSystem=strict",
        f"ProtectHome={'read-only' if at_home else 'yes'}",
        "PrivateTmp=yes",
        "PrivateDevices=yes",
        "ProtectKernelTunables=yes",
        "ProtectKernelModules=yes",
        "ProtectKernelLogs=yes",
        "ProtectControlGroups=yes",
        "ProtectClock=yes",
        "ProtectHostname=yes",
        "ProtectProc=invisible",
        "RestrictNamespaces=yes",
        "RestrictRealtime=yes",
        "RestrictSUIDSGID=yes",
        "RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK",
        "LockPersonality=yes",
        "MemoryDenyWriteExecute=yes",
        "SystemCallArchitectures=native",
        "SystemCallFilter=@system-service",
        "SystemCallErrorNumber=EPERM",
        "UMask=0077",
        f"MemoryMax={MEMORY_MAX}",
        "TasksMax=64",
        # It must never take a disk or a core from the server that serves meanwhile.
        "Nice=10",
        "IOSchedulingClass=idle",
        *(f"ReadWritePaths={path}" for path in job.write_paths),
    ]
    if job.allow_addresses:
        properties += [
            "IPAddressDeny=any",
            *(f"IPAddressAllow={_network(text)}" for text in job.allow_addresses),
        ]
    return properties


def _network(text: str) -> str:
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError as error:
        raise RolloutError(
            "A transfer can't be confined to this address",
            found=repr(text),
            expected="an IP address or a network",
        ) from error


def start(job: Job, *, check: bool = False) -> bool:
    """Have the job run; True when it had to be started. A running one with the same everything is left alone.

    Raises RolloutError; then it doesn't run.
    """
    unit = unit_name(job.name)
    if not job.argv or not os.path.isabs(job.argv[0]):
        raise RolloutError("A transfer needs an absolute program", found=repr(job.argv))
    account = _account(job.user) if not check else None
    properties = unit_properties(job)
    with _lock(job.name, check):
        if units.show(unit).running and _recorded(job.name) == job.digest():
            return False
        if check:
            return True
        _remove(job.name)
        for path in job.write_paths:
            _own(path, account)
        credential = f"{RUN_DIR}/{job.name}.config"
        try:
            write_json(credential, job.config, mode=0o600)
            write_json(_record_path(job.name), {"digest": job.digest(), "limit_s": job.limit_s}, mode=0o600)
            command = ["systemd-run", f"--unit={unit}", "--collect", "--quiet", "--service-type=exec"]
            command += [f"--property={value}" for value in properties]
            done = subprocess.run(
                [*command, "--", *job.argv],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=units.TIMEOUT_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RolloutError(f"{unit} can't be started", found=str(error)) from error
        finally:
            # systemd has handed it over by now: the program's copy lies in memory that only it can read.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(credential)
        if done.returncode != 0:
            log = " / ".join(units.journal_tail(unit, lines=3))
            _remove(job.name)
            raise RolloutError(f"{unit} can't be started", found=" ".join(done.stderr.split()) + f" {log}")
    return True


def follow(name: str, *, timeout: float) -> dict:
    """Watch a job for up to `timeout` seconds, or until nothing more will come of it.

    Returns the fields of PROGRESS and `finished` (the file is complete, even if the job goes on to serve others),
    `failure` (why it won't come, and what to do; "" while it may), `percent`, `mb_per_s` and `msg`, one line.
    """
    unit = unit_name(name)
    begin = time.monotonic()
    first: tuple[float, int] | None = None
    asked, running = 0.0, True
    while True:
        now = time.monotonic()
        if now - asked >= ASK_S:
            # In this order: what ends between the two looks has written its last word.
            asked, running = now, units.show(unit).running
        progress = read_progress(name)
        if progress["state"] == "running" and first is None:
            first = (now, progress["bytes_done"])
        finished = progress["state"] == "complete"
        failure = "" if finished else progress["error"]
        if not (finished or failure or running):
            failure = _why_ended(name)
        if finished or failure or now - begin >= timeout:
            break
        time.sleep(min(POLL_S, max(timeout - (now - begin), 0.01)))
    seconds, before = (now - first[0], first[1]) if first else (0.0, 0)
    rate = (progress["bytes_done"] - before) / seconds if seconds >= POLL_S else 0.0
    return {
        **progress,
        "finished": finished,
        "failure": failure,
        "percent": percent(progress),
        "mb_per_s": round(rate / 1e6, 1),
        "msg": failure or line(progress, rate),
    }


def stop(name: str, *, check: bool = False) -> bool:
    """End the job and forget it; True when there was anything. What it brought so far stays."""
    with _lock(name, check):
        there = units.show(unit_name(name)).running or os.path.lexists(_record_path(name))
        if there and not check:
            _remove(name)
    return there


@contextlib.contextmanager
def ended(name: str) -> Iterator[None]:
    """The job has ended and nobody else is at it, so that what it brought can be verified. `follow` still knows it.

    Raises RolloutError when it won't end.
    """
    with _lock(name, check=False):
        _end(name)
        yield


def percent(progress: dict) -> int:
    """How much is there, rounded down: 100 means all of it."""
    return progress["bytes_done"] * 100 // progress["bytes_total"] if progress["bytes_total"] else 0


def size_text(count: float) -> str:
    """Bytes for people, in powers of ten as disks and networks count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def line(progress: dict, rate: float) -> str:
    """One line on a transfer; `rate` in bytes/s, 0 where it isn't known."""
    total = size_text(progress["bytes_total"])
    if progress["state"] == "complete":
        return f"{total} in {progress['seconds']:.1f} s"
    if progress["state"] == "starting":
        return "starting"
    if progress["state"] == "checking":
        return f"looking at what an earlier run left, {percent(progress)} % of {total} is good"
    text = f"{percent(progress)} % of {total}"
    if rate <= 0:
        return f"{text}, nothing arrived lately"
    left = (progress["bytes_total"] - progress["bytes_done"]) / rate
    return f"{text}, {rate / 1e6:.3g} MB/s, {left:.0f} s left"


def parse_progress(text: str) -> dict:
    """PROGRESS with what the program wrote. Raises RolloutError for what no such program writes."""
    try:
        written = json.loads(text)
        progress = {key: type(value)(written.get(key, value)) for key, value in PROGRESS.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise RolloutError("The progress of a transfer can't be read", found=str(error)) from error
    if progress["state"] not in STATES:
        raise RolloutError(
            "The progress of a transfer can't be read", found=f"state {progress['state'][:40]!r}"
        )
    if progress["state"] == "failed" and not progress["error"]:
        progress["error"] = "The transfer failed without a reason."
    return progress


def read_progress(name: str) -> dict:
    """What the program wrote last; as PROGRESS before it wrote anything.

    The file is another user's: no link is followed, and not more is read than such a program writes.
    """
    try:
        descriptor = os.open(f"{RUN_DIR}/{name}/progress.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return dict(PROGRESS)
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream:
        return parse_progress(stream.read(MAX_PROGRESS_BYTES))


def ending_text(ended: str, limit_s: int, log: list[str]) -> str:
    """Why a job that did not say so itself is over. `ended`: SERVICE_RESULT EXIT_CODE EXIT_STATUS, or ""."""
    result, _, status = ended.strip().partition(" ")
    kept = "run again: it goes on with what arrived"
    found = " / ".join(log) or "no log"
    if result == "timeout":
        return str(RolloutError(f"The transfer was not done within its limit of {limit_s} s", remedy=kept))
    if result == "oom-kill":
        return str(RolloutError(f"The transfer needed more memory than {MEMORY_MAX}", remedy=kept))
    if result == "success":
        return str(RolloutError("The transfer ended before the file was complete", found=found, remedy=kept))
    how = f"{result}, {status}" if result else "killed, or the host was restarted"
    return str(RolloutError(f"The transfer broke off ({how})", found=found, remedy=kept))


def _why_ended(name: str) -> str:
    record = read_json(_record_path(name))
    if record is None:
        return str(
            RolloutError(
                f"No transfer {name} is known on this host",
                found="it was never started, was stopped, or the host was restarted",
                remedy="run again: it goes on with what arrived",
            )
        )
    ended = ""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(f"{RUN_DIR}/{name}/ended", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, encoding="utf-8", errors="replace") as stream:
            ended = stream.read(200)
    return ending_text(ended, record["limit_s"], units.journal_tail(unit_name(name), lines=3))


def _record_path(name: str) -> str:
    return f"{RUN_DIR}/{name}.json"


def _recorded(name: str) -> str | None:
    record = read_json(_record_path(name))
    return record["digest"] if record else None


@contextlib.contextmanager
def _lock(name: str, check: bool) -> Iterator[None]:
    """A module whose connection was lost may still be at it when it is asked again: one after the other."""
    if check:
        yield
        return
    os.makedirs(RUN_DIR, mode=0o755, exist_ok=True)
    with open(f"{RUN_DIR}/.{name}.lock", "a", encoding="ascii") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _end(name: str) -> None:
    unit = unit_name(name)
    if units.show(unit).running:
        units.stop(unit)
        deadline = time.monotonic() + 2 * STOP_S + 5
        while units.show(unit).running:
            if time.monotonic() > deadline:
                raise RolloutError(f"{unit} does not end", remedy=f"look at it: systemctl status {unit}")
            time.sleep(0.1)


def _remove(name: str) -> None:
    """End the unit, wait for that, and remove what it left. Raises RolloutError when it won't end."""
    _end(name)
    shutil.rmtree(f"{RUN_DIR}/{name}", ignore_errors=True)
    for path in (f"{RUN_DIR}/{name}.config", _record_path(name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def _account(user: str) -> pwd.struct_passwd:
    try:
        account = pwd.getpwnam(user)
    except KeyError as error:
        raise RolloutError(
            f"There is no user {user}", remedy="create the user of the transfers first"
        ) from error
    if account.pw_uid == 0:
        raise RolloutError("A transfer does not run as root", found=user, expected="a system user of its own")
    return account


def _own(path: str, account: pwd.struct_passwd) -> None:
    """Give the job its file, empty where there is none yet: it can't make one in a folder of root's."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            found = os.fstat(descriptor)
            # The file is root's no longer after this: it must be no other file too.
            if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
                raise RolloutError(f"{path} can't be given to a transfer", expected="a file with one name")
            os.fchown(descriptor, account.pw_uid, account.pw_gid)
            os.fchmod(descriptor, 0o600)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RolloutError(f"{path} can't be given to a transfer", found=str(error)) from error
