"""The states of a switch: every transition, every illegal one, who may start, how it is resumed."""

from __future__ import annotations

import itertools

import pytest
from dflash_rollout.errors import RolloutError
from dflash_rollout.switch_state import (
    END_STATES,
    TRANSITIONS,
    advance,
    entered,
    may_start,
    new_record,
    resume,
    seconds_in_states,
)

OLD = {"unit": "old.service"}
NEW = {"unit": "new.service"}
ORDER = {"id": "o1", "old": OLD, "new": NEW}

# Written out, not read from the program: what may follow what.
LEGAL = {
    (None, "PREPARED"),
    (None, "REFUSED"),
    ("PREPARED", "OLD_STOPPED"),
    ("OLD_STOPPED", "GPU_FREE"),
    ("GPU_FREE", "NEW_STARTED"),
    ("NEW_STARTED", "PROVED"),
    ("PROVED", "CONFIRMED"),
    ("PREPARED", "ROLLING_BACK"),
    ("OLD_STOPPED", "ROLLING_BACK"),
    ("GPU_FREE", "ROLLING_BACK"),
    ("NEW_STARTED", "ROLLING_BACK"),
    ("PROVED", "ROLLING_BACK"),
    ("ROLLING_BACK", "NEW_GONE"),
    ("ROLLING_BACK", "STRANDED"),
    ("ROLLING_BACK", "ROLLING_BACK"),
    ("NEW_GONE", "ROLLED_BACK"),
    ("NEW_GONE", "STRANDED"),
    ("NEW_GONE", "ROLLING_BACK"),
}
STATES = sorted({state for pair in LEGAL for state in pair if state})


def record_in(state):
    return {**new_record(ORDER, "boot-1"), "state": state}


def test_no_state_is_missing_here():
    assert set(TRANSITIONS) == {None, *STATES}


@pytest.mark.parametrize(("before", "after"), sorted(itertools.product([None, *STATES], STATES), key=str))
def test_transition(before, after):
    record = record_in(before)
    if (before, after) in LEGAL:
        changed = advance(record, after, at="noon", boot_s=5.0, cause="why")
        assert changed["state"] == after
        assert changed["states"][-1] == {"state": after, "at": "noon", "boot_s": 5.0}
        assert changed["cause"] == "why"
        assert record == record_in(before), "the record handed in stays as it was"
    else:
        with pytest.raises(RolloutError, match=f"can't go from {before} to {after}"):
            advance(record, after, at="noon", boot_s=5.0)


@pytest.mark.parametrize(
    ("state", "unit"),
    [
        ("PREPARED", None),
        ("OLD_STOPPED", None),
        ("GPU_FREE", "new.service"),
        ("NEW_STARTED", "new.service"),
        ("PROVED", "new.service"),
        ("ROLLING_BACK", None),
        ("NEW_GONE", "old.service"),
    ],
)
def test_who_may_start(state, unit):
    assert may_start(state, OLD, NEW) == unit


def test_without_an_old_server_nobody_may_start_on_the_way_back():
    assert may_start("NEW_GONE", None, NEW) is None


@pytest.mark.parametrize("state", [state for state in STATES if state not in END_STATES])
@pytest.mark.parametrize("boot", ["boot-1", "boot-2"])
@pytest.mark.parametrize("committed", [None, "another", "o1"])
def test_resume(state, boot, committed):
    direction = resume(record_in(state), boot_id=boot, serving_switch=committed)
    if committed == "o1":
        assert direction == "confirm"
    elif state in ("ROLLING_BACK", "NEW_GONE") or boot == "boot-2":
        assert direction == "back"
    else:
        assert direction == "forward"


@pytest.mark.parametrize("state", ["CONFIRMED", "ROLLED_BACK", "STRANDED", "REFUSED"])
def test_an_end_is_an_end(state):
    assert resume(record_in(state), boot_id="boot-2", serving_switch="o1") == "nothing"


def test_seconds_in_states_over_a_boot():
    record = new_record(ORDER, "boot-1")
    for state, boot_s in (
        ("PREPARED", 100.0),
        ("OLD_STOPPED", 103.5),
        ("ROLLING_BACK", 20.0),
        ("NEW_GONE", 21.0),
    ):
        record = advance(record, state, at="", boot_s=boot_s)
    assert [row["seconds"] for row in seconds_in_states(record, 30.0)] == [3.5, None, 1.0, 9.0]
    assert [row["seconds"] for row in seconds_in_states(record)] == [3.5, None, 1.0, None]
    assert entered(record, "ROLLING_BACK") == 20.0
    with pytest.raises(KeyError):
        entered(record, "PROVED")
