"""nvidia-smi → the GPUs of a host and the processes that hold memory on them.

The parsers take text and are pure; `query_gpus` and `query_processes` call nvidia-smi and read /proc.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
import signal
import subprocess
from dataclasses import dataclass

from .errors import RolloutError

GPU_FIELDS = "index,uuid,name,memory.total,memory.used,driver_version,compute_cap"
PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"

# Without persistence mode the driver initialises every card for each call: seconds, but never half a minute.
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Gpu:
    """One card. Memory in MiB; None where the card doesn't say (unified memory)."""

    index: int
    uuid: str
    name: str
    memory_total_mib: int | None
    memory_used_mib: int | None
    driver_version: str
    compute_capability: str


@dataclass(frozen=True)
class GpuProcess:
    """One process on one card; a process on two cards is listed twice.

    None is "not known": nvidia-smi withholds it, or the process ended or is hidden from the caller.
    `cgroup` is the path below the host's cgroup root, `unit` the systemd unit that it belongs to.
    """

    pid: int
    gpu_uuid: str
    gpu_index: int | None
    name: str | None
    used_mib: int | None
    user: str | None = None
    command: str | None = None
    cgroup: str | None = None
    unit: str | None = None


def _known(field: str) -> str | None:
    """The field, or None for nvidia-smi's "[N/A]", "[Not Found]", "[Insufficient Permissions]" etc."""
    field = field.strip()
    return None if not field or (field.startswith("[") and field.endswith("]")) else field


def _mib(field: str) -> int | None:
    known = _known(field)
    return None if known is None else int(known)


def _unreadable(line: str, fields: str) -> RolloutError:
    return RolloutError(
        "nvidia-smi printed a line that can't be read",
        found=repr(line),
        expected=fields.replace(",", ", "),
        remedy="run nvidia-smi on the host and look whether every card answers",
    )


def parse_gpus(text: str) -> list[Gpu]:
    """Read `nvidia-smi --query-gpu=GPU_FIELDS --format=csv,noheader,nounits`.

    Raises RolloutError for a line of another shape, which is what a lost card prints.
    """
    gpus = []
    for line in filter(str.strip, text.splitlines()):
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 7:
            raise _unreadable(line, GPU_FIELDS)
        index, uuid, name, total, used, driver, capability = fields
        try:
            gpus.append(
                Gpu(
                    int(index),
                    uuid,
                    name,
                    _mib(total),
                    _mib(used),
                    _known(driver) or "",
                    _known(capability) or "",
                )
            )
        except ValueError as error:
            raise _unreadable(line, GPU_FIELDS) from error
    return gpus


def parse_processes(text: str, index_of: dict[str, int]) -> list[GpuProcess]:
    """Read `nvidia-smi --query-compute-apps=PROCESS_FIELDS --format=csv,noheader,nounits`.

    `index_of` maps the uuid of a card to its index. No process prints nothing at all. A process name may hold
    commas, so it is whatever stands between the second field and the last.
    """
    processes = []
    for line in filter(str.strip, text.splitlines()):
        try:
            uuid, pid, rest = line.split(",", 2)
            name, used = rest.rsplit(",", 1)
            processes.append(
                GpuProcess(int(pid), uuid.strip(), index_of.get(uuid.strip()), _known(name), _mib(used))
            )
        except ValueError as error:
            raise _unreadable(line, PROCESS_FIELDS) from error
    return processes


def parse_cgroup(text: str, root: str = "/") -> str | None:
    """The process's path in systemd's hierarchy, from the text of /proc/<pid>/cgroup (version 2 or 1).

    `root` is what PID 1 calls the top: not "/" in a container that shares the cgroup namespace of its host.
    """
    paths = {}
    for line in text.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        paths[f"{hierarchy}:{controllers}" if hierarchy == "0" else controllers] = path
    path = paths.get("0:", paths.get("name=systemd"))
    if path is None:
        return None
    prefix = root.rstrip("/")
    return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path


def unit_of(cgroup: str | None) -> str | None:
    """The systemd unit of a cgroup path: its first part that isn't a slice, as systemd itself reads it.

    A process of a user's own service belongs to `user@1000.service`, one of a login to `session-3.scope`.
    """
    for part in (cgroup or "").strip("/").split("/"):
        # systemd puts "_" before names that the kernel could take for a file of its own.
        name = part.removeprefix("_")
        if name.endswith(".slice"):
            continue
        return name if name.endswith((".service", ".scope")) else None
    return None


# A server's API key on its command line must not end up in our messages and records.
_SECRET_OPTION = re.compile(r"^(--?[\w.-]*(?:key|token|password|secret))(?:=.*)?$", re.IGNORECASE | re.DOTALL)


def is_secret_option(argument: str) -> str | None:
    """The name of an option that holds a secret (`--api-key` of `--api-key=…`), or None for any other word."""
    match = _SECRET_OPTION.match(argument)
    return match.group(1) if match else None


def printable_command(arguments: list[str]) -> str:
    """One line of a command's arguments, with the values of options that hold secrets replaced by ***."""
    words: list[str] = []
    hide = False
    for argument in arguments:
        secret = is_secret_option(argument)
        if hide and not argument.startswith("-"):
            words.append("***")
            hide = False
        elif secret:
            words.append(f"{secret}=***" if "=" in argument else argument)
            hide = "=" not in argument
        else:
            words.append(argument)
            hide = False
    return " ".join(words)


def _proc_text(pid: int, name: str) -> str | None:
    """A file of /proc/<pid>, or None where the process ended or is hidden from us (hidepid)."""
    try:
        with open(f"/proc/{pid}/{name}", encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None


def _user(pid: int) -> str | None:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _command(pid: int) -> str | None:
    cmdline = _proc_text(pid, "cmdline")
    if cmdline is None:
        return None
    if not cmdline:  # a zombie has no arguments any more, only its name
        comm = _proc_text(pid, "comm")
        return None if comm is None else f"[{comm.strip()}]"
    return printable_command(cmdline.rstrip("\0").split("\0"))


def process_details(pid: int) -> dict[str, str | None]:
    """`user`, `command`, `cgroup` and `unit` of a process, each None where it can't be known."""
    first = parse_cgroup(_proc_text(1, "cgroup") or "") or "/"
    text = _proc_text(pid, "cgroup")
    cgroup = None if text is None else parse_cgroup(text, first.removesuffix("/init.scope") or "/")
    return {"user": _user(pid), "command": _command(pid), "cgroup": cgroup, "unit": unit_of(cgroup)}


def _remedy(output: str) -> str:
    """What to do about an nvidia-smi that ran and failed."""
    if "version mismatch" in output:
        return "the driver was updated under a running kernel: reboot the host"
    if "communicate with the NVIDIA driver" in output or "Driver Not Loaded" in output:
        return "load the driver (modprobe nvidia); if that fails, reinstall it for the running kernel"
    if "not a valid field" in output:
        return "the driver is too old for this roll-out: install a current one"
    if "GPU is lost" in output or "Unable to determine the device handle" in output:
        return "a card fell off the bus (see dmesg for Xid): reboot the host"
    if "No devices were found" in output:
        return "check that this host has a GPU, that it is seen by lspci, and that it isn't passed to a guest"
    return "run nvidia-smi on the host and repair what it says"


def _nvidia_smi(query: str) -> str:
    """What `nvidia-smi --query-…` prints. Raises RolloutError when it is missing, fails or hangs."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        # A session of its own, so that a hanging wrapper is ended with its children.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise RolloutError(
            "nvidia-smi is missing",
            found="no nvidia-smi on PATH",
            expected="the NVIDIA driver with its tools",
            remedy="install the NVIDIA driver on this host (on Debian the package nvidia-smi comes with it)",
        ) from error
    except PermissionError as error:
        raise RolloutError(
            "nvidia-smi can't be run", found=str(error), remedy="make it executable for this user"
        ) from error
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        # In a wedged driver even SIGKILL waits for the kernel: give it a second, don't hang along.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        raise RolloutError(
            "nvidia-smi hangs",
            found=f"no answer within {TIMEOUT_S:g} s to {' '.join(command)}",
            remedy="the driver or a card is wedged (see dmesg for Xid): reboot the host",
        ) from error
    output = output.strip()
    if process.returncode != 0 or "No devices were found" in output:
        raise RolloutError(
            f"nvidia-smi failed with exit status {process.returncode}",
            found=" ".join(output.split()) or "no output",
            expected="a line for each GPU",
            remedy=_remedy(output),
        )
    return output


def query_gpus() -> list[Gpu]:
    """The GPUs of this host in nvidia-smi's order; at least one.

    Raises RolloutError when nvidia-smi is missing, fails, hangs, or sees no card.
    """
    gpus = parse_gpus(_nvidia_smi(f"--query-gpu={GPU_FIELDS}"))
    if not gpus:
        raise RolloutError(
            "nvidia-smi lists no GPU", found="no output", remedy=_remedy("No devices were found")
        )
    return gpus


def query_processes(gpus: list[Gpu] | None = None) -> list[GpuProcess]:
    """The processes that hold GPU memory, with what /proc says of each.

    `gpus` spares those who already have the cards a second look at them. Raises as query_gpus does.
    """
    index_of = {gpu.uuid: gpu.index for gpu in (query_gpus() if gpus is None else gpus)}
    found = parse_processes(_nvidia_smi(f"--query-compute-apps={PROCESS_FIELDS}"), index_of)
    return [
        GpuProcess(
            process.pid,
            process.gpu_uuid,
            process.gpu_index,
            process.name,
            process.used_mib,
            **process_details(process.pid),
        )
        for process in found
    ]
