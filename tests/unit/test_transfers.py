"""Files on their way to a host: what is missing, what goes on from where, what is removed, and what is never touched."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from dflash_rollout import model_file, transfers
from dflash_rollout.errors import RolloutError
from dflash_rollout.transfers import Held, Wanted, held_from_json, look, place, receive, summary
from hypothesis import given, settings
from hypothesis import strategies as st

PIECE = 1024
CONTENT = random.Random(6).randbytes(10 * PIECE + 100)  # noqa: S311
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(model_file, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(model_file, "CLOCK_TICK_NS", 0)  # nobody writes within a tick here


@pytest.fixture
def wanted(tmp_path) -> Wanted:
    return Wanted(str(tmp_path / "drafters" / DIGEST / "model.safetensors"), DIGEST, len(CONTENT))


def write(path: str, content: bytes) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(path).write_bytes(content)


def to_me(held: list[Held], **options) -> list[Held]:
    return receive(held, owner=(os.getuid(), os.getgid()), **options)


@pytest.fixture
def placed(wanted) -> Wanted:
    """The file as a transfer left it: verified, with stamp and checksums of its pieces."""
    write(wanted.incoming, CONTENT)
    _, changed = place(look([wanted]))
    assert changed
    assert look([wanted])[0].state == "verified"
    return wanted


def flip(path: str, *offsets: int) -> None:
    """Damage as a disk does it: the mtime is as before."""
    before = os.stat(path)
    with open(path, "r+b") as stream:
        for offset in offsets:
            stream.seek(offset)
            byte = stream.read(1)[0]
            stream.seek(offset)
            stream.write(bytes([byte ^ 0x20]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def mend(file: Held) -> int:
    """What the transport by URL does: bytes that it wrote."""
    todo = file.ranges if file.ranges is not None else ((os.path.getsize(file.incoming), len(CONTENT)),)
    with open(file.incoming, "r+b") as stream:
        for first, end in todo:
            stream.seek(first)
            stream.write(CONTENT[first:end])
    return sum(end - first for first, end in todo)


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# -- from nothing to verified


def test_the_way_of_a_file(wanted, tmp_path):
    (missing,) = look([wanted])
    assert missing == Held(
        wanted.path, DIGEST, "missing", len(CONTENT), incoming=f"{wanted.path}.incoming", here=0
    )
    assert names(tmp_path) == set()
    (ready,) = to_me([missing])
    assert Path(ready.incoming).read_bytes() == b""
    assert stat.S_IMODE(os.stat(ready.incoming).st_mode) == 0o600
    assert mend(ready) == len(CONTENT)
    (done,), changed = place([ready])
    assert (done.state, done.size, done.read_bytes, done.incoming, changed) == (
        "verified", len(CONTENT), len(CONTENT), "", True,
    )  # fmt: skip
    assert names(Path(wanted.path).parent) == {
        "model.safetensors", "model.safetensors.stamp", "model.safetensors.pieces",
    }  # fmt: skip
    assert look([wanted]) == [Held(wanted.path, DIGEST, "verified", len(CONTENT))]
    assert to_me(look([wanted])) == []
    assert place(look([wanted])) == ([], False)


def test_what_an_earlier_transfer_left_is_kept(wanted):
    write(wanted.incoming, CONTENT[:5000])
    (missing,) = look([wanted])
    assert (missing.state, missing.here) == ("missing", 5000)
    (ready,) = to_me([missing])
    assert Path(ready.incoming).read_bytes() == CONTENT[:5000]
    assert mend(ready) == len(CONTENT) - 5000
    assert place([ready])[0][0].state == "verified"


def test_holes_are_no_bytes_that_are_here(wanted):
    write(wanted.incoming, b"")
    os.truncate(wanted.incoming, 1 << 30)
    assert look([replace(wanted, size=1 << 30)])[0].here == 0


def test_a_partial_that_is_too_long_is_cut(wanted):
    write(wanted.incoming, CONTENT + b"more")
    (ready,) = to_me(look([wanted]))
    assert mend(ready) == 0
    assert place([ready])[0][0].state == "verified"


def test_room_is_made_as_often_as_it_is_asked_for(wanted):
    first = to_me(look([wanted]))
    mend(first[0])
    assert to_me(look([wanted]))[0].here >= 0
    assert Path(wanted.incoming).read_bytes() == CONTENT


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file to somebody else")
def test_who_receives_owns_what_arrives_until_it_is_placed(wanted):
    (ready,) = receive(look([wanted]), owner=(4711, 4712))
    assert (os.stat(ready.incoming).st_uid, os.stat(ready.incoming).st_gid) == (4711, 4712)
    assert os.stat(os.path.dirname(ready.incoming)).st_uid == 0
    receive(look([wanted]))
    assert os.stat(ready.incoming).st_uid == 4711, "taken from a job of an earlier run that writes to it"
    mend(ready)
    place([ready])
    status = os.stat(wanted.path)
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o644)


@pytest.mark.parametrize("what", ["link", "hard link", "fifo", "folder"])
def test_what_has_the_name_of_the_partial_is_not_given_away(wanted, tmp_path, what):
    victim = tmp_path / "victim"
    victim.write_bytes(b"x")
    victim.chmod(0o640)
    os.makedirs(os.path.dirname(wanted.incoming))
    {
        "link": lambda: os.symlink(victim, wanted.incoming),
        "hard link": lambda: os.link(victim, wanted.incoming),
        "fifo": lambda: os.mkfifo(wanted.incoming),
        "folder": lambda: os.mkdir(wanted.incoming),
    }[what]()
    with pytest.raises(RolloutError, match="can't be written") as caught:
        to_me([Held(wanted.path, DIGEST, "missing", 1, incoming=wanted.incoming)])
    assert "remove what has that name" in caught.value.remedy
    assert stat.S_IMODE(victim.stat().st_mode) == 0o640
    assert victim.read_bytes() == b"x"


def test_nothing_is_made_in_check_mode(wanted, tmp_path):
    (planned,) = to_me(look([wanted], check=True), check=True)
    assert planned.state == "missing"
    assert list(tmp_path.iterdir()) == []


# -- space


@pytest.fixture
def free(monkeypatch):
    """`free(bytes)`: as much is free on each filesystem."""

    def say(count: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=count // 512, f_frsize=512))

    return say


def test_too_little_space_is_said_before_anything_is_written(wanted, tmp_path, free):
    free(transfers.RESERVE_BYTES + 4096)
    big = replace(wanted, size=3_460_000_000)
    for check in (False, True):
        with pytest.raises(RolloutError, match="too little space") as caught:
            to_me(look([big]), check=check)
        assert (caught.value.found, caught.value.expected) == ("0.27 GB free", "3.73 GB")
    assert list(tmp_path.iterdir()) == []


def test_all_files_of_a_filesystem_need_their_space_together(wanted, free):
    free(transfers.RESERVE_BYTES + 150 * 512)
    one = replace(wanted, size=100 * 512)
    other = replace(one, path=f"{one.path}2")
    to_me(look([one]), check=True)
    with pytest.raises(RolloutError, match="too little space"):
        to_me(look([one, other]))


def test_what_arrived_needs_no_space_again(wanted, free):
    write(wanted.incoming, CONTENT[: 8 * PIECE])
    free(transfers.RESERVE_BYTES + len(CONTENT) - 8 * PIECE + 512)
    to_me(look([wanted]))
    free(transfers.RESERVE_BYTES + len(CONTENT) - 8 * PIECE - 512)
    with pytest.raises(RolloutError, match="too little space"):
        to_me(look([wanted]))


def test_a_damaged_file_needs_space_for_its_copy(placed, free):
    flip(placed.path, 5)
    free(transfers.RESERVE_BYTES + len(CONTENT) - 512)
    with pytest.raises(RolloutError, match="too little space"):
        to_me(look([placed]))
    assert not os.path.exists(placed.incoming)


# -- damage


def test_one_flipped_byte_is_one_piece_to_bring(placed):
    flip(placed.path, 5 * PIECE + 3)
    damaged = Path(placed.path).read_bytes()
    (held,) = look([placed])
    assert (held.state, held.read_bytes) == ("damaged", len(CONTENT))
    (ready,) = to_me([held])
    assert ready.ranges == ((5 * PIECE, 6 * PIECE),)
    assert Path(ready.incoming).read_bytes() == damaged
    assert Path(placed.path).read_bytes() == damaged, "what serves may be reading it"
    assert mend(ready) == PIECE
    assert Path(placed.path).read_bytes() == damaged
    assert place([ready])[0][0].state == "verified"
    assert Path(placed.path).read_bytes() == CONTENT
    assert look([placed], verify="full")[0].state == "verified"


def test_rot_that_no_time_tells_is_found_by_full(placed, monkeypatch):
    """The disk alters the file below the filesystem: all times stay, so the stamp matches."""
    flip(placed.path, 77)
    stamp = Path(f"{placed.path}.stamp")
    model_file._write_stamp(str(stamp), os.stat(placed.path), DIGEST)
    assert look([placed])[0].state == "verified"
    assert look([placed], verify="full")[0].state == "damaged"
    (ready,) = to_me(look([placed], verify="full"))
    assert ready.ranges == ((0, PIECE),)


def test_a_mend_that_was_cut_off_goes_on(placed):
    flip(placed.path, 3, 5 * PIECE, 9 * PIECE)
    (ready,) = to_me(look([placed]))
    assert len(ready.ranges) == 3
    mend(replace(ready, ranges=ready.ranges[:2]))
    (again,) = to_me(look([placed]))
    assert again.ranges == ((9 * PIECE, 10 * PIECE),)
    assert mend(again) == PIECE
    assert place([again])[0][0].state == "verified"


def test_a_copy_that_was_cut_off_goes_on(placed):
    flip(placed.path, 3)
    write(placed.incoming, Path(placed.path).read_bytes()[: 2 * PIECE + 10])
    (ready,) = to_me(look([placed]))
    assert ready.ranges[0] == (0, PIECE)
    assert ready.ranges[1] == (2 * PIECE, 3 * PIECE)
    assert ready.ranges[-1] == (10 * PIECE, len(CONTENT))
    mend(ready)
    assert place([ready])[0][0].state == "verified"


def test_a_module_that_is_asked_twice_says_the_same(placed):
    flip(placed.path, 3)
    held = look([placed])
    first = to_me(held)
    assert to_me(held) == first
    assert to_me(first) == first, "what it returned can be given again"


def test_without_checksums_all_of_it_is_brought_again(placed):
    flip(placed.path, 3)
    Path(f"{placed.path}.pieces").unlink()
    (ready,) = to_me(look([placed]))
    assert (ready.state, ready.ranges) == ("damaged", None)
    assert Path(ready.incoming).read_bytes() == b""
    mend(ready)
    assert place([ready])[0][0].state == "verified"


@pytest.mark.parametrize(
    "change", [lambda data: data[:-1500], lambda data: b"", lambda data: data + b"x" * 3000]
)
def test_another_length_is_mended_too(placed, change):
    Path(placed.path).write_bytes(change(CONTENT))
    (ready,) = to_me(look([placed]))
    mend(ready)
    assert place([ready])[0][0].state == "verified"
    assert Path(placed.path).read_bytes() == CONTENT


@settings(max_examples=60, deadline=None)
@given(
    flipped=st.sets(st.integers(0, len(CONTENT) - 1), min_size=1, max_size=12),
    cut=st.none() | st.integers(0, len(CONTENT)),
)
def test_whatever_is_damaged_is_in_the_ranges_and_mending_them_is_enough(tmp_path_factory, flipped, cut):
    wanted = Wanted(str(tmp_path_factory.mktemp("t") / DIGEST / "x"), DIGEST, len(CONTENT))
    write(wanted.incoming, CONTENT)
    place(look([wanted]))
    flip(wanted.path, *flipped)
    if cut is not None:
        os.truncate(wanted.path, cut)
    (ready,) = to_me(look([wanted]))
    if cut is None:
        assert {offset // PIECE for offset in flipped} == {first // PIECE for first, _ in ready.ranges}
    for offset in flipped:
        assert any(first <= offset < end for first, end in ready.ranges)
    mend(ready)
    assert hashlib.sha256(Path(ready.incoming).read_bytes()).hexdigest() == DIGEST
    assert place([ready])[0][0].state == "verified"


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_filesystem_that_can_not_copy_by_itself(placed, monkeypatch, number):
    calls = []
    real = os.copy_file_range

    def refuse(source, target, count):
        calls.append(count)
        if len(calls) == 1:  # some filesystems copy a part before they refuse
            return real(source, target, 3000)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "copy_file_range", refuse)
    flip(placed.path, 3)
    (ready,) = to_me(look([placed]))
    assert Path(ready.incoming).read_bytes() == Path(placed.path).read_bytes()


def test_a_disk_that_is_full_while_copying_leaves_no_copy(placed, monkeypatch):
    def full(source, target, count):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    flip(placed.path, 3)
    with pytest.raises(RolloutError, match="can't be written") as caught:
        to_me(look([placed]))
    assert caught.value.found == "No space left on device"
    assert not os.path.exists(placed.incoming)


def test_another_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"somebody else's")
    with pytest.raises(RolloutError, match="wrong SHA-256"):
        look([Wanted(str(path), DIGEST, len(CONTENT))])
    assert names(tmp_path) == {"model.safetensors"}
    assert path.read_bytes() == b"somebody else's"


# -- placing


def test_placing_a_second_time_reads_nothing_and_changes_nothing(wanted):
    held = to_me(look([wanted]))
    mend(held[0])
    assert place(held)[1] is True
    (again,), changed = place(held)
    assert (again.state, again.read_bytes, changed) == ("verified", 0, False)


def test_placing_what_never_arrived(wanted):
    held = look([wanted])
    with pytest.raises(RolloutError, match="Neither"):
        place(held)


def test_a_wrong_digest_is_kept_or_discarded(wanted):
    for discard in (False, True):
        write(wanted.incoming, b"wrong")
        with pytest.raises(RolloutError, match="wrong SHA-256") as caught:
            place(look([wanted]), discard=discard)
        assert os.path.exists(wanted.incoming) != discard
        assert ("was removed" in caught.value.remedy) == discard
        assert caught.value.expected == DIGEST
        assert not os.path.exists(wanted.path)


@pytest.mark.parametrize("fails", ["_own", "_rename", "_write_pieces"])
def test_only_a_wrong_digest_is_a_reason_to_discard(wanted, monkeypatch, fails):
    def fail(*arguments):
        raise RolloutError("The disk is full")

    monkeypatch.setattr(model_file, fails, fail)
    write(wanted.incoming, CONTENT)
    with pytest.raises(RolloutError, match="disk is full"):
        place(look([wanted]), discard=True)
    kept = wanted.path if fails == "_write_pieces" else wanted.incoming
    assert Path(kept).read_bytes() == CONTENT


def test_check_mode_places_and_removes_nothing(wanted, tmp_path):
    write(wanted.incoming, CONTENT)
    write(str(tmp_path / "old" / "x.incoming"), b"x")
    before = names(tmp_path)
    held = look([wanted], check=True)
    (planned,), changed = place(held, check=True, superseded=[f"{tmp_path}/old/*.incoming"])
    assert (planned.state, changed) == ("verified", True)
    assert names(tmp_path) == before
    Path(wanted.incoming).write_bytes(b"wrong")
    with pytest.raises(RolloutError, match="wrong SHA-256"):
        place(held, check=True, discard=True)
    assert os.path.exists(wanted.incoming)


def test_superseded_partials_go_once_all_is_placed(wanted, tmp_path):
    drafters = tmp_path / "drafters"
    write(str(drafters / "a" / "model.safetensors.incoming"), b"a")
    write(str(drafters / "b" / "model.safetensors.incoming"), b"b")
    write(str(drafters / "b" / "model.safetensors"), b"b")
    write(str(drafters / ".c" / "model.safetensors.incoming"), b"c")
    write(wanted.incoming, b"wrong")
    globs = [f"{drafters}/*/model.safetensors.incoming", f"{drafters}/none/*"]
    with pytest.raises(RolloutError):
        place(look([wanted]), superseded=globs)
    assert (drafters / "a" / "model.safetensors.incoming").exists(), "nothing goes before all is placed"
    Path(wanted.incoming).write_bytes(CONTENT)
    place(look([wanted]), superseded=globs)
    assert {path.name for path in drafters.iterdir()} == {"b", DIGEST}
    assert [path.name for path in (drafters / "b").iterdir()] == ["model.safetensors"]


def test_a_superseded_partial_that_stays_is_said(placed, tmp_path):
    (tmp_path / "old" / "x.incoming").mkdir(parents=True)
    with pytest.raises(RolloutError, match=r"superseded partial .*/old/x.incoming can't be removed"):
        place([], superseded=[f"{tmp_path}/old/*"])


# -- what travels between modules


def test_what_a_module_returned_can_be_given_again(placed):
    flip(placed.path, 3)
    for held in (look([placed]), to_me(look([placed]))):
        assert held_from_json(held[0].as_json()) == held[0]
    as_yaml = {**held[0].as_json(), "ranges": [[0, PIECE]], "incoming": ""}
    assert held_from_json(as_yaml) == held[0]


@pytest.mark.parametrize("ranges", [7, "x", [[1]], [[1, 2, 3]], [["a", "b"]], [None]])
def test_ranges_that_are_none(ranges):
    with pytest.raises(RolloutError, match="no byte ranges"):
        held_from_json({"path": "/x", "sha256": DIGEST, "state": "damaged", "ranges": ranges})


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([], "all files are here, verified"),
        ([Held("/d/a", "", "verified", 5)], "all files are here, verified"),
        ([Held("/d/a", "", "missing", 3_458_278_136)], "1 file to bring (a), 3.46 GB"),
        ([Held("/d/a", "", "missing")], "1 file to bring (a), 0.00 GB"),
        (
            [Held(f"/d/{name}", "", "missing", 10**9, here=5 * 10**8) for name in "abcd"],
            "4 files to bring (a, b, c, …), 4.00 GB; 2.00 GB of it are here already",
        ),
        (
            [Held("/d/a", "", "damaged", 10**9, ranges=((0, 10**7),)), Held("/d/b", "", "verified", 10**9)],
            "1 file to bring (a), 1.00 GB, 1 damaged; 0.99 GB of it are here already",
        ),
        (
            [Held("/d/a", "", "damaged", None, ranges=((0, 10**7),))],
            "1 file to bring (a), 0.00 GB, 1 damaged",
        ),
    ],
)
def test_summary(held, text):
    assert summary(held) == text


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("processor\t: 0\nflags\t\t: fpu aes avx\n", True),
        ("Features\t: fp asimd aes pmull\n", True),
        ("flags\t\t: fpu vaes avx\n", False),
        ("model name\t: aes\nflags\t\t: fpu\n", False),
    ],
)
def test_aes(cpuinfo, has, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(cpuinfo)

    def instead(path, **how):
        assert path == "/proc/cpuinfo"
        return (tmp_path / "cpuinfo").open(**how)

    monkeypatch.setattr(transfers, "open", instead, raising=False)
    assert transfers.has_aes() is has
