"""Model weights in the page cache: what of them is there, and reading the rest, as far as it fits.

Nothing is kept between two calls: which pages are resident is asked of the kernel each time (mincore(2)), so reading
goes on after whatever interrupted it, and what is there already is not read again.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

PAGE = os.sysconf("SC_PAGE_SIZE")
# One read: far more than a disk needs to be fast, little enough to look at the clock in between.
PIECE = 8 << 20
INDEX = "model.safetensors.index.json"

#: Where in a file, in bytes: offset and length.
Range = tuple[int, int]


@dataclass(frozen=True)
class Weights:
    """One file: bytes of it on the disk (a hole is none), and what of them is not in the page cache."""

    path: str
    size: int
    missing: list[Range] = field(default_factory=list)

    @property
    def resident(self) -> int:
        """Bytes that are in the page cache."""
        return self.size - sum(length for _, length in self.missing)


def find(paths: Iterable[str]) -> list[str]:
    """The files of these weights in the order in which vLLM loads them; a folder stands for its checkpoint.

    Raises OSError for what is not there, ValueError for an index that is none.
    """
    found: list[str] = []
    for path in paths:
        found += _checkpoint(path) if os.path.isdir(path) else [path]
    return found


def _checkpoint(folder: str) -> list[str]:
    """The *.safetensors of a folder. Where there is an index those that it names: vLLM loads no others."""
    names = {name for name in os.listdir(folder) if name.endswith(".safetensors")}
    if os.path.exists(os.path.join(folder, INDEX)):
        with open(os.path.join(folder, INDEX), encoding="utf-8") as stream:
            names &= set(json.load(stream)["weight_map"].values())
    return [os.path.join(folder, name) for name in sorted(names, key=_by_number)]


def _by_number(name: str) -> list[tuple[int, str]]:
    """Sort key: shard 2 before shard 10, however they are written."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def residency(descriptor: int, size: int) -> bytes:
    """One byte for each page of an open file: 1 where it is in the page cache, else 0. Raises OSError."""
    if not size:
        return b""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    pages = -(-size // PAGE)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap: {os.strerror(ctypes.get_errno())}")
    states = ctypes.create_string_buffer(pages)
    try:
        if libc.mincore(address, size, states):
            raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    finally:
        libc.munmap(address, size)
    return states.raw.translate(_LAST_BIT)


#: mincore(2) promises the last bit of a byte only.
_LAST_BIT = bytes(number & 1 for number in range(256))


def absent(pages: bytes, begin: int, end: int) -> Iterator[Range]:
    """The ranges between two offsets of a file whose pages are not resident, from what `residency` returned."""
    for run in re.compile(rb"\x00+").finditer(pages, begin // PAGE, -(-end // PAGE)):
        first, last = max(run.start() * PAGE, begin), min(run.end() * PAGE, end)
        if last > first:
            yield first, last - first


def data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of an open file that is on the disk: a hole costs nobody a read."""
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def look(path: str) -> Weights:
    """What of a file is in the page cache. Reads nothing of it. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        parts, pages = list(data(descriptor, size)), residency(descriptor, size)
    finally:
        os.close(descriptor)
    missing = [piece for begin, end in parts for piece in absent(pages, begin, end)]
    return Weights(path, sum(end - begin for begin, end in parts), missing)


def fitting(files: list[Weights], room: int) -> list[tuple[str, Range]]:
    """What is to be read with so many bytes of room, in the order of loading.

    The first ones, not a choice among all: what is loaded first is loaded before the load itself has displaced it.
    """
    wanted = []
    for file in files:
        for offset, length in file.missing:
            if room <= 0:
                return wanted
            wanted.append((file.path, (offset, min(length, room))))
            room -= length
    return wanted


def available_memory() -> int:
    """MemAvailable in bytes: what is free, and what the kernel would take back, most of the page cache included."""
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    raise OSError(errno.ENODATA, "/proc/meminfo has no MemAvailable")


def step_back() -> None:
    """This process reads and computes only when nobody else wants to; for good. Raises OSError."""
    os.nice(19)
    subprocess.run(["ionice", "--class", "3", "--pid", str(os.getpid())], check=True, capture_output=True)


def read(wanted: Iterable[tuple[str, Range]], deadline: float) -> tuple[int, bool]:
    """Read these ranges until the deadline (time.monotonic()): bytes, and whether it was all. Raises OSError."""
    buffer, done = memoryview(bytearray(PIECE)), 0
    for path, (offset, length) in wanted:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            end = offset + length
            while offset < end:
                if time.monotonic() >= deadline:
                    return done, False
                got = os.preadv(descriptor, [buffer[: min(PIECE, end - offset)]], offset)
                if not got:
                    break  # somebody made it shorter
                offset, done = offset + got, done + got
        finally:
            os.close(descriptor)
    return done, True


def warm(paths: Iterable[str], *, reserve: int, limit_s: float, dry: bool = False) -> dict:
    """Read what is missing of these weights, as far as it fits, for so many seconds.

    Returns what the module `page_cache` does (see its RETURN). Whatever prevents it is its `reason` and no error.
    """
    result = {"finished": True, "total_bytes": 0, "resident_bytes": 0, "read_bytes": 0, "reason": ""}
    rate = 0.0

    def seen(names: list[str]) -> list[Weights]:
        files = [look(name) for name in names]
        result["total_bytes"] = sum(file.size for file in files)
        result["resident_bytes"] = sum(file.resident for file in files)
        return files

    try:
        names = find(paths)
        files = seen(names)
        missing = result["total_bytes"] - result["resident_bytes"]
        # What is resident of them counts as available, and is not to be displaced by the rest.
        available = available_memory()
        room = max(0, available - reserve - result["resident_bytes"])
        wanted = fitting(files, room)
        if room < missing:
            result["reason"] = (
                f"{shown(available)} of memory are available, of which {shown(reserve)} are left to the start"
            )
        if wanted and not dry:
            step_back()
            before, begin = result["resident_bytes"], time.monotonic()
            result["read_bytes"], result["finished"] = read(wanted, begin + limit_s)
            rate = result["read_bytes"] / max(time.monotonic() - begin, 1e-3)
            seen(names)
            if result["resident_bytes"] - before < result["read_bytes"] / 2:
                # A filesystem with a cache of its own or none, or a limit of memory that we can't see.
                result["finished"] = True
                result["reason"] = (
                    f"of {shown(result['read_bytes'])} that were read the page cache kept less than half"
                )
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as problem:
        result.update(finished=True, reason=f"{type(problem).__name__}: {problem}")
    result["msg"] = sentence(**result, rate=rate)
    return result


def sentence(
    *, finished: bool, total_bytes: int, resident_bytes: int, read_bytes: int, reason: str, rate: float
) -> str:
    """The same in a line for people."""
    text = f"{shown(resident_bytes)} of {shown(total_bytes)} of weights are in the page cache"
    if rate and not finished:
        text += f", {rate / 1e6:.0f} MB/s"
    return f"{text}; the rest is left where it is: {reason}" if finished and reason else text


def shown(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
