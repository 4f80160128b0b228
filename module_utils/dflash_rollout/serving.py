"""What serves on this host now: what was decided, what systemd says, who listens, what answers."""

from __future__ import annotations

from dataclasses import asdict

from . import acceptance, proof, units
from .gate import OUR_UNITS, RUN_DIR, STATE_DIR
from .store import Store
from .switch_state import CONFIRMED, END_STATES, REFUSED, ROLLED_BACK, STRANDED, seconds_in_states

PROGRAM_UNIT = "llm-switchover.service"


def inspect_serving(
    unit: str | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    state_dir: str = STATE_DIR,
    prove: bool = False,
    proof_timeout_s: float = 120.0,
    run_dir: str = RUN_DIR,
) -> dict:
    """Everything that `serving_info` returns (see its RETURN). Reads only.

    serving.json goes before `unit`, which is what serves where no switch was confirmed yet.
    Raises RolloutError when systemd doesn't answer or the state can't be read.
    """
    store = Store(state_dir, run_dir)
    state = store.serving() or {"serving": None, "previous": None}
    server = state["serving"] or {
        "unit": unit,
        "port": port,
        "host": host,
        "model_id": None,
        "metrics": False,
    }
    port = port or server["port"]
    found = units.show(server["unit"]) if server["unit"] else None
    listening = units.listeners(port) if port else []
    own = {process.pid for process in units.members([found.control_group])} if found else set()
    record = store.record()
    result = {
        "serving": state["serving"],
        "previous": state["previous"],
        "unit": {**asdict(found), "running": found.running} if found else None,
        "listeners": [asdict(listener) for listener in listening],
        "listens_in_unit": bool(listening) and all(listener.pid in own for listener in listening),
        "model_ids": None,
        "switch": record and {**record, "seconds": seconds_in_states(record)},
        "switch_running": store.running() is not None,
        "acceptance": acceptance.kept(state_dir, store.serving()),
    }
    if port:
        asked = {**server, "port": port}
        try:
            result["model_ids"] = proof.model_ids(asked)
        except proof.NoProof as reason:
            result["no_answer"] = str(reason)
        if prove:
            result["proof"] = proof.prove(asked, timeout_s=proof_timeout_s).as_dict()
    result["advice"] = advice(store, found, result.get("proof"))
    return result


def advice(store: Store, unit: units.Unit | None, proven: dict | None) -> str:
    """What the operator should do, in a sentence; empty when nothing."""
    record, order = store.record(), store.running()
    if order is not None:
        if not units.show(PROGRAM_UNIT).running:
            return f"The switch {order['id']} was interrupted. Resume it: systemctl start {PROGRAM_UNIT}"
        return f"The switch {order['id']} to {order['new']['unit']} is running. Wait."
    if store.gate() is not None:
        return "The order of a switch was taken away while it ran. Switch again, or reboot."
    if record is not None and record["state"] == STRANDED and not (proven and proven["proved"]):
        return f"STRANDED: {record['cause']} What to do: {record['remedy']}"
    if unit is not None and not unit.running:
        return f"{unit.unit} is to serve and does not run. See journalctl -u {unit.unit}, start it."
    if proven is not None and not proven["proved"] and unit is not None:
        return f"{unit.unit} does not serve: {proven['problem']}. Try: systemctl restart {unit.unit}"
    if record is not None and record["state"] in (ROLLED_BACK, REFUSED):
        return f"The last switch ended {record['state']}: {record['cause']} Mend that and switch again."
    return acceptance.taken_back(store.state_dir, store.serving())


def start_at_boot(store: Store) -> str:
    """Start what the last confirmed switch chose, when that is a server of ours; returns what was done.

    Our units are not enabled themselves: the choice between two releases is serving.json's alone.
    """
    state = store.serving()
    chosen = state["serving"]["unit"] if state else None
    if chosen is None or not chosen.startswith(OUR_UNITS):
        return f"{chosen or 'nothing'} was chosen, which is not ours to start"
    units.start(chosen)
    return f"start of {chosen} queued"


def outcome_text(record: dict) -> str:
    """The end of a switch for people: what happened, why, what serves, what to do."""
    old, new, state = record["old"], record["new"], record["state"]
    outage = "" if record["outage_s"] is None else f" Outage: {record['outage_s']:g} s."
    if state not in END_STATES:
        return f"The switch to {new['unit']} is in {state}."
    if state == CONFIRMED:
        return f"{new['unit']} serves, proved and confirmed.{outage}"
    if state == REFUSED:
        return f"The switch to {new['unit']} was refused, nothing was stopped. {record['cause']}"
    if state == ROLLED_BACK:
        restored = old and record["old_class"] != "stopped"
        now = f"{old['unit']} serves again, proved" if restored else "no server serves, as before"
        text = f"The switch to {new['unit']} was rolled back: {now}.{outage} Cause: {record['cause']}"
    else:
        text = f"STRANDED: no server could be proved. Cause: {record['cause']} What to do: {record['remedy']}"
    for server, lines in ((new, record["log_tail"]), (old, record.get("old_log_tail", []))):
        if server and lines:
            text += f"\nLast log lines of {server['unit']}:\n" + "\n".join(lines)
    return text
