"""The simulated pair of the test bed: shapes of Qwen3.6-27B and its DFlash drafter, and a safetensors writer.

The real weights can't be had offline. Names, shapes and sizes are the published ones; the values are not.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

BF16_BYTES = 2
CHUNK = 64 << 10
VOCAB = 248320
TARGET_LAYERS = 64
DRAFTER_LAYERS = 5
TAPS = 5


@dataclass(frozen=True)
class Pair:
    """What differs between the real size and a small one for quick tests; heads are (query, kv, dim)."""

    hidden: int
    intermediate: int
    target_heads: tuple[int, int, int]
    linear_heads: tuple[int, int, int]
    drafter_heads: tuple[int, int, int]


REAL = Pair(5120, 17408, (24, 4, 256), (16, 48, 128), (32, 8, 128))
SMALL = Pair(256, 512, (4, 2, 64), (4, 8, 32), (4, 2, 64))

Tensors = list[tuple[str, tuple[int, ...]]]


def payload_bytes(tensors: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Bytes of all these tensors in BF16."""
    total = 0
    for _, shape in tensors:
        size = BF16_BYTES
        for length in shape:
            size *= length
        total += size
    return total


def write_safetensors(path: Path, tensors: Tensors, seed: int | None) -> None:
    """Write BF16 tensors under a temporary name and rename them into place; memory stays at a few chunks.

    With a seed the payload is pseudorandom, so it can't be compressed, and the same seed gives the same file.
    Without one the payload is a hole in a sparse file: as long as the real one, but no blocks on the disk.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors:
        begin, end = end, end + payload_bytes([(name, shape)])
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if seed is None:
            file.truncate(file.tell() + end)
        else:
            source = random.Random(seed)  # noqa: S311 - not a secret: bytes that can't be compressed
            for begin in range(0, end, CHUNK):
                file.write(source.randbytes(min(CHUNK, end - begin)))
    partial.chmod(0o644)
    os.replace(partial, path)
