"""The parsers on text as nvidia-smi prints it, and the calls against a simulated nvidia-smi."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dflash_rollout import gpus
from dflash_rollout.errors import RolloutError
from dflash_rollout.gpus import Gpu, GpuProcess

TWO_A6000 = """\
0, GPU-aaaa, NVIDIA RTX A6000, 49140, 44012, 580.95.05, 8.6
1, GPU-bbbb, NVIDIA RTX A6000, 49140, 1, 580.95.05, 8.6
"""


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Put a simulated nvidia-smi with the given shell body first on PATH."""

    def install(body: str) -> Path:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        return program

    return install


def test_gpus_are_read():
    assert gpus.parse_gpus(TWO_A6000) == [
        Gpu(0, "GPU-aaaa", "NVIDIA RTX A6000", 49140, 44012, "580.95.05", "8.6"),
        Gpu(1, "GPU-bbbb", "NVIDIA RTX A6000", 49140, 1, "580.95.05", "8.6"),
    ]


def test_unified_memory_has_no_numbers():
    (card,) = gpus.parse_gpus("0, GPU-c, NVIDIA GB10, [N/A], [Not Supported], 580.95.05, 12.1\n")
    assert (card.memory_total_mib, card.memory_used_mib) == (None, None)


@pytest.mark.parametrize(
    "line",
    [
        "Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error",
        "0, GPU-a, NVIDIA RTX A6000, lots, 1, 580.95.05, 8.6",
        "zero, GPU-a, NVIDIA RTX A6000, 1, 1, 580.95.05, 8.6",
    ],
)
def test_a_line_of_another_shape_is_named(line):
    with pytest.raises(RolloutError, match="can't be read") as caught:
        gpus.parse_gpus(TWO_A6000 + line)
    assert line in caught.value.found


def test_no_process_is_no_output():
    assert gpus.parse_processes("", {}) == []
    assert gpus.parse_processes("\n", {}) == []


def test_processes_are_read():
    text = (
        "GPU-aaaa, 2307, VLLM::EngineCore, 43000\n"
        "GPU-bbbb, 2307, VLLM::EngineCore, 42000\n"
        "GPU-aaaa, 99, [Insufficient Permissions], [N/A]\n"
        "MIG-cccc, 100, /opt/odd, name, 7\n"
    )
    assert gpus.parse_processes(text, {"GPU-aaaa": 0, "GPU-bbbb": 1}) == [
        GpuProcess(2307, "GPU-aaaa", 0, "VLLM::EngineCore", 43000),
        GpuProcess(2307, "GPU-bbbb", 1, "VLLM::EngineCore", 42000),
        GpuProcess(99, "GPU-aaaa", 0, None, None),
        GpuProcess(100, "MIG-cccc", None, "/opt/odd, name", 7),
    ]


@pytest.mark.parametrize("line", ["GPU-aaaa, 2307", "GPU-aaaa, [N/A], python3, 10", "an error"])
def test_a_process_line_of_another_shape_is_named(line):
    with pytest.raises(RolloutError, match="can't be read"):
        gpus.parse_processes(line, {})


@pytest.mark.parametrize(
    ("text", "root", "cgroup"),
    [
        ("0::/system.slice/sglang.service\n", "/", "/system.slice/sglang.service"),
        # hybrid: systemd's own hierarchy is the unified one
        ("4:memory:/x\n1:name=systemd:/y\n0::/system.slice/a.service\n", "/", "/system.slice/a.service"),
        ("4:memory:/x\n1:name=systemd:/system.slice/a.service\n", "/", "/system.slice/a.service"),
        ("0::/machine/h1/payload/system.slice/a.service\n", "/machine/h1/payload", "/system.slice/a.service"),
        ("0::/machine/h10/x.service\n", "/machine/h1", "/machine/h10/x.service"),
        ("4:memory:/x\n", "/", None),
        ("0::/odd:name/a.service\n", "/", "/odd:name/a.service"),
    ],
)
def test_cgroup_of_each_hierarchy(text, root, cgroup):
    assert gpus.parse_cgroup(text, root) == cgroup


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/system.slice/sglang.service", "sglang.service"),
        ("/system.slice/sglang.service/worker-0", "sglang.service"),
        ("/system.slice/system-vllm\\x2ddflash.slice/vllm-dflash@0a1b.service", "vllm-dflash@0a1b.service"),
        ("/user.slice/user-1000.slice/user@1000.service/app.slice/tmux.service", "user@1000.service"),
        ("/user.slice/user-0.slice/session-3.scope", "session-3.scope"),
        ("/system.slice/docker-0123abcd.scope", "docker-0123abcd.scope"),
        ("/system.slice/_cpu.service", "cpu.service"),
        ("/docker/0123abcd", None),
        ("/", None),
        (None, None),
    ],
)
def test_unit_of_a_cgroup(cgroup, unit):
    assert gpus.unit_of(cgroup) == unit


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["serve", "--port", "30000"], "serve --port 30000"),
        (["serve", "--api-key", "sk-1", "--port", "1"], "serve --api-key *** --port 1"),
        (["serve", "--api-key=sk-1\nx", "--hf-token=t"], "serve --api-key=*** --hf-token=***"),
        (["x", "--password", "--verbose"], "x --password --verbose"),
        (["x", "--ssl-keyfile", "/k", "--tokenizer-path=/t"], "x --ssl-keyfile /k --tokenizer-path=/t"),
    ],
)
def test_secrets_of_a_command_line_are_hidden(arguments, printed):
    assert gpus.printable_command(arguments) == printed


def test_details_of_a_live_process():
    command = [sys.executable, "-c", "print(flush=True); input()", "--api-key", "sk-1"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()  # until then it may still be a copy of this process
        details = gpus.process_details(process.pid)
    finally:
        process.communicate(b"\n")
    assert details["command"].endswith("-c print(flush=True); input() --api-key ***")
    assert details["user"] == ("root" if os.getuid() == 0 else os.environ["USER"])
    assert details["cgroup"].startswith("/")


def test_details_of_a_process_that_ended_are_unknown():
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    expected = {"user": None, "command": None, "cgroup": None, "unit": None}
    assert gpus.process_details(process.pid) == expected


def test_a_zombie_is_named_by_its_name():
    process = subprocess.Popen(["/bin/true"])
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert gpus.process_details(process.pid)["command"] == "[true]"
    finally:
        process.wait()


def test_query_asks_for_what_the_parsers_read(simulated):
    simulated(f"""
case "$1" in
  --query-gpu={gpus.GPU_FIELDS}) echo "0, GPU-aaaa, NVIDIA RTX A6000, 49140, 44012, 580.95.05, 8.6" ;;
  --query-compute-apps={gpus.PROCESS_FIELDS}) echo "GPU-aaaa, {os.getpid()}, python3, 44000" ;;
  *) exit 2 ;;
esac
[ "$2" = --format=csv,noheader,nounits ]""")
    assert [card.uuid for card in gpus.query_gpus()] == ["GPU-aaaa"]
    (process,) = gpus.query_processes()
    assert (process.pid, process.gpu_index, process.used_mib) == (os.getpid(), 0, 44000)
    assert sys.executable.rpartition("/")[2] in process.command


def test_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RolloutError, match="nvidia-smi is missing"):
        gpus.query_gpus()


def test_not_executable(simulated, monkeypatch, tmp_path):
    simulated("").chmod(0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RolloutError, match="can't be run"):
        gpus.query_gpus()


@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (
            'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9',
            "modprobe nvidia",
        ),
        ('echo "Failed to initialize NVML: Driver/library version mismatch" >&2; exit 18', "reboot"),
        ('echo "No devices were found"; exit 6', "lspci"),
        ('echo "No devices were found"', "lspci"),
        ("true", "lspci"),
        ('echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2', "too old"),
        ('echo "Unable to determine the device handle for GPU0: Unknown Error"; exit 15', "Xid"),
        ("exit 77", "run nvidia-smi on the host"),
    ],
)
def test_failures_say_what_to_do(simulated, body, remedy):
    simulated(body)
    with pytest.raises(RolloutError) as caught:
        gpus.query_gpus()
    assert remedy in caught.value.remedy
    assert caught.value.found


def test_a_hang_ends_with_its_children(simulated, monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "TIMEOUT_S", 0.3)
    simulated(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    before = time.monotonic()
    with pytest.raises(RolloutError, match="hangs"):
        gpus.query_gpus()
    assert time.monotonic() - before < 5
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if gpus.process_details(child)["command"] in (None, "[sleep]"):  # gone, or a zombie of PID 1
            return
        time.sleep(0.05)
    raise AssertionError(f"the child {child} of the simulated nvidia-smi still runs")
