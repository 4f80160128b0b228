"""The states of a switch from one server to another: pure, no clock, no file, no process in here.

A state is written down before anything is done that it allows, so whoever reads it after a crash knows the
most that can have happened. Going forward::

    PREPARED -> OLD_STOPPED -> GPU_FREE -> NEW_STARTED -> PROVED -> CONFIRMED

and back, from any of them before CONFIRMED::

    ROLLING_BACK (new is being stopped) -> NEW_GONE (old may start) -> ROLLED_BACK, or STRANDED

An order that fails its checks never becomes PREPARED: it is REFUSED and nothing was stopped.
"""

from __future__ import annotations

import copy

from .errors import RolloutError

PREPARED = "PREPARED"
OLD_STOPPED = "OLD_STOPPED"
GPU_FREE = "GPU_FREE"
NEW_STARTED = "NEW_STARTED"
PROVED = "PROVED"
CONFIRMED = "CONFIRMED"
ROLLING_BACK = "ROLLING_BACK"
NEW_GONE = "NEW_GONE"
ROLLED_BACK = "ROLLED_BACK"
STRANDED = "STRANDED"
REFUSED = "REFUSED"

END_STATES = (CONFIRMED, ROLLED_BACK, STRANDED, REFUSED)

TRANSITIONS: dict[str | None, tuple[str, ...]] = {
    None: (PREPARED, REFUSED),
    PREPARED: (OLD_STOPPED, ROLLING_BACK),
    OLD_STOPPED: (GPU_FREE, ROLLING_BACK),
    GPU_FREE: (NEW_STARTED, ROLLING_BACK),
    NEW_STARTED: (PROVED, ROLLING_BACK),
    PROVED: (CONFIRMED, ROLLING_BACK),
    # After a boot the way back begins anew.
    ROLLING_BACK: (NEW_GONE, STRANDED, ROLLING_BACK),
    NEW_GONE: (ROLLED_BACK, STRANDED, ROLLING_BACK),
    CONFIRMED: (),
    ROLLED_BACK: (),
    STRANDED: (),
    REFUSED: (),
}


def new_record(order: dict, boot_id: str) -> dict:
    """The record of an order that nothing has been done for yet (state None)."""
    return {
        "id": order["id"],
        "state": None,
        "boot_id": boot_id,
        "old": order["old"],
        "new": order["new"],
        "way_back": order.get("way_back"),
        "requested_at": order.get("requested_at"),
        "requested_by": order.get("requested_by"),
        "states": [],
        "cause": None,
        "remedy": None,
        "log_tail": [],
        "outage_s": None,
        "killed": [],
        "processes": [],
        "control_groups": [],
    }


def advance(record: dict, state: str, *, at: str, boot_s: float, **facts: object) -> dict:
    """A copy of `record` in `state`, with `facts` (cause, log_tail, …) put in.

    `at` is wall-clock time for people; `boot_s` seconds of CLOCK_BOOTTIME, what deadlines are counted from.
    Raises RolloutError for a transition that is not in TRANSITIONS.
    """
    if state not in TRANSITIONS[record["state"]]:
        raise RolloutError(
            f"A switch can't go from {record['state']} to {state}",
            expected=" or ".join(TRANSITIONS[record["state"]]) or "no state after an end state",
            remedy="this is a fault of the program, please report it with the record",
        )
    changed = copy.deepcopy(record)
    changed["state"] = state
    changed["states"].append({"state": state, "at": at, "boot_s": round(boot_s, 3)})
    changed.update(facts)
    return changed


def may_start(state: str, old: dict | None, new: dict) -> str | None:
    """Which unit may be started while a switch is in `state`: never two, mostly none."""
    if state in (GPU_FREE, NEW_STARTED, PROVED):
        return new["unit"]
    if state == NEW_GONE and old is not None:
        return old["unit"]
    return None


def entered(record: dict, state: str) -> float:
    """When `state` was entered last, in seconds of CLOCK_BOOTTIME.

    Raises KeyError when the record never was in that state.
    """
    for entry in reversed(record["states"]):
        if entry["state"] == state:
            return entry["boot_s"]
    raise KeyError(state)


def seconds_in_states(record: dict, now_boot_s: float | None = None) -> list[dict]:
    """For people: each state with the seconds spent in it.

    The last state has none (null) when it is an end state or `now_boot_s` is not given. After a reboot the
    counter began anew, so the state that was cut short has none either.
    """
    rows = []
    states = record["states"]
    for number, entry in enumerate(states):
        if number + 1 < len(states):
            until = states[number + 1]["boot_s"]
        else:
            until = now_boot_s if entry["state"] not in END_STATES else None
        seconds = None if until is None or until < entry["boot_s"] else round(until - entry["boot_s"], 2)
        rows.append({"state": entry["state"], "at": entry["at"], "seconds": seconds})
    return rows


def resume(record: dict, *, boot_id: str, serving_switch: str | None) -> str:
    """What a program that finds this record has to do first: "forward", "back", "confirm" or "nothing".

    `serving_switch` is the id of the switch that wrote serving.json. That rename is the commit: where it was
    done, the switch is confirmed whatever the record says. After a reboot nothing but going back is left,
    because serving.json still named the old server and the boot followed it.
    """
    if record["state"] in END_STATES:
        return "nothing"
    if serving_switch == record["id"]:
        return "confirm"
    if record["state"] in (ROLLING_BACK, NEW_GONE):
        return "back"
    return "forward" if record["boot_id"] == boot_id else "back"
