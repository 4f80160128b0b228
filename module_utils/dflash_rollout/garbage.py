"""Which releases, venvs, drafters and programs of the past may go. Choosing (`choose`) is pure; `collect` acts.

Nothing goes that serves, that a way back leads to, that an order or the last record names, that a unit of ours runs
from, or that a kept release links to.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from . import units
from .errors import RolloutError
from .files import locked
from .gate import OUR_UNITS
from .store import Store

DIGEST = re.compile(r"[0-9a-f]{16}|[0-9a-f]{64}")
REMOVED = re.compile(r"\..*\.removed")
YOUNG_S = 3600  # what changed within the last hour may be another run's, between its copy and its release
KINDS = ("releases", "venvs", "drafters", "programs", "uv")


@dataclass(frozen=True)
class Entry:
    """One folder: its kind (a name in KINDS), its digest, when it was made or last changed (seconds), its links."""

    kind: str
    digest: str
    changed: float
    links: tuple[str, ...] = ()  # of a release: the paths that it leads to

    @property
    def name(self) -> str:
        """The path below the root."""
        return f"{self.kind}/{self.digest}"


@dataclass(frozen=True)
class Choice:
    """What goes, releases first, and why the rest of it stays: path below the root → reason."""

    gone: list[Entry]
    kept: dict[str, str] = field(default_factory=dict)


def choose(entries: Iterable[Entry], keep: int, in_use: dict[str, str], now: float) -> Choice:
    """What may go. `in_use`: path below the root → why it stays whatever its age. `now` in seconds as `changed`.

    The newest `keep` releases stay besides those in use; so does whatever a release that stays leads to, and what
    changed within the last hour.
    """
    entries = sorted(entries, key=lambda entry: (-entry.changed, entry.name))
    kept = {entry.name: in_use[entry.name] for entry in entries if entry.name in in_use}
    releases = [entry for entry in entries if entry.kind == "releases"]
    for entry in releases[:keep]:
        kept.setdefault(entry.name, f"one of the newest {keep}")
    for entry in entries:
        if now - entry.changed < YOUNG_S:
            kept.setdefault(entry.name, "changed within the last hour")
    for entry in releases:
        if entry.name in kept:
            for link in entry.links:
                kept.setdefault(link, f"used by release {entry.digest}")
    gone = [entry for kind in KINDS for entry in entries if entry.kind == kind and entry.name not in kept]
    return Choice(gone, kept)


def entries_of(root: str) -> list[Entry]:
    """The folders below `root` that have the name of a digest; others are not ours to remove."""
    found = []
    for kind in KINDS:
        folder = os.path.join(root, kind)
        if not os.path.isdir(folder):
            continue
        for item in os.scandir(folder):
            if DIGEST.fullmatch(item.name) and item.is_dir(follow_symlinks=False):
                links = _links(item.path, root) if kind == "releases" else ()
                found.append(Entry(kind, item.name, _changed(item.path), links))
    return found


def _changed(path: str) -> float:
    """The newest change of a folder and of what lies directly in it: a file that is arriving counts."""
    return max(
        [os.lstat(path).st_mtime, *(item.stat(follow_symlinks=False).st_mtime for item in os.scandir(path))]
    )


def _links(release: str, root: str) -> tuple[str, ...]:
    """The folders of `root` that the links of a release lead to, as paths below it."""
    found = set()
    for directory, folders, files in os.walk(release):
        for name in (*folders, *files):
            path = os.path.join(directory, name)
            if os.path.islink(path):
                parts = os.path.relpath(os.path.join(directory, os.readlink(path)), root).split(os.sep)
                found.add("/".join(parts[:2]))
    return tuple(sorted(found))


def used(root: str, store: Store, also: Iterable[str]) -> dict[str, str]:
    """Path below `root` → why it is in use. `also` are paths that the caller's own run has staged."""
    found: dict[str, str] = {}
    serving, record, order = store.serving() or {}, store.record() or {}, store.order() or {}
    for server, reason in (
        (serving.get("serving"), "serves"),
        (serving.get("previous"), "the way back leads to it"),
        (order.get("new"), "an order names it"),
        (order.get("old"), "an order names it"),
        (record.get("new"), "the last switch names it"),
        (record.get("old"), "the last switch names it"),
    ):
        if server and server["unit"].startswith(OUR_UNITS):
            found.setdefault(f"releases/{_instance(server['unit'])}", reason)
    for unit in units.loaded(f"{OUR_UNITS}*.service"):
        found.setdefault(f"releases/{_instance(unit)}", f"{unit} is loaded")
    program = os.path.join(root, "program")
    if os.path.islink(program):
        found["/".join(os.path.normpath(os.readlink(program)).split(os.sep)[-2:])] = (
            "the program that switches"
        )
    for path in also:
        name = "/".join(os.path.relpath(path, root).split(os.sep)[:2])
        found.setdefault(name, "staged by this run")
    return found


def _instance(unit: str) -> str:
    return unit.removeprefix(OUR_UNITS).removesuffix(".service")


def collect(root: str, state_dir: str, keep: int, also: Iterable[str] = (), check: bool = False) -> dict:
    """Remove what may go. Returns `removed` (paths) and `kept` (path → reason), and `freed` in bytes.

    A folder loses its name before it loses its files, so that what is left under a name is whole. Does nothing while a
    switch runs. Raises RolloutError where the state can't be read or a folder can't be removed.
    """
    if keep < 1:
        raise RolloutError(
            "rollout_keep_releases is no number of releases", found=str(keep), expected="1 or more"
        )
    nothing = {"removed": [], "kept": {}, "freed": 0}
    if not os.path.isdir(os.path.join(root, "venvs")):
        return nothing
    store = Store(state_dir)
    try:
        # The lock of installs: nobody installs a venv, and nobody else collects.
        with locked(os.path.join(root, "venvs")):
            if store.running() is not None:
                return nothing
            choice = choose(entries_of(root), keep, used(root, store, also), time.time())
            before = shutil.disk_usage(root).free
            paths = [os.path.join(root, entry.name) for entry in choice.gone]
            if not check:
                for path in paths:
                    _remove(path)
                _remove_leftovers(root)
            freed = max(0, shutil.disk_usage(root).free - before)
    except OSError as error:
        raise RolloutError(
            "Old releases can't be removed",
            found=f"{error.strerror or error}: {error.filename}",
            remedy="what serves is not touched by this; look at the folder and run again",
        ) from error
    return {"removed": paths, "kept": choice.kept, "freed": freed}


def _remove(path: str) -> None:
    gone = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.removed")
    os.rename(path, gone)
    shutil.rmtree(gone)
    if os.path.exists(f"{path}.txt"):
        os.unlink(f"{path}.txt")


def _remove_leftovers(root: str) -> None:
    """Finish what an interrupted collection began."""
    for kind in KINDS:
        folder = os.path.join(root, kind)
        for name in filter(REMOVED.fullmatch, os.listdir(folder) if os.path.isdir(folder) else []):
            shutil.rmtree(os.path.join(folder, name))
