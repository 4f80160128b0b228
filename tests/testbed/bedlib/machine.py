"""The machine that the test bed runs on: paths, locks, commands, cgroups, missing packages."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TESTBED = Path(__file__).resolve().parents[1]
REPO = TESTBED.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-dflash-testbed"
RUN = Path("/run/vllm-dflash-testbed")
CGROUP = "vllm-dflash-testbed"

# Debian package -> a program or, by its path, a file that it brings. Installed only when that is missing.
NEEDED = {
    "debootstrap": "debootstrap",
    "systemd-container": "systemd-nspawn",
    "rsync": "rsync",
    "openssh-client": "ssh",
    "iproute2": "ip",
    "nftables": "nft",
    "gcc": "gcc",
    # A machine without recommended packages has a compiler and no headers.
    "libc6-dev": "/usr/include/dirent.h",
}


class BedError(Exception):
    """Something a person can act on; printed without a traceback."""


def log(text: str) -> None:
    """One progress line on stderr."""
    print(f"testbed: {text}", file=sys.stderr, flush=True)


def program(name: str) -> str | None:
    """Path of a program, the sbin directories included (a sudo-less root may lack them on PATH)."""
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")


def run(
    *command: str | Path, text_in: str | None = None, check: bool = True, env: dict[str, str] | None = None
) -> str:
    """Run a command, return its stdout; a failure becomes a BedError that carries the last output lines."""
    name = str(command[0])
    found = program(name)
    if found is None:
        raise BedError(f"{name} is not installed; run: tests/testbed/bed.py prepare")
    done = subprocess.run(
        [found, *map(str, command[1:])], input=text_in, capture_output=True, text=True, check=False, env=env
    )
    if check and done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BedError(f"{' '.join(map(str, command))[:300]} exited {done.returncode}:\n{tail}")
    return done.stdout


def _flocked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def lock(path: Path, *, shared: bool = False, wait: bool = True) -> Iterator[bool]:
    """Hold an flock on `path`; yields whether it is held (False only with wait=False)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        held = _flocked(descriptor, kind)
        end = time.monotonic() + (1 if wait else 0)
        while not held and time.monotonic() < end:
            time.sleep(0.02)
            held = _flocked(descriptor, kind)
        if not held and wait:
            log(f"waiting for another process that holds {path}")
            fcntl.flock(descriptor, kind)
        yield held or wait
    finally:
        os.close(descriptor)


def digest(*parts: str | bytes) -> str:
    """16 hex digits over the parts, each framed by its length."""
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:16]


def missing_packages() -> list[str]:
    """Those of NEEDED that this machine lacks."""
    return [
        package
        for package, brought in NEEDED.items()
        if not (os.path.exists(brought) if brought.startswith("/") else program(brought))
    ]


def install_packages() -> None:
    """Install whatever of NEEDED is missing, with apt-get."""
    missing = missing_packages()
    if not missing:
        return
    if program("apt-get") is None:
        raise BedError(f"missing {', '.join(missing)} and no apt-get: this needs Debian or Ubuntu")
    log(f"apt-get install {' '.join(missing)}")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    apt = ("apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300")
    run(*apt, "update", env=env)
    run(*apt, "install", "--no-install-recommends", *missing, env=env)


# --- cgroups -----------------------------------------------------------------------------------------


def hierarchies() -> list[Path]:
    """Mount points of the hierarchies that track processes: cgroup2, and v1 name=systemd on hybrid machines.

    Only these two matter to systemd and nspawn for telling guests apart; resource controllers of a v1
    machine stay as they are (they are read-only inside a guest anyhow).
    """
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup2" or (kind == "cgroup" and "name=systemd" in options.split(",")):
            found.append(Path(where))
    return found


def make_cgroups(*relative: str) -> list[Path]:
    """Make our cgroup `relative` in each hierarchy, with the controllers passed down where there are any."""
    made = []
    for top in hierarchies():
        group = top
        for part in (CGROUP, *relative):
            controllers = group / "cgroup.controllers"
            if controllers.exists():
                for controller in ("cpu", "memory", "pids", "io"):
                    # Not all are there and not all may be passed down; limits inside a guest are a bonus.
                    with contextlib.suppress(OSError):
                        (group / "cgroup.subtree_control").write_text(f"+{controller}")
            group = group / part
            group.mkdir(exist_ok=True)
        made.append(group)
    return made


def cgroup_pids(*relative: str) -> list[int]:
    """All processes in our cgroup `relative` and below, of every hierarchy."""
    pids: set[int] = set()
    for top in hierarchies():
        for directory, _, _ in os.walk(top / Path(CGROUP, *relative)):
            # A group may vanish, or be of the wrong type to list, while we walk.
            with contextlib.suppress(OSError):
                pids.update(map(int, (Path(directory) / "cgroup.procs").read_text().split()))
    return sorted(pids)


def wait_cgroup_empty(*relative: str, seconds: float) -> bool:
    """Wait until no process is left in our cgroup `relative`."""
    end = time.monotonic() + seconds
    while cgroup_pids(*relative):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def kill_cgroup(*relative: str) -> None:
    """SIGKILL everything in our cgroup `relative`, then remove the group itself."""
    end = time.monotonic() + 20
    seen: set[int] = set()
    while pids := cgroup_pids(*relative):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        seen.update(pids)
        if time.monotonic() > end:
            raise BedError(f"processes {pids} of {'/'.join(relative)} don't die after SIGKILL")
        time.sleep(0.02)
    # A dying process leaves its cgroup before it has let go of its mounts.
    while any(map(_is_alive, seen)) and time.monotonic() < end:
        time.sleep(0.01)
    for top in hierarchies():
        for directory, _, _ in os.walk(top / Path(CGROUP, *relative), topdown=False):
            _remove_cgroup(Path(directory))
        # The common parent goes with the last bed; with other beds about it isn't empty and stays.
        with contextlib.suppress(OSError):
            (top / CGROUP).rmdir()


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def _remove_cgroup(group: Path) -> None:
    for attempt in range(100):
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError:
            # Still "busy" for a moment after its last process died.
            if attempt == 99:
                raise
            time.sleep(0.02)
        else:
            return


# --- can this machine do it --------------------------------------------------------------------------

_TRY_MOUNTS = """
set -e
mount -t tmpfs tmpfs "$1"
mkdir "$1/lower" "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
"""


def why_not_bootable() -> str | None:
    """One sentence why this machine can't boot hosts, or None."""
    if sys.platform != "linux":
        return "booted hosts need Linux"
    if os.geteuid() != 0:
        return "booted hosts need root"
    missing = missing_packages()
    if missing and program("apt-get") is None:
        return f"missing {', '.join(missing)} and no apt-get to install them"
    if not hierarchies():
        return "neither a cgroup2 nor a name=systemd hierarchy is mounted"
    # What is tried has names of its own, and tests ask side by side.
    with lock(RUN / "can-boot.lock"):
        return _tried()


def _tried() -> str | None:
    """Make and remove what a host needs: a sentence about the first that can't be made, or None."""
    try:
        for group in make_cgroups("can-boot"):
            group.rmdir()
            with contextlib.suppress(OSError):
                group.parent.rmdir()
    except OSError as error:
        return f"cgroups can't be made here: {error}"
    with tempfile.TemporaryDirectory() as scratch:
        try:
            run("unshare", "--mount", "sh", "-c", _TRY_MOUNTS, "sh", scratch)
        except BedError as error:
            return "no overlay can be mounted here: " + str(error).splitlines()[-1]
    if program("ip"):
        try:
            run("ip", "link", "add", "vd-can-boot", "type", "bridge")
            run("ip", "link", "del", "vd-can-boot")
        except BedError as error:
            return "no bridge can be made here: " + str(error).splitlines()[-1]
    return None
