"""Model files on their way to a host: which are missing, where they arrive, and how they get their names.

A file arrives as `PATH.incoming`, beside the name that it gets once it is verified. What arrived stays there
when a transfer is cut off, and the next one goes on from it, by whichever transport.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from . import model_file
from .errors import RolloutError

#: Left free on a filesystem that receives, in bytes: a full disk takes journal and logs with it.
RESERVE_BYTES = 256 << 20


@dataclass(frozen=True)
class Wanted:
    """A file that a host is to hold. `size` in bytes; `source` is where the control node has it."""

    path: str
    sha256: str
    size: int | None = None
    source: str = ""

    @property
    def incoming(self) -> str:
        """Where it arrives."""
        return f"{self.path}.incoming"


@dataclass(frozen=True)
class Held:
    """What a host has of a file that it is to hold.

    `state` is "verified", "missing" or "damaged"; `here` the bytes that need not travel again, as far as is
    known without comparing; `ranges` the damaged byte ranges (first, end), None where all of it is to be
    brought; `read_bytes` what was read to know this; `stamp_dir` where the file's stamp lies, beside it where empty.
    """

    path: str
    sha256: str
    state: str
    size: int | None = None
    source: str = ""
    incoming: str = ""
    here: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None
    read_bytes: int = 0
    stamp_dir: str = ""

    def as_json(self) -> dict[str, object]:
        """The form that the modules return, and take again."""
        return asdict(self)


def held_from_json(value: dict) -> Held:
    """A Held from what `as_json` made of one. Raises RolloutError for what isn't from it."""
    ranges = value.get("ranges")
    try:
        pairs = None if ranges is None else tuple((int(first), int(end)) for first, end in ranges)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            "ranges are no byte ranges", found=repr(ranges), expected="[[first, end], ...]"
        ) from error
    try:
        incoming = value.get("incoming") or f"{value['path']}.incoming"
        return Held(**{**value, "ranges": pairs, "incoming": incoming})
    except (KeyError, TypeError) as error:
        raise RolloutError("This is not what model_files says of a file", found=str(error)) from error


def has_aes() -> bool:
    """Whether this processor has instructions for AES, with which AES-GCM is the fastest cipher of ssh."""
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as stream:
        return re.search(r"^(flags|Features)\s*:.*\baes\b", stream.read(), re.MULTILINE) is not None


def look(
    files: Iterable[Wanted], *, verify: str = "stamp", stamp_dir: str = "", check: bool = False
) -> list[Held]:
    """What this host has of `files`. Writes stamps (not in check mode), nothing else.

    Raises RolloutError for a file that is another one than the one wanted, see model_file.examine.
    """
    held = []
    for file in files:
        state, seen = model_file.examine(
            file.path, file.sha256, verify=verify, stamp_dir=stamp_dir, check=check
        )
        held.append(
            Held(
                file.path,
                file.sha256.strip().lower(),
                state,
                seen.size if state == "verified" else file.size,
                file.source,
                "" if state == "verified" else file.incoming,
                _arrived(file.incoming) if state != "verified" else 0,
                read_bytes=seen.read_bytes,
                stamp_dir=stamp_dir,
            )
        )
    return held


def receive(held: Iterable[Held], *, owner: tuple[int, int] | None = None, check: bool = False) -> list[Held]:
    """Make room and a file for each of `held` that isn't verified to arrive in.

    `owner` (uid, gid) gets it; without one it stays whose it is, for a job of an earlier run may still be writing to it.

    A damaged file stays under its name (what serves may be reading it); a copy of it is mended.
    Raises RolloutError, before anything is written, where the filesystem has too little space.
    """
    todo = [_plan(file) for file in held if file.state != "verified"]
    _check_space(todo)
    if check:
        return todo
    for file in todo:
        try:
            os.makedirs(os.path.dirname(file.incoming), mode=0o755, exist_ok=True)
            if file.ranges is not None and not os.path.lexists(file.incoming):
                _copy(file.path, file.incoming)
            _open_to(file.incoming, owner, file.size)
        except OSError as error:
            raise RolloutError(
                f"{file.incoming} can't be written",
                found=error.strerror or str(error),
                remedy="make room on the disk, or remove what has that name",
            ) from error
    return todo


def place(
    held: Iterable[Held], *, superseded: Iterable[str] = (), discard: bool = False, check: bool = False
) -> tuple[list[Held], bool]:
    """Verify what arrived and give it its name; then remove the partials that match the globs `superseded`.

    Returns the files, and whether one got its name now. `discard`: what has a wrong digest is removed, for
    transports that would go on from it for ever. Raises RolloutError as model_file.install does.
    """
    placed, changed = [], False
    for file in held:
        if file.state == "verified":
            continue
        if not os.path.lexists(file.incoming):
            # Asked a second time, after a lost connection.
            done = model_file.inspect(file.path, sha256=file.sha256, stamp_dir=file.stamp_dir, check=check)
            if not done.exists:
                raise RolloutError(f"Neither {file.incoming} nor {file.path} exists", remedy="run again")
        else:
            try:
                done = model_file.install(
                    file.incoming, file.path, sha256=file.sha256, stamp_dir=file.stamp_dir, check=check
                )
            except model_file.WrongDigest as error:
                if not discard or check:
                    raise
                os.unlink(file.incoming)
                raise RolloutError(
                    error.message,
                    found=error.found,
                    expected=error.expected,
                    remedy="what arrived was removed: see whether URL and SHA-256 belong together, then run again",
                ) from error
        changed = changed or done.changed
        placed.append(
            replace(file, state="verified", size=done.size, read_bytes=done.read_bytes, incoming="")
        )
    if not check:
        _remove(path for pattern in superseded for path in glob.glob(pattern, include_hidden=True))
    return placed, changed


def _remove(partials: Iterable[str]) -> None:
    """Remove partials, and the folders that held nothing else."""
    for path in partials:
        try:
            os.unlink(path)
            folder = os.path.dirname(path)
            if not os.listdir(folder):
                os.rmdir(folder)
        except FileNotFoundError:  # another run was faster
            continue
        except OSError as error:
            raise RolloutError(
                f"The superseded partial {path} can't be removed",
                found=error.strerror or str(error),
                remedy="remove it by hand: the files that were to be brought are in place",
            ) from error


def summary(held: Iterable[Held]) -> str:
    """One line: how many files of how many bytes are to be brought, and what of it is here already."""
    todo = [file for file in held if file.state != "verified"]
    if not todo:
        return "all files are here, verified"
    size = sum(file.size or 0 for file in todo)
    here = sum(
        max((file.size or 0) - _bytes_of(file.ranges), 0) if file.ranges is not None else file.here
        for file in todo
    )
    names = ", ".join(os.path.basename(file.path) for file in todo[:3]) + (", …" if len(todo) > 3 else "")
    damaged = sum(file.state == "damaged" for file in todo)
    return (
        f"{len(todo)} file{'s' if len(todo) > 1 else ''} to bring ({names}), {size / 1e9:.2f} GB"
        + (f", {damaged} damaged" if damaged else "")
        + (f"; {here / 1e9:.2f} GB of it are here already" if here else "")
    )


def _bytes_of(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


def _arrived(path: str) -> int:
    """Bytes on disk of a partial; a file that a swarm fills has holes."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    return min(status.st_size, status.st_blocks * 512)


def _plan(file: Held) -> Held:
    """What of a damaged file is to be mended: of the copy where an earlier run made one, which may be half mended."""
    if file.state == "damaged":
        copy = file.incoming if os.path.lexists(file.incoming) else ""
        ranges = model_file.damaged_ranges(file.path, file.sha256, copy, file.stamp_dir)
        return replace(file, ranges=None if ranges is None else tuple(ranges))
    return file


def _nearest(path: str) -> str:
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _check_space(todo: list[Held]) -> None:
    needs: dict[int, int] = {}
    folders: dict[int, str] = {}
    for file in todo:
        folder = _nearest(os.path.dirname(os.path.abspath(file.path)))
        device = os.stat(folder).st_dev
        folders[device] = folder
        needs[device] = needs.get(device, 0) + max(0, (file.size or 0) - file.here)
    for device, need in needs.items():
        status = os.statvfs(folders[device])
        free = status.f_bavail * status.f_frsize
        if free < need + RESERVE_BYTES:
            raise RolloutError(
                f"The filesystem of {folders[device]} has too little space for what is to be brought",
                found=f"{free / 1e9:.2f} GB free",
                expected=f"{(need + RESERVE_BYTES) / 1e9:.2f} GB",
                remedy="make room (old drafters and releases go first), then run again",
            )


def _copy(source: str, path: str) -> None:
    """Copy inside a filesystem; where it can share blocks, nothing is written."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        # Unbuffered: copy_file_range moves the position that a buffer would believe to know.
        with open(source, "rb", buffering=0) as stream:
            while True:
                try:
                    count = os.copy_file_range(stream.fileno(), descriptor, 1 << 30)
                except OSError as error:
                    if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL):
                        raise
                    data = stream.read(model_file.PIECE_BYTES)
                    count = os.write(descriptor, data) if data else 0
                    stream.seek(os.lseek(descriptor, 0, os.SEEK_CUR))
                if not count:
                    break
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _open_to(path: str, owner: tuple[int, int] | None, size: int | None) -> None:
    """A regular file at `path` that only its owner can write: root need not be the one who receives."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
            raise OSError(errno.EEXIST, "not a file of its own")
        if owner is not None:
            os.fchown(descriptor, *owner)
        os.fchmod(descriptor, 0o600)
        if size is not None and status.st_size > size:
            os.ftruncate(descriptor, size)
    finally:
        os.close(descriptor)
