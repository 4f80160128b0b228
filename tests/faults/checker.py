"""Judges one fault cell from what was written down on the host. It is written from the table of right ends and from
the promise "never two servers; the host ends with one proved server, or STRANDED with a true cause", and imports nothing of the
program that it judges.

`check(cell, log, facts)` returns what is wrong, in sentences; an empty list is a pass.
log: the observer's lines (observer.py). facts: {"injected": state or null, "answer": what the asking side was told,
"end": facts.py's answer, "converged": the answer of a further run, "healed": facts.py's answer after it}.
"""

from __future__ import annotations

import datetime
import itertools
import re

CHAIN = ["PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED", "CONFIRMED"]
ENDS = {"CONFIRMED", "ROLLED_BACK", "STRANDED", "REFUSED"}
SERVERS = ("sglang.service", "vllm-dflash@")


def check(cell: dict, log: list[dict], facts: dict) -> list[str]:
    """Everything that is wrong with this cell."""
    wrong: list[str] = []
    samples = [entry for entry in log if entry["kind"] == "sample"]
    healing = next((n for n, entry in enumerate(log) if entry.get("what") == "heal"), len(log))
    begin = next((n for n, entry in enumerate(log) if entry.get("what") == "order"), 0)
    during = [entry for entry in log[begin:healing] if entry["kind"] == "sample"]
    if len(during) < 5:
        return [f"only {len(during)} samples: the observer did not run"]
    wrong += _gaps(samples)
    wrong += _two_servers(samples)
    wrong += _foreign(log[:healing], facts["end"])
    wrong += _killed(facts["end"].get("record"), samples)
    wrong += _injected(cell, log[:healing], facts)
    wrong += _end(cell, during, facts)
    wrong += _converged(facts)
    return wrong


def _gaps(samples: list[dict]) -> list[str]:
    """An observer that slept could have missed anything."""
    found = []
    for before, after in itertools.pairwise(samples):
        if before["boot"] == after["boot"] and after["t"] - before["t"] > 2.0:
            found.append(f"the observer saw nothing for {after['t'] - before['t']:.1f} s at {before['t']}")
    return found


def _server_of(sample: dict, pid: int | str) -> str | None:
    process = sample["procs"].get(str(pid))
    return process[1] if process and process[1].startswith(SERVERS) else None


def _live(sample: dict) -> set[str]:
    """Servers of which a process listens or holds GPU memory."""
    pids = [*sample["listen"], *(pid for pid, _, _ in sample["holds"])]
    return {server for pid in pids if (server := _server_of(sample, pid))}


def _running(sample: dict) -> set[tuple[str, str]]:
    """(unit, pid) of server processes; the question whether a unit may start is none."""
    return {
        (process[1], pid)
        for pid, process in sample["procs"].items()
        if process[1].startswith(SERVERS)
        and process[2]
        and "may-start" not in process[2]
        and "program/__main__.py" not in process[2]
    }


def _two_servers(samples: list[dict]) -> list[str]:
    found = []
    for before, sample in zip([None, *samples], samples, strict=False):
        live = _live(sample)
        if len(live) > 1:
            found.append(f"two servers hold GPU memory or listen at {sample['t']}: {sorted(live)}")
        # A process on its way through exec still has the command line of systemd: it counts when seen twice.
        stay = {unit for unit, pid in _running(sample) & (_running(before) if before else set())}
        if len(stay) > 1 and len(live) <= 1:
            found.append(f"processes of two servers at {sample['t']}: {sorted(stay)}")
    return found[:3]


def _foreign(log: list[dict], end: dict) -> list[str]:
    """Who belongs to neither server lives on, and got no signal."""
    found = []
    alive: dict[tuple[str, str, int], float] = {}
    last_boot = None
    for entry in log:
        if entry["kind"] != "sample":
            continue
        if entry["boot"] != last_boot:
            alive, last_boot = {}, entry["boot"]
        now = {
            (pid, process[1], process[0])
            for pid, process in entry["procs"].items()
            if process[1].startswith(("faults-foreign", "dbus.service", "systemd-logind.service"))
        }
        for gone in set(alive) - now:
            found.append(f"pid {gone[0]} of {gone[1]}, of neither server, vanished before {entry['t']}")
            del alive[gone]
        alive.update(dict.fromkeys(now, entry["t"]))
    for signal in end.get("signals", []):
        found.append(
            f"foreign pid {signal['to']} got signal {signal['signal']} from {signal['sender'] or signal['from']}"
        )
    return found


def _killed(record: dict | None, samples: list[dict]) -> list[str]:
    """Whom the program says it killed, the observer must have seen in a server, or coming from one."""
    found = []
    ours = {
        pid
        for sample in samples
        for pid, process in sample["procs"].items()
        if process[1].startswith(SERVERS)
    }
    for entry in (record or {}).get("killed", []):
        if str(entry["pid"]) not in ours:
            found.append(
                f"the program killed pid {entry['pid']} ({entry['command']}), never seen in a server"
            )
    return found


def _injected(cell: dict, log: list[dict], facts: dict) -> list[str]:
    """The fault came, and came in the state where it was to come."""
    found = []
    if cell["state"] and facts["injected"] != cell["state"]:
        found.append(f"the fault was put in {facts['injected']}, not in {cell['state']}")
    samples = [entry for entry in log if entry["kind"] == "sample"]
    notes = [entry for entry in log if entry["kind"] == "note"]
    kind, _, value = cell["evidence"].partition(" ")
    if kind == "boots" and len({entry["boot"] for entry in samples}) != 2:
        found.append("the host was not booted again")
    if kind == "programs":
        programs = {
            (pid, process[0])
            for sample in samples
            for pid, process in sample["procs"].items()
            if process[1] == "llm-switchover.service" and " switch" in process[2]
        }
        if len(programs) < 2:
            found.append("the program was not killed: one process of it was seen")
    if kind == "foreign" and not any(
        process[1].startswith("faults-foreign") and any(str(hold[0]) == pid for hold in sample["holds"])
        for sample in samples
        for pid, process in sample["procs"].items()
    ):
        found.append("no foreign process was seen on a GPU")
    if kind == "clock":
        times = [
            datetime.datetime.fromisoformat(entry["at"]).timestamp()
            for entry in facts["end"]["record"]["states"]
        ]
        jumps = [after - before for before, after in itertools.pairwise(times)]
        if not any(abs(jump - int(value)) < 600 for jump in jumps):
            found.append(f"the program's clock did not jump by {value} s: {jumps}")
    if kind == "second-refused":
        said = " ".join(str(note.get("said")) for note in notes if note.get("what") == "second")
        if not re.search(r"running already.*since \d{4}-\d\d-\d\dT.*by \w+", said, re.DOTALL):
            found.append(f"the second was not refused with who and since when: {said!r}")
    if kind == "play-killed" and not any(note.get("what") == "play killed" for note in notes):
        found.append("the play was not killed")
    if kind == "play-succeeded" and facts["answer"].get("status") != 0:
        found.append(f"the play did not survive the cut: {str(facts['answer'].get('msg'))[-300:]}")
    return found


def _legal(states: list[str]) -> bool:
    """Forward in order from the beginning, perhaps back, one end."""
    forward = 0
    while forward < len(states) and forward < len(CHAIN) and states[forward] == CHAIN[forward]:
        forward += 1
    rest = states[forward:]
    if not rest:
        return forward == len(CHAIN)
    if rest == ["REFUSED"]:
        return forward == 0
    return (
        forward < len(CHAIN)
        and forward > 0
        and rest[0] == "ROLLING_BACK"
        and (rest[-1] in ("ROLLED_BACK", "STRANDED") and set(rest[:-1]) <= {"ROLLING_BACK", "NEW_GONE"})
    )


def _end(cell: dict, during: list[dict], facts: dict) -> list[str]:
    end, answer = facts["end"], facts["answer"]
    record = end["record"]
    outcome = (
        record["state"]
        if isinstance(record, dict) and answer.get("outcome") != "REFUSED"
        else answer.get("outcome")
    )
    if outcome not in cell["ends"]:
        cause = (record or {}).get("cause") if isinstance(record, dict) else record
        return [f"ended {outcome}, and right is {' or '.join(cell['ends'])}. {cause or answer.get('msg')}"]
    found = []
    if (
        isinstance(record, dict)
        and record["state"] in ENDS
        and not _legal([entry["state"] for entry in record["states"]])
    ):
        found.append(
            f"states that can't follow one another: {[entry['state'] for entry in record['states']]}"
        )
    words = " ".join(str(text) for text in ((record or {}).get("cause"), answer.get("msg")) if text)
    if outcome == "CONFIRMED":
        if record["cause"]:
            found.append(f"CONFIRMED with a cause: {record['cause']}")
    elif not re.search(cell["cause"], words, re.DOTALL):
        found.append(f"the message doesn't name the fault /{cell['cause']}/: {words}")
    new, old = end["new"], end["old"]
    if outcome == "CONFIRMED":
        found += _serves(end, new, old)
        if (end["serving"] or {}).get("serving", {}).get("unit") != new:
            found.append(f"CONFIRMED, and serving.json says {end['serving']}")
    elif outcome == "ROLLED_BACK" or (outcome == "REFUSED" and not cell["old"].get("absent")):
        found += _serves(end, old, new)
        if end["serving"]:
            found.append(f"{outcome}, and serving.json names {end['serving']}")
    elif outcome == "STRANDED":
        if not record["remedy"]:
            found.append("STRANDED without a remedy")
        if end["completion"]["text"]:
            found.append("STRANDED, and a completion works")
        if not str(end["status"].get("advice", "")).startswith("STRANDED") or end["status"]["exit"] != 1:
            found.append(f"status doesn't say STRANDED: {end['status'].get('advice')!r}")
        if end["units"]["llm-switchover.service"]["ActiveState"] != "failed":
            found.append("STRANDED, and the program's unit is not failed")
    if outcome == "REFUSED" and not cell["old"].get("absent"):
        listening = {tuple(sample["listen"]) for sample in during}
        if len(listening) != 1 or listening == {()}:
            found.append(f"REFUSED, and the old server did not serve throughout: {sorted(listening)}")
    if end["gate"] is not None:
        found.append(f"the gate is still closed: {end['gate']}")
    return found


def _serves(end: dict, unit: str, other: str) -> list[str]:
    """`unit` serves, is what would boot, and nothing of the other runs."""
    found = []
    if not end["completion"]["text"]:
        found.append(f"no completion works: {end['completion']}")
    if end["units"][unit]["ActiveState"] != "active":
        found.append(f"{unit} is {end['units'][unit]['ActiveState']}")
    if other and end["units"][other]["ActiveState"] not in ("inactive", "failed"):
        found.append(f"{other} is {end['units'][other]['ActiveState']} as well")
    allowed = sorted(name for name, may in end["may_start"].items() if may)
    if allowed != [unit]:
        found.append(f"{unit} serves, and a boot would start {allowed}")
    return found


def _converged(facts: dict) -> list[str]:
    healed, answer = facts["healed"], facts["converged"]
    if answer.get("failed") or answer.get("outcome") not in ("CONFIRMED", "UNCHANGED"):
        return [f"with the fault gone, another run ends {answer.get('outcome')}: {answer.get('msg')}"]
    found = [f"after another run: {problem}" for problem in _serves(healed, healed["new"], healed["old"])]
    if healed["pending"] is not None:
        found.append("after another run: the order is still there")
    if (healed["serving"] or {}).get("serving", {}).get("unit") != healed["new"]:
        found.append(f"after another run: serving.json says {healed['serving']}")
    return found


def dark_seconds(log: list[dict]) -> float | None:
    """Seconds without a listener on the port before the healing, as the observer saw them; None over a boot."""
    dark, since = 0.0, None
    samples = []
    begun = False
    for entry in log:
        begun = begun or entry.get("what") == "order"
        if entry.get("what") == "heal":
            break
        if not begun:
            continue
        if entry["kind"] == "sample":
            samples.append(entry)
    if len({sample["boot"] for sample in samples}) != 1:
        return None
    for sample in samples:
        if not sample["listen"] and since is None:
            since = sample["t"]
        elif sample["listen"] and since is not None:
            dark, since = dark + sample["t"] - since, None
    return None if since is not None else round(dark, 1)
