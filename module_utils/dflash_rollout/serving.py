"""What serves on this host now: what was decided, what systemd says, who listens, what answers."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING

from . import acceptance_record, containers, proof, servers, units
from .errors import RolloutError
from .files import read_json
from .gate import OUR_UNITS, RUN_DIR, STATE_DIR
from .store import Store
from .switch_state import CONFIRMED, END_STATES, REFUSED, ROLLED_BACK, STRANDED, seconds_in_states

if TYPE_CHECKING:
    from .detection import Found

PROGRAM_UNIT = "llm-switchover.service"
# Below the state: there from before a host is drained until it is back in its pool, also if the play was lost between.
OUT_OF_POOL = "out_of_pool"


def inspect_serving(
    unit: str | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    state_dir: str = STATE_DIR,
    prove: bool = False,
    proof_timeout_s: float = 120.0,
    run_dir: str = RUN_DIR,
    runtime: str = servers.SYSTEMD,
    api_key: str | None = None,
    releases: str | None = None,
) -> dict:
    """Everything that `serving_info` returns (see its RETURN). Reads only.

    `api_key` is for a server that no switch knows yet; the others' descriptions name a file.

    serving.json goes before `unit`, which is what serves where no switch was confirmed yet. Without either it is
    looked for (detection.py), if there is a port to look at.
    Raises RolloutError when systemd or an engine doesn't answer or the state can't be read.
    """
    store = Store(state_dir, run_dir)
    state = store.serving() or {"serving": None, "previous": None}
    looked = None if state["serving"] else _look(unit, runtime, port)
    refusal = looked.refusal if looked else None
    record = store.record()
    # Asked without a word before the first commit: what served when the last switch began.
    known = state["serving"] or (record["old"] if record and not unit and not port else None)
    server = known or {
        **((looked and looked.server) or {"unit": None}),
        "port": port,
        "host": host,
        "model_id": None,
        "metrics": False,
    }
    port = port or server["port"]
    found = servers.show(server) if server["unit"] else None
    listening = units.listeners(port) if port else []
    members = units.members([found.control_group]) if found else []
    own = {process.pid for process in members}
    rows = [
        {**asdict(item), "own": found is not None and (item.pid in own or found.forwards(item))}
        for item in listening
    ]
    result = {
        "systemd": units.systemd_version(),
        "serving": state["serving"],
        "previous": state["previous"],
        "unit": {**asdict(found), "running": found.running, "runtime": servers.runtime(server)}
        if found
        else None,
        "refusal": refusal,
        "adopt": looked.adopt if looked else None,
        "listeners": rows,
        "listens_in_unit": bool(rows) and all(row["own"] for row in rows),
        "model_ids": None,
        "switch": record and {**record, "seconds": seconds_in_states(record)},
        "switch_running": store.running() is not None,
        "acceptance": acceptance_record.kept(state_dir, state),
        "way_back": way_back(store),
        "drafter": drafter_of(releases, record, state["serving"]),
        "out_of_pool": os.path.exists(os.path.join(state_dir, OUT_OF_POOL)),
    }
    if port:
        asked = {**server, "port": port}
        if known is None:
            asked["api_key"] = api_key
        try:
            result["model_ids"] = proof.model_ids(asked)
        except proof.NoProof as reason:
            result["no_answer"] = str(reason)
        if prove:
            result["proof"] = proof.prove(asked, timeout_s=proof_timeout_s).as_dict()
    unproved = ""
    if found is not None and found.running and not result.get("proof", {"proved": True})["proved"]:
        unproved = _unproved(server, port, result["proof"]["problem"], rows, units.listens_at(members))
    proved = result.get("proof", {}).get("proved", False)
    result["advice"] = advice(store, server, found, unproved, refusal, proved)
    return result


def way_back(store: Store) -> dict | None:
    """The server before, and why it is not to be brought back, or null; None where there is none.

    As far as that can be known without starting it: its unit and files, and whether it was rejected.
    """
    state = store.serving()
    if state is None or state["previous"] is None:
        return None
    rejected = acceptance_record.taken_back(store.state_dir, state)
    return {
        "unit": state["previous"]["unit"],
        "problem": rejected or servers.startable(state["previous"]),
    }


def drafter_of(releases: str | None, record: dict | None, serving: dict | None) -> dict | None:
    """What a release says of its drafter: the one that was switched to, else that serves, else that was left.

    `release.json` as the release has it, and the rendered `config`. None without a folder, a release, or its files.
    Raises RolloutError for files that can't be read.
    """
    concerned = ((record or {}).get("new"), serving, (record or {}).get("old"))
    release = next((server["release"] for server in concerned if server and server.get("release")), None)
    if not releases or release is None:
        return None
    folder = os.path.join(releases, release)
    try:
        facts = read_json(os.path.join(folder, "release.json"))
        config = read_json(os.path.join(folder, "drafter", "config.json"))
    except ValueError as error:
        raise RolloutError(f"{folder} can't be read", found=str(error), remedy="stage it again") from error
    return None if facts is None else {"release": release, **facts, "config": config}


def _look(unit: str | None, runtime: str, port: int | None) -> Found:
    """What serves where no switch was confirmed yet: as it was named, or as it is found."""
    # Where a switch was confirmed, which is nearly always, nobody waits until this is compiled.
    from .detection import Found, detect

    found = Found({"unit": unit, "runtime": runtime}) if unit else detect(port) if port else Found()
    if found.server is not None and servers.is_container(found.server):
        try:
            servers.check_container(found.server)
        except containers.EngineSilent:
            raise
        except RolloutError as error:
            found.refusal = str(error)
    return found


def _unproved(server: dict, port: int | None, problem: str, rows: list[dict], listens_at: list[str]) -> str:
    """What to do about a server that runs and is not proved. A restart is no remedy for a wrong port."""
    name, asked = server["unit"], f"{server['host']}:{port}"
    strangers = [f"pid {row['pid']} ({row['user']}: {row['command']})" for row in rows if not row["own"]]
    if strangers:
        return f"{name} runs, but port {port} is answered by {', '.join(strangers)}. End that, or ask another port."
    if not rows:
        if listens_at:
            return (
                f"{name} runs, but nobody listens at {asked}; its own processes do at {', '.join(listens_at)}. "
                "If one of these is the server, set rollout_port to it; restart nothing."
            )
        return (
            f"{name} runs, but listens nowhere: it may still load. See {servers.command(server, 'logs')}; if that "
            f"stands still: {servers.command(server, 'restart')}"
        )
    return (
        f"{name} listens at {asked} and does not serve: {problem}. Try: {servers.command(server, 'restart')}"
    )


def advice(
    store: Store,
    server: dict,
    unit: units.Unit | None,
    unproved: str = "",
    refusal: str | None = None,
    proved: bool = False,
) -> str:
    """What the operator should do, in a sentence; empty when nothing.

    `unproved`: what to do about a proof that failed; `refusal`: why what serves can't be taken over.
    """
    record, order = store.record(), store.running()
    if order is not None:
        if not units.show(PROGRAM_UNIT).running:
            return f"The switch {order['id']} was interrupted. Resume it: systemctl start {PROGRAM_UNIT}"
        return f"The switch {order['id']} to {order['new']['unit']} is running. Wait."
    if store.gate() is not None:
        return "The order of a switch was taken away while it ran. Switch again, or reboot."
    if record is not None and record["state"] == STRANDED and not proved:
        return f"STRANDED: {record['cause']} What to do: {record['remedy']}"
    if refusal:
        return refusal
    if unit is not None and not unit.running:
        start, logs = servers.command(server, "start"), servers.command(server, "logs")
        return f"{server['unit']} is to serve and does not run. See {logs}; then: {start}"
    if unproved:
        return unproved
    if record is not None and record["state"] in (ROLLED_BACK, REFUSED):
        return f"The last switch ended {record['state']}: {record['cause']} Mend that and switch again."
    return acceptance_record.taken_back(store.state_dir, store.serving())


def start_at_boot(store: Store) -> str:
    """Start what the last confirmed switch chose, when that is a server of ours; returns what was done.

    Our units are not enabled themselves: the choice between two releases is serving.json's alone. An enabled unit
    of others starts by itself, a container by the restart policy that the commit gave back to it.
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
