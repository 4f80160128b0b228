"""The asking side of a switch: hand the order to the program on the host, follow it, read the outcome."""

from __future__ import annotations

import contextlib
import datetime
import getpass
import os
import secrets
import time

from . import proof, servers, units
from .errors import RolloutError
from .serving import PROGRAM_UNIT, outcome_text
from .store import Store
from .switch_state import CONFIRMED, END_STATES, seconds_in_states

POLL_S = 0.3
# systemd restarts a killed program after a second; if it isn't there after this, it won't come.
PROGRAM_ABSENT_S = 10.0
NOT_BEGUN = "NOT_BEGUN"


def order_switch(
    *,
    check_mode: bool,
    old: dict | None,
    new: dict,
    settings: dict,
    state_dir: str,
    id: str | None,
    follow_timeout: float,
    way_back: dict | None = None,
) -> tuple[bool, dict]:
    """What the module `switchover` does (see its documentation): (failed, what it returns).

    Raises RolloutError when nothing could be handed over or followed.
    """
    store = Store(state_dir)
    if old is not None and old["unit"] == new["unit"]:
        old = None
    if id is not None:
        known = store.find(id)
        if known is not None or (store.order() or {}).get("id") == id:
            return _follow(store, id, follow_timeout)
    running = store.running()
    if running is not None:
        if running["new"]["unit"] == new["unit"] and not check_mode:
            return _follow(store, running["id"], follow_timeout)
        record = store.record()
        state = record["state"] if record and record["id"] == running["id"] else "not begun"
        raise RolloutError(
            f"A switch to {running['new']['unit']} is running already",
            found=f"{running['id']} in {state}, since {running['requested_at']} by {running['requested_by']}",
            remedy=f"wait for its end; if it was interrupted: systemctl start {PROGRAM_UNIT}",
        )
    diff = _diff(store, old, new)
    if _serves(store, new, settings):
        return False, {"changed": False, "finished": True, "outcome": "UNCHANGED"}
    now = datetime.datetime.now(datetime.timezone.utc)
    order = {
        "id": id or f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}",
        "old": old,
        "new": new,
        "way_back": way_back,
        "settings": settings,
        "requested_at": now.isoformat(timespec="seconds"),
        "requested_by": os.environ.get("SUDO_USER") or getpass.getuser(),
        "boot_id": units.boot_id(),
    }
    if check_mode:
        would = f"switch from {old['unit'] if old else 'no server'} to {new['unit']}"
        return False, {
            "changed": True,
            "finished": True,
            "outcome": "WOULD_SWITCH",
            "would": would,
            **_foreseen(store, order),
            "diff": diff,
        }
    _hand_over(store, order)
    failed, result = _follow(store, order["id"], follow_timeout)
    return failed, {**result, "diff": diff}


def _diff(store: Store, old: dict | None, new: dict) -> dict:
    serving = store.serving()
    before = serving["serving"]["unit"] if serving else (old["unit"] if old else "nothing")
    return {
        "before": f"serving: {before}\n",
        "after": f"serving: {new['unit']}\n",
        "before_header": "what serves",
    }


def _serves(store: Store, new: dict, settings: dict) -> bool:
    """Whether the new server was confirmed, runs, and a completion works."""
    serving = store.serving()
    if serving is None or serving["serving"]["unit"] != new["unit"]:
        return False
    if servers.show(new).active_state != "active":
        return False
    return proof.prove(new, completions=1, timeout_s=settings["proof_timeout_s"]).proved


def _foreseen(store: Store, order: dict) -> dict:
    """Why the program would refuse the order as things are now, if it would, and what it takes the old server for."""
    # What drives a switch is compiled where one is to be: a host that serves what it should is asked far more often.
    from .switchover import Switchover

    try:
        facts = Switchover(store).check(order)
    except RolloutError as refusal:
        return {"would_refuse": str(refusal), "old_class": None}
    return {"would_refuse": None, "old_class": facts["old_class"]}


def _hand_over(store: Store, order: dict) -> None:
    if units.show(PROGRAM_UNIT).load_state != "loaded":
        raise RolloutError(
            f"{PROGRAM_UNIT} is not installed",
            remedy="run the switchover role first, it installs the program",
        )
    try:
        # A switch on a disk that could not be written ends, and its order stays there. The program takes an
        # order away last: while it runs, that is its to do.
        if store.order() is not None and store.running() is None and not units.show(PROGRAM_UNIT).running:
            store.close_order()
        store.hand_over(order)
    except FileExistsError as error:
        raise RolloutError(
            "Another order is there already",
            found=str((store.order() or {}).get("id")),
            remedy=f"wait for its end (systemctl status {PROGRAM_UNIT})",
        ) from error
    except OSError as error:
        raise RolloutError(
            "The order can't be written, nothing was stopped",
            found=str(error),
            remedy="free space, or remount it",
        ) from error
    try:
        units.start(PROGRAM_UNIT)
    except RolloutError:
        # Not begun: without the order nothing will begin at the next boot either.
        with contextlib.suppress(OSError):
            store.close_order()
        raise


def _follow(store: Store, order_id: str, timeout: float) -> tuple[bool, dict]:
    begin = time.monotonic()
    seen = begin
    while True:
        record = store.find(order_id)
        program_runs = units.show(PROGRAM_UNIT).running
        # The program takes the order away last, so that the next one can be handed over when we return.
        tidied = (store.order() or {}).get("id") != order_id or not program_runs
        if record is not None and record["state"] in END_STATES and tidied:
            return _outcome(record)
        now = time.monotonic()
        if now - begin >= timeout:
            return False, _progress(record, order_id)
        if program_runs:
            seen = now
        elif now - seen > PROGRAM_ABSENT_S:
            # Not an error before anything was done: somebody may be without a server now.
            interrupted = RolloutError(
                f"The switch {order_id} was interrupted and its program does not run",
                found=f"state {record['state'] if record else 'not begun'}",
                remedy=f"systemctl start {PROGRAM_UNIT} on the host resumes it; its log says why it stopped",
            )
            begun = _describe(record) if record else {"id": order_id}
            outcome = record["state"] if record else NOT_BEGUN
            return True, {
                **begun,
                "outcome": outcome,
                "finished": True,
                "changed": True,
                "msg": str(interrupted),
            }
        time.sleep(POLL_S)


def _describe(record: dict) -> dict:
    return {
        "id": record["id"],
        "states": seconds_in_states(record, units.boot_seconds()),
        "outage_s": record["outage_s"],
        "record": record,
    }


def _outcome(record: dict) -> tuple[bool, dict]:
    failed = record["state"] != CONFIRMED
    result = {
        **_describe(record),
        "outcome": record["state"],
        "finished": True,
        "changed": record["state"] != "REFUSED",
        "msg": outcome_text(record),
    }
    return failed, result


def _progress(record: dict | None, order_id: str) -> dict:
    if record is None:
        return {"id": order_id, "finished": False, "outcome": NOT_BEGUN, "changed": True}
    state = record["state"]
    try:
        lines = servers.log_tail(record["new"], record.get("journal_cursor"), 1)
    except RolloutError as problem:
        lines = [f"(no log: {problem})"]
    result = {**_describe(record), "outcome": state, "finished": False, "changed": True}
    result["last_log_line"] = lines[-1] if lines else ""
    spent = result["states"][-1]["seconds"] if result["states"] else None
    result["msg"] = f"{state} for {spent} s: {result['last_log_line']}"
    return result
