"""May a server's unit start now? Asked by its ExecCondition= at every start, so it imports next to nothing.

During a switch the gate file on /run says which unit may start (a boot removes it, and with it the switch's
claim); otherwise serving.json, which the last confirmed switch wrote.
"""

from __future__ import annotations

import json
import os

STATE_DIR = "/var/lib/vllm-dflash"
RUN_DIR = "/run/vllm-dflash"
GATE = "gate.json"
SERVING = "serving.json"
# Without any state, or with one that can't be read, only the server that was there before us may start.
OUR_UNITS = "vllm-dflash@"


def _read(directory: str, name: str) -> dict | None:
    try:
        with open(os.path.join(directory, name), encoding="utf-8") as stream:
            return json.load(stream)
    except FileNotFoundError:
        return None


def may_start(unit: str, state_dir: str, run_dir: str) -> tuple[bool, str]:
    """(whether `unit` may start, why). Never raises: a start must not hang on our state being well."""
    try:
        gate = _read(run_dir, GATE)
        if gate is not None:
            allowed = gate["may_start"]
            return unit == allowed, f"a switch is running, in which {allowed or 'no server'} may start"
        serving = _read(state_dir, SERVING)
        if serving is not None:
            chosen = serving["serving"]["unit"]
            return unit == chosen, f"the last confirmed switch chose {chosen}"
        return not unit.startswith(OUR_UNITS), "no switch was confirmed on this host yet"
    except Exception as error:  # whatever is wrong with the state, the old server must come up
        return not unit.startswith(OUR_UNITS), f"the state of the switch can't be read: {error!r}"
