"""The digest of a model file, and the stamp that spares reading gigabytes again to know it.

A stamp says: the file that has this device, inode, size, mtime and ctime had this digest. Whoever writes to
the file changes its ctime, even when the mtime is put back. What a stamp can't see (bit rot, a restored
snapshot, a network filesystem) is what `verify="full"` is for.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from dataclasses import dataclass

from .errors import RolloutError
from .files import fsync_directory, write_json

BUFFER_BYTES = 4 << 20

# The kernel takes file times from a clock that ticks every 1 to 10 ms: two writes in a tick look like one.
CLOCK_TICK_NS = 50_000_000


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
    if not stamp_dir:
        return f"{path}.stamp"
    key = hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]
    return os.path.join(stamp_dir, f"{os.path.basename(path)}-{key}.stamp")


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


def _hash(path: str, descriptor: int) -> tuple[str, os.stat_result, bool]:
    """SHA-256 of an open file, its status, and whether a stamp may be made of the two.

    Raises RolloutError when the file changes while it is read.
    """
    before = os.fstat(descriptor)
    # A write in the same tick as the last one before us would leave no trace in ctime. A ctime ahead of our
    # clock proves nothing at all (clock put back, network filesystem): read, but don't stamp.
    age = time.time_ns() - before.st_ctime_ns
    if 0 <= age < CLOCK_TICK_NS:
        time.sleep((CLOCK_TICK_NS - age) / 1e9)
    digest = hashlib.sha256()
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        while count := os.readv(descriptor, [buffer]):
            digest.update(view[:count])
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
    return digest.hexdigest(), after, age >= 0


def _compare(path: str, found: str, size: int, expected: str) -> None:
    if expected and found != expected:
        raise RolloutError(
            f"{path} has the wrong SHA-256",
            found=f"{found} ({size} bytes)",
            expected=expected,
            remedy="get the file again; if you meant another revision, correct the expected SHA-256",
        )


def inspect(
    path: str, *, sha256: str = "", verify: str = "stamp", stamp_dir: str = "", check: bool = False
) -> ModelFile:
    """The digest of the file at `path`, from its stamp if that matches, else by reading all of it.

    `verify="full"` reads it in any case. Having read it, the stamp is written, except in check mode.
    Raises RolloutError when the digest isn't `sha256` (where given), when the file changes while it is read,
    and when it no longer has the digest of a matching stamp, which means that the disk has altered it.
    """
    expected = _expected(sha256)
    descriptor = _open(path)
    if descriptor is None:
        return ModelFile(path, exists=False)
    stamp = stamp_path(path, stamp_dir)
    try:
        status = os.fstat(descriptor)
        stamped = _read_stamp(stamp, status)
        if stamped and verify == "stamp":
            _compare(path, stamped, status.st_size, expected)
            return ModelFile(path, True, stamped, status.st_size)
        digest, status, stampable = _hash(path, descriptor)
    finally:
        os.close(descriptor)
    if stamped and stamped != digest:
        raise RolloutError(
            f"{path} was altered though nobody wrote to it",
            found=f"{digest}, with the times it had when it was {stamped}",
            expected=stamped,
            remedy="the disk or the filesystem is failing: check it, then get the file again",
        )
    _compare(path, digest, status.st_size, expected)
    if stampable and not stamped and not check:
        _write_stamp(stamp, status, digest)
    return ModelFile(path, True, digest, status.st_size, read_bytes=status.st_size)


def install(incoming: str, path: str, *, sha256: str = "", check: bool = False) -> ModelFile:
    """Verify the file `incoming` and rename it to `path`, durable, with mode 0644, owned by us, stamped.

    Until the rename nothing under `path` changes; a file that was there is replaced by it in one step.
    Raises RolloutError when `incoming` is missing or a link, has another digest than `sha256`, changes while
    it is read, or lies on another filesystem than `path`.
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
        digest, status, stampable = _hash(incoming, descriptor)
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
            if stampable:
                _write_stamp(stamp_path(path), placed, digest)
    finally:
        os.close(descriptor)
    return ModelFile(path, True, digest, status.st_size, read_bytes=status.st_size, changed=True)


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
