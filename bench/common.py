"""What the benchmarks share: booted hosts, plays that are watched, tables, results as JSON."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
RESULTS = Path(os.environ.get("BENCH_RESULTS", BENCH / "results"))
sys.path.insert(0, str(ROOT / "tests" / "testbed"))

from bedlib import hosts as bedhosts  # noqa: E402 - after the path that leads to it
from bedlib import machine, network  # noqa: E402

BED = [sys.executable, str(ROOT / "tests" / "testbed" / "bed.py")]


def bed(*arguments: str) -> str:
    """Run one verb of the test bed and return what it prints; its progress goes to the terminal."""
    return subprocess.run([*BED, *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout


@contextlib.contextmanager
def booted(name: str, count: int, *options: str, keep: bool = False) -> Iterator[Bed]:
    """A bed of `count` hosts, taken down at the end unless `keep`; one that is up is taken as it is."""
    try:
        bed("up", name, "--hosts", str(count), *options)
        yield Bed(name)
    finally:
        if not keep:
            bed("down", name)


class Bed:
    """A bed that is up, seen from outside."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bed = bedhosts.require(name)
        self.inventory = self.bed.run / "inventory.yml"
        self.hosts = [host.name for host in self.bed.hosts]
        machine.make_cgroups(name, "control")  # there before the first look at its CPU time

    def upper(self, host: str) -> Path:
        """The host's own part of its disk, as this machine sees it."""
        return Path(self.bed.disks, host, "upper")

    def inside(self, host: str, command: str, *, check: bool = True) -> str:
        """What a shell command prints, run as root in the host's namespaces: no ssh, nothing over its cable."""
        pid = bedhosts.guest_init(self.bed, self.bed.host(host))
        if pid is None:
            raise SystemExit(f"{host} is off")
        enter = ["nsenter", "--all", f"--target={pid}", "sh", "-c", command]
        return subprocess.run(enter, check=check, stdout=subprocess.PIPE, text=True).stdout

    def everywhere(self, hosts: Sequence[str], command: str) -> None:
        """Run a shell command as root on several hosts, one after the other."""
        for host in hosts:
            self.inside(host, command)

    def cpu(self, *groups: str) -> float:
        """CPU seconds used so far by everything in cgroups of this bed: hosts by their name, or "control"."""
        total = 0
        for group in groups:
            for line in (self._cgroup2() / group / "cpu.stat").read_text().splitlines():
                if line.startswith("usage_usec "):
                    total += int(line.split()[1])
        return total / 1e6

    def hosts_cpu(self) -> float | None:
        """CPU seconds of all hosts so far; None when one of them is off."""
        on = all(bedhosts.running(self.bed, host) for host in self.bed.hosts)
        return self.cpu(*self.hosts) if on else None

    def _cgroup2(self) -> Path:
        for top in machine.hierarchies():
            if (top / "cgroup.controllers").exists():
                return top / machine.CGROUP / self.name
        raise machine.BedError("no cgroup2 hierarchy: CPU time can't be measured here")

    def control(self, command: Sequence[str]) -> list[str]:
        """The command, to be run in the bed's cgroup "control" and, where the bed has rates, on its own cable."""
        groups = machine.make_cgroups(self.name, "control")
        enter = "".join(f'echo $$ > "{group}/cgroup.procs"; ' for group in groups)
        if self.bed.rate:
            command = ["nsenter", f"--net={self._namespace}", *command]
        return ["sh", "-c", enter + 'exec "$@"', "sh", *command]

    def kill_control(self) -> None:
        """SIGKILL everything that runs as the control node, ssh's shared connections included."""
        for pid in machine.cgroup_pids(self.name, "control"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not machine.wait_cgroup_empty(self.name, "control", seconds=20):
            raise SystemExit("processes of the control node don't die")

    @property
    def _namespace(self) -> Path:
        return network.namespace_path(self.bed.control)

    def sent(self) -> int:
        """Bytes that the control node has sent through its cable, headers included."""
        return network.sent("uplink", inside=str(self._namespace))

    def cable(self, state: str) -> None:
        """Plug the control node's cable out or in: "down" or "up"."""
        network.set_link(f"vb-{self.bed.control}", state)


@dataclass
class Play:
    """One run of ansible-playbook. Times are seconds, or seconds since the epoch for start and end."""

    status: int
    output: str
    start: float
    end: float
    control_cpu: float
    host_cpu: float | None  # None when a host was off at the end: its cgroup, and the count, went with it
    batches: list[dict] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time of the whole command."""
        return self.end - self.start

    def tasks(self) -> Iterator[tuple[dict, dict, float]]:
        """(batch, task, wall seconds until the next task or the end of the batch) in order."""
        for number, batch in enumerate(self.batches):
            last = self.batches[number + 1]["start"] if number + 1 < len(self.batches) else self.end
            for task, following in zip(batch["tasks"], [*batch["tasks"][1:], None], strict=True):
                yield batch, task, (following["start"] if following else last) - task["start"]

    def changed(self) -> list[str]:
        """Names of tasks that changed something, with their hosts."""
        return [
            f"{task['name']} ({host})"
            for batch in self.batches
            for task in batch["tasks"]
            for host, result in task["hosts"].items()
            if result["changed"]
        ]


class Running:
    """An ansible-playbook that runs, from the root of the project and with its ansible.cfg, as a user's does."""

    def __init__(
        self,
        bed: Bed,
        playbook: Path | str,
        *options: str,
        variables: dict | None = None,
        env: dict | None = None,
    ) -> None:
        self.bed, self.playbook = bed, playbook
        self._folder = tempfile.TemporaryDirectory()
        self._tally = Path(self._folder.name) / "tally.json"
        self._output = Path(self._folder.name) / "output"
        command = [program("ansible-playbook"), "-i", str(bed.inventory), str(playbook), *options]
        environment = {
            **os.environ,
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_CALLBACK_PLUGINS": f"{ROOT / 'callback_plugins'}:{BENCH / 'callback_plugins'}",
            "ANSIBLE_CALLBACKS_ENABLED": "tally",
            "BENCH_TALLY": str(self._tally),
            **(env or {}),
        }
        self._cpu = bed.cpu("control"), bed.hosts_cpu()
        self.start = time.time()
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                bed.control([*command, "-e", json.dumps(variables or {})]),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def alive(self) -> bool:
        """It has not ended yet."""
        return self._process.poll() is None

    def wait(self, *, check: bool = True, timeout: float | None = None) -> Play:
        """Wait for its end. Raises SystemExit with the end of the output when `check` and it failed."""
        status = self._process.wait(timeout)
        end = time.time()
        cpu = self.bed.cpu("control"), self.bed.hosts_cpu()
        output = self._output.read_text(errors="replace")
        batches = json.loads(self._tally.read_text())["batches"] if self._tally.exists() else []
        self._folder.cleanup()
        if check and status:
            raise SystemExit(f"{self.playbook} ended with {status}:\n{output[-6000:]}")
        control = cpu[0] - self._cpu[0]
        hosts = None if None in (cpu[1], self._cpu[1]) else cpu[1] - self._cpu[1]
        return Play(status, output, self.start, end, control, hosts, batches)


def play(
    bed: Bed,
    playbook: Path | str,
    *options: str,
    variables: dict | None = None,
    env: dict | None = None,
    check: bool = True,
) -> Play:
    """Run ansible-playbook to its end. Raises SystemExit when `check` and it fails."""
    return Running(bed, playbook, *options, variables=variables, env=env).wait(check=check)


def program(name: str) -> str:
    """A program of the control node's venv, else the one on PATH."""
    own = ROOT / ".venv/bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        raise SystemExit(f"no {name}: run `make venv` first")
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose source is aligned as well; text to the left, numbers to the right."""
    cells = [[*map(str, head)], *([*map(_cell, row)] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    right = [
        bool(rows) and all(isinstance(row[column], int | float) or row[column] is None for row in rows)
        for column in range(len(head))
    ]
    lines = [
        "| "
        + " | ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        + " |"
        for row in cells
    ]
    rule = (
        "|"
        + "|".join(
            "-" * (width + 1) + (":" if to_right else "-")
            for width, to_right in zip(widths, right, strict=True)
        )
        + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def save(name: str, text: str, **data: object) -> None:
    """Print a benchmark's tables, and keep them and its numbers with the date and the machine they are from."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    kept = {"date": now(), "machine": this_machine(), **data}
    (RESULTS / f"{name}.json").write_text(json.dumps(kept, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(f"{kept['date']}, {kept['machine']}.\n\n{text}\n")
    print(f"\n{text}\n\nwritten: {RESULTS}/{name}.json and .md")


def now() -> str:
    """This minute in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")


def this_machine() -> str:
    """What a reader has to know to compare numbers: processor, cores, memory, kernel."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores {model}, {memory:.0f} GiB, Linux {platform.release()}"
