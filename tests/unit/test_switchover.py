"""The whole switch on a simulated host: the right end from everywhere, never two servers, no foreign kill."""

from __future__ import annotations

import json
import os

import pytest
from dflash_rollout import orders
from dflash_rollout import store as store_module
from dflash_rollout.gpus import GpuProcess
from dflash_rollout.store import SERVER_SPEC, SETTINGS_SPEC, complete
from dflash_rollout.switchover import Switchover
from dflash_rollout.units import Listener, Process
from simulated_switch import Killed, SimulatedDisk, SimulatedHost, SimulatedServer, SimulatedStore

OLD, NEW = "sglang.service", "vllm-dflash@a.service"
FORWARD = ["PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED", "CONFIRMED"]
BACK = ["ROLLING_BACK", "NEW_GONE", "ROLLED_BACK"]
TRAINER = GpuProcess(77, "GPU-1", 1, "python3", 20000, "alice", "python3 train.py")


class Bed:
    """One simulated host with an order; see `bed`."""

    def __init__(self, directory, monkeypatch):
        state, run = directory / "state", directory / "run"
        self.servers = {
            OLD: SimulatedServer(OLD, 1000, enabled=True),
            NEW: SimulatedServer(NEW, 5000),
        }
        self.host = SimulatedHost(str(state), str(run), self.servers)
        self.store = SimulatedStore(str(state), str(run))
        self.store.host = self.host
        self.disk = SimulatedDisk(self.host, str(state))
        monkeypatch.setattr(store_module, "write_json", self.disk.write_json)
        # A simulated power cut loses no file of this machine: waiting for its disk would test nothing.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)
        self.store.make_directories()
        self.order = {
            "id": "order-1",
            "old": complete(SERVER_SPEC, {"name": "old", "unit": OLD, "port": 30000, "model_id": "M"}),
            "new": complete(SERVER_SPEC, {"name": "new", "unit": NEW, "port": 30000, "model_id": "M"}),
            "settings": {key: option.get("default") for key, option in SETTINGS_SPEC.items()},
            "requested_at": "today",
            "requested_by": "ops",
        }
        self.host.start(OLD)
        self.host.clock += 100.0
        self.host.starts.clear()

    @property
    def old(self):
        return self.servers[OLD]

    @property
    def new(self):
        return self.servers[NEW]

    def program(self):
        """Run the program once; None when it was killed."""
        self.host.calls = 0
        try:
            return Switchover(self.store, self.host).run()
        except Killed:
            return None

    def switch(self, **settings):
        self.order["settings"].update(settings)
        self.store.hand_over(self.order)
        record = self.program()
        self.check_invariants(record)
        return record

    def check_invariants(self, record):
        assert self.host.two_servers == []
        own = range(1000, 9000)
        assert all(pid in own for pid, _ in self.host.signals), self.host.signals
        serving = self.host.serving()
        if record["state"] == "CONFIRMED":
            assert serving == [NEW]
            assert self.store.serving()["serving"]["unit"] == NEW
            assert self.store.serving()["previous"] == self.order["old"]
        elif record["state"] == "STRANDED":
            assert record["cause"]
            assert record["remedy"]
            assert self.store.serving() is None
        elif self.order["old"] and record.get("old_class") != "stopped":
            assert serving == [OLD]
            assert self.store.serving() is None
        assert self.store.gate() is None
        assert self.store.order() is None


@pytest.fixture
def bed(tmp_path, monkeypatch):
    return Bed(tmp_path, monkeypatch)


def states(record):
    return [entry["state"] for entry in record["states"]]


def test_a_switch(bed):
    record = bed.switch()
    assert states(record) == FORWARD
    assert record["cause"] is None
    assert record["killed"] == []
    assert bed.host.starts == [NEW]
    assert bed.host.signals == [(1010, "SIGTERM"), (1011, "SIGTERM")]
    # 1 s to stop, 0.5 s of lingering memory, 2 s stable, 5 s to ready, 0.5 s to the first answer.
    assert 9.0 <= record["outage_s"] <= 10.0
    assert json.loads(json.dumps(record)) == record


def test_without_an_order_nothing_happens(bed):
    assert bed.program() is None
    assert bed.host.calls == 0


def test_the_next_switch_goes_back_and_keeps_the_record_of_the_first(bed):
    bed.switch()
    back = {**bed.order, "id": "order-2", "old": bed.order["new"], "new": bed.order["old"]}
    bed.store.hand_over(back)
    record = bed.program()
    assert states(record) == FORWARD
    assert bed.host.serving() == [OLD]
    assert bed.store.serving()["serving"] == back["new"]
    assert bed.store.serving()["previous"] == back["old"]
    assert bed.store.find("order-1")["state"] == "CONFIRMED"
    bed.host.power_cut(bed.store)
    assert bed.host.serving() == [OLD]


def test_twenty_records_are_kept(bed):
    bed.new.guarded = False
    for number in range(25):
        bed.store.hand_over({**bed.order, "id": f"order-{number}"})
        assert bed.program()["state"] == "REFUSED"
    assert bed.store.find("order-24")["state"] == "REFUSED"
    assert bed.store.find("order-23")["state"] == "REFUSED"
    assert bed.store.find("order-0") is None


# ---- refused before anything is stopped --------------------------------------------------------------------


def spoil_port(bed):
    bed.host.port_holder = Listener("127.0.0.1", 30000, 88, "bob", "nc -l 30000", None)


def spoil_gpu(bed):
    bed.host.foreign = [TRAINER]


def spoil_gpu_index(bed):
    bed.order["settings"]["gpus"] = [0, 2]


def spoil_new_unit(bed):
    bed.new.load_state = "not-found"


def spoil_old_unit(bed):
    bed.old.load_state = "masked"


def spoil_guard(bed):
    bed.old.guarded = False


def spoil_answer(bed):
    bed.old.answer = "/v1/completions answered 500"


def spoil_hang(bed):
    bed.old.answer = "hangs"


def spoil_disk(bed):
    """The disk is full once the order lies there."""


def spoil_run(bed):
    """No room on /run, where the gate is."""
    bed.disk.full_directory, bed.disk.full_from = bed.store.run_dir, ""


def spoil_serving(bed):
    bed.store.confirm({"id": "order-0", "new": {"unit": "vllm-dflash@b.service"}, "old": None})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (spoil_port, ["Port 30000", "pid 88 (bob: nc -l 30000)"]),
        (spoil_gpu, ["pid 77 (alice: python3 train.py) with 20000 MiB on GPU 1"]),
        (spoil_gpu_index, ["no GPU 2"]),
        (spoil_new_unit, [NEW, "not-found", "daemon-reload"]),
        (spoil_old_unit, [OLD, "masked"]),
        (spoil_guard, [OLD, "ExecCondition"]),
        (spoil_answer, ["answered 500", "switchover_accept_unproven_old"]),
        (spoil_hang, ["no complete answer within 120 s"]),
        (spoil_disk, ["No space left on device"]),
        (spoil_run, ["No space left on device", "gate.json"]),
        (spoil_serving, ["vllm-dflash@b.service", OLD]),
    ],
)
def test_refused(bed, spoil, words):
    spoil(bed)
    bed.store.hand_over(bed.order)
    pid = bed.host.show(OLD).main_pid
    if spoil is spoil_disk:
        bed.disk.full_from = ""
    record = bed.program()
    assert states(record) == ["REFUSED"]
    for word in words:
        assert word in record["cause"]
    assert bed.host.show(OLD).main_pid == pid
    assert bed.host.signals == []
    assert bed.host.starts == []
    assert bed.store.gate() is None
    assert bed.store.order() is None
    assert bed.store.record()["state"] == "REFUSED"


def test_an_unproven_old_server_can_be_accepted(bed):
    bed.old.answer = "/v1/completions answered 500"
    record = bed.switch(accept_unproven_old=True)
    assert record["state"] == "CONFIRMED"
    assert record["outage_s"] is None, "it was out before"


@pytest.mark.parametrize(
    ("state", "answer", "accepted", "old_class"),
    [
        ("active", None, False, "proved"),
        ("active", "/v1/completions answered 500", True, "unproven"),
        ("active", "/v1/completions answered 500", False, None),
        ("inactive", None, False, "stopped"),
    ],
)
def test_check_mode_says_whether_the_old_server_still_serves(
    bed, monkeypatch, state, answer, accepted, old_class
):
    monkeypatch.setattr(orders, "Store", lambda state_dir: bed.store)
    monkeypatch.setattr("dflash_rollout.switchover.Switchover", lambda store: Switchover(store, bed.host))
    bed.old.state, bed.old.answer = state, answer if answer else bed.old.answer
    order = {key: bed.order[key] for key in ("old", "new", "settings")}
    order["settings"]["accept_unproven_old"] = accepted
    failed, result = orders.order_switch(
        check_mode=True, **order, state_dir=bed.store.state_dir, id=None, follow_timeout=0
    )
    assert (failed, result["outcome"], result["old_class"]) == (False, "WOULD_SWITCH", old_class)
    assert (result["would_refuse"] is None) is (old_class is not None)
    assert bed.host.signals == []
    assert bed.store.order() is None


def test_a_process_on_another_gpu_is_not_in_the_way(bed):
    bed.host.foreign = [TRAINER]
    assert bed.switch(gpus=[0])["state"] == "CONFIRMED"


def test_no_old_server(bed):
    bed.old.state, bed.old.enabled, bed.order["old"] = "inactive", False, None
    assert bed.switch()["state"] == "CONFIRMED"


def test_no_old_server_and_a_broken_new_one(bed):
    bed.old.state, bed.old.enabled, bed.order["old"] = "inactive", False, None
    bed.new.exits_after = 1.0
    record = bed.switch()
    assert states(record)[-3:] == BACK
    assert bed.host.serving() == []


def test_an_old_server_that_did_not_run_is_not_started(bed):
    bed.old.state, bed.new.exits_after = "inactive", 1.0
    record = bed.switch()
    assert record["state"] == "ROLLED_BACK"
    assert OLD not in bed.host.starts
    assert "as before" in record["remedy"]


def test_a_hanging_server_of_ours_is_replaced(bed):
    bed.switch()
    bed.store.hand_over({**bed.order, "id": "order-2", "old": None})
    record = bed.program()
    assert states(record) == FORWARD
    assert bed.new.generation == 2
    assert bed.host.two_servers == []
    assert bed.store.serving()["previous"]["unit"] == OLD, "the way back is kept"


@pytest.mark.parametrize("gone", [{"load_state": "not-found"}, {"load_state": "masked"}])
def test_a_dead_server_that_can_not_be_started_keeps_nobody_from_going_back(bed, gone):
    bed.switch()
    bed.host.stop(NEW)
    bed.host.clock += 10.0
    bed.host.show(NEW)
    for name, value in gone.items():
        setattr(bed.new, name, value)
    serving = bed.store.serving()
    bed.store.hand_over({**bed.order, "id": "order-2", "old": serving["serving"], "new": serving["previous"]})
    record = bed.program()
    assert record["state"] == "CONFIRMED", record["cause"]
    assert bed.host.serving() == [OLD]


def test_a_stopped_old_unit_without_a_guard_would_start_at_boot(bed):
    bed.old.guarded = False
    bed.host.stop(OLD)
    bed.host.clock += 10.0
    bed.host.show(OLD)
    bed.store.hand_over(bed.order)
    record = bed.program()
    assert record["state"] == "REFUSED"
    assert "would start without asking" in record["cause"]
    assert bed.host.serving() == []


# ---- the new server is no good -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ({"exits_after": 1.0}, "exited before it was ready"),
        ({"exits_after": 1.0, "restarts_itself": True}, "NRestarts=1"),
        ({"ready_after": None}, "not ready within 1200 s"),
        ({"answer": "hangs"}, "no complete answer within 120 s"),
        ({"answer": "/v1/completions answered 500"}, "answered 500"),
        ({"answer": "it serves X and not M as promised"}, "serves X and not M"),
        ({"answer": "dies"}, "did not live through its proof"),
        ({"ready_after": None, "stops_after": None}, "not ready within"),
        ({"ready_after": None, "leaves_worker": True}, "not ready within"),
        ({"ready_after": None, "leaves_worker": True, "worker_ignores_sigterm": True}, "not ready within"),
    ],
)
def test_a_bad_new_server_is_rolled_back(bed, behaviour, words):
    for key, value in behaviour.items():
        setattr(bed.new, key, value)
    record = bed.switch()
    assert states(record) == [*FORWARD[:4], *BACK]
    assert words in record["cause"]
    assert record["log_tail"] == [f"simulated log of {NEW}"]
    assert record["outage_s"] > 0
    assert bed.host.starts[0] == NEW
    assert bed.host.starts[-1] == OLD
    assert bed.host.starts.count(OLD) == 1
    bed.host.power_cut(bed.store)
    assert bed.host.serving() == [OLD]


def test_a_worker_that_the_new_server_leaves_when_it_dies_is_known_as_its_own(bed):
    bed.new.exits_after, bed.new.leaves_worker, bed.new.worker_ignores_sigterm = 4.0, True, True
    record = bed.switch()
    assert states(record) == [*FORWARD[:4], *BACK]
    assert [(entry["pid"], entry["signal"]) for entry in record["killed"]] == [
        (5011, "SIGTERM"),
        (5011, "SIGKILL"),
    ]
    assert "not free" not in record["cause"]


def test_an_answer_of_a_stranger_does_not_count(bed):
    bed.store.hand_over(bed.order)
    real = bed.host.start

    def start(unit):
        real(unit)
        spoil_port(bed)

    bed.host.start = start
    record = bed.program()
    assert states(record) == [*FORWARD[:4], "ROLLING_BACK", "NEW_GONE", "STRANDED"]
    assert "is answered by pid 88 (bob: nc -l 30000), not by vllm-dflash@a.service" in record["cause"]
    assert bed.host.two_servers == []


def test_a_broken_new_and_a_broken_old_server_is_stranded(bed):
    bed.new.exits_after = 1.0
    bed.store.hand_over(bed.order)
    real = bed.host.stop

    def stop(unit):
        real(unit)
        bed.old.exits_after = 2.0

    bed.host.stop = stop
    record = bed.program()
    assert states(record) == [*FORWARD[:4], "ROLLING_BACK", "NEW_GONE", "STRANDED"]
    assert "In NEW_STARTED" in record["cause"]
    assert "on the way back: sglang.service exited before it was ready" in record["cause"]
    assert record["old_log_tail"] == [f"simulated log of {OLD}"]
    assert f"systemctl restart {OLD}" in record["remedy"]
    bed.check_invariants(record)


# ---- the old server does not go quietly --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "signals"),
    [
        ({"stops_after": None}, [(1010, "SIGTERM"), (1011, "SIGTERM"), (1010, "SIGKILL"), (1011, "SIGKILL")]),
        ({"leaves_worker": True}, [(1010, "SIGTERM"), (1011, "SIGTERM"), (1011, "SIGTERM")]),
        ({"memory_lingers": 40.0}, [(1010, "SIGTERM"), (1011, "SIGTERM")]),
    ],
)
def test_an_old_server_that_lingers(bed, behaviour, signals):
    for key, value in behaviour.items():
        setattr(bed.old, key, value)
    record = bed.switch()
    assert states(record) == FORWARD
    assert bed.host.signals == signals


def test_a_worker_that_ignores_sigterm_is_killed_after_its_grace(bed):
    bed.old.leaves_worker, bed.old.worker_ignores_sigterm = True, True
    record = bed.switch(leftover_grace_s=40.0)
    assert record["state"] == "CONFIRMED"
    assert [(entry["pid"], entry["signal"]) for entry in record["killed"]] == [
        (1011, "SIGTERM"),
        (1011, "SIGKILL"),
    ]


def test_what_the_old_server_left_and_holds_neither_gpu_nor_port_is_left_alone(bed):
    """It is in nobody's way: the GPUs and the port are what the new server needs, not a clean process list."""
    bed.old.leaves_worker, bed.old.worker_holds_gpu = True, False
    record = bed.switch()
    assert record["state"] == "CONFIRMED"
    assert record["killed"] == []
    assert bed.host.signals == [(1010, "SIGTERM"), (1011, "SIGTERM")], (
        "the stop of the unit, and nothing after it"
    )
    assert bed.old.worker_left is not None


def test_a_worker_that_exits_by_itself_within_its_grace_is_not_killed(bed):
    bed.old.leaves_worker, bed.old.worker_ignores_sigterm, bed.old.worker_exits_after = True, True, 8.0
    record = bed.switch()
    assert record["state"] == "CONFIRMED"
    assert [entry["signal"] for entry in record["killed"]] == ["SIGTERM"]


def test_memory_that_nobody_holds_and_that_never_gets_free(bed):
    bed.old.memory_lingers = 1e9
    record = bed.switch()
    assert states(record) == ["PREPARED", "OLD_STOPPED", *BACK]
    assert "40001 MiB used on GPU 0" in record["cause"]
    assert bed.host.starts == [OLD]
    assert record["outage_s"] < 130, "the limit is waited for once: the new server never started"


def test_an_old_server_that_not_even_sigkill_ends(bed):
    bed.old.stops_after, bed.old.dies_of_sigkill = None, False
    record = bed.switch()
    assert record["state"] == "STRANDED"
    assert "can't be stopped" in record["cause"]
    assert "pid 1010" in record["cause"]
    assert NEW not in bed.host.starts


def test_a_new_server_that_not_even_sigkill_ends_keeps_the_old_one_down(bed):
    bed.new.ready_after, bed.new.stops_after, bed.new.dies_of_sigkill = None, None, False
    record = bed.switch()
    assert states(record)[-2:] == ["ROLLING_BACK", "STRANDED"]
    assert bed.host.starts == [NEW], "never two servers"
    assert "reboot the host" in record["cause"]


def test_a_foreign_process_that_comes_during_the_switch_is_left_alone(bed):
    bed.host.foreign, bed.host.foreign_from = [TRAINER], bed.host.clock + 2.0
    record = bed.switch()
    assert states(record) == ["PREPARED", "OLD_STOPPED", *BACK]
    assert "pid 77 (alice: python3 train.py)" in record["cause"]


@pytest.mark.parametrize(
    ("prepare", "end"), [("good", "CONFIRMED"), ("/v1/completions answered 500", "ROLLED_BACK")]
)
def test_somebody_who_keeps_starting_both_gets_nowhere(bed, prepare, end):
    bed.new.answer = prepare
    bed.store.hand_over(bed.order)
    bed.store.confirm({"id": "order-0", "new": bed.order["old"], "old": None})
    bed.host.watchdogs = (OLD, NEW)
    record = bed.program()
    assert record["state"] == end
    assert record["cause"] is None or "answered 500" in record["cause"]
    assert bed.host.two_servers == []
    assert bed.host.serving() == [NEW if end == "CONFIRMED" else OLD]


# ---- whatever dies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED"])
def test_a_disk_that_fills_up(bed, state):
    bed.disk.full_from = state
    record = bed.switch()
    assert states(record) == [*FORWARD[: FORWARD.index(state) + 1], *BACK]
    assert "No space left on device" in record["cause"]
    assert "No space left on device" in record["not_persisted"]
    assert bed.store.record()["state"] == "ROLLED_BACK"


@pytest.mark.parametrize("day", [86400.0, -86400.0])
def test_a_clock_jump_has_no_effect(bed, day):
    bed.store.hand_over(bed.order)
    real = bed.host.start

    def start(unit):
        bed.host.wall_offset = day
        real(unit)

    bed.host.start = start
    record = bed.program()
    assert states(record) == FORWARD
    assert 9.0 <= record["outage_s"] <= 10.0


def good(bed):
    """A switch that goes through."""


def bad(bed):
    """A switch that is rolled back."""
    bed.new.answer = "/v1/completions answered 500"


def count_calls(tmp_path, monkeypatch, prepare):
    bed = Bed(tmp_path / "count", monkeypatch)
    prepare(bed)
    bed.store.hand_over(bed.order)
    bed.program()
    return bed.host.calls


@pytest.mark.parametrize(("prepare", "end"), [(good, "CONFIRMED"), (bad, "ROLLED_BACK")])
def test_killed_at_every_moment_it_resumes_to_the_same_end(tmp_path, monkeypatch, prepare, end):
    total = count_calls(tmp_path, monkeypatch, prepare)
    assert total > 50
    for moment in range(1, total + 1):
        bed = Bed(tmp_path / str(moment), monkeypatch)
        prepare(bed)
        bed.store.hand_over(bed.order)
        bed.host.kill_at_call = moment
        record = bed.program()
        assert record is None, f"killed at call {moment} of {total}"
        bed.host.kill_at_call = None
        record = bed.program() or bed.store.record()
        assert record["state"] == end, f"killed at call {moment}: {record['cause']}"
        bed.check_invariants(record)


def test_killed_again_and_again_it_gets_there(bed):
    bed.store.hand_over(bed.order)
    record, runs = None, 0
    while record is None:
        bed.host.kill_at_call = 35
        record = bed.program()
        runs += 1
        assert runs < 100
    assert runs > 3
    assert record["state"] == "CONFIRMED"
    bed.check_invariants(record)


@pytest.mark.parametrize("prepare", [good, bad])
def test_a_power_cut_at_every_moment_leaves_one_proved_server(tmp_path, monkeypatch, prepare):
    total = count_calls(tmp_path, monkeypatch, prepare)
    ends = set()
    for moment in range(1, total + 1):
        bed = Bed(tmp_path / str(moment), monkeypatch)
        prepare(bed)
        bed.store.hand_over(bed.order)
        bed.host.kill_at_call = moment
        assert bed.program() is None
        committed = bed.store.serving() is not None
        begun = bed.store.record() is not None
        bed.host.power_cut(bed.store)
        if not begun:
            bed.host.clock += 60.0  # the old server is up when the program begins
        record = bed.program() or bed.store.record()
        if committed:
            assert record["state"] == "CONFIRMED"
        elif begun:
            assert record["state"] == "ROLLED_BACK", f"cut at call {moment}: {record['cause']}"
        ends.add(record["state"])
        bed.check_invariants(record)
    assert "ROLLED_BACK" in ends
    assert ("CONFIRMED" in ends) == (prepare is good)


def test_a_power_cut_and_an_old_server_that_does_not_come_back(bed):
    bed.store.hand_over(bed.order)
    bed.host.kill_at_call = 40
    bed.program()
    bed.old.exits_after = 1.0
    bed.host.power_cut(bed.store)
    record = bed.program()
    assert record["state"] == "STRANDED"
    assert "The host was restarted in " in record["cause"]
    bed.check_invariants(record)


def test_after_a_boot_a_process_with_the_pid_and_start_time_of_an_old_one_is_a_stranger(bed):
    bed.old.enabled, bed.new.ready_after = False, None
    bed.store.hand_over(bed.order)
    bed.host.kill_at_call = 200
    bed.program()
    earlier = bed.store.record()
    assert earlier["state"] == "NEW_STARTED"
    assert {"pid": 1011, "start_ticks": 1001, "user": "llm", "command": f"{OLD} 1"} in earlier["processes"]
    bed.host.power_cut(bed.store)
    bed.host.strangers = [Process(1011, 1001, "llm", f"{OLD} 1")]
    bed.host.foreign = [GpuProcess(1011, "GPU-0", 0, "python3", 20000, "alice", "python3 train.py")]
    before = list(bed.host.signals)
    assert bed.program()["state"] == "ROLLED_BACK"
    assert bed.host.signals == before


def test_a_commit_whose_durability_failed_is_a_commit(bed, monkeypatch):
    def write_json(path, value, mode=0o644):
        bed.disk.write_json(path, value, mode)
        if path.endswith("serving.json"):
            raise OSError("fsync of the directory failed")

    monkeypatch.setattr(store_module, "write_json", write_json)
    assert states(bed.switch()) == FORWARD


def test_a_second_order_is_not_taken_while_one_is_there(bed):
    bed.store.hand_over(bed.order)
    with pytest.raises(FileExistsError):
        bed.store.hand_over({**bed.order, "id": "order-2"})
    assert bed.store.order()["id"] == "order-1"
    assert bed.store.running()["id"] == "order-1"
