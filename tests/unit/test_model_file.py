"""A stamp is trusted exactly as long as nobody wrote to the file; a wrong file never gets its final name."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import mmap
import os
import stat
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest
from dflash_rollout import model_file
from dflash_rollout.errors import RolloutError
from dflash_rollout.model_file import (
    ModelFile,
    WrongDigest,
    damaged_ranges,
    examine,
    inspect,
    install,
    stamp_path,
    stamped_digest,
)
from hypothesis import given, settings
from hypothesis import strategies as st

CONTENT = b"weights" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def stamped(model: Path) -> Path:
    assert inspect(str(model)).read_bytes == len(CONTENT)
    assert inspect(str(model)).read_bytes == 0
    return model


def snapshot(folder: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_absent(tmp_path):
    assert inspect(str(tmp_path / "no")) == ModelFile(str(tmp_path / "no"), exists=False)


def test_first_look_reads_and_stamps_the_second_reads_nothing(model):
    first = inspect(str(model), sha256=DIGEST)
    assert first == ModelFile(str(model), True, DIGEST, 7000, read_bytes=7000, changed=False)
    status = model.stat()
    assert json.loads(Path(f"{model}.stamp").read_text()) == {
        "sha256": DIGEST,
        "device": status.st_dev,
        "inode": status.st_ino,
        "size": 7000,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }
    assert inspect(str(model), sha256=DIGEST.upper()).read_bytes == 0


def test_a_matching_stamp_opens_no_way_to_read(stamped, monkeypatch):
    def refuse(*arguments):
        raise AssertionError("the model was read")

    monkeypatch.setattr(os, "readv", refuse)
    assert inspect(str(stamped)).sha256 == DIGEST


def test_full_reads_though_stamped(stamped):
    assert inspect(str(stamped), verify="full").read_bytes == 7000


def flip_by_write(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.seek(100)
        stream.write(b"\0")


def flip_by_mmap(path: Path) -> None:
    with open(path, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
        mapped[100] = 0
        mapped.flush()


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"\0" * len(CONTENT))
    os.replace(other, path)


@pytest.mark.parametrize("alter", [flip_by_write, flip_by_mmap, replace])
def test_an_altered_file_with_its_mtime_put_back_is_found(stamped, alter):
    before = stamped.stat()
    alter(stamped)
    os.utime(stamped, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert stamped.stat().st_mtime_ns == before.st_mtime_ns
    with pytest.raises(RolloutError, match="wrong SHA-256") as caught:
        inspect(str(stamped), sha256=DIGEST)
    assert caught.value.expected == DIGEST
    assert hashlib.sha256(stamped.read_bytes()).hexdigest() in caught.value.found


def test_the_clock_ticks_between_the_last_write_and_the_first_read(model, monkeypatch):
    """Else a write during or after reading could have the ctime of the stamp."""
    ages = []
    real = os.readv

    def readv(descriptor, buffers):
        ages.append(time.time_ns() - os.fstat(descriptor).st_ctime_ns)
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", readv)
    model.chmod(0o644)  # now
    inspect(str(model))
    assert ages[0] >= 50_000_000


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stamp: stamp.write_text(""),
        lambda stamp: stamp.write_text('{"sha256": "'),
        lambda stamp: stamp.write_text("[]"),
        lambda stamp: stamp.write_bytes(b"\xff\xfe"),
        lambda stamp: stamp.write_text(stamp.read_text().replace(DIGEST, "f00")),
        lambda stamp: stamp.write_text(stamp.read_text().replace("}", ', "more": 1}')),
        lambda stamp: stamp.chmod(0o666),
        lambda stamp: stamp.rename(f"{stamp}.moved") and stamp.symlink_to(f"{stamp}.moved"),
    ],
)
def test_a_stamp_that_proves_nothing_is_written_anew(stamped, spoil):
    stamp = Path(f"{stamped}.stamp")
    spoil(stamp)
    assert inspect(str(stamped)) == ModelFile(str(stamped), True, DIGEST, 7000, read_bytes=7000)
    assert inspect(str(stamped)).read_bytes == 0
    assert not stamp.is_symlink()
    assert stat.S_IMODE(stamp.stat().st_mode) == 0o644


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file to somebody else")
def test_a_stamp_of_somebody_else_is_not_trusted(stamped):
    stamp = Path(f"{stamped}.stamp")
    stamp.write_text(stamp.read_text().replace(DIGEST, "0" * 64))
    os.chown(stamp, 65534, 65534)
    assert inspect(str(stamped)).sha256 == DIGEST


def test_bit_rot_under_a_matching_stamp_is_found_by_full(stamped):
    stamp = Path(f"{stamped}.stamp")
    stamp.write_text(stamp.read_text().replace(DIGEST, "0" * 64))
    assert inspect(str(stamped)).sha256 == "0" * 64
    with pytest.raises(RolloutError, match="altered though nobody wrote"):
        inspect(str(stamped), verify="full")


def test_stamp_in_another_folder(model, tmp_path):
    stamps = tmp_path / "cache" / "stamps"
    assert inspect(str(model), stamp_dir=str(stamps)).read_bytes == 7000
    assert inspect(str(model), stamp_dir=str(stamps)).read_bytes == 0
    assert not Path(f"{model}.stamp").exists()
    other = tmp_path / "other" / "model.safetensors"
    other.parent.mkdir()
    other.write_bytes(b"x")
    assert inspect(str(other), stamp_dir=str(stamps)).sha256 == hashlib.sha256(b"x").hexdigest()
    assert inspect(str(model), stamp_dir=str(stamps)).read_bytes == 0


def test_a_stamp_that_can_not_be_read_or_written_is_said(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RolloutError, match=r"stamp .* can't be read"):
        inspect(str(model), stamp_dir=str(tmp_path / "file"))
    with pytest.raises(RolloutError, match=r"stamp .* can't be written"):
        inspect(str(model), stamp_dir="/proc/stamps")


def test_a_link_to_a_model_is_followed(model, tmp_path):
    link = tmp_path / "snapshot.safetensors"
    link.symlink_to(model)
    assert inspect(str(link)).sha256 == DIGEST
    assert inspect(str(link)).read_bytes == 0


def test_a_link_to_nothing_is_no_absent_file(tmp_path):
    link = tmp_path / "model.safetensors"
    link.symlink_to("blobs/gone")
    with pytest.raises(RolloutError, match="link to nothing") as caught:
        inspect(str(link))
    assert "blobs/gone" in caught.value.found


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(RolloutError, match="isn't a file"):
            inspect(str(path))


@pytest.mark.parametrize("sha256", ["abc", "g" * 64, f"sha256:{DIGEST}"])
def test_an_expected_digest_that_is_none(model, sha256):
    with pytest.raises(RolloutError, match="expected SHA-256 isn't one"):
        inspect(str(model), sha256=sha256)


def test_a_file_that_is_written_to_while_read(model, monkeypatch):
    real = os.readv

    def write_meanwhile(descriptor, buffers):
        with open(model, "ab") as stream:
            stream.write(b"more")
        monkeypatch.setattr(os, "readv", real)
        return real(descriptor, buffers)

    monkeypatch.setattr(os, "readv", write_meanwhile)
    with pytest.raises(RolloutError, match="changed while it was read"):
        inspect(str(model))
    assert not Path(f"{model}.stamp").exists()


def test_a_time_ahead_of_the_clock_is_not_stamped(model, monkeypatch):
    monkeypatch.setattr(model_file.time, "time_ns", lambda: model.stat().st_ctime_ns - 10**9)
    assert inspect(str(model)).sha256 == DIGEST
    assert not Path(f"{model}.stamp").exists()


def test_check_mode_writes_no_stamp(model, tmp_path):
    before = snapshot(tmp_path)
    assert inspect(str(model), check=True).read_bytes == 7000
    assert snapshot(tmp_path) == before


def test_wrong_digest_writes_no_stamp(model, tmp_path):
    before = snapshot(tmp_path)
    with pytest.raises(RolloutError, match="wrong SHA-256"):
        inspect(str(model), sha256="0" * 64)
    assert snapshot(tmp_path) == before


def test_wrong_digest_is_found_from_the_stamp(stamped, monkeypatch):
    monkeypatch.setattr(os, "readv", None)
    with pytest.raises(RolloutError, match="wrong SHA-256"):
        inspect(str(stamped), sha256="0" * 64)


# -- putting in place


@pytest.fixture
def incoming(tmp_path: Path) -> Path:
    path = tmp_path / "incoming" / "model.safetensors.part"
    path.parent.mkdir()
    path.write_bytes(CONTENT)
    path.chmod(0o600)
    return path


def test_install(incoming, tmp_path):
    path = tmp_path / "model.safetensors"
    assert install(str(incoming), str(path), sha256=DIGEST) == ModelFile(
        str(path), True, DIGEST, 7000, read_bytes=7000, changed=True
    )
    assert not incoming.exists()
    assert path.read_bytes() == CONTENT
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert inspect(str(path), sha256=DIGEST).read_bytes == 0


def test_install_is_durable_in_the_right_order(incoming, tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "rename", "replace"):
        real = getattr(os, name)

        def spy(*arguments, name=name, real=real):
            first = arguments[0]
            calls.append((name, os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else first))
            return real(*arguments)

        monkeypatch.setattr(os, name, spy)
    install(str(incoming), str(tmp_path / "model.safetensors"))
    assert calls[:3] == [("fsync", str(incoming)), ("rename", str(incoming)), ("fsync", str(tmp_path))]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file to somebody else")
def test_install_takes_the_file_from_who_transferred_it(incoming, tmp_path):
    os.chown(incoming, 65534, 65534)
    path = tmp_path / "model.safetensors"
    install(str(incoming), str(path))
    assert (path.stat().st_uid, path.stat().st_gid) == (0, os.getegid())


HOLDER = """
import mmap, sys
stream = open(sys.argv[1], "r+b")
if sys.argv[2] == "map":
    held = mmap.mmap(stream.fileno(), 0)
    stream.close()
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(incoming):
    """Another process that has the file open for writing, or mapped and closed, until its standard input ends."""
    started = []

    def hold(how: str) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(incoming), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        started.append(process)
        process.stdout.readline()
        return process

    yield hold
    for process in started:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


@pytest.mark.parametrize("how", ["open", "map"])
def test_install_refuses_what_somebody_has_open_for_writing(incoming, held, tmp_path, monkeypatch, how):
    """An rsync of a run that lost its connection: it could go on writing to the file that serves."""
    monkeypatch.setattr(model_file, "WRITERS_LIMIT_S", 0.3)
    process = held(how)
    path = tmp_path / "model.safetensors"
    with pytest.raises(RolloutError, match="is still open for writing") as refused:
        install(str(incoming), str(path), sha256=DIGEST)
    if how == "open":
        assert refused.value.found.endswith(f"(pid {process.pid})")
    assert incoming.read_bytes() == CONTENT
    assert not path.exists()
    process.stdin.close()
    process.wait(10)
    assert install(str(incoming), str(path), sha256=DIGEST).changed


def test_install_waits_for_a_writer_that_ends(incoming, held, tmp_path):
    process = held("open")
    ending = threading.Timer(0.5, process.stdin.close)
    ending.start()
    assert install(str(incoming), str(tmp_path / "model.safetensors"), sha256=DIGEST).changed
    assert process.wait(5) == 0
    assert not ending.is_alive()


def test_a_reader_is_no_writer(incoming, tmp_path):
    with open(incoming, "rb"):
        assert install(str(incoming), str(tmp_path / "model.safetensors"), sha256=DIGEST).changed


def test_install_on_a_filesystem_without_leases(incoming, tmp_path, monkeypatch):
    real = fcntl.fcntl

    def without(descriptor, command, *arguments):
        if command == fcntl.F_SETLEASE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", without)
    assert install(str(incoming), str(tmp_path / "model.safetensors"), sha256=DIGEST).changed


def test_install_replaces_a_damaged_file(incoming, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"damaged")
    inspect(str(path))
    install(str(incoming), str(path), sha256=DIGEST)
    assert inspect(str(path), sha256=DIGEST).read_bytes == 0


def test_a_wrong_file_gets_no_final_name(incoming, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the old one")
    before = snapshot(tmp_path)
    with pytest.raises(RolloutError, match="wrong SHA-256") as caught:
        install(str(incoming), str(path), sha256="0" * 64)
    assert DIGEST in caught.value.found
    assert snapshot(tmp_path) == before


def test_install_in_check_mode(incoming, tmp_path):
    before, mode = snapshot(tmp_path), incoming.stat().st_mode
    result = install(str(incoming), str(tmp_path / "model.safetensors"), sha256=DIGEST, check=True)
    assert result.changed
    assert snapshot(tmp_path) == before
    assert incoming.stat().st_mode == mode


def test_install_of_nothing_and_of_a_link(incoming, tmp_path):
    with pytest.raises(RolloutError, match="is missing"):
        install(str(tmp_path / "no"), str(tmp_path / "model.safetensors"))
    link = tmp_path / "link"
    link.symlink_to(incoming)
    with pytest.raises(RolloutError, match="is a link"):
        install(str(link), str(tmp_path / "model.safetensors"))
    assert not (tmp_path / "model.safetensors").exists()


def test_install_into_no_folder(incoming, tmp_path):
    with pytest.raises(RolloutError, match="can't be renamed") as caught:
        install(str(incoming), str(tmp_path / "no" / "model.safetensors"), sha256=DIGEST)
    assert f"make the folder {tmp_path}/no first" in caught.value.remedy
    assert incoming.exists()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs a second filesystem")  # noqa: S108
def test_install_from_another_filesystem(tmp_path, request):
    incoming = Path(f"/dev/shm/test-model-file-{os.getpid()}")  # noqa: S108
    incoming.write_bytes(CONTENT)
    request.addfinalizer(incoming.unlink)
    if os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:  # noqa: S108
        pytest.skip("no second filesystem here")
    with pytest.raises(RolloutError, match="can't be renamed") as caught:
        install(str(incoming), str(tmp_path / "model.safetensors"))
    assert "same filesystem" in caught.value.remedy


def test_a_writer_that_outlives_the_rename_is_noticed(incoming, tmp_path, monkeypatch):
    real = os.rename

    def rename_and_write(source, target):
        real(source, target)
        with open(target, "ab") as stream:
            stream.write(b"late")

    monkeypatch.setattr(os, "rename", rename_and_write)
    path = tmp_path / "model.safetensors"
    with pytest.raises(RolloutError, match="written to while it was put in place"):
        install(str(incoming), str(path), sha256=DIGEST)
    assert not Path(f"{path}.stamp").exists()


# -- what is wrong with a file that we put there


@pytest.fixture
def ours(incoming, tmp_path, monkeypatch) -> Path:
    """A file of 7 pieces that was put in place by us."""
    monkeypatch.setattr(model_file, "PIECE_BYTES", 1000)
    path = tmp_path / "model.safetensors"
    install(str(incoming), str(path), sha256=DIGEST)
    return path


def test_install_keeps_the_checksums_of_the_pieces(ours):
    record = json.loads(Path(f"{ours}.pieces").read_text())
    assert record == {
        "sha256": DIGEST,
        "size": 7000,
        "piece_bytes": 1000,
        "adler32": [zlib.adler32(CONTENT[first : first + 1000]) for first in range(0, 7000, 1000)],
    }
    assert damaged_ranges(str(ours), DIGEST) == []


def test_examine(ours, tmp_path):
    assert examine(str(ours), DIGEST) == ("verified", ModelFile(str(ours), True, DIGEST, 7000))
    absent = str(tmp_path / "no")
    assert examine(absent, DIGEST.upper()) == ("missing", ModelFile(absent, exists=False))


def test_one_flipped_byte_with_its_mtime_put_back_is_damage_of_one_piece(ours):
    before = ours.stat()
    flip_by_write(ours)
    os.utime(ours, ns=(before.st_atime_ns, before.st_mtime_ns))
    state, seen = examine(str(ours), DIGEST)
    assert (state, seen.read_bytes, seen.size) == ("damaged", 7000, 7000)
    assert seen.sha256 == hashlib.sha256(ours.read_bytes()).hexdigest()
    assert damaged_ranges(str(ours), DIGEST) == [(0, 1000)]
    assert json.loads(Path(f"{ours}.stamp").read_text())["sha256"] == DIGEST, "it still vouches"


def test_damage_is_found_in_a_copy_too(ours, tmp_path):
    copy = tmp_path / "copy"
    content = bytearray(CONTENT)
    content[6999] ^= 1
    copy.write_bytes(content)
    assert damaged_ranges(str(ours), DIGEST, str(copy)) == [(6000, 7000)]
    copy.write_bytes(CONTENT[:2500])
    assert damaged_ranges(str(ours), DIGEST, str(copy))[0] == (2000, 3000)
    assert damaged_ranges(str(ours), DIGEST, str(tmp_path / "none")) is None


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 6999])
def test_what_is_cut_off_is_damaged(ours, size):
    os.truncate(ours, size)
    ranges = damaged_ranges(str(ours), DIGEST)
    assert ranges[0][0] == size // 1000 * 1000
    assert ranges[-1][1] == 7000
    assert [end for _, end in ranges[:-1]] == [first for first, _ in ranges[1:]]


@pytest.mark.parametrize("spoil", ["gone", "cut short", "another digest", "another piece size", "a list"])
def test_without_checksums_nothing_is_known_of_pieces(ours, spoil, monkeypatch):
    record = Path(f"{ours}.pieces")
    flip_by_write(ours)
    if spoil == "gone":
        record.unlink()
    elif spoil == "cut short":
        record.write_text(record.read_text()[:-9])
    elif spoil == "another piece size":
        monkeypatch.setattr(model_file, "PIECE_BYTES", 500)
    elif spoil == "a list":
        record.write_text("[]")
    assert damaged_ranges(str(ours), DIGEST if spoil != "another digest" else "0" * 64) is None


def test_any_one_of_three_vouches_for_a_damaged_file(model, tmp_path):
    inspect(str(model))
    flip_by_write(model)
    assert examine(str(model), DIGEST)[0] == "damaged"  # its stamp
    stamps = tmp_path / "stamps"
    Path(f"{model}.stamp").rename(tmp_path / "elsewhere")
    with pytest.raises(WrongDigest):
        examine(str(model), DIGEST, stamp_dir=str(stamps))
    stamps.mkdir()
    (tmp_path / "elsewhere").rename(stamp_path(str(model), str(stamps)))
    assert examine(str(model), DIGEST, stamp_dir=str(stamps))[0] == "damaged"  # its stamp in another folder
    with pytest.raises(WrongDigest):
        examine(str(model), DIGEST)
    Path(f"{model}.pieces").write_text(json.dumps({"sha256": DIGEST}))
    assert examine(str(model), DIGEST)[0] == "damaged"  # its checksums
    named = tmp_path / DIGEST / "x"
    named.parent.mkdir()
    named.write_bytes(b"")
    assert examine(str(named), DIGEST)[0] == "damaged"  # a folder of ours


@pytest.mark.parametrize("record", ["stamp", "pieces"])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": null}', '{"sha256": "0"}', "\xff"])
def test_a_file_that_we_never_vouched_for_is_refused(model, record, text, tmp_path):
    Path(f"{model}.{record}").write_text(text, encoding="latin-1")
    before = snapshot(tmp_path)
    with pytest.raises(WrongDigest, match="wrong SHA-256") as caught:
        examine(str(model), "0" * 64)
    assert DIGEST in caught.value.found
    assert snapshot(tmp_path) == before


def test_another_file_of_known_digest_is_refused_without_reading_it(stamped, monkeypatch):
    monkeypatch.setattr(os, "readv", None)
    with pytest.raises(WrongDigest):
        examine(str(stamped), "0" * 64)


def test_stamped_digest_reads_no_byte(stamped, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "readv", None)
    assert stamped_digest(str(stamped)) == DIGEST
    assert stamped_digest(str(stamped), str(tmp_path / "stamps")) is None
    assert stamped_digest(str(tmp_path / "no")) is None
    flip_by_write(stamped)
    assert stamped_digest(str(stamped)) is None


def test_pieces_that_can_not_be_written_are_said(incoming, tmp_path):
    (tmp_path / "model.safetensors.pieces").mkdir()
    with pytest.raises(RolloutError, match=r"pieces can't be written"):
        install(str(incoming), str(tmp_path / "model.safetensors"))


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.integers(0, 6999), st.integers(1, 255), min_size=1, max_size=8))
def test_any_flipped_bytes_are_in_the_damaged_ranges(tmp_path_factory, flips):
    folder = tmp_path_factory.mktemp("flips")
    path, arrived = folder / "x", folder / "x.incoming"
    arrived.write_bytes(CONTENT)
    content = bytearray(CONTENT)
    for offset, bits in flips.items():
        content[offset] ^= bits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_file, "PIECE_BYTES", 1000)
        patch.setattr(model_file, "CLOCK_TICK_NS", 0)
        install(str(arrived), str(path))
        path.write_bytes(content)
        ranges = damaged_ranges(str(path), DIGEST)
    assert ranges == [(piece * 1000, piece * 1000 + 1000) for piece in sorted({o // 1000 for o in flips})]
    for first, end in ranges:
        content[first:end] = CONTENT[first:end]
    assert hashlib.sha256(content).hexdigest() == DIGEST
