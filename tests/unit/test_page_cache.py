"""Which pages of weights are resident, what of the rest fits, and reading it."""

from __future__ import annotations

import json
import os
import time

import pytest
from dflash_rollout import page_cache
from dflash_rollout.page_cache import PAGE, PIECE, Weights, absent, fitting
from hypothesis import given
from hypothesis import strategies as st

MIB = 1 << 20


@pytest.fixture
def on_disk(tmp_path):
    """Makes a file of random bytes of which no page is in the page cache."""

    def make(name: str, size: int):
        path = tmp_path / name
        path.write_bytes(os.urandom(size))
        drop(path)
        if page_cache.look(str(path)).resident:
            pytest.skip(f"{tmp_path} lies on a filesystem that is nothing but page cache")
        return path

    return make


def drop(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def warm(*paths, reserve=0, limit_s=60.0, **options):
    return page_cache.warm(map(str, paths), reserve=reserve, limit_s=limit_s, **options)


@pytest.fixture(autouse=True)
def priority(monkeypatch):
    """The lowest priority is for good: pytest's own stays, and what was asked for is noted."""
    asked = []
    monkeypatch.setattr(page_cache, "step_back", lambda: asked.append(True))
    return asked


# ---- what is resident, pure -----------------------------------------------------------------------------


@given(
    st.binary(max_size=40).map(lambda text: bytes(byte & 1 for byte in text)),
    st.integers(0, PAGE - 1),
    st.data(),
)
def test_absent_ranges_are_exactly_the_bytes_of_pages_that_are_not_there(pages, short, draw):
    size = max(0, len(pages) * PAGE - short)
    begin = draw.draw(st.integers(0, size))
    end = draw.draw(st.integers(begin, size))
    found = list(absent(pages, begin, end))
    assert all(begin <= offset and length > 0 and offset + length <= end for offset, length in found)
    for page, there in enumerate(pages):
        first, last = max(page * PAGE, begin), min((page + 1) * PAGE, end)
        covered = sum(max(0, min(last, offset + length) - max(first, offset)) for offset, length in found)
        assert covered == (0 if there else max(0, last - first))


def test_no_range_touches_the_next_one():
    assert list(absent(b"\0\0\1\0\1\1\0", 0, 7 * PAGE - 5)) == [
        (0, 2 * PAGE),
        (3 * PAGE, PAGE),
        (6 * PAGE, PAGE - 5),
    ]


# ---- what fits, pure ------------------------------------------------------------------------------------


def test_what_fits_is_the_beginning_in_the_order_of_loading():
    files = [Weights("a", 100, [(0, 10), (50, 20)]), Weights("b", 100, []), Weights("c", 40, [(0, 40)])]
    assert fitting(files, 1000) == [("a", (0, 10)), ("a", (50, 20)), ("c", (0, 40))]
    assert fitting(files, 35) == [("a", (0, 10)), ("a", (50, 20)), ("c", (0, 5))]
    assert fitting(files, 10) == [("a", (0, 10))]
    assert fitting(files, 0) == []
    assert fitting(files, -5) == []


# ---- which files ----------------------------------------------------------------------------------------


def test_a_folder_stands_for_its_shards_by_number(tmp_path):
    for name in ("model-10.safetensors", "model-2.safetensors", "config.json", "notes.safetensors.txt"):
        (tmp_path / name).touch()
    (tmp_path / "drafter").touch()
    found = page_cache.find([str(tmp_path), str(tmp_path / "drafter")])
    assert [os.path.basename(path) for path in found] == [
        "model-2.safetensors",
        "model-10.safetensors",
        "drafter",
    ]


def test_with_an_index_only_what_it_names(tmp_path):
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / name).touch()
    weight_map = {"a": "model-2.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (tmp_path / page_cache.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert [os.path.basename(path) for path in page_cache.find([str(tmp_path)])] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]


# ---- with files -----------------------------------------------------------------------------------------


def test_what_is_missing_is_read_and_then_there(on_disk, priority):
    path = on_disk("model.safetensors", 3 * MIB + 5)
    first = warm(path)
    assert first["finished"], first
    assert first["reason"] == ""
    assert first["read_bytes"] == first["total_bytes"] == first["resident_bytes"] == 3 * MIB + 5
    assert priority == [True]
    again = warm(path)
    assert (again["read_bytes"], again["finished"]) == (0, True)
    assert again["msg"] == "3.1 MB of 3.1 MB of weights are in the page cache"
    assert priority == [True]


def test_only_what_is_missing_is_read(on_disk):
    path = on_disk("model.safetensors", 4 * MIB)
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
    os.pread(descriptor, MIB, MIB)
    os.close(descriptor)
    looked = page_cache.look(str(path))
    assert looked.missing == [(0, MIB), (2 * MIB, 2 * MIB)]
    assert warm(path)["read_bytes"] == 3 * MIB


def test_a_hole_is_no_weight(tmp_path):
    path = tmp_path / "sparse.safetensors"
    with path.open("wb") as stream:
        stream.write(b"x" * PAGE)
        stream.truncate(1 << 30)
    drop(path)
    if os.stat(path).st_blocks * 512 > MIB:
        pytest.skip("a filesystem without holes")
    result = warm(path)
    assert result["total_bytes"] < MIB
    assert result["read_bytes"] < MIB


def test_the_reserve_and_what_is_resident_are_not_filled(on_disk, monkeypatch):
    first, second = on_disk("1.safetensors", 2 * MIB), on_disk("2.safetensors", 2 * MIB)
    warm(first)
    # What is resident is a part of what is available: 5 less 2 less a reserve of 2.
    monkeypatch.setattr(page_cache, "available_memory", lambda: 5 * MIB)
    result = warm(first, second, reserve=2 * MIB)
    assert result["read_bytes"] == MIB
    assert result["finished"]
    assert result["reason"] == "5.2 MB of memory are available, of which 2.1 MB are left to the start"
    assert "the rest is left where it is: 5.2 MB" in result["msg"]


def test_without_room_nothing_is_read(on_disk, monkeypatch, priority):
    path = on_disk("model.safetensors", MIB)
    monkeypatch.setattr(page_cache, "available_memory", lambda: MIB)
    result = warm(path, reserve=2 * MIB)
    assert (result["read_bytes"], result["resident_bytes"], result["finished"]) == (0, 0, True)
    assert result["reason"]
    assert priority == []


def test_the_limit_ends_a_call_and_the_next_goes_on(on_disk):
    # The kernel reads ahead of one read, on some disks by 8 MiB, and goes on with that after it.
    path = on_disk("model.safetensors", 6 * PIECE)
    ticks = iter(range(1000))

    with pytest.MonkeyPatch.context() as patch:
        # A clock that jumps a second each time it is looked at: room for one read.
        patch.setattr(page_cache.time, "monotonic", lambda: next(ticks))
        first = warm(path, limit_s=2)
    assert first["read_bytes"] == PIECE
    assert not first["finished"]
    assert "MB/s" in first["msg"]
    second = warm(path)
    assert second["finished"]
    assert PIECE <= first["resident_bytes"] < second["resident_bytes"] == 6 * PIECE
    assert 0 < second["read_bytes"] <= 6 * PIECE - first["resident_bytes"]


def test_a_dry_look_reads_nothing(on_disk):
    path = on_disk("model.safetensors", MIB)
    assert warm(path, dry=True)["read_bytes"] == 0
    assert page_cache.look(str(path)).resident == 0


def test_a_filesystem_that_keeps_nothing_is_given_up(on_disk, monkeypatch):
    path = on_disk("model.safetensors", 4 * MIB)
    real = page_cache.read

    def forgetful(wanted, deadline):
        result = real(wanted, deadline)
        drop(path)
        return result

    monkeypatch.setattr(page_cache, "read", forgetful)
    result = warm(path)
    assert result["finished"]
    assert "kept less than half" in result["reason"]


@pytest.mark.parametrize("broken", ["missing", "index", "index without a map", "priority"])
def test_what_prevents_it_is_said_and_no_error(on_disk, monkeypatch, broken):
    path = on_disk("model.safetensors", MIB)
    if broken == "missing":
        path.unlink()
        result = warm(path)
        assert "No such file" in result["reason"]
    elif broken.startswith("index"):
        (path.parent / page_cache.INDEX).write_text("{}" if "map" in broken else "{")
        result = warm(path.parent)
    else:
        monkeypatch.setattr(page_cache, "step_back", lambda: os.stat("/no/such/thing"))
        result = warm(path)
    assert result["finished"]
    assert result["read_bytes"] == 0
    assert result["reason"]
    assert result["reason"] in result["msg"]


def test_available_memory_is_part_of_all_memory():
    assert 0 < page_cache.available_memory() < os.sysconf("SC_PHYS_PAGES") * PAGE


def test_reading_ends_at_a_deadline_that_is_over(on_disk):
    path = str(on_disk("model.safetensors", MIB))
    assert page_cache.read([(path, (0, MIB))], time.monotonic()) == (0, False)


def test_a_file_that_became_shorter_is_no_endless_loop(on_disk):
    path = str(on_disk("model.safetensors", MIB))
    assert page_cache.read([(path, (0, 3 * MIB))], time.monotonic() + 60) == (MIB, True)
