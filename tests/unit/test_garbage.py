"""What may go from a host: never what serves, what a way back leads to, or what these need."""

from __future__ import annotations

import json
import os

import pytest
from dflash_rollout import garbage
from dflash_rollout.errors import RolloutError
from dflash_rollout.garbage import YOUNG_S, Entry, choose
from hypothesis import given
from hypothesis import strategies as st

NOW = 1_000_000_000.0
OLD = NOW - 10 * YOUNG_S


def digest(number: int) -> str:
    return f"{number:016x}"


def release(number: int, age: float, venv: int = 1, drafter: int = 1) -> Entry:
    return Entry(
        "releases", digest(number), OLD - age, (f"venvs/{digest(venv)}", f"drafters/{digest(drafter)}")
    )


def test_the_newest_stay_with_all_they_lead_to():
    entries = [release(number, age=number, venv=number, drafter=1) for number in range(1, 6)]
    entries += [Entry("venvs", digest(number), OLD) for number in range(1, 7)]
    entries += [Entry("drafters", digest(1), OLD), Entry("drafters", digest(2), OLD)]
    choice = choose(entries, 2, {}, NOW)
    gone = [entry.name for entry in choice.gone]
    assert gone == [
        *(f"releases/{digest(number)}" for number in (3, 4, 5)),
        *(f"venvs/{digest(number)}" for number in (3, 4, 5, 6)),
        f"drafters/{digest(2)}",
    ]
    assert choice.kept[f"venvs/{digest(2)}"] == f"used by release {digest(2)}"


def test_the_way_back_stays_however_old():
    entries = [release(number, age=number, venv=number) for number in range(1, 9)]
    entries += [Entry("venvs", digest(number), OLD) for number in range(1, 9)]
    in_use = {f"releases/{digest(8)}": "the way back leads to it"}
    gone = {entry.name for entry in choose(entries, 1, in_use, NOW).gone}
    assert f"releases/{digest(8)}" not in gone
    assert f"venvs/{digest(8)}" not in gone
    assert f"venvs/{digest(7)}" in gone


def test_what_just_arrived_stays():
    entries = [
        release(1, 0),
        release(2, 1),
        Entry("drafters", "a" * 64, NOW - 60),
        Entry("drafters", "b" * 64, OLD),
    ]
    assert [entry.digest for entry in choose(entries, 1, {}, NOW).gone] == [digest(2), "b" * 64]


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.floats(0, 1e6), st.integers(0, 4)), unique_by=lambda row: row[0]
    ),
    st.integers(1, 4),
    st.sets(st.integers(0, 9)),
)
def test_no_release_that_stays_loses_what_it_needs(rows, keep, used):
    entries = [release(number, age, venv=venv, drafter=venv) for number, age, venv in rows]
    entries += [Entry(kind, digest(number), OLD) for kind in ("venvs", "drafters") for number in range(5)]
    choice = choose(entries, keep, {f"releases/{digest(number)}": "serves" for number in used}, NOW)
    gone = {entry.name for entry in choice.gone}
    for entry in entries:
        if entry.kind == "releases" and entry.name not in gone:
            assert not gone & set(entry.links)
        if entry.kind == "releases" and int(entry.digest, 16) in used:
            assert entry.name not in gone
    assert gone.isdisjoint(choice.kept)
    assert gone | set(choice.kept) == {entry.name for entry in entries}


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A root with four releases of four venvs, the first serving and the last the way back; no unit is loaded."""
    root, state = tmp_path / "root", tmp_path / "state"
    monkeypatch.setattr(garbage.units, "loaded", lambda pattern: [])
    state.mkdir()
    for number in range(1, 5):
        venv = root / "venvs" / digest(number)
        venv.mkdir(parents=True)
        (root / "venvs" / f"{digest(number)}.txt").write_text("lock")
        folder = root / "releases" / digest(number)
        folder.mkdir(parents=True)
        (folder / "venv").symlink_to(venv)
        for path in (venv, folder):
            os.utime(path, (OLD - number, OLD - number))
        os.utime(folder / "venv", (OLD, OLD), follow_symlinks=False)
    server = {"unit": f"vllm-dflash@{digest(1)}.service"}
    before = {"unit": f"vllm-dflash@{digest(4)}.service"}
    (state / "serving.json").write_text(json.dumps({"serving": server, "previous": before, "switch_id": "x"}))
    return root, state


def names(root, kind):
    return sorted(path.name for path in (root / kind).iterdir())


def test_collect(host):
    root, state = host
    (root / "venvs" / f".{digest(9)}.removed").mkdir()
    shown = garbage.collect(str(root), str(state), 1, check=True)
    assert names(root, "releases") == [digest(number) for number in (1, 2, 3, 4)]
    done = garbage.collect(str(root), str(state), 1)
    assert done["removed"] == shown["removed"]
    assert names(root, "releases") == [digest(1), digest(4)]
    assert names(root, "venvs") == [digest(1), f"{digest(1)}.txt", digest(4), f"{digest(4)}.txt"]
    assert garbage.collect(str(root), str(state), 1)["removed"] == []


def test_a_loaded_unit_keeps_its_release(host, monkeypatch):
    root, state = host
    monkeypatch.setattr(garbage.units, "loaded", lambda pattern: [f"vllm-dflash@{digest(3)}.service"])
    garbage.collect(str(root), str(state), 1)
    assert names(root, "releases") == [digest(1), digest(3), digest(4)]


def test_what_the_run_staged_stays(host):
    root, state = host
    garbage.collect(str(root), str(state), 1, also=[str(root / "venvs" / digest(2))])
    assert digest(2) in names(root, "venvs")


def test_nothing_goes_while_a_switch_runs(host):
    root, state = host
    (state / "switch").mkdir()
    (state / "switch" / "pending.json").write_text(json.dumps({"id": "now", "new": {}, "old": None}))
    assert garbage.collect(str(root), str(state), 1)["removed"] == []
    assert len(names(root, "releases")) == 4


def test_a_state_that_cannot_be_read_removes_nothing(host):
    root, state = host
    (state / "serving.json").write_text("{")
    with pytest.raises(RolloutError, match="can't be read"):
        garbage.collect(str(root), str(state), 1)
    assert len(names(root, "releases")) == 4


def test_keeping_none_is_refused(host):
    with pytest.raises(RolloutError, match="rollout_keep_releases"):
        garbage.collect(str(host[0]), str(host[1]), 0)
