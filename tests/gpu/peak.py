#!/usr/bin/env python3
"""What lies in GPU memory when vLLM's profile run takes the most: the ground for the VRAM-fit table's estimate.

    VENV/bin/python peak.py VLLM.YAML [--eager]

Starts the engine of that config in this process, records every allocation of the profile run with PyTorch's own
history, prints one JSON line (bytes) and ends before there is a cache. --eager: without compiling, whose code has
no Python lines to point to.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "module_utils"))

from dflash_rollout.launch_probe import parse

BEGIN = "PEAK "


def at_peak(events: Iterable[Mapping[str, Any]], frames: int = 6) -> dict[str, Any]:
    """{"bytes": most bytes live at once, "parts": [{"bytes", "count", "where"}], largest first} of an allocator's trace.

    `events` are one device's of torch.cuda.memory._snapshot()["device_traces"]. What was allocated before the
    trace began counts as nothing.
    """
    events = [event for event in events if event["action"] in ("alloc", "free_completed")]

    def play(until: int | None) -> tuple[int, int, dict[int, Mapping[str, Any]]]:
        live: dict[int, Mapping[str, Any]] = {}
        total = most = where = 0
        for number, event in enumerate(events if until is None else events[: until + 1]):
            if event["action"] == "alloc":
                live[event["addr"]] = event
                total += event["size"]
                if total > most:
                    most, where = total, number
            elif event["addr"] in live:
                total -= live.pop(event["addr"])["size"]
        return most, where, live

    most, where, _ = play(None)
    parts: dict[tuple[int, str], int] = {}
    for event in (play(where)[2] if most else {}).values():
        lines = [
            f"{frame['filename'].split('site-packages/')[-1]}:{frame['line']} {frame['name']}"
            for frame in event.get("frames", [])
            if frame["filename"].endswith(".py") and "/torch/nn/modules/" not in frame["filename"]
        ]
        key = event["size"], " < ".join(lines[:frames])
        parts[key] = parts.get(key, 0) + 1
    rows = [{"bytes": size * count, "count": count, "where": text} for (size, text), count in parts.items()]
    return {"bytes": most, "parts": sorted(rows, key=lambda row: -row["bytes"])}


def main() -> None:
    """Run, print, end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    profile_run, determine = GPUModelRunner.profile_run, Worker.determine_available_memory
    found: dict[str, Any] = {"eager": given.eager}

    def recorded(runner: GPUModelRunner) -> None:
        before = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=2_000_000)
        profile_run(runner)
        found["trace"] = at_peak(torch.cuda.memory._snapshot()["device_traces"][0])
        torch.cuda.memory._record_memory_history(enabled=None)
        found["trace"]["parts"] = found["trace"]["parts"][:25]
        found["allocated_before"], found["allocated_peak"] = before, torch.cuda.max_memory_allocated()

    def ended(worker: Worker) -> int:
        cache = determine(worker)
        found.update(
            cache=cache,
            weights=int(worker.model_runner.model_memory_usage),
            activations=worker.peak_activation_memory,
            not_torch=worker.non_torch_memory,
            graphs_estimated=worker.cudagraph_memory_estimate,
            requested=int(worker.requested_memory),
        )
        print(BEGIN + json.dumps(found), flush=True)
        os._exit(0)

    GPUModelRunner.profile_run, Worker.determine_available_memory = recorded, ended
    arguments = parse(given.config)
    arguments.enforce_eager = given.eager
    LLMEngine.from_engine_args(AsyncEngineArgs.from_cli_args(arguments))
    raise SystemExit("the engine started without measuring its memory")


if __name__ == "__main__":
    main()
