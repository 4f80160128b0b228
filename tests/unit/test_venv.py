"""Installing with a simulated uv: a shell script that does what it is told and writes down how it was called."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from dflash_rollout import venv
from dflash_rollout.errors import RolloutError
from dflash_rollout.venv import Index, Wanted, driver_fault, ensure, failure

LOCK, UV_LOCK = "vllm==0.20.1 --hash=…\n", "uv==0.13.9 --hash=…\n"
SIMULATED_UV = """#!/bin/sh
# simulated uv
printf '%s\\n' "$@" >> {log}; env >> {log}
case $1 in
venv) for last; do :; done; mkdir -p "$last/bin"; touch "$last/.lock"; chmod 666 "$last/.lock"
  cp {root}/python "$last/bin/python"; chmod 755 "$last/bin/python";;
pip) test -e {root}/fail && {{ cat {root}/fail; exit 2; }}
  test -e {root}/die && kill -9 $$
  touch {partial}/bin/vllm;;
esac
"""
ANSWER = {"faults": [], "vllm": "0.20.1", "cuda": "13.0"}


@pytest.fixture
def wanted(tmp_path, monkeypatch) -> Wanted:
    """An installation that has uv already; nvidia-smi is not there."""
    monkeypatch.setattr(venv, "_drivers", list)
    root = tmp_path / "root"
    made = Wanted(
        root=str(root),
        digest=venv.digest_of(LOCK),
        lock=LOCK,
        version="0.20.1",
        uv_digest=venv.digest_of(UV_LOCK),
        uv_lock=UV_LOCK,
        python=sys.executable,
    )
    simulate(made, tmp_path, ANSWER)
    return made


def simulate(wanted: Wanted, tmp_path, answer: dict) -> None:
    path = os.path.join(wanted.uv, "bin", "uv")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # The probe runs as a user without rights, and pytest's folders are closed.
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        if folder.owner() == "root" and os.geteuid() == 0:
            folder.chmod(0o755)
    partial = venv._partial(wanted.venv)
    text = SIMULATED_UV.format(root=wanted.root, partial=partial, log=tmp_path / "called")
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
    os.chmod(path, 0o755)  # noqa: S103
    with open(f"{wanted.root}/python", "w", encoding="utf-8") as stream:
        stream.write(f"#!/bin/sh\ncat > /dev/null\necho '{json.dumps(answer)}'\n")


def test_a_venv_is_complete_under_its_name(wanted):
    old = os.umask(0o077)
    try:
        assert ensure(wanted) == {
            "changed": True,
            "warnings": [],
            "found": {"vllm": "0.20.1", "cuda": "13.0"},
        }
    finally:
        os.umask(old)
    assert sorted(os.listdir(os.path.join(wanted.root, "venvs"))) == [wanted.digest, f"{wanted.digest}.txt"]
    assert stat.S_IMODE(os.stat(wanted.venv).st_mode) == 0o755
    assert not os.path.exists(os.path.join(wanted.venv, ".lock"))
    assert stat.S_IMODE(os.stat(wanted.cache).st_mode) == 0o700
    assert ensure(wanted)["changed"] is False


def test_a_killed_uv_leaves_nothing_under_the_name_and_the_next_run_succeeds(wanted):
    other = os.path.join(wanted.root, "venvs", "0123456789abcdef")
    stale = os.path.join(wanted.root, "venvs", ".fedcba9876543210.partial")
    for folder in (other, stale):
        os.makedirs(folder)
    open(f"{wanted.root}/die", "w").close()
    with pytest.raises(RolloutError, match=r"killed by signal 9.*run again"):
        ensure(wanted)
    assert not os.path.exists(wanted.venv)
    assert not os.path.exists(stale)
    os.unlink(f"{wanted.root}/die")
    assert ensure(wanted)["changed"] is True
    assert os.path.isdir(other)


def test_what_the_probe_finds_is_refused_before_the_venv_has_its_name(wanted, tmp_path):
    fault = ["no DFlashProposer", "a vLLM with DFlash", "use a locked version"]
    simulate(wanted, tmp_path, {**ANSWER, "faults": [fault]})
    with pytest.raises(RolloutError) as caught:
        ensure(wanted)
    assert (caught.value.found, caught.value.expected, caught.value.remedy) == tuple(fault)
    assert not os.path.exists(wanted.venv)


def test_credentials_travel_in_the_environment_alone(wanted, tmp_path):
    index = Index("https://packages.example.com/simple", "me", "s3cr:t/")
    ensure(replace(wanted, index=index))
    called = (tmp_path / "called").read_text()
    assert "UV_DEFAULT_INDEX=https://me:s3cr%3At%2F@packages.example.com/simple" in called
    assert not [line for line in called.splitlines() if "s3cr" in line and "=" not in line]
    for folder, _, names in os.walk(wanted.root):
        for name in names:
            with open(os.path.join(folder, name), encoding="utf-8") as stream:
                assert "s3cr" not in stream.read()


def test_a_wheelhouse_is_the_only_source_and_goes_afterwards(wanted, tmp_path):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    ensure(replace(wanted, find_links=str(wheels), index=Index("https://packages.example.com/simple")))
    called = (tmp_path / "called").read_text().splitlines()
    assert "--no-index" in called
    assert f"--find-links={wheels}" in called
    assert not [line for line in called if line.startswith("UV_DEFAULT_INDEX")]
    assert not wheels.exists()


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (Index("https://me:pw@packages.example.com/simple"), "credentials"),
        (Index("", "me", "pw"), "without vllm_index_url"),
        (Index("packages.example.com/simple"), "no URL"),
    ],
)
def test_an_index_that_is_none(index, words):
    with pytest.raises(RolloutError, match=words) as caught:
        index.variables()
    assert "pw" not in str(caught.value)


@pytest.mark.parametrize(
    ("output", "remedy"),
    [
        ("error: Hash mismatch for `six==1.17.0`", "another file under that name"),
        ("HTTP status client error (401 Unauthorized) for url (https://u:pw@x/)", "vllm_index_password"),
        ("error: Request failed\n  Caused by: dns error: failed to lookup address", "air-gapped"),
        ("× No solution found when resolving dependencies: six was not found in the provided package locations",
         "wheelhouse.yml"),
        ("error: failed to copy: No space left on device (os error 28)", "rollout_root"),
        ("error: something new", "run again"),
    ],
)  # fmt: skip
def test_what_uv_says_has_a_remedy(wanted, output, remedy):
    error = failure("install vLLM", 2, output, 50 * 10**9, wanted)
    assert remedy in error.remedy
    assert "pw" not in str(error)


def test_a_full_disk_is_told_by_what_is_left(wanted):
    assert "is full" in str(failure("install vLLM", 2, "Bus error", 10**6, wanted))


def test_driver_and_cuda():
    assert driver_fault("13.0", ["580.95.05", "575.1"])[0][0] == "NVIDIA driver 575.1"
    assert driver_fault("13.0", ["580.95.05"]) == driver_fault("12.8", ["525.60.13"]) == []
    assert driver_fault(None, ["1"]) == driver_fault("13.0", []) == []


def test_a_python_in_a_closed_folder(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    python = closed / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    with pytest.raises(RolloutError, match="user without rights"):
        venv.probe(str(python), "0.20.1")


def test_the_real_probe_where_there_is_no_vllm():
    """A sentence, where an import would end in a traceback."""
    source = venv.pkgutil.get_data("dflash_rollout", "venv_probe.py")
    done = subprocess.run(
        [sys.executable, "-I", "-B", "-", "0.20.1"], input=source, capture_output=True, check=True, cwd="/"
    )
    answer = json.loads(done.stdout)
    assert answer == {
        "faults": [["no vLLM in this venv", "vLLM 0.20.1", answer["faults"][0][2]]],
        "vllm": None,
    }
    assert done.stderr == b""
