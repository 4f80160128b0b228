"""The switch on a simulated host where one of the two servers is a container: what keeps it down is its policy."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from simulated_switch import SimulatedServer
from test_switchover import BACK, FORWARD, NEW, Bed, bad, good, states

BOX = "sglang"
POLICY = "unless-stopped"


class BoxBed(Bed):
    """The old server is a container of a simulated docker, and serves."""

    def __init__(self, directory, monkeypatch):
        super().__init__(directory, monkeypatch)
        self.servers.clear()
        self.servers[BOX] = SimulatedServer(BOX, 1000, guarded=False, policy=POLICY)
        self.servers[NEW] = SimulatedServer(NEW, 5000)
        self.order["old"].update(unit=BOX, runtime="docker")
        self.host.start(BOX)
        self.host.clock += 100.0
        self.host.starts.clear()

    @property
    def old(self):
        return self.servers[BOX]

    def check_invariants(self, record):
        assert self.host.two_servers == []
        serving = self.host.serving()
        if record["state"] == "CONFIRMED":
            assert serving == [NEW]
            assert self.old.policy == "no", "nothing may start it beside the new one"
            assert self.store.serving()["previous"]["restart_policy"] == POLICY
        elif record["state"] == "ROLLED_BACK":
            assert serving == [BOX]
            assert self.old.policy == POLICY
            assert self.store.serving() is None
        assert self.store.gate() is None
        assert self.store.order() is None


class BackBed(BoxBed):
    """The container was replaced by a unit, and is to serve again."""

    def __init__(self, directory, monkeypatch):
        super().__init__(directory, monkeypatch)
        self.store.hand_over(self.order)
        assert self.program()["state"] == "CONFIRMED"
        self.host.clock += 100.0
        serving = self.store.serving()
        self.order = {**self.order, "id": "back", "old": serving["serving"], "new": serving["previous"]}
        self.host.starts.clear()
        self.host.policies.clear()

    def check_invariants(self, record):
        assert self.host.two_servers == []
        confirmed = record["state"] == "CONFIRMED"
        assert self.host.serving() == [BOX if confirmed else NEW]
        assert self.old.policy == (POLICY if confirmed else "no")
        assert self.store.serving()["serving"]["unit"] == (BOX if confirmed else NEW)


@pytest.fixture
def bed(tmp_path, monkeypatch):
    return BoxBed(tmp_path, monkeypatch)


@pytest.fixture
def back(tmp_path, monkeypatch):
    return BackBed(tmp_path, monkeypatch)


def test_from_a_container_to_a_unit(bed):
    real, on_disk = bed.host.set_restart_policy, []

    def set_restart_policy(server, policy):
        if server["unit"] == BOX and policy != bed.old.policy:
            on_disk.append(bed.store.record()["old"]["restart_policy"])
        real(server, policy)

    bed.host.set_restart_policy = set_restart_policy
    record = bed.switch()
    assert states(record) == FORWARD
    assert bed.host.policies == [(BOX, "no")]
    assert on_disk == [POLICY], "what it was is on disk before it is changed"
    assert bed.host.signals == [(1010, "SIGTERM"), (1011, "SIGTERM")]
    bed.host.power_cut(bed.store)
    assert bed.host.serving() == [NEW]


def test_a_bad_new_server_gives_the_container_back_with_its_policy(bed):
    bad(bed)
    record = bed.switch()
    assert states(record) == [*FORWARD[:4], *BACK]
    assert bed.host.policies == [(BOX, "no"), (BOX, POLICY)]
    assert bed.host.starts == [NEW, BOX]
    bed.host.power_cut(bed.store)
    assert bed.host.serving() == [BOX]


def test_a_stopped_container_stays_stopped_and_keeps_its_policy(bed):
    bed.old.state = "inactive"
    bad(bed)
    bed.store.hand_over(bed.order)
    assert bed.program()["state"] == "ROLLED_BACK"
    assert BOX not in bed.host.starts
    assert bed.old.policy == POLICY


def test_a_container_without_a_policy_keeps_none(bed):
    bed.old.policy = "no"
    bad(bed)
    bed.store.hand_over(bed.order)
    assert bed.program()["state"] == "ROLLED_BACK"
    assert bed.host.policies == []
    assert bed.host.serving() == [BOX]


def test_back_to_the_container_it_gets_its_policy_when_it_is_confirmed(back):
    back.store.hand_over(back.order)
    record = back.program()
    assert states(record) == FORWARD
    assert back.host.policies == [(BOX, POLICY)]
    back.check_invariants(record)
    back.host.power_cut(back.store)
    assert back.host.serving() == [BOX]


def test_back_to_a_container_that_is_no_good_any_more(back):
    back.old.answer = "/v1/completions answered 500"
    back.store.hand_over(back.order)
    record = back.program()
    assert states(record) == [*FORWARD[:4], *BACK]
    back.check_invariants(record)
    back.host.power_cut(back.store)
    assert back.host.serving() == [NEW]


def test_somebody_starts_the_old_container_during_the_switch(bed):
    real = bed.store.set_gate

    def set_gate(unit):
        real(unit)
        if unit == NEW and bed.host.starts == []:
            bed.host.start({"unit": BOX, "runtime": "docker"})

    bed.store.set_gate = set_gate
    record = bed.switch()
    assert record["state"] == "ROLLED_BACK"
    assert "sglang was started by somebody during the switch" in record["cause"]
    assert NEW not in bed.host.starts


@pytest.mark.parametrize("userland_proxy", [True, False])
def test_a_port_that_docker_publishes_is_the_containers(bed, userland_proxy):
    """docker-proxy, in docker.service, listens for the container; or nobody does and the kernel forwards."""
    bad(bed)
    show, listeners = bed.host.show, bed.host.listeners

    def shown(server):
        unit = show(server)
        if unit.unit != BOX:
            return unit
        return dataclasses.replace(unit, published=(30000,), forwarders=("docker.service",))

    def proxied(port):
        found = listeners(port)
        boxed = [item for item in found if item.unit == BOX]
        rest = [item for item in found if item.unit != BOX]
        if not userland_proxy:
            return rest
        return rest + [dataclasses.replace(item, pid=99, unit="docker.service") for item in boxed]

    bed.host.show, bed.host.listeners = shown, proxied
    record = bed.switch()
    assert states(record) == [*FORWARD[:4], *BACK], record["cause"]


# ---- the engine gives no answer ----------------------------------------------------------------------------


def test_a_dead_engine_is_found_out_before_the_outage(bed):
    bed.host.silent_until = 1e9
    bed.store.hand_over(bed.order)
    record = bed.program()
    assert states(record) == ["REFUSED"]
    assert "docker doesn't answer" in record["cause"]
    assert bed.host.policies == []
    assert bed.host.signals == []


def silent_from(bed, state, seconds):
    """The simulated engine answers nothing once the switch is in `state`, for so many seconds."""
    real = bed.store.write_record

    def write_record(record):
        real(record)
        if record["state"] == state:
            bed.host.silent_from, bed.host.silent_until = bed.host.clock, bed.host.clock + seconds

    bed.store.write_record = write_record


def test_an_engine_that_hangs_when_the_container_is_to_be_stopped(bed):
    silent_from(bed, "PREPARED", 200.0)
    record = bed.switch()
    assert record["state"] == "ROLLED_BACK"
    assert "In PREPARED: simulated docker doesn't answer" in record["cause"]


@pytest.mark.parametrize("state", ["GPU_FREE", "PROVED"])
def test_a_dead_engine_takes_no_new_server_down(bed, state):
    # Going back is the one direction that needs it.
    silent_from(bed, state, 1e12)
    assert bed.switch()["state"] == "CONFIRMED"


def test_an_engine_that_never_comes_back(bed):
    bad(bed)
    silent_from(bed, "GPU_FREE", 1e12)
    record = bed.switch()
    assert record["state"] == "STRANDED"
    assert "on the way back: simulated docker doesn't answer" in record["cause"]
    assert "docker restart sglang" in record["remedy"]


def test_a_removed_container_is_no_reason_to_stay_with_a_dead_server(back):
    """What serves died, was a container, and is gone: the way to the server before must not need it."""
    back.order["old"], back.order["new"] = back.order["new"], back.order["old"]
    serving = back.store.serving()
    swapped = {**serving, "serving": back.order["old"], "previous": back.order["new"]}
    (pathlib.Path(back.store.state_dir) / "serving.json").write_text(json.dumps(swapped))
    back.host.stop(NEW)
    back.host.clock += 10.0
    back.host.show(NEW)
    del back.servers[BOX]
    back.store.hand_over(back.order)
    assert back.program()["state"] == "CONFIRMED"
    assert back.host.serving() == [NEW]


def test_an_engine_that_fails_after_the_commit_is_said_and_the_switch_confirmed(back):
    real = back.store.confirm

    def confirm(record):
        real(record)
        back.host.silent_from, back.host.silent_until = back.host.clock, back.host.clock + 1000.0

    back.store.confirm = confirm
    back.store.hand_over(back.order)
    record = back.program()
    assert record["state"] == "CONFIRMED"
    assert f"docker update --restart={POLICY} sglang" in record["remedy"]


def test_at_boot_the_engine_may_come_up_after_the_program(bed):
    bed.store.hand_over(bed.order)
    bed.host.kill_at_call = 80
    assert bed.program() is None
    assert bed.store.record()["state"] in ("GPU_FREE", "NEW_STARTED")
    bed.host.power_cut(bed.store)
    bed.host.silent_from, bed.host.silent_until = bed.host.clock, bed.host.clock + 120.0
    record = bed.program()
    assert record["state"] == "ROLLED_BACK"
    bed.check_invariants(record)


# ---- whatever dies -----------------------------------------------------------------------------------------


def calls(kind, directory, monkeypatch, prepare):
    bed = kind(directory, monkeypatch)
    prepare(bed)
    bed.store.hand_over(bed.order)
    bed.program()
    return bed.host.calls


@pytest.mark.parametrize("kind", [BoxBed, BackBed])
@pytest.mark.parametrize(("prepare", "end"), [(good, "CONFIRMED"), (bad, "ROLLED_BACK")])
def test_killed_at_every_moment_it_resumes_to_the_same_end(tmp_path, monkeypatch, kind, prepare, end):
    if kind is BackBed and prepare is bad:
        prepare = spoiled_box
    total = calls(kind, tmp_path / "count", monkeypatch, prepare)
    for moment in range(1, total + 1, 3):
        bed = kind(tmp_path / str(moment), monkeypatch)
        prepare(bed)
        bed.store.hand_over(bed.order)
        bed.host.kill_at_call = moment
        assert bed.program() is None
        bed.host.kill_at_call = None
        record = bed.program() or bed.store.record()
        assert record["state"] == end, f"killed at call {moment}: {record['cause']}"
        bed.check_invariants(record)


def spoiled_box(bed):
    bed.old.answer = "/v1/completions answered 500"


@pytest.mark.parametrize("kind", [BoxBed, BackBed])
def test_a_power_cut_at_every_moment_leaves_one_proved_server(tmp_path, monkeypatch, kind):
    total = calls(kind, tmp_path / "count", monkeypatch, good)
    ends = set()
    for moment in range(1, total + 1, 3):
        bed = kind(tmp_path / str(moment), monkeypatch)
        bed.store.hand_over(bed.order)
        bed.host.kill_at_call = moment
        assert bed.program() is None
        record = bed.store.record()
        begun = record is not None and record["id"] == bed.order["id"]
        bed.host.power_cut(bed.store)
        if not begun:
            bed.host.clock += 60.0
        record = bed.program() or bed.store.record()
        ends.add(record["state"])
        bed.check_invariants(record)
    assert ends == {"CONFIRMED", "ROLLED_BACK"}
