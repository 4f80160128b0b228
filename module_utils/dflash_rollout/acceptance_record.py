"""How well a release was found to draft: the record that acceptance.py keeps on the host, for who only reads it."""

from __future__ import annotations

import os

from .errors import RolloutError
from .files import read_json

PASSED, BELOW, NOT_DRAFTING, NOT_JUDGED, OFF = "passed", "below", "not drafting", "not judged", "off"


def path_of(state_dir: str, release: str) -> str:
    """Where the measurement of a release is kept."""
    return os.path.join(state_dir, "acceptance", f"{release}.json")


def kept(state_dir: str, serving: dict | None) -> dict | None:
    """The kept measurement of what serves, or None. Raises RolloutError for one that can't be read."""
    release = ((serving or {}).get("serving") or {}).get("release")
    if not release:
        return None
    record = _read(state_dir, release)
    # The same release after another switch has to show again what it can do.
    same = record is not None and record["switch_id"] == (serving or {}).get("switch_id")
    return record if same else None


def goes_back(mode: str, verdict: str) -> bool:
    """Whether this verdict takes the server back."""
    return mode == "enforce" and verdict in (BELOW, NOT_DRAFTING)


def taken_back(state_dir: str, serving: dict | None) -> str:
    """Why the release before doesn't serve any more, if the gate is why; else empty."""
    release = ((serving or {}).get("previous") or {}).get("release")
    record = _read(state_dir, release) if serving and release else None
    if record is None or not goes_back(record["mode"], record["verdict"]):
        return ""
    if record["way_back"] != serving["serving"]["unit"]:
        return ""
    return (
        f"Release {release} doesn't serve because of how it drafts: {record['text']}. Mend its config or the "
        "reference, and switch again."
    )


def _read(state_dir: str, release: str) -> dict | None:
    path = path_of(state_dir, release)
    try:
        return read_json(path)
    except ValueError as error:
        raise RolloutError(f"{path} can't be read", found=str(error), remedy="remove it") from error
