"""The action plugins control_file, model_source and push_files, by ansible-playbook on this machine (connection local)."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import encode  # noqa: E402


@pytest.fixture
def play(tmp_path):
    """`play(task, ..., check=False) -> [result, ...]`: tasks ({module: options}) in one play, each with its result."""

    def run(*tasks: dict, check: bool = False) -> list[dict]:
        out = tmp_path / "results.json"
        steps = []
        for number, task in enumerate(tasks):
            steps.append({**task, "register": f"result{number}", "ignore_errors": True})
        names = ", ".join(f"result{number}" for number in range(len(tasks)))
        keep = {"content": f"{{{{ [{names}] | to_json }}}}", "dest": str(out)}
        steps.append({"ansible.builtin.copy": keep, "check_mode": False})
        book = tmp_path / "play.yml"
        book.write_text(
            json.dumps([{"hosts": "box", "gather_facts": False, "connection": "local", "tasks": steps}])
        )
        done = subprocess.run(
            [
                Path(sys.executable).with_name("ansible-playbook"),
                "-i", "box,", *(["--check"] if check else []),
                "-e", f"ansible_python_interpreter={sys.executable}", book,
            ],
            cwd=REPOSITORY,
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(REPOSITORY / "ansible.cfg"),
                "ANSIBLE_LOCAL_TEMP": str(tmp_path / "ansible"),
                "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.default",
            },
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        return json.loads(out.read_text())

    return run


# -- model_source


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


WEIGHTS = encode({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"abc")


def source(path: Path, cache: Path, **options) -> dict:
    return {"model_source": {"path": str(path), "cache": str(cache), **options}}


def test_model_source_of_a_file(play, tmp_path):
    path, cache = tmp_path / "model.safetensors", tmp_path / "cache" / "stamps"
    path.write_bytes(WEIGHTS)
    first, second, full, wrong, pinned = play(
        source(path, cache, header=True),
        source(path, cache, header=True),
        source(path, cache, verify="full"),
        source(path, cache, sha256="0" * 64),
        source(path, cache, sha256=sha(WEIGHTS).upper()),
    )
    entry = {"name": "", "source": str(path), "sha256": sha(WEIGHTS), "size": len(WEIGHTS)}
    for result in (first, second, full, pinned):
        assert (result["files"], result["sha256"], result["size"]) == ([entry], sha(WEIGHTS), len(WEIGHTS))
        assert result["changed"] is False
    assert first["header"]["tensors"] == {"a": {"dtype": "U8", "shape": [3]}} == second["header"]["tensors"]
    assert "header" not in full
    assert [result["read_bytes"] for result in (first, second, full)] == [len(WEIGHTS), 0, len(WEIGHTS)]
    assert wrong["failed"]
    assert f"{path} has the wrong SHA-256. Found: {sha(WEIGHTS)}" in wrong["msg"]
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix == ".stamp"] == []


def test_model_source_of_a_folder(play, tmp_path):
    cache = tmp_path / "cache"
    results = {}
    for name, tensor in (("one", "a"), ("two", "b")):
        folder = tmp_path / name
        (folder / "sub").mkdir(parents=True)
        (folder / ".git").mkdir()
        weights = encode({tensor: {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}, b"abc")
        for file, content in {
            "LICENSE": b"free", "model.safetensors": weights, "sub/x.json": b"{}", ".hidden": b"", ".git/HEAD": b"",
        }.items():  # fmt: skip
            (folder / file).write_bytes(content)
        results[name] = {"LICENSE": sha(b"free"), "model.safetensors": sha(weights), "sub/x.json": sha(b"{}")}
    one, two = tmp_path / "one", tmp_path / "two"
    good, other, wrong, lacking = play(
        source(one, cache, header=True, digests={"LICENSE": sha(b"free")}),
        source(two, cache, header=True),
        source(one, cache, digests={"sub/x.json": "0" * 64}),
        source(one, cache, digests={"model-2.safetensors": "0" * 64, "LICENSE": sha(b"free")}),
    )
    assert {file["name"]: file["sha256"] for file in good["files"]} == results["one"]
    assert {file["name"]: file["sha256"] for file in other["files"]} == results["two"]
    assert good["files"][2]["source"] == f"{one}/sub/x.json"
    assert good["sha256"] == ""
    assert good["size"] == sum(file["size"] for file in good["files"]) == good["read_bytes"]
    # The first file of both is the same.
    assert (list(good["header"]["tensors"]), list(other["header"]["tensors"])) == (["a"], ["b"])
    assert wrong["failed"]
    assert f"{one}/sub/x.json has the wrong SHA-256" in wrong["msg"]
    assert lacking["failed"]
    assert "lacks files whose SHA-256 is pinned. Found: model-2.safetensors." in lacking["msg"]


def test_model_source_of_what_is_not_there(play, tmp_path):
    cache = tmp_path / "cache"
    (tmp_path / "empty").mkdir()
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors").symlink_to("../blobs/gone")
    (tmp_path / "text").write_text("version https://git-lfs.github.com/spec/v1\n")
    missing, empty, gone, pointer, nowhere = play(
        source(tmp_path / "no.safetensors", cache),
        source(tmp_path / "empty", cache),
        source(tmp_path / "hub", cache),
        source(tmp_path / "text", cache, header=True),
        source(tmp_path / "text", Path("/proc/cache")),
    )
    assert all(result["failed"] for result in (missing, empty, gone, pointer, nowhere))
    assert f"{tmp_path}/no.safetensors is not on the control node. Expected: the model file" in missing["msg"]
    assert f"{tmp_path}/empty is empty" in empty["msg"]
    assert "model.safetensors is a link to nothing. Found: a link to ../blobs/gone" in gone["msg"]
    assert "Git-LFS pointer" in pointer["msg"]
    assert "can't be looked at" in nowhere["msg"]


# -- push_files

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="needs rsync")
SIZE = 40 << 20


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> tuple[Path, str]:
    """40 MB that can't be compressed, and their digest."""
    path = tmp_path_factory.mktemp("source") / "model.safetensors"
    content = random.Random(7).randbytes(SIZE)  # noqa: S311
    path.write_bytes(content)
    return path, sha(content)


def pushed(file: dict, **options) -> list[dict]:
    """What the role does: look, then push what is missing, then look again."""
    look = {"model_files": {"files": [file], "verify": "full"}}
    push = {"push_files": {"files": "{{ result0.missing }}", **options}}
    return [look, push, look]


@needs_rsync
def test_push_files_sends_goes_on_and_repairs(play, weights, tmp_path):
    path, digest = weights
    there = tmp_path / "host" / digest / "model.safetensors"
    incoming = Path(f"{there}.incoming")
    file = {"path": str(there), "sha256": digest, "size": SIZE, "source": str(path)}

    looked, planned, still = play(*pushed(file), check=True)
    assert planned["changed"]
    assert planned["msg"] == "1 file to bring (model.safetensors), 0.04 GB"
    assert "sent_bytes" not in planned
    assert still["missing"] == looked["missing"]
    assert not (tmp_path / "host").exists()

    old = tmp_path / "host" / "old" / "model.safetensors.incoming"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"half of another")
    _, sent, held = play(*pushed(file, superseded=[f"{tmp_path}/host/*/*.incoming"]))
    assert sent["changed"]
    assert SIZE <= sent["sent_bytes"] < SIZE * 1.01
    assert held["missing"] == []
    assert sorted(entry.name for entry in there.parent.iterdir()) == [
        "model.safetensors", "model.safetensors.pieces", "model.safetensors.stamp",
    ]  # fmt: skip
    assert not old.parent.exists()

    _, nothing, _ = play(*pushed(file))
    assert (nothing["changed"], nothing["sent_bytes"]) == (False, 0)

    # One flipped byte, the mtime put back.
    before = there.stat()
    with open(there, "r+b") as stream:
        stream.seek(SIZE // 2)
        byte = stream.read(1)[0]
        stream.seek(SIZE // 2)
        stream.write(bytes([byte ^ 1]))
    os.utime(there, ns=(before.st_atime_ns, before.st_mtime_ns))
    found, mended, held = play(*pushed(file))
    assert found["missing"][0]["state"] == "damaged"
    assert mended["changed"]
    assert 0 < mended["sent_bytes"] <= SIZE // 100
    assert held["missing"] == []
    assert not incoming.exists()

    # A transfer that was cut off at 60 %.
    there.rename(incoming)
    for record in ("stamp", "pieces"):
        Path(f"{there}.{record}").unlink()
    os.truncate(incoming, SIZE * 6 // 10)
    found, went_on, held = play(*pushed(file))
    assert found["missing"][0]["here"] == SIZE * 6 // 10
    assert SIZE * 4 // 10 <= went_on["sent_bytes"] <= SIZE * 45 // 100
    assert held["missing"] == []
    assert hashlib.sha256(there.read_bytes()).hexdigest() == digest


@needs_rsync
def test_push_files_that_can_not_be_sent(play, tmp_path):
    file = {
        "path": str(tmp_path / "host" / "x"),
        "sha256": "0" * 64,
        "size": 3,
        "source": str(tmp_path / "gone"),
    }
    other = {**file, "source": str(tmp_path / "other")}
    (tmp_path / "other").write_bytes(b"abc")
    gone, wrong, too_big = play(
        {"push_files": {"files": [file]}},
        {"push_files": {"files": [other]}},
        {"push_files": {"files": [{**other, "size": 1 << 60}]}},
    )
    assert all(result["failed"] for result in (gone, wrong, too_big))
    assert f"{tmp_path}/gone could not be sent. Found: rsync: " in gone["msg"]
    assert "No such file" in gone["msg"]
    assert gone["sent_bytes"] == 0
    assert f"{tmp_path}/host/x.incoming has the wrong SHA-256" in wrong["msg"]
    assert (tmp_path / "host" / "x.incoming").read_bytes() == b"abc", "kept: a next run mends it"
    assert not (tmp_path / "host" / "x").exists()
    assert "too little space" in too_big["msg"]


def test_push_files_ends_at_its_limit(play, tmp_path, monkeypatch):
    """With a stand-in for rsync that would go on for a minute."""
    (tmp_path / "bin").mkdir()
    rsync = tmp_path / "bin/rsync"
    rsync.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid\nexec sleep 60\n")
    rsync.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "source").write_bytes(b"abc")
    file = {
        "path": str(tmp_path / "host/x"),
        "sha256": "0" * 64,
        "size": 3,
        "source": str(tmp_path / "source"),
    }
    (late,) = play({"push_files": {"files": [file], "limit_s": 2}})
    assert late["failed"]
    assert f"{tmp_path}/source was not sent within 2 s (transfer_limit)" in late["msg"]
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


# -- control_file


def test_control_file(play, tmp_path):
    path = tmp_path / "records" / "new" / "gpu1.json"
    task = {"control_file": {"path": str(path), "content": "{}\n"}, "diff": True}
    (planned,) = play(task, check=True)
    assert planned["changed"]
    assert not path.parent.exists()
    made, again, other = play(
        task, task, {"control_file": {"path": str(path), "content": "[]\n"}, "diff": True}
    )
    assert (made["changed"], again["changed"], other["changed"]) == (True, False, True)
    assert (other["diff"]["before"], other["diff"]["after"]) == ("{}\n", "[]\n")
    assert path.read_text() == "[]\n"
    (tmp_path / "file").touch()
    (refused,) = play({"control_file": {"path": str(tmp_path / "file" / "x.json"), "content": ""}})
    assert refused["failed"]
    assert "can't be written on the control node. Found: " in refused["msg"]
