"""Which pages of a file are in the page cache: to measure what was read of it, by whomever."""

from __future__ import annotations

import ctypes
import mmap
import os

PAGE = os.sysconf("SC_PAGE_SIZE")


def drop(path: str) -> None:
    """Drop the file's clean pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def resident(path: str) -> int:
    """Pages of the file in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    size = os.path.getsize(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "mmap")
        states = ctypes.create_string_buffer(-(-size // PAGE))
        try:
            if libc.mincore(address, size, states):
                raise OSError(ctypes.get_errno(), "mincore")
        finally:
            libc.munmap(address, size)
    finally:
        os.close(descriptor)
    return sum(byte & 1 for byte in states.raw[: -(-size // PAGE)])
