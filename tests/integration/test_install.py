"""The real wheel on hosts that have nothing: without a way out, interrupted in every way, and the second lock.

The release layer of the other tests is the first lock from the registry, by the same role.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from drafters import drafter_shapes

from .conftest import ROOT, WORKER, Fleet, Play, _boot, bed
from .test_launch_check import CACHE, DRAFTER, FLAGS, FOLDER, SANDBOX, put_drafter, to_yaml

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

INSTALL = "tests/testbed/layer.yml"
VENVS = "/opt/vllm-dflash/venvs"
SECOND = "0.26.0"


@pytest.fixture
def bare(bootable, request):
    """A host on the base image alone, with the full-size target; `request.param` are options of `bed.py up`."""
    name = f"vn{WORKER}"
    bed("down", name)
    yield Fleet(_boot(name, 1, "--no-sglang", *request.param), Path("/nonexistent"))
    bed("down", name)


@pytest.fixture(scope="session")
def wheelhouse() -> Path:
    """Kept in the test bed's cache: it is 3.5 GB."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "vllm-dflash-testbed"
        / "wheelhouse"
    )


def begin(fleet: Fleet, **variables) -> subprocess.Popen:
    """The install, running."""
    command = ["ansible-playbook", "-i", str(fleet.inventory), INSTALL, "-e", json.dumps(variables)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ}
    )


def flat(output: str) -> str:
    """Without the line breaks of the callback."""
    return " ".join(output.split())


def wait_for_half_a_venv(host) -> None:
    """Until uv has linked some of the packages into a venv that has no name yet."""
    host.wait(f"test -d {VENVS}/.*.partial/lib/python3*/site-packages/torch", seconds=240)


def launch_check(host, tmp_path, python: str, flags: dict | None = None) -> dict:
    """As a user without rights in a sandbox, with nothing cached."""
    put_drafter(host, tmp_path, DRAFTER, drafter_shapes())
    host.put(to_yaml(FLAGS | (flags or {})), f"{FOLDER}/vllm.yaml")
    host.run(f"rm -rf {CACHE} /var/cache/private/launch-check")
    return host.module(
        "vllm_launch_check", python=python, config=f"{FOLDER}/vllm.yaml", unit_properties=SANDBOX
    )


def venvs(host) -> list[str]:
    return host.run(f"ls -A {VENVS}").split()


@pytest.mark.parametrize("bare", [["--no-outside"]], indirect=True)
def test_without_a_way_out_and_interrupted(bare, wheelhouse, tmp_path):
    host, variables = bare.hosts[0], {"vllm_wheelhouse": str(wheelhouse)}

    # No wheels for this kind of host: refused with the command that makes them.
    play = bare.play(INSTALL, vllm_wheelhouse=str(tmp_path))
    assert play.status != 0
    assert "Make it: ansible-playbook playbooks/wheelhouse.yml" in flat(play.output)

    assert bare.play("playbooks/wheelhouse.yml", **variables).status == 0
    again = bare.play("playbooks/wheelhouse.yml", **variables)
    assert again.recap[host.name]["changed"] == 0, again.output

    # A disk that is too small: said so, and nothing under the name.
    host.run("mkdir -p /opt/vllm-dflash/venvs && mount -t tmpfs -o size=600m tmpfs /opt/vllm-dflash/venvs")
    play = bare.play(INSTALL, **variables)
    assert play.status != 0
    assert "/opt/vllm-dflash is full" in flat(play.output), play.output
    assert not [name for name in venvs(host) if name[0] != "." and not name.endswith(".txt")]
    host.run("umount /opt/vllm-dflash/venvs")

    # A venv in use, as the interrupted installs find it.
    host.run(f"mkdir -p {VENVS}/00000000000000aa/bin && echo used > {VENVS}/00000000000000aa/bin/vllm")

    running = begin(bare, **variables)
    wait_for_half_a_venv(host)
    host.run("pkill -9 -x uv")
    output = running.communicate(timeout=300)[0]
    assert running.returncode != 0
    assert "killed by signal 9" in flat(output), output

    running = begin(bare, **variables)
    wait_for_half_a_venv(host)
    bed("power-cut", host.bed, "gpu1")
    running.terminate()
    running.communicate(timeout=300)
    bed("power-on", host.bed, "gpu1")
    assert not [
        name for name in venvs(host) if name[0] != "." and name != "00000000000000aa" and name[-4:] != ".txt"
    ]

    begun = time.monotonic()
    play = bare.play(INSTALL, **variables)
    assert play.status == 0, play.output
    print(f"install from the wheelhouse after interruptions: {time.monotonic() - begun:.0f} s")
    assert host.run(f"cat {VENVS}/00000000000000aa/bin/vllm") == "used"
    assert not [name for name in venvs(host) if name.endswith(".partial")]
    assert host.run("ls /opt/vllm-dflash/wheelhouse") == ""
    assert host.run("ls -d /root/.cache /root/.local /root/.config 2>/dev/null", check=False) == ""
    assert host.run("find /opt/vllm-dflash -xdev -type f -perm -0002 -not -path '*/uv-cache/*'") == ""
    assert host.run("stat -c %a /opt/vllm-dflash/uv-cache") == "700"

    python = host.run(f"ls -d {VENVS}/*/bin/python")
    result = launch_check(host, tmp_path, python)
    assert not result["failed"], result
    assert (result["tensors_loaded"], result["aux_layers"]) == (58, [2, 17, 32, 47, 62])
    assert result["sliding_windows"] == [None] * 5
    assert bare.play(INSTALL, **variables).recap[host.name]["changed"] == 0


@pytest.mark.skipif(
    os.environ.get("CI") != "true" and "SECOND_LOCK" not in os.environ,
    reason="downloads 4 GB more: set SECOND_LOCK=1 (CI does it)",
)
@pytest.mark.parametrize("bare", [[]], indirect=True)
def test_the_second_lock_honours_the_window(bare, tmp_path):
    """vLLM 0.26.0 from the registry, its launch check cold: the drafter's four windows are built as windows."""
    host = bare.hosts[0]
    play: Play = bare.play(INSTALL, vllm_version=SECOND)
    assert play.status == 0, play.output
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
