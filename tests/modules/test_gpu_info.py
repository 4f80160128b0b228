"""gpu_info against a simulated nvidia-smi."""

from __future__ import annotations

import os
import sys


def simulate(tmp_path, body):
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_lists_gpus_and_processes_in_check_mode_too(run_module, tmp_path):
    env = simulate(
        tmp_path,
        f"""
case "$1" in
  --query-gpu=*) echo "0, GPU-aaaa, NVIDIA RTX A6000, 49140, 44012, 580.95.05, 8.6" ;;
  *) echo "GPU-aaaa, {os.getpid()}, python3, 44000" ;;
esac""",
    )
    for check in (False, True):
        result = run_module("gpu_info", {}, check=check, env=env)
        assert result["changed"] is False
        assert result["gpus"] == [
            {
                "index": 0,
                "uuid": "GPU-aaaa",
                "name": "NVIDIA RTX A6000",
                "memory_total_mib": 49140,
                "memory_used_mib": 44012,
                "driver_version": "580.95.05",
                "compute_capability": "8.6",
            }
        ]
        (process,) = result["processes"]
        assert process["pid"] == os.getpid()
        assert process["used_mib"] == 44000
        assert sys.executable.rpartition("/")[2] in process["command"]


def test_a_driver_that_is_not_loaded_fails_in_words(run_module, tmp_path):
    env = simulate(tmp_path, 'echo "couldn\'t communicate with the NVIDIA driver"; exit 9')
    result = run_module("gpu_info", {}, env=env)
    assert result["failed"]
    assert "modprobe nvidia" in result["msg"]
    assert "Traceback" not in result["msg"]
