"""Unit files and drop-ins of systemd: verified, written whole, read by systemd, and enabled or started as asked."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass

from . import units
from .errors import RolloutError
from .files import ensure_folder, read_text, write_atomically

FOLDER = "/etc/systemd/system"
MODE = 0o644


@dataclass(frozen=True)
class Change:
    """A file whose text, owner or mode isn't what it should be. `before` is None where there is none."""

    name: str
    before: str | None
    after: str


def differing(files: dict[str, str], folder: str = FOLDER) -> list[Change]:
    """Those of `files` (name relative to `folder` → text) that have to be written."""
    changes = []
    for name, text in files.items():
        path = os.path.join(folder, name)
        if os.path.islink(path):
            # systemctl mask makes a link to /dev/null.
            raise RolloutError(
                f"{path} is a link",
                found=f"it leads to {os.readlink(path)}",
                expected="a file of this roll-out, or nothing",
                remedy=f"see who made it, e.g. 'systemctl mask'; then remove it: systemctl unmask {name}",
            )
        before = read_text(path)
        if before == text:
            status = os.stat(path)
            if (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), MODE):
                continue
        changes.append(Change(name, before, text))
    return changes


def verify(change: Change, instance: str = "") -> None:
    """Let systemd read the text as the unit `instance` (needed for a template) before it is in place.

    Raises RolloutError with what systemd says.
    """
    command = ["systemd-analyze", "verify", "--man=no"]
    if (units.systemd_version() or 0) >= 250:
        # What other units have wrong is not asked.
        command.append("--recursive-errors=no")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, instance or change.name)
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(change.after)
        done = units.run([*command, path])
    if done.returncode != 0:
        raise RolloutError(
            f"systemd doesn't accept {change.name}, which was not written",
            found=" ".join((done.stderr or done.stdout).split()).replace(f"{folder}/", ""),
            remedy="correct the variables that its text is made of",
        )


def write(changes: Iterable[Change], folder: str = FOLDER) -> None:
    """Write each file whole, with the folder of drop-ins that it belongs to."""
    for change in changes:
        path = os.path.join(folder, change.name)
        if os.path.dirname(change.name):
            ensure_folder(os.path.dirname(path))
        write_atomically(path, change.after, MODE)


def unit_of(name: str) -> str:
    """The units that a file is of, as a name or pattern for systemctl: drop-ins and templates stand for others."""
    unit = os.path.dirname(name).removesuffix(".d") or name
    return unit.replace("@.", "@*.")


@dataclass(frozen=True)
class State:
    """What systemd knows of a unit. One that it has not read yet is neither enabled nor active."""

    enabled: bool = False
    active: bool = False
    outdated: bool = False


def parse_states(text: str) -> dict[str, State]:
    """Read what `systemctl show --property=Id,UnitFileState,ActiveState,NeedDaemonReload` prints: unit → state."""
    return {
        values["Id"]: State(
            enabled=values.get("UnitFileState") == "enabled",
            active=values.get("ActiveState") in ("active", "activating", "reloading"),
            outdated=values.get("NeedDaemonReload") == "yes",
        )
        for values in map(units.parse_show, text.split("\n\n"))
        if values.get("Id")
    }


def states_of(names: Iterable[str]) -> dict[str, State]:
    """The states of units, each a name or a pattern of loaded ones."""
    names = sorted(set(names))
    if not names:
        return {}
    properties = "--property=Id,UnitFileState,ActiveState,NeedDaemonReload"
    return parse_states(units.systemctl("show", properties, "--", *names))


def commands(
    changed: Iterable[str],
    states: dict[str, State],
    enabled: Iterable[str] = (),
    started: Iterable[str] = (),
    disabled: Iterable[str] = (),
) -> list[list[str]]:
    """The calls of systemctl that are needed, in their order.

    `changed`: names of files that were written. `states`: as from `states_of`, before anything is done.
    `enabled` are to start at boot; `started` also now, and anew where their own file changed; `disabled` neither.
    """
    changed = set(changed)
    calls = []
    if changed or any(state.outdated for state in states.values()):
        calls.append(["daemon-reload"])
    unknown = State()
    stop = [
        name for name in disabled if states.get(name, unknown).enabled or states.get(name, unknown).active
    ]
    if stop:
        calls.append(["disable", "--now", *stop])
    started = list(started)
    enable = [name for name in [*enabled, *started] if not states.get(name, unknown).enabled]
    if enable:
        calls.append(["enable", *enable])
    start = [name for name in started if name in changed or not states.get(name, unknown).active]
    if start:
        calls.append(["restart", *start])
    return calls
