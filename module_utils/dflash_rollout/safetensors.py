"""The header of a safetensors file: names, dtypes, shapes; never the payload.

A file is 8 bytes (little-endian length of the header), the header (a JSON object), and the payload. Only
the first two are read, with pread, so the cost does not grow with the file. Whatever the `safetensors`
library refuses is refused here too; a few things that it lets pass (a name given twice, unknown fields)
are refused as well, because two readers of such a file can disagree about what is in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass

from .errors import RolloutError
from .files import read_json, write_json

#: Bits of one element, for every dtype that the format names.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

#: The library's own limit; a longer header is a damaged length field.
MAX_HEADER_BYTES = 100_000_000

_U64_MAX = 2**64 - 1
_FETCH_AGAIN = "fetch the file again and compare its sha256 with the publisher's"


@dataclass(frozen=True)
class Tensor:
    """One tensor: its dtype as the format spells it ("BF16") and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Header:
    """What a checkpoint holds: one file, or all the shards that an index names.

    `payload_bytes` are the tensors', `file_bytes` those of the files with their headers.
    """

    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    payload_bytes: int
    file_bytes: int
    files: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """The JSON form that the modules return and take (`tensors_from_json` reads it back)."""
        return {
            "tensors": {name: {"dtype": t.dtype, "shape": list(t.shape)} for name, t in self.tensors.items()},
            "metadata": self.metadata,
            "payload_bytes": self.payload_bytes,
            "file_bytes": self.file_bytes,
            "files": list(self.files),
        }


def tensors_from_json(value: object) -> dict[str, Tensor]:
    """Tensors from the `tensors` that safetensors_info returned: name → {dtype, shape}.

    Raises RolloutError naming the first entry that is not of that form.
    """
    if not isinstance(value, dict) or not value:
        raise RolloutError(
            "`tensors` holds no tensor",
            found=f"{type(value).__name__} with {len(value) if isinstance(value, dict) else 0} entries",
            expected="what safetensors_info returned as `tensors`: name -> {dtype, shape}",
        )
    tensors = {}
    for name, entry in value.items():
        if not isinstance(entry, dict):
            raise RolloutError(
                f"tensors[{name!r}] is not an object", found=_shown(entry), expected="{dtype, shape}"
            )
        tensors[str(name)] = _tensor(f"tensors[{name!r}]", entry.get("dtype"), entry.get("shape"))
    return tensors


def read_checkpoint(path: str) -> Header:
    """The header of `path`: a .safetensors file, a shard index (.json), or a folder that holds either.

    Symbolic links are followed (a hub cache is made of them); shards are looked for beside the index as
    it was named, not beside what it links to. Raises RolloutError.
    """
    if os.path.isdir(path):
        return read_checkpoint(_checkpoint_in(path))
    return _read_index(path) if path.endswith(".json") else read_header(path)


def read_header(path: str) -> Header:
    """The header of one safetensors file. Reads 8 bytes and the header, whatever the payload's size.

    Raises RolloutError with a diagnosis and a remedy for every kind of damage, and for what is not a
    safetensors file at all.
    """
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        return header_of(path, size, lambda length, offset: _pread(path, descriptor, length, offset))
    finally:
        os.close(descriptor)


def header_of(name: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """The header of a file of `size` bytes of which `read(length, offset)` returns a part."""
    head = read(min(size, 512), 0)
    length = _header_length(name, head, size)
    raw = read(length, 8)
    tensors, metadata, payload = _parse(name, raw)
    expected = 8 + length + payload
    if size < expected:
        raise RolloutError(
            f"{name} is cut short: {_bytes(expected - size)} missing at its end",
            found=f"{size:,} bytes",
            expected=f"{expected:,} bytes (8 + header {length:,} + payload {payload:,})",
            remedy="the transfer did not finish; resume it or " + _FETCH_AGAIN,
        )
    if size > expected:
        raise RolloutError(
            f"{name} is too long by {_bytes(size - expected)}",
            found=f"{size:,} bytes",
            expected=f"{expected:,} bytes (8 + header {length:,} + payload {payload:,})",
            remedy="something was appended, or two downloads were mixed; " + _FETCH_AGAIN,
        )
    return Header(tensors, metadata, payload, expected, (name,))


def known_header(
    cache_dir: str, sha256: str, read: Callable[[], Header], *, keep: bool = True
) -> dict[str, object]:
    """The JSON form of a header, from `cache_dir` where the header of the file of this digest was kept before.

    With a digest that is known, not even the header's pages are read again. `keep` what was read only where the
    file is known to have this digest. Raises what `read` raises; a folder that can't be read or written is no
    reason not to know the header.
    """
    if not sha256 or not cache_dir:
        return read().as_json()
    path = os.path.join(cache_dir, f"{sha256}.header.json")
    try:
        known = read_json(path)
    except (OSError, ValueError):  # cut short
        known = None
    if isinstance(known, dict) and known.get("tensors"):
        return known
    header = read().as_json()
    if keep:
        with contextlib.suppress(OSError):
            os.makedirs(cache_dir, exist_ok=True)
            write_json(path, header)
    return header


def _open_regular(path: str) -> int:
    try:
        # O_NONBLOCK: opening a named pipe must not hang. It has no effect on regular files.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _open_failure(path, error) from error
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        raise RolloutError(
            f"{path} is not a regular file",
            found="a folder" if stat.S_ISDIR(kind) else "a device, pipe or socket",
            expected="a .safetensors file",
            remedy="give the path of the weights file itself",
        )
    # Several readers at once look like one that will read on: the kernel then reads megabytes of weights ahead.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    return descriptor


def _open_failure(path: str, error: OSError) -> RolloutError:
    if error.errno == errno.ENOENT and os.path.islink(path):
        return RolloutError(
            f"{path} is a symbolic link to nothing",
            found=f"link to {os.readlink(path)}",
            remedy="in a hub cache: the download was not finished or was cleaned up; fetch it again",
        )
    message, remedy = {
        errno.ENOENT: ("is not there", "put the file in place or correct the path"),
        errno.ENOTDIR: ("is not there: something above it is a file", "correct the path"),
        errno.ELOOP: ("is a symbolic link that leads to itself", "replace the link by the file"),
        errno.EACCES: (
            f"may not be read by uid {os.geteuid()}",
            "let this user read the file and enter every folder above it, or run as one who may",
        ),
    }.get(error.errno, (f"can't be opened: {error.strerror}", "check the path and the filesystem"))
    return RolloutError(f"{path} {message}", remedy=remedy)


def _pread(path: str, descriptor: int, length: int, offset: int) -> bytes:
    parts, wanted = [], length
    while wanted:
        try:
            part = os.pread(descriptor, wanted, offset)
        except OSError as error:
            raise RolloutError(
                f"{path} can't be read: {error.strerror}",
                remedy="check the disk (kernel log) and " + _FETCH_AGAIN,
            ) from error
        if not part:
            raise RolloutError(
                f"{path} became shorter while it was read", remedy="wait until its writer is done"
            )
        parts.append(part)
        wanted -= len(part)
        offset += len(part)
    return b"".join(parts)


_NO_PICKLE = "get the safetensors checkpoint: a pickle runs code when it is loaded"

#: What other files begin with: (first bytes, what it is, what to do).
_OTHER_FORMATS = (
    (
        b"version https://git-lfs",
        "a Git-LFS pointer, not the weights",
        "run `git lfs pull` in its repository",
    ),
    (
        b"GGUF",
        "a GGUF file (llama.cpp)",
        "get the safetensors checkpoint; vLLM's DFlash loader reads no GGUF",
    ),
    (b"PK\x03\x04", "a zip archive as torch.save writes it, with a pickle inside", _NO_PICKLE),
    *((b"\x80" + bytes([protocol]), "a Python pickle", _NO_PICKLE) for protocol in range(2, 6)),
    (b"\x1f\x8b", "a gzip file", "unpack it"),
    (b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it"),
    (b"\xfd7zXZ\x00", "an xz file", "unpack it"),
    (b"\x89HDF\r\n", "an HDF5 file", "get the safetensors checkpoint"),
)


def _header_length(path: str, head: bytes, size: int) -> int:
    """The header's length from the file's first bytes, or the diagnosis of what the file is instead."""
    if size == 0:
        raise RolloutError(
            f"{path} is empty",
            found="0 bytes",
            remedy="the transfer never started or the disk was full; fetch it again",
        )
    length = struct.unpack("<Q", head[:8])[0] if size >= 8 else None
    if length is None or length > MAX_HEADER_BYTES or head[8:9] != b"{":
        # Not always: the length of a header of 640 bytes begins as a pickle does.
        _refuse_other_formats(path, head)
    if length is None:
        raise RolloutError(
            f"{path} is too short to be a safetensors file",
            found=f"{size} bytes",
            expected="8 bytes of header length, then the header",
            remedy=_FETCH_AGAIN,
        )
    if length == 0 and not head.strip(b"\0"):
        raise RolloutError(
            f"{path} begins with zeros only",
            found=f"{size:,} bytes",
            remedy="the space was reserved but the download never wrote it; fetch the file again",
        )
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise RolloutError(
            f"{path} is not a safetensors file, or its first 8 bytes are damaged",
            found=f"a header length of {length:,} bytes in a file of {size:,}",
            expected=f"2 to {MAX_HEADER_BYTES:,}",
            remedy=_FETCH_AGAIN,
        )
    if length > size - 8:
        raise RolloutError(
            f"{path} ends inside its own header",
            found=f"{size:,} bytes",
            expected=f"at least {length + 8:,} bytes (8 + header {length:,})",
            remedy="the transfer did not finish; resume it or " + _FETCH_AGAIN,
        )
    if head[8:9] == b"{":
        return length
    raise RolloutError(
        f"{path} is not a safetensors file: its header does not begin with '{{'",
        found=_shown(head[8:24].decode("utf-8", "backslashreplace")),
        remedy=_FETCH_AGAIN,
    )


def _refuse_other_formats(path: str, head: bytes) -> None:
    for magic, what, remedy in _OTHER_FORMATS:
        if head.startswith(magic):
            raise RolloutError(f"{path} is {what}", expected="a .safetensors file", remedy=remedy)
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text.startswith(b"<"):
        raise RolloutError(
            f"{path} is an HTML or XML page, not the weights",
            found=_shown(text[:60].decode("utf-8", "replace")),
            remedy="the server answered with an error or login page; check address and access, fetch again",
        )
    if text.startswith((b"{", b"[")):
        raise RolloutError(
            f"{path} is a JSON text, not the weights",
            found=_shown(text[:60].decode("utf-8", "replace")),
            remedy="this is an error message of the server, or a config or index; fetch the weights",
        )


class _BadHeader(ValueError):
    """A header that JSON itself would let pass."""


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _BadHeader(f"the name {key!r} stands twice")
        result[key] = value
    return result


def _no_constant(text: str) -> object:
    raise _BadHeader(f"{text} is not JSON")


def _whole_number(text: str) -> int:
    if text.startswith("-") or len(text) > 20:
        raise _BadHeader(f"the number {text[:24]} is out of range")
    return int(text)


def _load_strict(raw: bytes) -> object:
    """JSON as strict readers see it: no name twice, no NaN, no half surrogate, whole numbers 0 … 2^64−1."""
    text = raw.decode("utf-8")
    value = json.loads(
        text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant, parse_int=_whole_number
    )
    json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone \ud800 passes json.loads and fails here
    return value


def _parse(path: str, raw: bytes) -> tuple[dict[str, Tensor], dict[str, str], int]:
    def bad(message: str, **more: str) -> RolloutError:
        return RolloutError(f"{path}: {message}", **{"remedy": _FETCH_AGAIN, **more})

    try:
        document = _load_strict(raw)
    except _BadHeader as error:
        raise bad(f"the header is damaged: {error}") from error
    except (UnicodeError, RecursionError) as error:
        raise bad("the header is damaged: it is not plain UTF-8 JSON") from error
    except ValueError as error:
        raise bad(f"the header is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise bad("the header is not a JSON object")

    metadata = document.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad("__metadata__ is not a table of strings", found=_shown(metadata))

    tensors: dict[str, Tensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in document.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise bad(
                f"the header describes {name} in no known way",
                found=_shown(entry),
                expected="exactly dtype, shape and data_offsets",
            )
        offsets = entry["data_offsets"]
        if not (isinstance(offsets, list) and len(offsets) == 2 and all(map(_is_u64, offsets))):
            raise bad(f"data_offsets of {name}", found=_shown(offsets), expected="[begin, end]")
        tensor = _tensor(f"{path}: tensor {name}", entry["dtype"], entry["shape"])
        begin, end = offsets
        if end - begin != tensor.nbytes:
            raise bad(
                f"tensor {name} does not fill its place",
                found=f"data_offsets {begin:,} to {end:,}, {end - begin:,} bytes apart",
                expected=f"{tensor.nbytes:,} bytes for {tensor.dtype} {list(tensor.shape)}",
            )
        tensors[name] = tensor
        spans.append((begin, end, name))

    spans.sort()
    end_before, name_before = 0, "the beginning of the payload"
    for begin, end, name in spans:
        if begin != end_before:
            raise bad(
                f"{'a gap' if begin > end_before else 'an overlap'} of {_bytes(abs(begin - end_before))} "
                f"between {name_before} and {name}",
                found=f"{name} begins at {begin:,}",
                expected=f"{end_before:,}",
            )
        end_before, name_before = end, name
    return tensors, metadata, end_before


def _tensor(where: str, dtype: object, shape: object) -> Tensor:
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise RolloutError(
            f"{where} has an unknown dtype",
            found=_shown(dtype),
            expected=", ".join(DTYPE_BITS),
            remedy=_FETCH_AGAIN,
        )
    if not (isinstance(shape, (list, tuple)) and all(map(_is_u64, shape))):
        raise RolloutError(
            f"{where} has no usable shape",
            found=_shown(shape),
            expected="a list of sizes",
            remedy=_FETCH_AGAIN,
        )
    bits = 1
    for size in (*shape, DTYPE_BITS[dtype]):
        # Step by step, as a 64-bit reader multiplies: [2^63, 4, 0] is too large although its product is 0.
        bits *= size
        if bits > _U64_MAX:
            raise RolloutError(
                f"{where} is too large to exist", found=f"shape {list(shape)}", remedy=_FETCH_AGAIN
            )
    if bits % 8:
        raise RolloutError(
            f"{where} does not end at a byte",
            found=f"{dtype} {list(shape)}, {bits} bits",
            remedy=_FETCH_AGAIN,
        )
    return Tensor(dtype, tuple(shape))


def _is_u64(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _U64_MAX


def _bytes(count: int) -> str:
    return f"{count:,} byte{'' if count == 1 else 's'}"


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = "".join(c if c.isprintable() else "·" for c in text)
    return text if len(text) <= 80 else text[:77] + "..."


def _checkpoint_in(folder: str) -> str:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise RolloutError(f"the folder {folder} can't be listed: {error.strerror}") from error
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    weights = [name for name in names if name.endswith(".safetensors")]
    for candidates in (indexes, weights):
        if len(candidates) == 1:
            return os.path.join(folder, candidates[0])
    raise RolloutError(
        f"{folder} does not say which file holds the weights",
        found=", ".join(indexes + weights)[:200] or "no .safetensors file",
        expected="one .safetensors file, or one .safetensors.index.json with its shards",
        remedy="finish the download, or give the path of the file itself",
    )


def _read_index(path: str) -> Header:
    descriptor = _open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > MAX_HEADER_BYTES:
            raise RolloutError(f"{path} is too large for a shard index", found=f"{size:,} bytes")
        raw = _pread(path, descriptor, size, 0)
    finally:
        os.close(descriptor)
    try:
        # Sizes in `metadata` may be floats; only the map of names is used, so plain JSON will do.
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise RolloutError(
            f"the shard index {path} is damaged: {_shown(str(error))}", remedy=_FETCH_AGAIN
        ) from error
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not (
        isinstance(weight_map, dict) and weight_map and all(isinstance(v, str) for v in weight_map.values())
    ):
        raise RolloutError(
            f"{path} is not a shard index",
            expected="a JSON object with weight_map: tensor name -> file name",
            remedy="give the .safetensors file or its .safetensors.index.json",
        )
    folder = os.path.dirname(path)
    shards = sorted(set(weight_map.values()))
    strange = [name for name in shards if os.path.basename(name) != name or name in ("", ".", "..")]
    if strange:
        raise RolloutError(
            f"{path} names a shard outside its own folder",
            found=_shown(strange[0]),
            expected="plain file names",
            remedy="fetch the index again; its shards lie beside it",
        )
    missing = [name for name in shards if not os.path.exists(os.path.join(folder, name))]
    if missing:
        raise RolloutError(
            f"{len(missing)} of {len(shards)} shards that {path} names are not beside it",
            found="missing: " + ", ".join(missing[:4]) + (" …" if len(missing) > 4 else ""),
            remedy="finish the download: an index is of no use without every shard",
        )
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    payload = size = 0
    for shard in shards:
        header = read_header(os.path.join(folder, shard))
        for name, tensor in header.tensors.items():
            if weight_map.get(name) != shard:
                raise RolloutError(
                    f"{path} and the shard {shard} disagree about {name}",
                    found=f"the shard holds it, the index says {weight_map.get(name, 'nothing about it')}",
                    remedy="index and shards are of two revisions; fetch all of them again",
                )
            tensors[name] = tensor
        metadata.update(header.metadata)
        payload += header.payload_bytes
        size += header.file_bytes
    absent = sorted(set(weight_map) - set(tensors))
    if absent:
        raise RolloutError(
            f"{path} promises tensors that its shards do not hold",
            found=f"{absent[0]} is not in {weight_map[absent[0]]} ({len(absent)} such)",
            remedy="index and shards are of two revisions; fetch all of them again",
        )
    return Header(
        tensors, metadata, payload, size, (path, *(os.path.join(folder, shard) for shard in shards))
    )
