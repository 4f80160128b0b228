"""Installs on hosts that have nothing and no way out: interrupted in every way, and a whole lock of the real vLLM.

The release layer of the other tests is the first lock from the registry, by the same role. What is interrupted here is
the install of a small lock: a few of the real wheels, and simulated wheels of vLLM and torch, big enough for that.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path

import pytest
from drafters import drafter_shapes

from .conftest import ROOT, WORKER, Fleet, Play, _boot, bed
from .test_launch_check import CACHE, DRAFTER, FLAGS, FOLDER, SANDBOX, put_drafter, to_yaml

pytestmark = [pytest.mark.booted]

INSTALL = "tests/testbed/layer.yml"
VENVS = "/opt/vllm-dflash/venvs"
LOCK = ROOT / "roles/vllm/files/locks/vllm-0.20.1.txt"
SIMULATED = "0.20.1+simulated"
SECOND = "0.26.0"


@pytest.fixture
def bare(bootable, request):
    """A host on the base image alone, with the full-size target; `request.param` are options of `bed.py up`."""
    name = f"vn{WORKER}"
    bed("down", name)
    yield Fleet(_boot(name, 1, "--no-sglang", *request.param), Path("/nonexistent"))
    bed("down", name)


def simulated_wheel(folder: Path, name: str, files: dict[str, str | bytes], scripts: str = "") -> str:
    """Write a wheel; returns its line for a lock."""
    info = f"{name}-{SIMULATED}.dist-info"
    files = files | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {SIMULATED}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: simulated\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{scripts}",
    }
    path = folder / f"{name}-{SIMULATED}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
        record = "".join(f"{inside},,\n" for inside in [*files, f"{info}/RECORD"])
        archive.writestr(f"{info}/RECORD", record)
    return f"{name}=={SIMULATED} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def small_lock(bare, tmp_path, monkeypatch) -> dict[str, str]:
    """The variables of an install from a lock that is small. Its simulated wheels are found beside the index by pip and by uv."""
    folder = tmp_path / "simulated"
    folder.mkdir()
    library = bare.hosts[0].run(
        "cd $(mktemp -d) && gcc -shared -o lib.so -x c /dev/null && base64 -w 0 lib.so"
    )
    vllm = {
        "vllm/__init__.py": "def main(): raise SystemExit('simulated')\n",
        "vllm/_C.so": base64.b64decode(library),
        "vllm/v1/spec_decode/dflash.py": "class DFlashProposer: ...\n",
        "vllm/v1/attention/backends/tree_attn.py": "class TreeAttentionBackend: ...\n",
    }
    torch = {"torch/__init__.py": "", "torch/weight": os.urandom(48 << 20)}
    # Bytecode is made of these: seconds, in which the install can be stopped.
    torch |= {f"torch/simulated{number}.py": f"A = {number}\n" * 200 for number in range(600)}
    real = re.findall(r"^(?:markupsafe|msgspec|pyyaml)==.*\n(?: .*\n)*", LOCK.read_text(), re.M)
    assert len(real) == 3
    lock = tmp_path / "lock.txt"
    lock.write_text(
        "".join(real)
        + simulated_wheel(folder, "vllm", vllm, "vllm = vllm:main\n")
        + simulated_wheel(folder, "torch", torch)
    )
    for program in ("PIP", "UV"):
        monkeypatch.setenv(f"{program}_FIND_LINKS", str(folder))
    return {
        "__vllm_lock": str(lock),
        "vllm_version": SIMULATED,
        "vllm_wheelhouse": str(tmp_path / "wheelhouse"),
        # So that libtorrent is among the wheels.
        "drafter_transport": "swarm",
    }


def begin(fleet: Fleet, variables: dict[str, str]) -> tuple[subprocess.Popen, Path]:
    """The install, running and then halted in the middle: uv has put some of the packages into a venv that has no name yet.

    Its output goes to a file. It has ssh connections of its own, since they may be cut.
    """
    # What an interrupted one left is there until uv is about to run: only with uv is it the one to stop.
    there = f"test -e {VENVS}/.*.partial/lib/python3*/site-packages/torch"
    halt = f"until {there} && pkill -STOP -x uv; do sleep 0.02; done"
    fleet.hosts[0].run(f"systemd-run --quiet --collect sh -c '{halt}'")
    folder = Path(tempfile.mkdtemp(prefix="cp"))
    command = ["ansible-playbook", "-i", str(fleet.inventory), INSTALL, "-e", json.dumps(variables)]
    environment = {**os.environ, "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder)}
    with (folder / "output").open("w") as output:
        running = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    fleet.hosts[0].wait("ps -C uv -o stat= | grep -q T", seconds=120)
    return running, folder / "output"


def flat(output: str) -> str:
    """Without the line breaks of the callback."""
    return " ".join(output.split())


def launch_check(host, tmp_path, python: str, flags: dict | None = None) -> dict:
    """As a user without rights in a sandbox, with nothing cached."""
    put_drafter(host, tmp_path, DRAFTER, drafter_shapes())
    host.put(to_yaml(FLAGS | (flags or {})), f"{FOLDER}/vllm.yaml")
    host.run(f"rm -rf {CACHE} /var/cache/private/launch-check")
    return host.module(
        "vllm_launch_check", python=python, config=f"{FOLDER}/vllm.yaml", unit_properties=SANDBOX
    )


def venvs(host) -> list[str]:
    """What stands there under a name of its own, but for the locks."""
    return [name for name in host.run(f"ls -A {VENVS}").split() if name[0] != "." and name[-4:] != ".txt"]


@pytest.mark.parametrize("bare", [["--no-outside"]], indirect=True)
def test_without_a_way_out_and_interrupted(bare, small_lock, tmp_path):
    (host,) = bare.hosts

    # No wheels for this kind of host: refused with the command that makes them.
    play = bare.play(INSTALL, **small_lock)
    assert play.status != 0
    assert "Make it: ansible-playbook playbooks/wheelhouse.yml" in flat(play.output)

    # Made before there was a swarm, it lacks libtorrent: not complete any more.
    play = bare.play("playbooks/wheelhouse.yml", **small_lock | {"drafter_transport": "rsync"})
    assert play.status == 0, play.output
    play = bare.play(INSTALL, **small_lock)
    assert "has no complete" in flat(play.output), play.output

    play = bare.play("playbooks/wheelhouse.yml", **small_lock)
    assert play.status == 0, play.output
    again = bare.play("playbooks/wheelhouse.yml", **small_lock)
    assert again.recap[host.name]["changed"] == 0, again.output

    # On a machine that can't reach the hosts, the kind that the refusal named leads to the same folder.
    (made,) = Path(small_lock["vllm_wheelhouse"]).iterdir()
    kind = made.name.split("-", 1)[1]
    elsewhere = {**small_lock, "vllm_wheelhouse": str(tmp_path / "elsewhere")}
    bed("power-cut", host.bed, "gpu1")
    play = bare.play("playbooks/wheelhouse.yml", **elsewhere, vllm_wheelhouse_kind=kind)
    assert play.status == 0, play.output
    there = tmp_path / "elsewhere" / made.name
    assert {path.name for path in there.iterdir()} == {path.name for path in made.iterdir()}
    bed("power-on", host.bed, "gpu1")

    # A disk that is too small: said so, and nothing under the name.
    host.run(f"mkdir -p {VENVS} && mount -t tmpfs -o size=24m tmpfs {VENVS}")
    play = bare.play(INSTALL, **small_lock)
    assert play.status != 0
    assert "/opt/vllm-dflash is full" in flat(play.output), play.output
    assert venvs(host) == []
    host.run(f"umount {VENVS}")

    # A venv in use, as the interrupted installs find it.
    used = "00000000000000aa"
    host.run(f"mkdir -p {VENVS}/{used}/bin && echo used > {VENVS}/{used}/bin/vllm")

    running, output = begin(bare, small_lock)
    host.run("pkill -KILL -x uv")
    assert running.wait(timeout=120) != 0
    assert "killed by signal 9" in flat(output.read_text()), output.read_text()
    assert venvs(host) == [used]

    running, _ = begin(bare, small_lock)
    bed("power-cut", host.bed, "gpu1")
    running.terminate()
    running.wait(timeout=120)
    bed("power-on", host.bed, "gpu1")
    assert venvs(host) == [used]

    begun = time.monotonic()
    play = bare.play(INSTALL, **small_lock)
    assert play.status == 0, play.output
    print(f"install from the wheelhouse after interruptions: {time.monotonic() - begun:.0f} s")
    assert host.run(f"cat {VENVS}/{used}/bin/vllm") == "used"
    # By its name: the digest of the lock may begin like the other's.
    (made,) = set(venvs(host)) - {used}
    assert "simulated" in host.run(f"{VENVS}/{made}/bin/vllm 2>&1", check=False)
    assert not host.run(f"ls -d {VENVS}/.*.partial", check=False)
    assert host.run("ls /opt/vllm-dflash/wheelhouse") == ""
    assert host.run("ls -d /root/.cache /root/.local /root/.config 2>/dev/null", check=False) == ""
    assert host.run("find /opt/vllm-dflash -xdev -type f -perm -0002 -not -path '*/uv-cache/*'") == ""
    assert host.run("stat -c %a /opt/vllm-dflash/uv-cache") == "700"
    assert bare.play(INSTALL, **small_lock).recap[host.name]["changed"] == 0

    play = bare.play("bench/plays/swarm.yml", **small_lock)
    assert play.status == 0, play.output
    host.run("/opt/vllm-dflash/transfer/*/bin/python -c 'import libtorrent'")


@pytest.mark.real_vllm
@pytest.mark.skipif(
    os.environ.get("CI") != "true" and "SECOND_LOCK" not in os.environ,
    reason="downloads 4 GB more: set SECOND_LOCK=1 (CI does it)",
)
@pytest.mark.parametrize("bare", [["--no-outside"]], indirect=True)
def test_the_second_lock_from_a_wheelhouse_honours_the_window(bare, tmp_path):
    """Every real wheel of vLLM 0.26.0 by way of the control node; its launch check, cold, builds the drafter's four windows."""
    (host,) = bare.hosts
    variables = {"vllm_version": SECOND, "vllm_wheelhouse": str(tmp_path / "wheelhouse")}
    for playbook in ("playbooks/wheelhouse.yml", INSTALL):
        begun = time.monotonic()
        play: Play = bare.play(playbook, **variables)
        assert play.status == 0, play.output
        print(f"{playbook}: {time.monotonic() - begun:.0f} s")
    size = sum(path.stat().st_size for path in Path(variables["vllm_wheelhouse"]).rglob("*.whl"))
    shutil.rmtree(variables["vllm_wheelhouse"])
    assert size > 2e9
    assert host.run("ls /opt/vllm-dflash/wheelhouse") == ""
    python = host.run(f"ls -d {VENVS}/*/bin/python")
    result = launch_check(host, tmp_path, python)
    assert not result["failed"], result
    assert result["vllm_version"] == SECOND
    assert (result["tensors_loaded"], result["tensors_expected"]) == (58, 58)
    assert result["aux_layers"] == [2, 17, 32, 47, 62]
    assert result["mask_token_id"] == 248070
    assert result["sliding_windows"] == [2048, 2048, 2048, 2048, None]

    refused = launch_check(host, tmp_path, python, {"max-num-batched-tokens": 2048, "max-num-seqs": 256})
    assert refused["phase"] == "engine config"
    assert "max_num_batched_tokens" in refused["msg"]
