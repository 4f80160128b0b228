"""A simulated host for the switch: time, units, GPUs and processes are numbers in here.

Its systemd asks the real gate before each start, as ExecCondition= does. It notes whenever two servers run.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass, field

from dflash_rollout import gate
from dflash_rollout.containers import EngineSilent
from dflash_rollout.errors import RolloutError
from dflash_rollout.files import write_json
from dflash_rollout.gpus import Gpu, GpuProcess
from dflash_rollout.proof import Proof
from dflash_rollout.servers import is_container
from dflash_rollout.store import Store
from dflash_rollout.units import Listener, Process, Unit


class Killed(BaseException):
    """The program was killed here."""


def _name(server: dict | str) -> str:
    return server if isinstance(server, str) else server["unit"]


@dataclass
class SimulatedServer:
    """A unit, or with a restart policy a container, and how it behaves. Seconds; None for never."""

    unit: str
    first_pid: int
    port: int = 30000
    memory_mib: int = 40000
    load_state: str = "loaded"
    guarded: bool = True
    enabled: bool = False
    policy: str | None = None
    ready_after: float | None = 5.0
    exits_after: float | None = None
    restarts_itself: bool = False
    answer: str = "good"
    stops_after: float | None = 1.0
    dies_of_sigkill: bool = True
    memory_lingers: float = 0.5
    leaves_worker: bool = False
    worker_exits_after: float | None = None
    worker_ignores_sigterm: bool = False
    worker_holds_gpu: bool = True

    state: str = "inactive"
    since: float = 0.0
    restarts: int = 0
    generation: int = 0
    result: str = "success"
    worker_left: Process | None = None
    worker_left_at: float = 0.0
    memory_until: float = -1.0

    @property
    def group(self) -> str:
        return f"/system.slice/{self.unit}"

    @property
    def up(self) -> bool:
        return self.state in ("running", "stopping")

    def pid(self, number: int) -> int:
        return self.first_pid + 10 * self.generation + number

    def processes(self) -> list[Process]:
        """The main process and the worker that holds the GPUs."""
        if not self.up:
            return []
        ticks = 1000 + self.generation
        return [Process(self.pid(n), ticks, "llm", f"{self.unit} {n}") for n in (0, 1)]


@dataclass
class SimulatedHost:
    """Stands where switchover.Host stands.

    `watchdogs`: units that somebody starts again whenever they are down, as a cron job of the operator would.
    From `silent_from` until `silent_until` the container engine answers nothing.
    """

    state_dir: str
    run_dir: str
    servers: dict[str, SimulatedServer]
    foreign: list[GpuProcess] = field(default_factory=list)
    foreign_from: float = 0.0
    port_holder: Listener | None = None
    clock: float = 1000.0
    wall_offset: float = 0.0
    boot: int = 1
    calls: int = 0
    kill_at_call: int | None = None
    said: list[str] = field(default_factory=list)
    signals: list[tuple[int, str]] = field(default_factory=list)
    two_servers: list[str] = field(default_factory=list)
    watchdogs: tuple[str, ...] = ()
    strangers: list[Process] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    policies: list[tuple[str, str]] = field(default_factory=list)
    silent_from: float = 0.0
    silent_until: float = 0.0

    def tick(self) -> None:
        """Every call counts: the program can be killed at any of them."""
        self.calls += 1
        if self.kill_at_call == self.calls:
            raise Killed
        self._settle()
        for unit in self.watchdogs:
            if not self.servers[unit].up:
                self._launch(self.servers[unit])

    def _settle(self) -> None:
        for server in self.servers.values():
            passed = self.clock - server.since
            if server.state == "stopping" and server.stops_after is not None and passed >= server.stops_after:
                self._end(server, "inactive")
            elif (
                server.state == "running" and server.exits_after is not None and passed >= server.exits_after
            ):
                self._end(server, "failed")
                if server.restarts_itself:
                    server.restarts += 1
                    self._launch(server)
            limit = server.worker_exits_after
            if server.worker_left and limit is not None and self.clock >= server.worker_left_at + limit:
                server.worker_left = None
        up = [server.unit for server in self.servers.values() if server.up]
        if len(up) > 1:
            self.two_servers.append(f"{self.clock}: {up}")

    def _end(self, server: SimulatedServer, state: str) -> None:
        if server.leaves_worker:
            server.worker_left, server.worker_left_at = server.processes()[1], self.clock
        server.state, server.since = state, self.clock
        server.result = "success" if state == "inactive" else "exit-code"
        server.memory_until = self.clock + server.memory_lingers

    def _launch(self, server: SimulatedServer) -> None:
        allowed, _ = gate.may_start(server.unit, self.state_dir, self.run_dir)
        if server.policy is None and server.guarded and not allowed:
            server.state, server.result = "inactive", "exec-condition"
            return
        server.generation += 1
        server.state, server.since = "running", self.clock
        self.starts.append(server.unit)
        self._settle()

    # ---- what the program calls ----

    def _silent(self, server: dict | str) -> None:
        container = not isinstance(server, str) and is_container(server)
        if container and self.silent_from <= self.clock < self.silent_until:
            self.clock += 30.0
            raise EngineSilent("simulated docker doesn't answer")

    def show(self, unit: dict | str) -> Unit:
        self.tick()
        self._silent(unit)
        unit = _name(unit)
        server = self.servers.get(unit)
        if server is None:
            return Unit(unit, "not-found", "inactive", "dead", 0, 0, "", "", "success", "", 0, False)
        active = {"running": "active", "stopping": "deactivating"}.get(server.state, server.state)
        main = server.processes()[0].pid if server.up else 0
        group = server.group if server.up else ""
        return Unit(
            unit, server.load_state, active, "", main, server.restarts, group, "", server.result,
            server.policy or ("enabled" if server.enabled else "disabled"), 0, server.guarded,
        )  # fmt: skip

    def check_container(self, server: dict) -> None:
        if self.show(server).load_state != "loaded":
            raise RolloutError(f"The simulated container {server['unit']} does not exist")

    def set_restart_policy(self, server: dict, policy: str) -> None:
        found = self.servers[server["unit"]]
        if found.policy is None:
            return
        self._silent(server)
        self.tick()
        if policy != found.policy:
            found.policy = policy
            self.policies.append((server["unit"], policy))
        self.tick()

    def start(self, unit: dict | str) -> None:
        self.tick()
        self._silent(unit)
        server = self.servers[_name(unit)]
        if not server.up:
            server.restarts = 0
            self._launch(server)

    def stop(self, unit: dict) -> None:
        self.tick()
        self._silent(unit)
        server = self.servers[_name(unit)]
        if server.state == "running":
            server.state, server.since = "stopping", self.clock
            self.signals += [(process.pid, "SIGTERM") for process in server.processes()]

    def kill_group(self, unit: dict) -> None:
        self.tick()
        server = self.servers[_name(unit)]
        self.signals += [(process.pid, "SIGKILL") for process in server.processes()]
        if server.up and server.dies_of_sigkill:
            self._end(server, "failed")

    def _alive(self) -> list[tuple[str, Process]]:
        found = [
            (server.group, process) for server in self.servers.values() for process in server.processes()
        ]
        left = [server.worker_left for server in self.servers.values() if server.worker_left]
        return found + [("/user.slice", process) for process in left + self.strangers]

    def members(self, groups, recorded=()) -> list[Process]:
        self.tick()
        groups, recorded = [group for group in groups if group], set(recorded)
        return [process for group, process in self._alive() if group in groups or process in recorded]

    def send_signal(self, process: Process, number: signal.Signals) -> bool:
        self.tick()
        self.signals.append((process.pid, number.name))
        assert process not in self.strangers
        for server in self.servers.values():
            if server.worker_left == process and (
                number == signal.SIGKILL or not server.worker_ignores_sigterm
            ):
                server.worker_left = None
        return True

    def listeners(self, port: int) -> list[Listener]:
        self.tick()
        found = [self.port_holder] if self.port_holder and self.port_holder.port == port else []
        for server in self.servers.values():
            ready = server.ready_after is not None and self.clock >= server.since + server.ready_after
            if server.state == "running" and server.port == port and ready:
                found.append(Listener("127.0.0.1", port, server.pid(0), "llm", server.unit, server.unit))
        return found

    def _foreign(self) -> list[GpuProcess]:
        return self.foreign if self.clock >= self.foreign_from else []

    def gpus(self) -> list[Gpu]:
        self.tick()
        used = 1
        for server in self.servers.values():
            left = server.worker_left and server.worker_holds_gpu
            if server.up or left or self.clock < server.memory_until:
                used += server.memory_mib
        return [
            Gpu(
                index,
                f"GPU-{index}",
                "NVIDIA RTX A6000",
                49140,
                used + sum(p.used_mib or 0 for p in self._foreign() if p.gpu_index == index),
                "580.95.05",
                "8.6",
            )
            for index in (0, 1)
        ]

    def gpu_processes(self) -> list[GpuProcess]:
        self.tick()
        holders = [
            server.processes()[1] if server.up else server.worker_left
            for server in self.servers.values()
            if server.up or (server.worker_left and server.worker_holds_gpu)
        ]
        return [
            GpuProcess(process.pid, f"GPU-{index}", index, "python3", 40000, process.user, process.command)
            for process in holders
            for index in (0, 1)
        ] + self._foreign()

    def journal_cursor(self) -> str:
        self.tick()
        return "s=1"

    def log_tail(self, server: dict, cursor: str | None = None, lines: int = 30) -> list[str]:
        self.tick()
        return [f"simulated log of {server['unit']}"]

    def not_ready(self, server: dict) -> str | None:
        self.tick()
        found = self.servers[server["unit"]]
        if found.state != "running" or found.ready_after is None:
            return "/v1/models can't be reached"
        return None if self.clock >= found.since + found.ready_after else "/v1/models can't be reached"

    def prove(self, server: dict, *, completions: int, timeout_s: float) -> Proof:
        self.tick()
        found = self.servers[server["unit"]]
        if found.answer == "hangs":
            self.clock += timeout_s
            return Proof(False, f"no complete answer within {timeout_s:g} s", None, timeout_s)
        self.clock += 0.5 * completions
        if found.answer == "dies":
            self._end(found, "failed")
        if found.answer != "good":
            return Proof(False, found.answer, None, 1.0)
        return Proof(True, None, server["model_id"], 1.5, [{}] * completions, 0.5)

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.tick()

    def now(self) -> float:
        return self.clock

    def wall(self) -> str:
        return f"day {int((self.clock + self.wall_offset) // 86400)}"

    def boot_id(self) -> str:
        return f"boot-{self.boot}"

    def say(self, text: str) -> None:
        self.said.append(text)

    # ---- what tests do to it ----

    def power_cut(self, store: SimulatedStore) -> None:
        """Everything in memory is gone; then boot: /run is empty and enabled units start."""
        store.forget_run()
        for server in self.servers.values():
            server.state, server.worker_left, server.memory_until, server.restarts = "inactive", None, -1.0, 0
        self.boot += 1
        self.clock = 30.0
        self.kill_at_call = None
        for server in self.servers.values():
            if server.enabled or server.policy in ("always", "unless-stopped"):
                self.start(server.unit)
        chosen = store.serving()
        if chosen and chosen["serving"]["unit"].startswith(gate.OUR_UNITS):
            self.start(chosen["serving"]["unit"])

    def serving(self) -> list[str]:
        """The units that run and would answer, after all that is under way has ended."""
        self.clock += 3600.0
        self._settle()
        return [
            server.unit
            for server in self.servers.values()
            if server.state == "running" and server.answer == "good" and server.ready_after is not None
        ]


class SimulatedStore(Store):
    """The real store, whose files are written through `SimulatedDisk` (see there)."""

    host: SimulatedHost

    def forget_run(self) -> None:
        """What a boot does to /run."""
        for name in os.listdir(self.run_dir):
            os.unlink(os.path.join(self.run_dir, name))

    def close_order(self) -> None:
        self.host.tick()
        super().close_order()
        self.host.tick()

    def open_gate(self) -> None:
        self.host.tick()
        super().open_gate()
        self.host.tick()


@dataclass
class SimulatedDisk:
    """Stands where files.write_json stands: the program can be killed before and after each write.

    `full_directory` is full once the state `full_from` is written; "" is from the start.
    """

    host: SimulatedHost
    full_directory: str
    full_from: str | None = None
    full: bool = False

    def write_json(self, path: str, value: dict, mode: int = 0o644) -> None:
        self.host.tick()
        self.full = self.full or self.full_from == ""
        if self.full and path.startswith(self.full_directory):
            raise OSError(errno.ENOSPC, "No space left on device", path)
        write_json(path, value, mode)
        self.full = self.full or (self.full_from is not None and value.get("state") == self.full_from)
        self.host.tick()
