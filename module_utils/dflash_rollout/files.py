"""Writing files so that a crash at any moment leaves the old content or the new, never a part of it."""

from __future__ import annotations

import json
import os
import tempfile


def fsync_directory(path: str) -> None:
    """Make a rename inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: str, content: str, mode: int = 0o644) -> None:
    """Write text to `path` through a fsynced temporary file and one rename.

    Raises OSError (disk full, read-only) with `path` untouched and no temporary file left.
    """
    directory = os.path.dirname(os.path.abspath(path))
    descriptor, temporary = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    fsync_directory(directory)


def write_json(path: str, value: object, mode: int = 0o644) -> None:
    """`write_atomically` for a JSON document, indented so that a person can read it."""
    write_atomically(path, json.dumps(value, indent=1, sort_keys=False) + "\n", mode)


def read_text(path: str) -> str | None:
    """The text of `path`, or None where there is no such file."""
    try:
        with open(path, encoding="utf-8") as stream:
            return stream.read()
    except FileNotFoundError:
        return None


def read_json(path: str) -> dict | None:
    """The JSON document at `path`, or None where there is no such file.

    Raises json.JSONDecodeError when the file is there and is not JSON.
    """
    text = read_text(path)
    return None if text is None else json.loads(text)
