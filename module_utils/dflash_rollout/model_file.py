"""The digest of a model file, and the stamp that spares reading gigabytes again to know it.

A stamp says: the file that has this device, inode, size, mtime and ctime had this digest. Whoever writes to
the file changes its ctime, even when the mtime is put back. What a stamp can't see (bit rot, a restored
snapshot, a network filesystem) is what `verify="full"` is for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import signal
import stat
import time
import zlib
from dataclasses import dataclass

from .errors import RolloutError
from .files import fsync_directory, read_json, write_json

#: Size of a piece. Each has a checksum, by which a damaged file is mended without sending all of it again.
PIECE_BYTES = 4 << 20

# The kernel takes file times from a clock that ticks every 1 to 10 ms: two writes in a tick look like one.
CLOCK_TICK_NS = 50_000_000

#: An rsync that lost its connection ends after 60 s (push_files, IO_TIMEOUT_S), and has its file open until then.
WRITERS_LIMIT_S = 90


@dataclass(frozen=True)
class ModelFile:
    """What is known of a model file; `read_bytes` is how much of it was read to know it.

    `sha256` and `size` (bytes) are None where the file does not exist. `changed`: it was put in place.
    """

    path: str
    exists: bool
    sha256: str | None = None
    size: int | None = None
    read_bytes: int = 0
    changed: bool = False


def _identity(status: os.stat_result) -> dict[str, int]:
    return {
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def stamp_path(path: str, stamp_dir: str = "") -> str:
    """Where the stamp of `path` lies: beside it, or in `stamp_dir` under a name of its own."""
    return _beside(path, stamp_dir) + ".stamp"


def pieces_path(path: str, stamp_dir: str = "") -> str:
    """Where the checksums of the pieces of `path` lie, as `stamp_path`."""
    return _beside(path, stamp_dir) + ".pieces"


def _beside(path: str, stamp_dir: str) -> str:
    if not stamp_dir:
        return path
    key = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    return os.path.join(stamp_dir, f"{os.path.basename(path)}-{key}")


def _read_stamp(path: str, status: os.stat_result) -> str | None:
    """The digest that the stamp at `path` gives the file of `status`, or None where it proves nothing."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP):
            return None
        raise RolloutError(
            f"The stamp {path} can't be read", found=error.strerror or str(error), remedy="remove it"
        ) from error
    with os.fdopen(descriptor, encoding="utf-8") as stream:
        owner = os.fstat(stream.fileno())
        # Only root or we ourselves may vouch for a file.
        if owner.st_uid not in (0, os.geteuid()) or owner.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return None
        try:
            stamp = json.load(stream)
        except ValueError:  # cut short or not a stamp: the file is read instead, and the stamp written anew
            return None
    if not isinstance(stamp, dict) or {**_identity(status), "sha256": stamp.get("sha256")} != stamp:
        return None
    return stamp["sha256"] if _is_digest(stamp["sha256"]) else None


def _write_stamp(path: str, status: os.stat_result, digest: str) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_json(path, {"sha256": digest, **_identity(status)})
    except OSError as error:
        raise RolloutError(
            f"The stamp {path} can't be written",
            found=error.strerror or str(error),
            remedy="make its folder writable, or name another folder for stamps",
        ) from error


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and re.fullmatch(r"[0-9a-f]{64}", text) is not None


def _expected(sha256: str) -> str:
    digest = sha256.strip().lower()
    if digest and not _is_digest(digest):
        raise RolloutError(
            "The expected SHA-256 isn't one",
            found=repr(sha256),
            expected="64 hexadecimal digits, as sha256sum prints them",
        )
    return digest


def _open(path: str) -> int | None:
    """A descriptor of the regular file at `path`, or None where there is nothing."""
    try:
        # Not to wait for a writer, should somebody have put a named pipe there.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        if os.path.islink(path):
            raise RolloutError(
                f"{path} is a link to nothing",
                found=f"a link to {os.readlink(path)}",
                expected="a model file",
                remedy="download the model again, or remove the link",
            ) from None
        return None
    except OSError as error:
        raise RolloutError(f"{path} can't be read", found=error.strerror or str(error)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise RolloutError(f"{path} isn't a file", found="a folder or a device", expected="a model file")
    return descriptor


def stamped_digest(path: str, stamp_dir: str = "") -> str | None:
    """The digest that a matching stamp gives the file at `path`, or None. Reads no byte of the file itself."""
    descriptor = _open(path)
    if descriptor is None:
        return None
    try:
        return _read_stamp(stamp_path(path, stamp_dir), os.fstat(descriptor))
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class _Read:
    """What reading a whole file gave: SHA-256, status, Adler-32 of each piece, and whether a stamp may be made of it."""

    digest: str
    status: os.stat_result
    pieces: tuple[int, ...]
    stampable: bool


def _hash(path: str, descriptor: int) -> _Read:
    """Read all of an open file.

    Raises RolloutError when the file changes while it is read.
    """
    before = os.fstat(descriptor)
    # A write in the same tick as the last one before us would leave no trace in ctime. A ctime ahead of our
    # clock proves nothing at all (clock put back, network filesystem): read, but don't stamp.
    age = time.time_ns() - before.st_ctime_ns
    if 0 <= age < CLOCK_TICK_NS:
        time.sleep((CLOCK_TICK_NS - age) / 1e9)
    digest = hashlib.sha256()
    pieces = []
    buffer = bytearray(PIECE_BYTES)
    view = memoryview(buffer)
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        while count := os.readv(descriptor, [buffer]):
            digest.update(view[:count])
            pieces.append(zlib.adler32(view[:count]))
    except OSError as error:
        raise RolloutError(
            f"{path} can't be read to its end",
            found=error.strerror or str(error),
            remedy="look at the disk (dmesg), then get the file again",
        ) from error
    after = os.fstat(descriptor)
    if _identity(before) != _identity(after):
        raise RolloutError(
            f"{path} changed while it was read",
            found="another size, mtime or ctime after reading than before",
            expected="a file that nobody writes to",
            remedy="wait until its download or copy has ended, then run again",
        )
    return _Read(digest.hexdigest(), after, tuple(pieces), age >= 0)


class WrongDigest(RolloutError):
    """A file was read in full, and is another one than the one expected."""


def _compare(path: str, found: str, size: int, expected: str) -> None:
    if expected and found != expected:
        raise WrongDigest(
            f"{path} has the wrong SHA-256",
            found=f"{found} ({size} bytes)",
            expected=expected,
            remedy="get the file again; if you meant another revision, correct the expected SHA-256",
        )


@dataclass(frozen=True)
class _Observed:
    """A file as it is: what is known of it, and whether it differs from its stamp though nobody wrote to it."""

    file: ModelFile
    stamped: str | None = None

    @property
    def altered(self) -> bool:
        return self.stamped is not None and self.stamped != self.file.sha256


def _observe(path: str, expected: str, verify: str, stamp_dir: str, check: bool) -> _Observed:
    descriptor = _open(path)
    if descriptor is None:
        return _Observed(ModelFile(path, exists=False))
    stamp = stamp_path(path, stamp_dir)
    try:
        status = os.fstat(descriptor)
        stamped = _read_stamp(stamp, status)
        if stamped and verify == "stamp":
            return _Observed(ModelFile(path, True, stamped, status.st_size), stamped)
        read = _hash(path, descriptor)
    finally:
        os.close(descriptor)
    if read.stampable and not stamped and not check and expected in ("", read.digest):
        _write_stamp(stamp, read.status, read.digest)
    size = read.status.st_size
    return _Observed(ModelFile(path, True, read.digest, size, read_bytes=size), stamped)


def inspect(
    path: str, *, sha256: str = "", verify: str = "stamp", stamp_dir: str = "", check: bool = False
) -> ModelFile:
    """The digest of the file at `path`, from its stamp if that matches, else by reading all of it.

    `verify="full"` reads it in any case. Having read it, the stamp is written, except in check mode.
    Raises RolloutError when the digest isn't `sha256` (where given), when the file changes while it is read,
    and when it no longer has the digest of a matching stamp, which means that the disk has altered it.
    """
    expected = _expected(sha256)
    seen = _observe(path, expected, verify, stamp_dir, check)
    if not seen.file.exists:
        return seen.file
    if seen.altered:
        raise RolloutError(
            f"{path} was altered though nobody wrote to it",
            found=f"{seen.file.sha256}, with the times it had when it was {seen.stamped}",
            expected=seen.stamped,
            remedy="the disk or the filesystem is failing: check it, then get the file again",
        )
    _compare(path, seen.file.sha256, seen.file.size, expected)
    return seen.file


def examine(
    path: str, sha256: str, *, verify: str = "stamp", stamp_dir: str = "", check: bool = False
) -> tuple[str, ModelFile]:
    """Whether the host holds the file of digest `sha256` at `path`: "verified", "missing" or "damaged".

    Damaged is a file that we put there with that digest and that has another one now. A file that we never
    vouched for is another file: raises RolloutError, so that nothing of anybody else's is replaced.
    """
    expected = _expected(sha256)
    seen = _observe(path, expected, verify, stamp_dir, check)
    if not seen.file.exists:
        return "missing", seen.file
    if seen.file.sha256 == expected:
        return "verified", seen.file
    if seen.stamped != expected and not _vouched(path, expected, stamp_dir):
        _compare(path, seen.file.sha256, seen.file.size, expected)
    return "damaged", seen.file


def _vouched(path: str, digest: str, stamp_dir: str) -> bool:
    """Whether we ever put the file of this digest at `path`: a folder named for it, its checksums, or its stamp."""
    if os.path.basename(os.path.dirname(os.path.abspath(path))) == digest:
        return True
    for record in (pieces_path(path, stamp_dir), stamp_path(path, stamp_dir)):
        try:
            known = read_json(record)
        except ValueError:  # cut short: vouches for nothing
            continue
        if isinstance(known, dict) and known.get("sha256") == digest:
            return True
    return False


def install(
    incoming: str, path: str, *, sha256: str = "", stamp_dir: str = "", check: bool = False
) -> ModelFile:
    """Verify the file `incoming` and rename it to `path`, durable, with mode 0644, owned by us, stamped.

    Until the rename nothing under `path` changes; a file that was there is replaced by it in one step.
    Raises RolloutError when `incoming` is missing or a link, has another digest than `sha256`, changes while
    it is read, lies on another filesystem than `path`, or is still open for writing after WRITERS_LIMIT_S.
    """
    expected = _expected(sha256)
    if os.path.islink(incoming):
        raise RolloutError(f"{incoming} is a link", expected="the transferred file itself")
    descriptor = _open(incoming)
    if descriptor is None:
        raise RolloutError(f"{incoming} is missing", expected=f"the file that becomes {path}")
    try:
        if not check:
            _own(incoming, descriptor)
            _await_writers(incoming, descriptor)
        read = _hash(incoming, descriptor)
        digest, status = read.digest, read.status
        _compare(incoming, digest, status.st_size, expected)
        if not check:
            _rename(incoming, path, descriptor)
            # The rename itself sets ctime. Everything else has to be as it was when the last byte was read.
            placed = os.lstat(path)
            if {**_identity(placed), "ctime_ns": status.st_ctime_ns} != _identity(status):
                raise RolloutError(
                    f"{path} was written to while it was put in place",
                    remedy=f"end whatever writes to {incoming}, then run again",
                )
            _write_pieces(pieces_path(path, stamp_dir), read)
            if read.stampable:
                _write_stamp(stamp_path(path, stamp_dir), placed, digest)
    finally:
        os.close(descriptor)
    return ModelFile(path, True, digest, status.st_size, read_bytes=status.st_size, changed=True)


def _write_pieces(path: str, read: _Read) -> None:
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_json(
            path,
            {
                "sha256": read.digest,
                "size": read.status.st_size,
                "piece_bytes": PIECE_BYTES,
                "adler32": read.pieces,
            },
        )
    except OSError as error:
        raise RolloutError(
            f"The checksums {path} can't be written",
            found=error.strerror or str(error),
            remedy="make room, then run again",
        ) from error


def damaged_ranges(
    path: str, sha256: str, copy: str = "", stamp_dir: str = ""
) -> list[tuple[int, int]] | None:
    """The byte ranges (first, end) of `path` that differ from when it was put in place with digest `sha256`.

    `copy`: look at this file instead of the one at `path`, a copy of it that was begun to be mended.
    Adler-32 finds every change of one byte and misses 1 of 4 billion others, so what was mended by this still
    has to be verified. None where nothing is known of its pieces: then all of it is to be brought again.
    Raises RolloutError when the file can't be read.
    """
    try:
        known = read_json(pieces_path(path, stamp_dir))
    except ValueError:  # cut short: as good as none
        known = None
    if (
        not isinstance(known, dict)
        or known.get("sha256") != sha256
        or known.get("piece_bytes") != PIECE_BYTES
    ):
        return None
    descriptor = _open(copy or path)
    if descriptor is None:
        return None
    try:
        found = _hash(copy or path, descriptor).pieces
    finally:
        os.close(descriptor)
    size, expected = known["size"], known["adler32"]
    return [
        (index * PIECE_BYTES, min((index + 1) * PIECE_BYTES, size))
        for index, checksum in enumerate(expected)
        if index >= len(found) or found[index] != checksum
    ]


def _own(path: str, descriptor: int) -> None:
    """Make the file ours: its owner could write to it later, whatever its mode. Changes ctime."""
    try:
        os.fchown(descriptor, os.geteuid(), os.getegid())
        os.fchmod(descriptor, 0o644)
    except OSError as error:
        raise RolloutError(
            f"Owner and mode of {path} can't be set",
            found=error.strerror or str(error),
            remedy="run as root, or as the owner of the file",
        ) from error


def _await_writers(path: str, descriptor: int) -> None:
    """Wait until nobody has the file open for writing: who has could go on writing after it got its name.

    The kernel grants a read lease only then (fcntl(2), F_SETLEASE). Once the file is ours, nobody else can open it anew.
    """
    deadline = time.monotonic() + WRITERS_LIMIT_S
    # A lease is broken by a signal, whose default, SIGIO, would end this process. This one is ignored.
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
    while True:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return  # A filesystem without leases (NFS): that nothing changed while it was read has to do.
        else:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
            return
        if time.monotonic() > deadline:
            raise RolloutError(
                f"{path} is still open for writing",
                found=", ".join(_writers(descriptor))
                or "a process that has it mapped, or that we may not see",
                expected="a transfer that has ended",
                remedy="end it, then run again; what arrived is kept",
            )
        time.sleep(0.2)


def _writers(descriptor: int) -> list[str]:
    """Who has the file open for writing, for a message: name and pid."""
    wanted = os.fstat(descriptor)
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # A process may end, or be another user's when we aren't root, while we look.
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                status = os.stat(f"/proc/{pid}/fd/{name}")
                # An open file's link in /proc has the mode in which it is open.
                writes = os.lstat(f"/proc/{pid}/fd/{name}").st_mode & stat.S_IWUSR
                if writes and (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino):
                    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as stream:
                        found.add(f"{stream.read().strip()} (pid {pid})")
    return sorted(found)


def _rename(incoming: str, path: str, descriptor: int) -> None:
    try:
        os.fsync(descriptor)
        os.rename(incoming, path)
        fsync_directory(os.path.dirname(os.path.abspath(path)))
    except OSError as error:
        found = error.strerror or str(error)
        remedy = ""
        if error.errno == errno.EXDEV:
            remedy = "transfer to a folder on the same filesystem"
        elif error.errno == errno.ENOENT:
            remedy = f"make the folder {os.path.dirname(path)} first"
        raise RolloutError(f"{incoming} can't be renamed to {path}", found=found, remedy=remedy) from error
