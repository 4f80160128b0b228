"""The checker of the fault cells finds each kind of violation: a made-up log is right, then one thing in it is wrong."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

import checker
from cells import CELLS

OLD, NEW = "sglang.service", "vllm-dflash@a.service"
OLD_PROCESSES = {"10": [100, OLD, "launch_server.py"], "11": [101, OLD, "sglang::scheduler_TP0"]}
NEW_PROCESSES = {"20": [200, NEW, "vllm serve"], "21": [201, NEW, "VLLM::Worker_TP0"]}
OTHERS = {
    "5": [50, "dbus.service", "dbus-daemon"],
    "6": [51, "systemd-logind.service", "systemd-logind"],
}


def sample(t, processes, listen=(), holds=(), boot="one"):
    return {
        "kind": "sample", "boot": boot, "t": t, "procs": {**OTHERS, **processes}, "listen": list(listen),
        "holds": [[pid, 0, 40000] for pid in holds], "used": {}, "record": None, "gate": None, "serving": None,
    }  # fmt: skip


def units(old="inactive", new="inactive", program="inactive"):
    states = {OLD: old, NEW: new, "llm-switchover.service": program}
    return {unit: {"ActiveState": state} for unit, state in states.items()}


class Case:
    """A cell that went well: to CONFIRMED, or back."""

    def __init__(self, end):
        states = {
            "CONFIRMED": ["PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED", "CONFIRMED"],
            "ROLLED_BACK": [
                "PREPARED",
                "OLD_STOPPED",
                "GPU_FREE",
                "NEW_STARTED",
                "ROLLING_BACK",
                "NEW_GONE",
                "ROLLED_BACK",
            ],
            "STRANDED": ["PREPARED", "OLD_STOPPED", "ROLLING_BACK", "NEW_GONE", "STRANDED"],
            "REFUSED": ["REFUSED"],
        }[end]
        cause = None if end == "CONFIRMED" else "the disk is full"
        self.cell = {
            "name": "x",
            "ends": [end],
            "state": None,
            "evidence": "",
            "cause": "disk is full",
            "old": {},
        }
        self.log = [{"kind": "note", "what": "order"}]
        self.log += [sample(n / 10, OLD_PROCESSES, [10], [11]) for n in range(10)]
        if end != "REFUSED":
            self.log += [sample(n / 10, {}) for n in range(10, 20)]
        if end == "CONFIRMED":
            self.log += [sample(n / 10, NEW_PROCESSES, [20], [21]) for n in range(20, 30)]
        elif end == "ROLLED_BACK":
            again = {"30": [300, OLD, "launch_server.py"], "31": [301, OLD, "sglang::scheduler_TP0"]}
            self.log += [sample(n / 10, again, [30], [31]) for n in range(20, 30)]
        self.log.append({"kind": "note", "what": "heal"})
        serving = {"serving": {"unit": NEW}, "previous": {"unit": OLD}}
        final = {
            "old": OLD, "new": NEW, "gate": None, "pending": None, "signals": [], "serving": serving,
            "completion": {"text": "x"}, "units": units(new="active"), "may_start": {OLD: False, NEW: True},
            "status": {"exit": 0, "advice": ""},
        }  # fmt: skip
        self.end = copy.deepcopy(final)
        self.end["record"] = {
            "state": end, "cause": cause, "remedy": "reboot", "killed": [],
            "states": [{"state": state, "at": f"2026-01-01T00:00:{n:02}+00:00"} for n, state in enumerate(states)],
        }  # fmt: skip
        if end != "CONFIRMED":
            self.end.update(serving=None, units=units(old="active"), may_start={OLD: True, NEW: False})
        if end == "STRANDED":
            self.end.update(
                completion={"text": ""},
                units=units(program="failed"),
                status={"exit": 1, "advice": "STRANDED: the disk is full"},
            )
        self.facts = {
            "injected": None, "answer": {"outcome": end, "msg": cause}, "end": self.end,
            "converged": {"outcome": "CONFIRMED", "failed": False}, "healed": final,
        }  # fmt: skip

    def check(self):
        return checker.check(self.cell, self.log, self.facts)

    def samples(self):
        return [entry for entry in self.log if entry["kind"] == "sample"]


@pytest.mark.parametrize("end", ["CONFIRMED", "ROLLED_BACK", "STRANDED", "REFUSED"])
def test_nothing_is_wrong(end):
    assert Case(end).check() == []


def two_hold_memory(case):
    case.samples()[22]["procs"].update(OLD_PROCESSES)
    case.samples()[22]["holds"].append([11, 0, 40000])


def two_listen(case):
    case.samples()[22]["procs"].update(OLD_PROCESSES)
    case.samples()[22]["listen"].append(10)


def two_run(case):
    for entry in case.samples()[22:24]:
        entry["procs"].update(OLD_PROCESSES)


def foreign_killed(case):
    for entry in case.samples()[:15]:
        entry["procs"]["77"] = [7, "faults-foreign.service", "train.py"]


def foreign_replaced_under_its_pid(case):
    for number, entry in enumerate(case.samples()):
        entry["procs"]["77"] = [7 if number < 15 else 8, "faults-foreign.service", "train.py"]


def foreign_signalled(case):
    case.end["signals"].append({"to": 77, "signal": 15, "from": 9, "sender": "program switch"})


def stranger_in_the_killed(case):
    case.end["record"]["killed"].append({"pid": 78, "signal": "SIGKILL", "command": "train.py"})


def daemon_killed(case):
    for entry in case.samples()[15:]:
        del entry["procs"]["5"]


def observer_slept(case):
    for entry in case.samples()[20:]:
        entry["t"] += 3


def observer_never_ran(case):
    case.log = [entry for entry in case.log if entry["kind"] == "note"]


def wrong_end(case):
    case.end["record"]["state"] = "ROLLED_BACK"


def illegal_states(case):
    del case.end["record"]["states"][1]


def cause_at_confirmed(case):
    case.end["record"]["cause"] = "something"


def serving_names_old(case):
    case.end["serving"] = None


def boot_would_start_old(case):
    case.end["may_start"] = {OLD: True, NEW: False}


def boot_would_start_both(case):
    case.end["may_start"] = {OLD: True, NEW: True}


def no_completion(case):
    case.end["completion"] = {"text": "", "error": "refused"}


def gate_left(case):
    case.end["gate"] = {"may_start": NEW}


def old_left_running(case):
    case.end["units"] = units(old="active", new="active")


def does_not_converge(case):
    case.facts["converged"] = {"outcome": "REFUSED", "failed": True, "msg": "another order is there"}


def order_left_after_another_run(case):
    case.facts["healed"]["pending"] = {"id": "x"}


def fault_in_another_state(case):
    case.cell["state"], case.facts["injected"] = "PROVED", "CONFIRMED"


def not_booted(case):
    case.cell["evidence"] = "boots"


def program_not_killed(case):
    case.cell["evidence"] = "programs"


def no_foreign_seen(case):
    case.cell["evidence"] = "foreign"


def clock_did_not_jump(case):
    case.cell["evidence"] = "clock 86400"


def second_not_refused(case):
    case.cell["evidence"] = "second-refused"
    case.log.insert(3, {"kind": "note", "what": "second", "said": "not refused"})


def play_not_killed(case):
    case.cell["evidence"] = "play-killed"


def play_failed(case):
    case.cell["evidence"] = "play-succeeded"
    case.facts["answer"]["status"] = 2


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (two_hold_memory, "two servers hold GPU memory"),
        (two_listen, "two servers hold GPU memory or listen"),
        (two_run, "processes of two servers"),
        (foreign_killed, "pid 77 of faults-foreign.service, of neither server, vanished"),
        (foreign_replaced_under_its_pid, "vanished"),
        (foreign_signalled, "foreign pid 77 got signal 15 from program switch"),
        (stranger_in_the_killed, "never seen in a server"),
        (daemon_killed, "pid 5 of dbus.service"),
        (observer_slept, "the observer saw nothing for"),
        (observer_never_ran, "the observer did not run"),
        (wrong_end, "ended ROLLED_BACK, and right is CONFIRMED"),
        (illegal_states, "states that can't follow"),
        (cause_at_confirmed, "CONFIRMED with a cause"),
        (serving_names_old, "serving.json says None"),
        (boot_would_start_old, "a boot would start ['sglang.service']"),
        (boot_would_start_both, "a boot would start"),
        (no_completion, "no completion works"),
        (gate_left, "the gate is still closed"),
        (old_left_running, "sglang.service is active as well"),
        (does_not_converge, "another run ends REFUSED: another order"),
        (order_left_after_another_run, "the order is still there"),
        (fault_in_another_state, "the fault was put in CONFIRMED, not in PROVED"),
        (not_booted, "not booted again"),
        (program_not_killed, "the program was not killed"),
        (no_foreign_seen, "no foreign process was seen"),
        (clock_did_not_jump, "did not jump"),
        (second_not_refused, "not refused with who and since when"),
        (play_not_killed, "the play was not killed"),
        (play_failed, "did not survive the cut"),
    ],
)
def test_each_violation_is_found(spoil, words):
    case = Case("CONFIRMED")
    spoil(case)
    assert any(words in sentence for sentence in case.check()), case.check()


def test_a_question_whether_it_may_start_is_no_second_server():
    case = Case("CONFIRMED")
    for entry in case.samples()[22:26]:
        entry["procs"]["40"] = [
            400,
            OLD,
            "/usr/bin/python3 -IB /opt/vllm-dflash/program may-start sglang.service",
        ]
    assert case.check() == []


def test_a_message_that_does_not_name_the_fault():
    case = Case("ROLLED_BACK")
    case.end["record"]["cause"] = case.facts["answer"]["msg"] = "something went wrong"
    assert any("doesn't name the fault" in sentence for sentence in case.check())


def test_rolled_back_with_serving_json_of_the_new_server():
    case = Case("ROLLED_BACK")
    case.end["serving"] = {"serving": {"unit": NEW}}
    assert any("serving.json names" in sentence for sentence in case.check())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"completion": {"text": "x"}}, "a completion works"),
        ({"status": {"exit": 0, "advice": ""}}, "status doesn't say STRANDED"),
        ({"units": units(program="inactive")}, "the program's unit is not failed"),
    ],
)
def test_stranded_that_is_not_so_or_not_said(change, words):
    case = Case("STRANDED")
    case.end.update(change)
    assert any(words in sentence for sentence in case.check())


def test_stranded_without_a_remedy():
    case = Case("STRANDED")
    case.end["record"]["remedy"] = None
    assert any("without a remedy" in sentence for sentence in case.check())


def test_a_refusal_that_restarted_the_old_server():
    case = Case("REFUSED")
    case.samples()[5]["listen"] = [99]
    assert any("did not serve throughout" in sentence for sentence in case.check())


@pytest.mark.parametrize(
    ("states", "right"),
    [
        (["REFUSED"], True),
        (["PREPARED", "REFUSED"], False),
        (["PREPARED", "ROLLING_BACK", "NEW_GONE", "ROLLED_BACK"], True),
        (["PREPARED", "ROLLING_BACK", "ROLLING_BACK", "NEW_GONE", "STRANDED"], True),
        (["PREPARED", "OLD_STOPPED"], False),
        (["PREPARED", "ROLLED_BACK"], False),
        (["ROLLING_BACK", "ROLLED_BACK"], False),
        (["PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED", "CONFIRMED", "ROLLING_BACK", "ROLLED_BACK"], False),
    ],
)  # fmt: skip
def test_order_of_states(states, right):
    assert checker._legal(states) == right


def test_seconds_in_the_dark_are_counted_from_the_log():
    assert checker.dark_seconds(Case("CONFIRMED").log) == 1.0
    assert checker.dark_seconds(Case("STRANDED").log) is None
    assert checker.dark_seconds(Case("REFUSED").log) == 0.0


def test_the_table_has_every_row_and_no_name_twice():
    names = [cell.name for cell in CELLS]
    assert len(names) == len(set(names))
    rows = {cell.row for cell in CELLS}
    assert len(rows) == 15, rows
    ends = {cell.ends[0] for cell in CELLS if cell.through == "site"}
    assert ends == {"CONFIRMED", "ROLLED_BACK", "STRANDED", "REFUSED"}
    assert all(cell.cause for cell in CELLS if cell.ends != ("CONFIRMED",))
