"""host_preflight against the simulated nvidia-smi of the test bed, on this very machine."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

HOST_FILES = Path(__file__).parents[1] / "testbed" / "host-files"
GPUS = (HOST_FILES / "etc/simulated-gpu/gpus").read_text().splitlines()


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


class Host:
    """Simulated driver, tools and Python; the module's options, fit unless changed."""

    def __init__(self, folder, run_module):
        self.folder, self._run_module = folder, run_module
        (folder / "etc/simulated-gpu").mkdir(parents=True)
        (folder / "run/simulated-gpu/holds").mkdir(parents=True)
        (folder / "bin").mkdir()
        self.gpus(GPUS)
        script(folder / "bin/systemctl", "echo 'systemd 252 (simulated)'")
        script(folder / "bin/rsync", "")
        script(folder / "bin/cc", "")
        target = folder / "Qwen3.6-27B"
        target.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
            (target / name).write_text("{}")
        self.options = {
            "gpus": 2,
            "min_driver": "580",
            "min_compute_capability": "8.0",
            "root": str(folder / "opt"),
            "needs": {str(folder / "opt/venvs/0123"): 1},
            "python": str(script(folder / "python3", "echo 3.11 1 1")),
            "target": str(target),
            "port": 30000,
            "known_units": ["sglang.service"],
        }

    def gpus(self, lines):
        (self.folder / "etc/simulated-gpu/gpus").write_text("".join(f"{line}\n" for line in lines))

    def hold(self, pid, index, mib):
        (self.folder / f"run/simulated-gpu/holds/{pid}").write_text(f"{index} {mib}\n")

    def look(self, check=False, **options):
        path = f"{self.folder / 'bin'}:{HOST_FILES / 'usr/bin'}:{os.environ['PATH']}"
        env = {"PATH": path, "SIMULATED_GPU_ROOT": str(self.folder)}
        return self._run_module("host_preflight", {**self.options, **options}, check=check, env=env)


@pytest.fixture
def host(run_module):
    # Not pytest's tmp_path, which the unprivileged user of the Python probe can't enter.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Host(Path(folder), run_module)


def test_a_fit_host_in_check_mode_too(host):
    for check in (False, True):
        result = host.look(check=check)
        assert result["changed"] is False
        assert result["findings"] == []
        assert [card["memory_total_mib"] for card in result["gpus"]] == [49140, 49140]
    assert not (host.folder / "opt").exists()


def test_everything_at_once_and_no_failure(host):
    host.gpus(["0|Tesla V100|GPU-a|16384|7.0|535.1"])
    host.hold(os.getpid(), 0, 2000)
    shutil.rmtree(host.options["target"])
    result = host.look(
        needs={str(host.folder / "opt/venvs/0123"): 2**60},
        python="/nowhere/python3",
        listeners=[{"pid": 9, "user": "www", "command": "nginx", "unit": "nginx.service"}],
    )
    assert "failed" not in result
    assert [finding.partition(":")[0] for finding in result["findings"]] == [
        "GPUs",
        "NVIDIA driver",
        "compute capability",
        "foreign process on a GPU",
        "port 30000",
        "disk",
        "Python",
        "target",
    ]
    assert f"2000 MiB on GPU 0 held by pid {os.getpid()} of " in result["findings"][3]
    assert "expected 1073741824.0 GiB" in result["findings"][5]


def test_what_has_no_version_and_no_memory_is_said_in_words(host):
    # The test bed's cards all have memory of their own, so another simulated nvidia-smi goes before.
    script(
        host.folder / "bin/nvidia-smi",
        'case "$1" in --query-gpu=*) echo "0, GPU-a, NVIDIA RTX A6000, 49140, 1, 580.95.05, 8.6"; '
        'echo "1, GPU-b, NVIDIA GB10, [N/A], [N/A], [N/A], [N/A]" ;; esac',
    )
    result = host.look()
    assert [finding.partition(";")[0] for finding in result["findings"]] == [
        "NVIDIA driver: found no version in what nvidia-smi says",
        "compute capability: found none (NVIDIA GB10)",
    ]
    assert result["gpus"][1]["memory_total_mib"] is None


def test_without_a_driver_the_rest_is_looked_at_all_the_same(host):
    (host.folder / "etc/simulated-gpu/gpus").unlink()
    result = host.look(python="/nowhere/python3")
    assert result["gpus"] == []
    assert [finding.partition(":")[0] for finding in result["findings"]] == ["GPUs", "Python"]
    assert "modprobe nvidia" in result["findings"][0]


def test_this_python_as_it_really_is(host):
    result = host.look(python="/usr/bin/python3")
    names = {finding.partition(":")[0] for finding in result["findings"]}
    assert names <= {"Python", "venv module", "Python.h"}  # what a machine with tests may lack
    assert not any("answer" in finding for finding in result["findings"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_driver": "new"}, "min_driver: 'new' is not dotted numbers, as 580.65 would be."),
        (
            {"min_compute_capability": ""},
            "min_compute_capability: '' is not dotted numbers, as 580.65 would be.",
        ),
        (
            {"needs": {"/opt": "16 GB"}},
            "needs: found {'/opt': '16 GB'}; expected a number of bytes for each path.",
        ),
        ({"needs": {"/opt": None}}, "needs: found {'/opt': None}; expected a number of bytes for each path."),
    ],
)
def test_wrong_options_fail_in_words(host, options, message):
    result = host.look(**options)
    assert result["failed"]
    assert result["msg"] == message
