"""The program that switches, held for a moment in one state so that a fault can be put there.

A drop-in of the fault tests runs this in the place of the program. It is the installed program and nothing of it is
replaced; after a state is entered (on disk, gate set) that /run/faults/hold names, it waits until /run/faults/go
is there, or for the seconds that the hold says.
"""

from __future__ import annotations

import json
import os
import sys
import time

sys.path.insert(0, "/opt/vllm-dflash/program")

from dflash_rollout import program, switchover

HOLD, HELD, GO = "/run/faults/hold", "/run/faults/held", "/run/faults/go"


def hold(state: str) -> None:
    """Wait here, once, when this state is the one to be held."""
    try:
        with open(HOLD, encoding="utf-8") as stream:
            wanted = json.load(stream)
    except FileNotFoundError:
        return
    if wanted["state"] != state:
        return
    os.rename(HOLD, HELD)
    until = time.monotonic() + wanted["seconds"]
    while not os.path.exists(GO) and time.monotonic() < until:
        time.sleep(0.02)


enter = switchover.Switchover._to


def enter_and_hold(self, state, *rest, **facts):
    enter(self, state, *rest, **facts)
    hold(state)


switchover.Switchover._to = enter_and_hold
sys.exit(program.main())
