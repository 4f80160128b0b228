"""Simulated GPUs of a test host: which there are, who holds their memory, and workers that hold some.

Standard library only: the simulated nvidia-smi, SGLang and engine all import this file.

- `/etc/simulated-gpu/gpus`: a line per GPU,
  `index|name|uuid|memory_total_mib|compute_capability|driver_version`.
- `/run/simulated-gpu/holds/<pid>`: lines `<gpu index> <MiB>`, counted while that process lives.
- `/run/simulated-gpu/unseen`: lines `<gpu index> <MiB>`, counted although no process is seen to hold it, as with
  one of another container or one that is stuck in the driver.
- `/etc/simulated-gpu/faults.json`: `{"sglang": {KNOB: value}, "engine": {KNOB: value}}`, see FAULTS.
- The environment variable SIMULATED_GPU_ROOT stands before these paths, to try all of it anywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

IDLE_MIB = 1
# What a worker holds until it takes the rest: the context and small weights. docs/gpu-results.md, section 11.
STARTING_MIB = 740

# What a test can make a simulated server do. Read at start; those marked * are read at every request as well.
FAULTS = {
    "exit_at_start": "exit with 1 before anything is loaded",
    "never_ready": "load for ever",
    "load_s": "seconds to load (default 2)",
    "token_s": "seconds for each generated token (default 0.002) *",
    "hang_completions": "/health answers 200, completions never end *",
    "completions_500": "/health answers 200, completions answer 500 *",
    "no_chat_template": "chats answer 400, as of a base model *",
    "empty_chat": "chats answer 200 without content, reasoning or tool calls *",
    "broken_tool_call": "the arguments of tool calls are no JSON *",
    "wrong_model_id": "/v1/models names this model instead *",
    "crash_on_nth_completion": "the process dies during its n-th completion *",
    "ignore_sigterm": "only SIGKILL ends the server and its workers",
    "worker_holds_s": "workers keep their memory so many seconds after they were told to stop",
    "leave_orphan": "one more worker leaves the process tree, though not the cgroup, and holds 2000 MiB",
}


@dataclass(frozen=True)
class Gpu:
    """A simulated card."""

    index: int
    name: str
    uuid: str
    total_mib: int
    compute_capability: str
    driver_version: str

    def used_mib(self) -> int:
        """MiB in use now, by the driver and by living processes."""
        held = sum(mib for _, index, mib in holds() if index == self.index) + unseen_mib(self.index)
        return min(IDLE_MIB + held, self.total_mib)


def path_of(path: str) -> Path:
    """A path of the contract, below SIMULATED_GPU_ROOT if that is set."""
    return Path(os.environ.get("SIMULATED_GPU_ROOT", "") + path)


def gpus() -> list[Gpu]:
    """The simulated cards. Raises FileNotFoundError where there is no simulated driver."""
    cards = []
    for line in path_of("/etc/simulated-gpu/gpus").read_text(encoding="utf-8").splitlines():
        index, name, uuid, total, capability, driver = line.split("|")
        cards.append(Gpu(int(index), name, uuid, int(total), capability, driver))
    return cards


def alive(pid: int) -> bool:
    """Does this process live? A zombie doesn't: it has given its memory back. A hidden one (EPERM) does."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    try:
        state = (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
        )
    except OSError:
        return True
    return state not in ("Z", "X")


def holds() -> list[tuple[int, int, int]]:
    """(pid, GPU index, MiB) of every hold whose process lives."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(path_of("/run/simulated-gpu/holds").iterdir(), key=lambda file: file.name):
            if not file.name.isdigit() or not alive(int(file.name)):
                continue
            with contextlib.suppress(FileNotFoundError):
                for line in file.read_text(encoding="utf-8").splitlines():
                    index, mib = line.split()
                    found.append((int(file.name), int(index), int(mib)))
    return found


def unseen_mib(index: int) -> int:
    """MiB of a GPU that no visible process holds."""
    try:
        lines = path_of("/run/simulated-gpu/unseen").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return 0
    return sum(int(mib) for number, mib in map(str.split, lines) if int(number) == index)


def faults(server: str) -> dict:
    """The faults asked of this server ("sglang" or "engine"). An unknown knob raises ValueError."""
    try:
        asked = json.loads(path_of("/etc/simulated-gpu/faults.json").read_text(encoding="utf-8")).get(
            server, {}
        )
    except FileNotFoundError:
        return {}
    if unknown := set(asked) - set(FAULTS):
        raise ValueError(f"simulated faults: unknown {sorted(unknown)}, there are {sorted(FAULTS)}")
    return asked


def set_title(title: str) -> None:
    """Show this title as the process's command line and name, as setproctitle does."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, fields 48 and 49 of proc(5)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(begin)
        memory.write(title.encode()[: end - begin - 1].ljust(end - begin, b"\0"))
    Path("/proc/self/comm").write_text(title[:15], encoding="utf-8")


class Workers:
    """The worker processes of a simulated server. They end when told to, or when the server is gone."""

    def __init__(self, asked_faults: dict) -> None:
        self._common = {
            "linger_s": asked_faults.get("worker_holds_s", 0),
            "ignore_sigterm": asked_faults.get("ignore_sigterm", False),
        }
        self._running: list[subprocess.Popen] = []

    def start(self, title: str, held: dict[int, int], escape: bool = False) -> None:
        """Start one under this title, that is to hold {GPU index: MiB}; returns once it holds the first of them.

        One that escapes takes all at once.
        """
        order = json.dumps({**self._common, "title": title, "holds": list(held.items()), "escape": escape})
        worker = subprocess.Popen(
            [sys.executable, "-IS", __file__, order],
            stdin=subprocess.DEVNULL if escape else subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=escape,
        )
        assert worker.stdout is not None
        if worker.stdout.readline() != b"held\n":
            raise RuntimeError(f"simulated worker {title} did not start")
        if escape:
            worker.stdout.close()
            worker.wait()
        else:
            self._running.append(worker)

    def take_all(self) -> None:
        """Have all that live take the rest of their memory; returns once they hold it."""
        for worker in self._running:
            assert worker.stdin is not None
            assert worker.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                os.write(worker.stdin.fileno(), b"all\n")
            worker.stdout.readline()

    def dead(self) -> list[int]:
        """Pids of workers that ended although nobody told them to."""
        return [worker.pid for worker in self._running if worker.poll() is not None]

    def stop(self) -> None:
        """Tell all to stop and wait until they have."""
        for worker in self._running:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._running:
            worker.wait()


def _hold(file: Path, holds: list) -> None:
    if holds:
        # Over what stands there and is shorter: a reader must not find it empty.
        out = os.open(file, os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(out, "".join(f"{index} {mib}\n" for index, mib in holds).encode(), 0)
        os.fchmod(out, 0o644)
        os.close(out)
    os.write(1, b"held\n")


def _work(order: dict) -> None:
    if order["escape"] and os.fork():
        os._exit(0)
    set_title(order["title"])
    told, tell = os.pipe()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if order["ignore_sigterm"]:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os.write(tell, b"."))
    folder = path_of("/run/simulated-gpu/holds")
    for stale in folder.iterdir():
        if stale.name.isdigit() and not alive(int(stale.name)):
            # Another user's in a sticky directory stays: it isn't counted either way.
            with contextlib.suppress(PermissionError, FileNotFoundError):
                stale.unlink()
    hold = folder / str(os.getpid())
    _hold(
        hold,
        order["holds"] if order["escape"] else [(i, min(mib, STARTING_MIB)) for i, mib in order["holds"]],
    )
    # An orphan has no server to listen to. The others see their standard input end when theirs is gone.
    sources = [told] if order["escape"] else [told, 0]
    while select.select(sources, [], [])[0] == [0] and os.read(0, 100):
        _hold(hold, order["holds"])
    time.sleep(order["linger_s"])
    hold.unlink(missing_ok=True)


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
