"""Writing files so that a crash at any moment leaves the old content or the new, never a part of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator

FOLDER_MODE = 0o755


def fsync_directory(path: str) -> None:
    """Make a rename inside `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """Hold the one lock of installs and of garbage collection, waiting for it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def ensure_folder(path: str, check: bool = False) -> bool:
    """Have a folder of ours with mode 0755 at `path`, and what is missing above it. True when something was to be done.

    Raises OSError, NotADirectoryError among them.
    """
    try:
        status = os.stat(path)
    except FileNotFoundError:
        parent = os.path.dirname(os.path.abspath(path))
        if not os.path.isdir(parent):
            ensure_folder(parent, check)
        if not check:
            os.mkdir(path)
            os.chmod(path, FOLDER_MODE)  # mkdir obeys the umask
        return True
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "There is a file where a folder has to be", path)
    if (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), FOLDER_MODE):
        return False
    if not check:
        os.chown(path, os.geteuid(), os.getegid())
        os.chmod(path, FOLDER_MODE)
    return True


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


def difference(path: str, before: str | None, after: str) -> dict[str, str]:
    """What Ansible's diff mode prints of a file that gets another text; `before` is None where there is none."""
    return {
        "before": before or "",
        "after": after,
        "before_header": path if before is not None else f"{path} (absent)",
        "after_header": path,
    }


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
