"""A model folder that others could change, that carries code, or that leads out of itself; its files against their pins."""

from __future__ import annotations

import os
import pwd
import stat
from dataclasses import dataclass, field

from . import model_file
from .errors import RolloutError

#: What `ProtectHome=` empties in the server's unit (systemd.exec(5)).
HOMES = ("/home", "/root", "/run/user")


@dataclass
class Folder:
    """What was seen below a model folder. Paths are relative to it, but for where links lead."""

    code: list[str] = field(default_factory=list)  # Python files
    open: list[str] = field(default_factory=list)  # everybody can write these
    shared: list[str] = field(default_factory=list)  # a group, or a user other than root, can write these
    service: list[str] = field(default_factory=list)  # the service user can write these
    hidden: dict[str, str] = field(
        default_factory=dict
    )  # link → where it leads: a home that the unit doesn't see


def bound(folder: str) -> str:
    """What the unit binds of a target: the folder, or of a snapshot of the hub's cache the folder with the blobs as well."""
    head, snapshots, _ = folder.rstrip("/").rpartition("/snapshots/")
    inside_cache = snapshots and os.path.basename(head).startswith("models--")
    return head if inside_cache else folder.rstrip("/")


def look(folder: str, service_uid: int | None, service_gids: tuple[int, ...] = ()) -> Folder:
    """Look at every file and folder below `folder` and at itself, links followed. Reads no file.

    `service_uid` is None where there is no such user yet.
    """
    seen = Folder()
    visible = os.path.realpath(bound(folder))
    for directory, folders, names in os.walk(folder):
        for name in (".", *sorted([*folders, *names])):
            path = os.path.join(directory, name)
            shown = os.path.normpath(os.path.relpath(path, folder))
            if name == "." and directory != folder:
                continue  # it was an entry of the folder above
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue  # a link that leads nowhere is missing, which is said elsewhere
            _who_can_write(seen, shown, status, service_uid, service_gids)
            if name.endswith(".py"):
                seen.code.append(shown)
            if os.path.islink(path):
                leads = os.path.realpath(path)
                if _below(leads, HOMES) and not _below(leads, (visible,)):
                    seen.hidden[shown] = leads
    return seen


def _below(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _who_can_write(
    seen: Folder, shown: str, status: os.stat_result, uid: int | None, gids: tuple[int, ...]
) -> None:
    mode = status.st_mode
    # In a sticky folder others can add files, not replace ours; still nothing for a model.
    if mode & stat.S_IWOTH:
        seen.open.append(shown)
    elif uid is not None and (status.st_uid == uid or (mode & stat.S_IWGRP and status.st_gid in gids)):
        seen.service.append(shown)
    elif status.st_uid != 0 or (mode & stat.S_IWGRP and status.st_gid != 0):
        seen.shared.append(shown)


def account(user: str) -> tuple[int | None, tuple[int, ...]]:
    """User id and group ids of a user; None and nothing where there is none yet."""
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return None, ()
    return found.pw_uid, tuple(os.getgrouplist(user, found.pw_gid))


def check_pins(folder: str, pins: dict[str, str], stamps: str, check: bool = False) -> list[str]:
    """Each file that isn't what its sha256 says, as a sentence. A file is read once; then its stamp in `stamps` is enough.

    In check mode no stamp is written.
    """
    faults = []
    for name in sorted(pins):
        path = os.path.normpath(os.path.join(folder, name))
        try:
            if not _below(path, (folder.rstrip("/"),)):
                raise RolloutError(f"{name} is no file of {folder}")
            found = model_file.inspect(path, sha256=str(pins[name]).lower(), stamp_dir=stamps, check=check)
            if not found.exists:
                raise RolloutError(f"There is no {path}")
        except RolloutError as fault:
            faults.append(str(fault))
    return faults
