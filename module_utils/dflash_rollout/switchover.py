"""The switch from one server to another, driven on the host: stop, wait, start, prove, commit, or all the way
back.

It knows two server descriptions and nothing of what they are. Each state is on disk before what it allows is
done (switch_state.py), so a killed program or a reboot is resumed. It ends with one proved server, or says
that it is STRANDED and why; it kills nothing that it can't attribute to the two servers.
"""

from __future__ import annotations

import datetime
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from . import proof, servers, units
from .containers import EngineSilent
from .errors import RolloutError
from .gpus import Gpu, GpuProcess, query_gpus, query_processes
from .store import Store
from .switch_state import (
    CONFIRMED,
    END_STATES,
    GPU_FREE,
    NEW_GONE,
    NEW_STARTED,
    OLD_STOPPED,
    PREPARED,
    PROVED,
    REFUSED,
    ROLLED_BACK,
    ROLLING_BACK,
    STRANDED,
    advance,
    entered,
    may_start,
    new_record,
    resume,
)

# The folder that is run as a program; as it was called, so by its link.
PROGRAM = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
POLL_S = 0.25
# How often a starting server's processes are written down: reading all of /proc four times a second is too much.
REMEMBER_S = 2.0
LOG_LINES = 30
# What systemd may need beyond SIGKILL to see a control group empty.
KILLED_TIMEOUT_S = 15.0
# What a container engine may take to answer, at boot above all, before the way back gives it up.
ENGINE_TIMEOUT_S = 300.0


class Host:
    """The machine, as the switch sees it. Tests put a simulated one in its place."""

    show = staticmethod(servers.show)
    start = staticmethod(servers.start)
    stop = staticmethod(servers.stop)
    kill_group = staticmethod(servers.kill_group)
    check_container = staticmethod(servers.check_container)
    set_restart_policy = staticmethod(servers.set_restart_policy)
    log_tail = staticmethod(servers.log_tail)
    members = staticmethod(units.members)
    is_alive = staticmethod(units.is_alive)
    send_signal = staticmethod(units.send_signal)
    listeners = staticmethod(units.listeners)
    journal_cursor = staticmethod(units.journal_cursor)
    boot_id = staticmethod(units.boot_id)
    now = staticmethod(units.boot_seconds)
    gpus = staticmethod(query_gpus)
    gpu_processes = staticmethod(query_processes)
    not_ready = staticmethod(proof.not_ready)
    prove = staticmethod(proof.prove)
    sleep = staticmethod(time.sleep)

    @staticmethod
    def wall() -> str:
        """The time of day, for people only."""
        return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")

    @staticmethod
    def say(text: str) -> None:
        """One line for the journal."""
        print(text, flush=True)


def describe(process: units.Process | GpuProcess | units.Listener) -> str:
    """ "pid 12 (alice: python3 train.py)", with the memory for a process on a GPU."""
    text = f"pid {process.pid} ({process.user or 'unknown user'}: {process.command or 'unknown command'})"
    if isinstance(process, GpuProcess):
        memory = "an unknown amount of memory" if process.used_mib is None else f"{process.used_mib} MiB"
        return f"{text} with {memory} on GPU {process.gpu_index}"
    return text


class Switchover:
    """One switch: `run` carries the pending order out, from wherever it was left."""

    def __init__(self, store: Store, host: Host | None = None):
        self.store = store
        self.host = host or Host()
        self.record: dict = {}
        self.settings: dict = {}

    # ---- the frame -------------------------------------------------------------------------------------

    def run(self) -> dict | None:
        """Carry out the pending order and return its record in an end state; None without an order."""
        order = self.store.order()
        if order is None:
            return None
        self.settings = order["settings"]
        record = self.store.record()
        if record is not None and record["id"] == order["id"]:
            self._resume(record)
        else:
            self._begin(order)
        while self.record["state"] not in END_STATES:
            self._step()
        self.store.open_gate()
        try:
            self.store.close_order()
        except OSError as error:
            self.host.say(f"The order can't be taken away, the next boot looks at it again: {error}")
        return self.record

    def _begin(self, order: dict) -> None:
        self.record = new_record(order, self.host.boot_id())
        try:
            self.store.make_directories()
            self.store.archive()
            facts = self.check(order)
            self.store.set_gate(None)
            self._to(PREPARED, **facts)
        except Exception as refusal:  # whatever it is, nothing was stopped yet and nothing will be
            self._to(REFUSED, must_persist=False, cause=_text(refusal), remedy="nothing was stopped")

    def _resume(self, record: dict) -> None:
        boot_id = self.host.boot_id()
        direction = resume(
            record, boot_id=boot_id, serving_switch=(self.store.serving() or {}).get("switch_id")
        )
        rebooted = record["boot_id"] != boot_id
        if direction != "nothing":
            self.host.say(f"Resuming {record['id']} in {record['state']}: {direction}")
        if rebooted:
            # Pids and seconds of another boot say nothing in this one.
            record.update(boot_id=boot_id, processes=[], rebooted=True)
        self.record = record
        if direction == "confirm":
            self._confirmed()
        elif direction == "back" and rebooted:
            cause = record["cause"] or f"The host was restarted in {record['state']}."
            log = record["log_tail"] or self._log(record["new"])
            self._to(ROLLING_BACK, must_persist=False, cause=cause, log_tail=log)
        elif direction != "nothing":
            self.store.set_gate(may_start(record["state"], record["old"], record["new"]))

    def _to(self, state: str, must_persist: bool = True, **facts: object) -> None:
        """Enter a state: on disk first, then the gate, so the gate never allows more than the disk says.

        Raises OSError when `must_persist` and the state can't be written: nobody may act on it then. On the
        way back (`must_persist` false) nothing that can't be written keeps the old server from coming back.
        """
        changed = advance(self.record, state, at=self.host.wall(), boot_s=self.host.now(), **facts)
        try:
            self.store.write_record(changed)
        except OSError as error:
            if must_persist:
                raise
            changed["not_persisted"] = str(error)
        self.record = changed
        if state not in END_STATES:
            try:
                self.store.set_gate(may_start(state, changed["old"], changed["new"]))
            except OSError:
                if must_persist:
                    raise
                self.store.open_gate()  # then serving.json decides, which still names the old server
        cause = (
            f": {changed['cause']}" if changed["cause"] and state in (REFUSED, ROLLING_BACK, STRANDED) else ""
        )
        self.host.say(f"{state}{cause}")

    def _step(self) -> None:
        forward: dict[str, Callable[[], None]] = {
            PREPARED: self._stop_old,
            OLD_STOPPED: self._wait_for_gpus,
            GPU_FREE: self._start_new,
            NEW_STARTED: self._prove_new,
            PROVED: self._commit,
        }
        back: dict[str, Callable[[], None]] = {ROLLING_BACK: self._stop_new, NEW_GONE: self._restore_old}
        state = self.record["state"]
        if state in forward:
            try:
                forward[state]()
            except Exception as problem:  # whatever it is, the old server has to come back
                self._to(ROLLING_BACK, must_persist=False, **self._cause(problem))
            return
        try:
            self._patiently(back[state])
        except Exception as problem:  # there is no third server: say so
            self._to(
                STRANDED,
                must_persist=False,
                cause=f"{self.record['cause']} Then, on the way back: {_text(problem)}",
                remedy=self._way_out(),
                old_log_tail=self._log(self.record["old"]),
            )

    def _patiently(self, act: Callable[[], None]) -> None:
        """Act, and again as long as a container engine gives no answer: at boot it may come up after us.

        Steps begin anew as they do after a crash. Raises what `act` raises when the time is over.
        """
        deadline = None
        while True:
            try:
                return act()
            except EngineSilent as silence:
                now = self.host.now()
                if deadline is None:
                    deadline = now + ENGINE_TIMEOUT_S
                    self.host.say(f"Waiting up to {ENGINE_TIMEOUT_S:g} s: {silence}")
                if now >= deadline:
                    raise
                self.host.sleep(1.0)

    def _cause(self, problem: Exception) -> dict:
        return {
            "cause": f"In {self.record['state']}: {_text(problem)}",
            "log_tail": self._log(self.record["new"]),
        }

    def _log(self, server: dict | None) -> list[str]:
        """The server's log since the switch began; a journal that can't be read is no reason to stop."""
        if server is None:
            return []
        try:
            return self.host.log_tail(server, self.record.get("journal_cursor"), LOG_LINES)
        except RolloutError as error:
            return [f"(no log: {error})"]

    def _way_out(self) -> str:
        old, new = self.record["old"], self.record["new"]
        start = servers.command(old or new, "restart")
        text = (
            "look at nvidia-smi and at the log of the unit, free the GPUs (reboot the host when "
            f"a process can't be killed), then: {start}, and look: python3 -IB {PROGRAM} status"
        )
        if (
            servers.is_container(old)
            and old["restart_policy"] != "no"
            and self.record["state"] == ROLLING_BACK
        ):
            # The new server may live: nothing may start the old one by itself.
            text += (
                f". Its restart policy is `no` until you set it back: "
                f"{old['runtime']} update --restart={old['restart_policy']} {old['unit']}"
            )
        return text

    # ---- before anything is stopped ----------------------------------------------------------------------

    def check(self, order: dict) -> dict:
        """Everything that can be known before the outage. Reads only.

        Returns the facts that PREPARED starts with. Raises RolloutError for what would make the switch fail.
        """
        old, new, settings = order["old"], order["new"], order["settings"]
        self.settings = settings
        self._check_server(new)
        if old is not None:
            self._check_old(old)
            serving = self.store.serving()
            if serving is not None and serving["serving"]["unit"] != old["unit"]:
                raise RolloutError(
                    "The order takes another server for the old one than the last confirmed switch",
                    found=f"serving.json names {serving['serving']['unit']}, the order {old['unit']}",
                    remedy="give the server that serving.json names as the old one",
                )
        owned = {process.pid: process for server in (old, new) if server for process in self._members(server)}
        self._check_foreign(new["port"], set(owned), [server for server in (old, new) if server])
        facts = {
            "old": self._with_policy(old),
            "new": self._with_policy(new),
            "old_class": self._classify(old, settings),
            "processes": [asdict(process) for process in owned.values()],
            "journal_cursor": self.host.journal_cursor(),
        }
        self._gpus_over(settings["gpu_free_mib"])  # an nvidia-smi that doesn't answer is found out now
        return facts

    def _with_policy(self, server: dict | None) -> dict | None:
        """A container with the restart policy it is to have when it serves, for the record and serving.json.

        What it has now, but where that is `no` what the description says: an earlier switch took it away.
        """
        if not servers.is_container(server):
            return server
        shown = self.host.show(server)
        now = shown.enabled if shown.load_state == "loaded" else "no"
        return {**server, "restart_policy": now if now != "no" else server.get("restart_policy") or "no"}

    def _check_server(self, server: dict) -> None:
        if servers.is_container(server):
            self.host.check_container(server)
        else:
            servers.check_unit(server, self.host.show(server))

    def _check_old(self, server: dict) -> None:
        """An old server that is down is never started again: it must only be sure not to start by itself."""
        unit = self.host.show(server)
        if unit.running:
            self._check_server(server)
        elif unit.load_state == "loaded" and not servers.is_container(server):
            servers.check_guard(server, unit)

    def _members(self, server: dict) -> list[units.Process]:
        return self.host.members([self.host.show(server).control_group])

    def _check_foreign(self, port: int, owned: set[int], either: list[dict]) -> None:
        shown = [self.host.show(server) for server in either]
        listening = [
            listener
            for listener in self.host.listeners(port)
            if listener.pid not in owned and not any(unit.forwards(listener) for unit in shown)
        ]
        if listening:
            raise RolloutError(
                f"Port {port} is held by something that is not one of the two servers",
                found=", ".join(describe(listener) for listener in listening),
                remedy="stop it, or give another port",
            )
        foreign = [process for process in self._gpu_processes() if process.pid not in owned]
        if foreign:
            raise RolloutError(
                "A process on a GPU belongs to neither of the two servers",
                found=", ".join(describe(process) for process in foreign),
                remedy="end it, or let it run on another host",
            )

    def _classify(self, old: dict | None, settings: dict) -> str:
        """ "none", "stopped", "proved" or "unproven". Raises RolloutError for the last, unless accepted."""
        if old is None:
            return "none"
        if not self.host.show(old).running:
            return "stopped"
        result = self._ask_for_proof(old)
        if result.proved:
            return "proved"
        if not settings["accept_unproven_old"]:
            raise RolloutError(
                f"{old['unit']} runs, but it is not proved that it serves: there would be no way back",
                found=result.problem or "",
                expected=f"{settings['proof_completions']} completions on port {old['port']}",
                remedy="repair it, stop it, or set switchover_accept_unproven_old",
            )
        return "unproven"

    # ---- GPUs --------------------------------------------------------------------------------------------

    def _ours(self, index: int | None) -> bool:
        return self.settings["gpus"] is None or index in self.settings["gpus"]

    def _gpu_processes(self) -> list[GpuProcess]:
        return [process for process in self.host.gpu_processes() if self._ours(process.gpu_index)]

    def _gpus_over(self, limit_mib: int) -> list[Gpu]:
        """The GPUs that are not free. Raises RolloutError for a GPU that doesn't say, or one not there."""
        found = [gpu for gpu in self.host.gpus() if self._ours(gpu.index)]
        missing = set(self.settings["gpus"] or []) - {gpu.index for gpu in found}
        silent = [gpu for gpu in found if gpu.memory_used_mib is None]
        if missing or silent:
            raise RolloutError(
                "The memory of the GPUs can't be watched",
                found=", ".join(
                    [f"no GPU {index}" for index in sorted(missing)]
                    + [f"GPU {gpu.index} doesn't say how much is used" for gpu in silent]
                ),
            )
        return [gpu for gpu in found if (gpu.memory_used_mib or 0) >= limit_mib]

    def _wait_free(self, control_groups: Iterable[str], since: float) -> None:
        """Wait until the GPUs are free and stay so and nobody holds the port of the new server.

        What a stopped server left behind gets SIGTERM, and SIGKILL after a grace. Nothing else does.
        Raises RolloutError at the limit, counted from `since`, naming who holds what.
        """
        settings, port = self.settings, self.record["new"]["port"]
        free_since = None
        terminated: dict[units.Process, float] = {}
        while True:
            over = self._gpus_over(settings["gpu_free_mib"])
            listening = self.host.listeners(port)
            now = self.host.now()
            if not over and not listening:
                free_since = now if free_since is None else free_since
                if now - free_since >= settings["gpu_free_stable_s"]:
                    return
            else:
                free_since = None
                holders = [*self._gpu_processes(), *listening] if over else listening
                self._end_leftovers({holder.pid for holder in holders}, control_groups, terminated)
                if now - since > settings["gpu_free_timeout_s"]:
                    raise RolloutError(
                        f"GPUs and port {port} are not free after {settings['gpu_free_timeout_s']:g} s",
                        found="; ".join(
                            [f"{gpu.memory_used_mib} MiB used on GPU {gpu.index}" for gpu in over]
                            + [describe(holder) for holder in holders]
                        ),
                        remedy="only the servers' own processes were killed; if no process holds the "
                        "memory, the host needs a reboot",
                    )
            self.host.sleep(POLL_S)

    def _end_leftovers(
        self, holders: set[int | None], control_groups: Iterable[str], terminated: dict[units.Process, float]
    ) -> None:
        recorded = [units.Process(**process) for process in self.record["processes"]]
        for process in self.host.members(control_groups, recorded):
            if process.pid not in holders:
                continue
            if process not in terminated:
                terminated[process] = self.host.now()
                self._kill(process, signal.SIGTERM)
            elif self.host.now() - terminated[process] >= self.settings["leftover_grace_s"]:
                self._kill(process, signal.SIGKILL)

    def _kill(self, process: units.Process, number: signal.Signals) -> None:
        if self.host.send_signal(process, number):
            entry = {
                "pid": process.pid,
                "signal": number.name,
                "user": process.user,
                "command": process.command,
            }
            if entry not in self.record["killed"]:
                self.record["killed"].append(entry)
            self.host.say(f"{number.name} to {describe(process)}, left behind by a stopped server")

    # ---- steps -------------------------------------------------------------------------------------------

    def _stop_server(self, server: dict, since: float) -> str:
        """Stop a server by its control group and return that group; SIGKILL to it after its deadline.

        A container's restart policy goes first: only then does it stay down, over a boot as well. Which it had is
        in the record already. Raises RolloutError when even SIGKILL leaves processes.
        """
        unit = self.host.show(server)
        if unit.load_state == "not-found":
            return ""
        self.host.set_restart_policy(server, "no")
        group = unit.control_group
        if not unit.running:
            return group
        self.host.stop(server)
        deadline, killed = since + server["stop_timeout_s"], False
        while True:
            unit = self.host.show(server)
            if not unit.running:
                return group
            self._remember(self.host.members([group]))
            if self.host.now() >= deadline:
                if killed:
                    raise RolloutError(
                        f"{server['unit']} can't be stopped",
                        found=", ".join(describe(process) for process in self.host.members([group]))
                        or f"ActiveState={unit.active_state} without a process",
                        remedy="a process that SIGKILL doesn't end waits in the kernel: reboot the host",
                    )
                self.host.say(f"SIGKILL to the control group of {server['unit']} after its stop_timeout_s")
                self.host.kill_group(server)
                killed, deadline = True, self.host.now() + KILLED_TIMEOUT_S
            self.host.sleep(POLL_S)

    def _remember(self, processes: Iterable[units.Process]) -> None:
        """Add to the processes that are the servers' own, wherever they are found later."""
        known = {(process["pid"], process["start_ticks"]) for process in self.record["processes"]}
        self.record["processes"] += [
            asdict(process) for process in processes if (process.pid, process.start_ticks) not in known
        ]

    def _stop_old(self) -> None:
        since = entered(self.record, PREPARED)
        self.record.setdefault(
            "outage_begin_s", self.host.now() if self.record["old_class"] == "proved" else None
        )
        # The new unit as well: when it runs, it is to be replaced by one that is known from its start.
        groups = [
            self._stop_server(server, since) for server in (self.record["old"], self.record["new"]) if server
        ]
        self._to(OLD_STOPPED, control_groups=[group for group in groups if group])

    def _wait_for_gpus(self) -> None:
        self._wait_free(self.record["control_groups"], entered(self.record, OLD_STOPPED))
        self._to(GPU_FREE)

    def _start_new(self) -> None:
        self._old_stays_down()
        self.host.start(self.record["new"])
        self._to(NEW_STARTED)

    def _old_stays_down(self) -> None:
        """No guard keeps a person from starting a container: look. Raises RolloutError when it runs.

        An engine that doesn't answer is no reason to go back: the way back is what needs it. Who answers on the port is
        looked at anyway.
        """
        old = self.record["old"]
        try:
            running = servers.is_container(old) and self.host.show(old).running
        except EngineSilent as silence:
            self.host.say(f"It can't be seen whether {old['unit']} stays down: {silence}")
            return
        if running:
            raise RolloutError(
                f"{old['unit']} was started by somebody during the switch",
                found=f"a running container of {old['runtime']}, whose restart policy is `no`",
                remedy="leave it alone while a switch runs (also docker compose up and the like)",
            )

    def _prove_new(self) -> None:
        new = self.record["new"]
        deadline = entered(self.record, NEW_STARTED) + new["ready_timeout_s"]
        self._wait_ready(new, deadline, restarts_allowed=False)
        before = self.host.show(new)
        begin = self.host.now()
        result = self._ask_for_proof(new)
        after = self.host.show(new)
        if (after.main_pid, after.restarts, after.active_state) != (before.main_pid, 0, "active"):
            raise RolloutError(
                f"{new['unit']} did not live through its proof",
                found=f"ActiveState={after.active_state}, NRestarts={after.restarts}; {result.problem or ''}",
            )
        if not result.proved:
            raise RolloutError(
                f"{new['unit']} was ready, but could not be proved", found=result.problem or ""
            )
        self._to(PROVED, proof=result.as_dict(), outage_s=self._outage(begin, result))

    def _commit(self) -> None:
        self._old_stays_down()
        self.store.confirm(self.record)
        self._confirmed()

    def _confirmed(self) -> None:
        """After the commit: a container gets its restart policy back, and is started where a boot came between.

        The commit is done, so what fails here is said and changes nothing of the end.
        """
        new, facts = self.record["new"], {}
        if servers.is_container(new):

            def give_back() -> None:
                self.host.set_restart_policy(new, new["restart_policy"])
                if self.record.get("rebooted") and not self.host.show(new).running:
                    self.host.start(new)

            try:
                self._patiently(give_back)
            except Exception as problem:  # whatever it is, the commit is done
                facts["remedy"] = (
                    f"set its restart policy by hand ({new['runtime']} update "
                    f"--restart={new['restart_policy']} {new['unit']}): {_text(problem)}"
                )
        self._to(CONFIRMED, must_persist=False, **facts)

    def _stop_new(self) -> None:
        old, new = self.record["old"], self.record["new"]
        since = entered(self.record, ROLLING_BACK)
        self._remember(self._members(new))
        group = self._stop_server(new, since)
        facts: dict = {}
        new_may_have_started = any(entry["state"] == GPU_FREE for entry in self.record["states"])
        if new_may_have_started and (old is None or not self.host.show(old).running):
            groups = {group, *self.record["control_groups"]} - {""}
            try:
                self._wait_free(sorted(groups), self.host.now())
            except RolloutError as problem:
                # Whoever holds it can't be ended or is not ours to end. The old server may find room.
                facts["cause"] = f"{self.record['cause']} Then: {problem}"
        self._to(NEW_GONE, must_persist=False, **facts)

    def _restore_old(self) -> None:
        old = self.record["old"]
        if servers.is_container(old) and self.host.show(old).load_state != "not-found":
            self.host.set_restart_policy(old, old["restart_policy"])
        if old is None or self.record["old_class"] == "stopped":
            self._to(ROLLED_BACK, must_persist=False, remedy="no server serves, as before the switch")
            return
        deadline = entered(self.record, NEW_GONE) + old["ready_timeout_s"]
        if not self.host.show(old).running:
            self.host.start(old)
        while True:
            self._wait_ready(old, deadline, restarts_allowed=True)
            begin = self.host.now()
            result = self._ask_for_proof(old)
            if result.proved:
                break
            if self.host.now() >= deadline:
                raise RolloutError(f"{old['unit']} is ready, but can't be proved", found=result.problem or "")
            self.host.sleep(1.0)
        self._to(
            ROLLED_BACK,
            must_persist=False,
            proof=result.as_dict(),
            outage_s=self._outage(begin, result),
            remedy=None,
        )

    def _ask_for_proof(self, server: dict) -> proof.Proof:
        return self.host.prove(
            server,
            completions=self.settings["proof_completions"],
            timeout_s=self.settings["proof_timeout_s"],
        )

    def _outage(self, proof_begin: float, result: proof.Proof) -> float | None:
        """Seconds from the stop of a proved old server to the first good completion; None over a reboot."""
        if self.record["old_class"] != "proved" or self.record.get("rebooted") or result.first_good_s is None:
            return None
        return round(proof_begin + result.first_good_s - entered(self.record, PREPARED), 2)

    def _wait_ready(self, server: dict, deadline: float, *, restarts_allowed: bool) -> None:
        """Wait until the unit is active, says it is ready and listens itself.

        Raises RolloutError as soon as that can't happen any more, or at the deadline (seconds since boot).
        """
        name = server["unit"]
        remembered = self.host.now() - REMEMBER_S
        while True:
            unit = self.host.show(server)
            if self.host.now() - remembered >= REMEMBER_S:
                # A worker that leaves the control group can't be told from a stranger once its server is gone.
                self._remember(self.host.members([unit.control_group]))
                remembered = self.host.now()
            if not unit.running or (unit.active_state == "deactivating" and not restarts_allowed):
                raise RolloutError(
                    f"{name} exited before it was ready",
                    found=f"ActiveState={unit.active_state}, Result={unit.result}",
                )
            if (unit.restarts or unit.sub_state.startswith("auto-restart")) and not restarts_allowed:
                raise RolloutError(
                    f"{name} exited before it was ready, {servers.runtime(server)} starts it again",
                    found=f"SubState={unit.sub_state}, Result={unit.result}, NRestarts={unit.restarts}",
                )
            reason: str | None = f"the unit is {unit.active_state}"
            if unit.active_state == "active":
                reason = self.host.not_ready(server) or self._stranger_listens(server, unit)
            if reason is None:
                return
            if self.host.now() >= deadline:
                raise RolloutError(
                    f"{name} was not ready within {server['ready_timeout_s']} s", found=f"at last: {reason}"
                )
            self.host.sleep(POLL_S)

    def _stranger_listens(self, server: dict, unit: units.Unit) -> str | None:
        """An answer counts only when it comes from the unit itself."""
        listening = self.host.listeners(server["port"])
        own = {process.pid for process in self.host.members([unit.control_group])}
        strangers = [
            listener for listener in listening if listener.pid not in own and not unit.forwards(listener)
        ]
        if strangers:
            who = ", ".join(describe(listener) for listener in strangers)
            return f"port {server['port']} is answered by {who}, not by {server['unit']}"
        # docker without its userland proxy forwards a published port in the kernel: no process listens.
        heard = bool(listening) or server["port"] in unit.published
        return None if heard else f"nobody listens on port {server['port']}"


def _text(problem: Exception) -> str:
    """A problem in words; one that the program does not know keeps its type."""
    return str(problem) if isinstance(problem, RolloutError) else f"{type(problem).__name__}: {problem}."
