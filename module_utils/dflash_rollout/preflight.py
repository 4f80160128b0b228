"""Is this host fit? Looking (`observe`) and judging (`judge`) are apart, so that every judgement has a unit test."""

from __future__ import annotations

import glob
import grp
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field

from . import model_folder, topology, units
from .errors import RolloutError
from .gpus import Gpu, GpuProcess, query_gpus, query_processes

PYTHON_VERSIONS = ((3, 10), (3, 13))  # what the lock was resolved for
MIN_SYSTEMD = 247  # ExecCondition= 243, Restart= of a oneshot 244, ProtectProc= 247
TIMEOUT_S = 30.0  # for a program that only says its version
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")

# Prints what the interpreter is; runs as an unprivileged user, since a Python under root's home works for root alone.
_PYTHON_PROBE = (
    "import sys, os, sysconfig, importlib.util as u;"
    "print('%d.%d' % sys.version_info[:2], "
    "int(os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h'))), "
    "int(u.find_spec('ensurepip') is not None and u.find_spec('venv') is not None))"
)


@dataclass(frozen=True)
class Finding:
    """One reason why the host is not fit."""

    check: str
    found: str
    expected: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: found {self.found}; expected {self.expected}. What to do: {self.remedy}."


@dataclass(frozen=True)
class Wanted:
    """What the inventory asks of a host. Sizes in bytes."""

    gpus: int
    min_driver: str
    min_compute_capability: str
    root: str
    needs: dict[str, int]  # path → bytes that it takes, where it isn't there yet
    python: str
    target: str
    port: int
    known_units: tuple[str, ...]
    known_group: str = ""  # the control group of the server before, which for a container need not be a unit
    target_sha256: dict[str, str] = field(default_factory=dict)  # file of the target → its digest
    stamps: str = ""  # folder of the stamps of these
    target_comes: bool = False  # the roll-out is going to bring it
    needs_rsync: bool = True
    trust_remote_code: bool = False
    service_user: str = ""
    service_groups: tuple[str, ...] = ()
    open_to_all: bool = False  # listens everywhere and asks for no API key


@dataclass
class Observed:
    """What the host is like. None where it could not be seen, with the reason in `trouble`."""

    gpus: list[Gpu] = field(default_factory=list)
    processes: list[GpuProcess] = field(default_factory=list)
    trouble: list[Finding] = field(default_factory=list)
    free_bytes: int = 0
    need_bytes: int = 0
    filesystem: str = "/"
    python_version: tuple[int, int] | None = None
    python_error: str = ""
    python_headers: bool = False
    python_venv: bool = False
    compiler: str | None = None
    rsync: str | None = None
    systemd: int | None = None
    target_missing: list[str] = field(default_factory=list)
    target_unreadable: str | None = None
    listeners: list[dict] = field(default_factory=list)
    target_folder: model_folder.Folder = field(default_factory=model_folder.Folder)
    target_faults: list[str] = field(default_factory=list)
    closed_device: str = ""  # a device of the driver that the service user can't open, with mode and group
    topology: list[str] = field(default_factory=list)


def nearest_existing(path: str) -> str:
    """The deepest folder above `path` (or itself) that exists: the filesystem that is going to receive it."""
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def missing_target_files(folder: str) -> list[str]:
    """Names that a target folder lacks: config, tokenizer, weights. The folder's own name when it isn't there.

    Weights whose link leads nowhere are lacking too.
    """
    if not os.path.isdir(folder):
        return [folder]
    missing = [
        name for name in ("config.json", *TOKENIZER_FILES) if not os.path.isfile(os.path.join(folder, name))
    ]
    weights = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    missing += [os.path.basename(path) for path in weights if not os.path.isfile(path)]
    return missing if weights else [*missing, "*.safetensors"]


def unreadable_for_others(folder: str) -> str | None:
    """The first file or folder below `folder` that a service user could not read, or None.

    The path above `folder` doesn't count: the unit binds the folder itself into its own view.
    """
    for directory, _, names in os.walk(folder):
        if os.stat(directory).st_mode & 0o5 != 0o5:
            return directory
        for name in names:
            path = os.path.join(directory, name)
            if os.path.exists(path) and not os.stat(path).st_mode & 0o4:
                return path
    return None


def _run(argv: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=TIMEOUT_S,
        check=False,
        cwd="/",
        **options,
    )


def _observe_python(python: str, seen: Observed) -> None:
    nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        done = _run([python, "-I", "-c", _PYTHON_PROBE], **nobody)
    except subprocess.TimeoutExpired:
        seen.python_error = f"no answer within {TIMEOUT_S:g} s"
        return
    except OSError as error:
        seen.python_error = str(error)
        return
    if done.returncode:
        seen.python_error = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return
    answer = re.fullmatch(r"(\d+)\.(\d+) ([01]) ([01])\n", done.stdout)
    if answer is None:
        seen.python_error = f"its answer is not that of a Python: {done.stdout[:80]!r}"
        return
    major, minor, headers, venv = map(int, answer.groups())
    seen.python_version = (major, minor)
    seen.python_headers, seen.python_venv = bool(headers), bool(venv)


def closed_device(groups: tuple[str, ...], path: str = "/dev/nvidiactl") -> str:
    """What keeps the service user from the driver's device, in words; "" when nothing, or when there is no device."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return ""
    try:
        name = grp.getgrgid(status.st_gid).gr_name
    except KeyError:
        name = str(status.st_gid)
    mode = status.st_mode
    if mode & 0o006 == 0o006 or (mode & 0o060 == 0o060 and name in groups):
        return ""
    return f"{path} is {mode & 0o777:04o} of group {name}"


def observe(wanted: Wanted, listeners: list[dict], check: bool = False) -> Observed:
    """Look at this host. Reads only, but for the stamps of files that were read (not in check mode).

    `listeners` are those of the port, as `serving.inspect_serving` lists them.
    """
    seen = Observed(listeners=listeners)
    try:
        seen.gpus = query_gpus()
        seen.processes = query_processes(seen.gpus)
    except RolloutError as error:
        seen.trouble.append(
            Finding(
                "GPUs",
                error.found or error.message,
                error.expected or "an answer of nvidia-smi",
                error.remedy,
            )
        )
    seen.filesystem = nearest_existing(wanted.root)
    seen.free_bytes = shutil.disk_usage(seen.filesystem).free
    seen.need_bytes = sum(size for path, size in wanted.needs.items() if not os.path.exists(path))
    _observe_python(wanted.python, seen)
    seen.compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    seen.rsync = shutil.which("rsync")
    seen.systemd = units.systemd_version()
    seen.target_missing = missing_target_files(wanted.target)
    if not seen.target_missing:
        seen.target_unreadable = unreadable_for_others(wanted.target)
        seen.target_folder = model_folder.look(wanted.target, *model_folder.account(wanted.service_user))
        seen.target_faults = model_folder.check_pins(
            wanted.target, wanted.target_sha256, wanted.stamps, check
        )
    seen.closed_device = closed_device(wanted.service_groups)
    if wanted.gpus > 1:
        seen.topology = topology.hints(wanted.gpus)
    return seen


def numbers(version: str) -> tuple[int, ...]:
    """`580.95.05` → (580, 95, 5). Raises ValueError for anything that isn't dotted numbers."""
    if not re.fullmatch(r"\d+(\.\d+)*", version, re.ASCII):
        raise ValueError(f"{version!r} is not dotted numbers")
    return tuple(int(part) for part in version.split("."))


def _below(version: str, least: tuple[int, ...]) -> bool:
    """Whether a version of this host is lower than the least one wanted; one that can't be read is."""
    try:
        return numbers(version) < least
    except ValueError:
        return True


def _holder(pid: int | None, user: str | None, command: str | None, unit: str | None) -> str:
    """Who a process is, in words also where some of it can't be known."""
    if pid is None:
        return "a process that can't be seen from here"
    return f"pid {pid} of {user or 'an unknown user'}: {command or 'unknown command'} (unit {unit or 'none'})"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def _judge_gpus(seen: Observed, wanted: Wanted):
    if not seen.gpus and seen.trouble:
        return
    names = ", ".join(f"{gpu.index}: {gpu.name}" for gpu in seen.gpus) or "none"
    if len(seen.gpus) < wanted.gpus:
        yield Finding(
            "GPUs",
            f"{len(seen.gpus)} ({names})",
            f"{wanted.gpus}, which tensor-parallel-size asks for",
            "lower tensor-parallel-size, or see why nvidia-smi shows fewer cards",
        )
    least_driver, least_capability = numbers(wanted.min_driver), numbers(wanted.min_compute_capability)
    for gpu in seen.gpus:
        if _below(gpu.driver_version, least_driver):
            yield Finding(
                "NVIDIA driver",
                gpu.driver_version or "no version in what nvidia-smi says",
                f"{wanted.min_driver} or later (the wheel is built for CUDA 13)",
                "update the driver on this host, reboot, run preflight again",
            )
            break
    for gpu in seen.gpus:
        if _below(gpu.compute_capability, least_capability):
            yield Finding(
                "compute capability",
                f"{gpu.compute_capability or 'none'} ({gpu.name})",
                f"{wanted.min_compute_capability} or higher",
                "DFlash needs FLASH_ATTN, which these cards don't have: leave the host out with --limit",
            )
            break
    for process in seen.processes:
        inside = bool(wanted.known_group) and f"{process.cgroup}/".startswith(f"{wanted.known_group}/")
        if process.unit not in wanted.known_units and not inside:
            # nvidia-smi withholds the memory in some guests; a card between two queries can go away.
            memory = "unknown memory" if process.used_mib is None else f"{process.used_mib} MiB"
            index = process.gpu_uuid if process.gpu_index is None else process.gpu_index
            yield Finding(
                "foreign process on a GPU",
                f"{memory} on GPU {index} held by "
                + _holder(process.pid, process.user, process.command or process.name, process.unit),
                " or ".join(("nobody", *wanted.known_units)),
                "end it, or name its unit in sglang_unit if it is the server to replace; this roll-out kills nothing "
                "that isn't its own",
            )


def _judge_python(seen: Observed, wanted: Wanted):
    low, high = PYTHON_VERSIONS
    expected = f"Python {low[0]}.{low[1]} to {high[0]}.{high[1]} that an unprivileged user can run"
    if seen.python_version is None:
        yield Finding(
            "Python",
            f"{wanted.python}: {seen.python_error}",
            expected,
            "set vllm_python to the distribution's python3",
        )
        return
    version = ".".join(map(str, seen.python_version))
    if not low <= seen.python_version <= high:
        yield Finding(
            "Python", f"{wanted.python} is {version}", expected, "set vllm_python to another interpreter"
        )
    if not seen.python_venv:
        yield Finding(
            "venv module",
            f"none in {wanted.python}",
            "venv and ensurepip",
            f"apt install python{version}-venv",
        )
    if not seen.python_headers:
        yield Finding(
            "Python.h",
            f"none for {wanted.python}",
            "the C headers of the interpreter: Triton compiles at start",
            f"apt install python{version}-dev",
        )


def _judge_target(seen: Observed, wanted: Wanted):
    if seen.target_missing and wanted.target_comes:
        pass
    elif seen.target_missing == [wanted.target]:
        yield Finding(
            "target",
            f"no folder {wanted.target}",
            "the target model on this host",
            "put it there, or set vllm_service_target",
        )
    elif seen.target_missing:
        yield Finding(
            "target",
            f"{wanted.target} without {', '.join(seen.target_missing)}",
            "a complete model folder",
            "bring the missing files",
        )
    if seen.target_unreadable:
        yield Finding(
            "target",
            f"{seen.target_unreadable} is closed to other users",
            "files that the service user can read",
            f"chmod -R o+rX {wanted.target}",
        )
    yield from _judge_supply(seen, wanted)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _judge_supply(seen: Observed, wanted: Wanted):
    """Whether the target is what it was when somebody pinned it, and whether that stays so."""
    folder = seen.target_folder
    for fault in seen.target_faults:
        yield Finding(
            "target",
            fault,
            "the files of vllm_service_target_sha256",
            "bring the right file, or correct the pin if the file was meant to change",
        )
    for names, who in (
        (folder.open, "everybody"),
        (folder.service, f"the server itself ({wanted.service_user})"),
    ):
        if names:
            yield Finding(
                "target",
                f"{_some(names)} of {wanted.target} can be changed by {who}",
                "a model that only its owner changes",
                f"chown -R root: {wanted.target}; chmod -R go-w {wanted.target}",
            )
    if folder.hidden:
        link, leads = next(iter(folder.hidden.items()))
        yield Finding(
            "target",
            f"{link} leads to {leads}, in a home that the server's unit doesn't see",
            "links that stay inside the target's folder, or inside its models--… folder of the hub's cache",
            "copy the files (cp -rL) to a folder such as /srv/models, and set vllm_service_target to it",
        )
    loose = [name for name in folder.code if name not in wanted.target_sha256]
    if loose and wanted.trust_remote_code:
        yield Finding(
            "target",
            f"trust-remote-code is on and {_some(loose)} of {wanted.target} would be run without a pin",
            "the digest of all code that is run, in vllm_service_target_sha256",
            "read the code, pin it (sha256sum), or remove trust-remote-code from vllm_service_args",
        )


def notes(seen: Observed, wanted: Wanted) -> list[str]:
    """What doesn't stand in the way and should be known."""
    folder, said = seen.target_folder, list(seen.topology)
    if wanted.open_to_all:
        said.append(
            f"vLLM is going to listen on every address, port {wanted.port}, and asks for no API key. Set "
            "vllm_service_api_key, or vllm_service_host to 127.0.0.1 behind a proxy, or mind the firewall"
        )
    if folder.shared:
        said.append(
            f"target: {_some(folder.shared)} of {wanted.target} can be changed by a user other than root"
        )
    if folder.code and not wanted.trust_remote_code:
        said.append(
            f"target: {wanted.target} carries Python code ({_some(folder.code)}), which is not run: "
            "trust-remote-code is off"
        )
    return said


def judge(seen: Observed, wanted: Wanted) -> list[Finding]:
    """Every reason why the host is not fit, in the order in which a person would mend them. Empty: it is fit.

    Raises ValueError when a least version in `wanted` isn't dotted numbers.
    """
    findings = [*seen.trouble, *_judge_gpus(seen, wanted)]
    findings += [
        Finding(
            f"port {wanted.port}",
            "held by " + _holder(*(listener[key] for key in ("pid", "user", "command", "unit"))),
            " or ".join(("nobody", *wanted.known_units)),
            "end it, set rollout_port, or name its unit in sglang_unit if it is the server to replace",
        )
        for listener in seen.listeners
        if listener["unit"] not in wanted.known_units and not listener.get("own")
    ]
    if seen.free_bytes < seen.need_bytes:
        findings.append(
            Finding(
                "disk",
                f"{_gib(seen.free_bytes)} free on the filesystem of {seen.filesystem}",
                f"{_gib(seen.need_bytes)} for {wanted.root}",
                "free space there, or set rollout_root to another filesystem",
            )
        )
    findings += _judge_python(seen, wanted)
    if seen.compiler is None:
        findings.append(
            Finding(
                "C compiler",
                "no cc, gcc or clang",
                "one: Triton compiles at start",
                "apt install gcc libc6-dev",
            )
        )
    if seen.rsync is None and wanted.needs_rsync:
        findings.append(
            Finding("rsync", "none", "rsync: files come from the control node by it", "apt install rsync")
        )
    if seen.systemd is None or seen.systemd < MIN_SYSTEMD:
        findings.append(
            Finding(
                "systemd",
                str(seen.systemd or "no answer of systemctl --version"),
                f"{MIN_SYSTEMD} or later",
                "upgrade the distribution",
            )
        )
    if seen.closed_device:
        findings.append(
            Finding(
                "GPU devices",
                seen.closed_device,
                f"devices that {wanted.service_user or 'the service user'} can open",
                "name that group in vllm_service_groups",
            )
        )
    findings += _judge_target(seen, wanted)
    return findings
