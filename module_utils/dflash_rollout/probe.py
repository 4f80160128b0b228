"""One completion of what serves, as metrics in a file that node_exporter's textfile collector reads.

A health page is no proof, and neither are the server's own metrics: a dead engine leaves both as they were.
"""

from __future__ import annotations

import re
import time

from .files import write_atomically
from .proof import Deadline, NoProof, Proof, ask, prove
from .store import Store

TIMEOUT_S = 60.0
HEALTH_TIMEOUT_S = 5.0

# Name → help; all of them gauges.
_METRICS = {
    "llm_probe_success": "Whether the server answered a completion.",
    "llm_probe_health": "Whether the server's /health says 200, whatever that is worth.",
    "llm_probe_seconds": "How long the probe took.",
    "llm_probe_time_seconds": "When the probe ended, in seconds since 1970.",
    "llm_probe_switching": "Whether a switch runs: then nobody is asked, and a server may well be missing.",
}


def _label(text: str) -> str:
    return re.sub(r'[\\"\n]', lambda found: {"\\": r"\\", '"': r"\"", "\n": r"\n"}[found[0]], text)


def exposition(unit: str, values: dict[str, float]) -> str:
    """The text format of Prometheus: metrics by name (of _METRICS), each with the unit as its label."""
    lines = []
    for name, value in values.items():
        lines += [f"# HELP {name} {_METRICS[name]}", f"# TYPE {name} gauge"]
        lines.append(f'{name}{{unit="{_label(unit)}"}} {value}')
    return "\n".join(lines) + "\n"


def _healthy(server: dict) -> bool:
    try:
        ask(server, "/health", Deadline(HEALTH_TIMEOUT_S))
    except NoProof:
        return False
    return True


def probe(store: Store, path: str) -> tuple[str, Proof | None]:
    """Ask what the last confirmed switch chose for one completion and write `path`.

    Returns a sentence for the log, and the proof where one was tried. Raises OSError when the file can't be written, and
    RolloutError when the state can't be read.
    """
    state = store.serving()
    if state is None:
        return "No switch was confirmed on this host yet: there is nothing to ask.", None
    server, values, proof = state["serving"], {}, None
    if store.running() is None:
        # Only what every client does: chats and the refusal of strangers are for the proof of a switch.
        plain = {**server, "chat": False, "tools": False, "metrics": False, "release": None}
        proof = prove(plain, completions=1, timeout_s=TIMEOUT_S)
        values = {
            "llm_probe_success": int(proof.proved),
            "llm_probe_health": int(_healthy(server)),
            "llm_probe_seconds": proof.seconds,
        }
    # A switch that began meanwhile may have taken the server away.
    switching = store.running() is not None
    values |= {"llm_probe_time_seconds": round(time.time(), 3), "llm_probe_switching": int(switching)}
    write_atomically(path, exposition(server["unit"], values))
    if proof is None or (switching and not proof.proved):
        return f"A switch runs; {server['unit']} is not judged.", None
    if proof.proved:
        return f"{server['unit']} answered in {proof.seconds:g} s.", proof
    health = "says 200" if values["llm_probe_health"] else "doesn't say 200 either"
    return f"{server['unit']} does not serve: {proof.problem}. Its /health {health}.", proof
