#!/usr/bin/python3
"""Simulated `vllm serve --config FILE`, without vLLM: what the real wheel's command line and parser would do is left
out, so that a server starts in a second. The unit, its sandbox, its user and its ExecCondition= are the roles' own.

FILE is YAML that is JSON: port, served-model-name, model, tensor-parallel-size, gpu-memory-utilization.
"""

from __future__ import annotations

import json
import logging
import socket
import sys

sys.path.insert(0, "/opt/simulated-gpu")
sys.path.insert(0, "/opt/simulated-engine")

import simulated_gpu
from simulated_drafting import Drafting
from simulated_server import SimulatedServer


class SimulatedVllm(SimulatedServer):
    """As the simulated engine, with counters of its own in the place of vLLM's metrics."""

    fault_key = "engine"
    owner = "vllm"
    reasoning_key = "reasoning"
    checks_model_id = True
    drafting = Drafting(4.2, 15)
    accepted: list[int]

    def get(self, path: str) -> tuple[str, bytes] | None:
        if path == "/version":
            return "application/json", b'{"version": "0.20.1"}'
        if path != "/metrics":
            return None
        drafts = len(self.accepted)
        lines = [
            f"vllm:spec_decode_num_drafts_total {drafts}",
            f"vllm:spec_decode_num_draft_tokens_total {drafts * 15}",
            f"vllm:spec_decode_num_accepted_tokens_total {sum(self.accepted)}",
        ]
        for position in range(15):
            count = sum(1 for accepted in self.accepted if accepted > position)
            name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines.append(f'{name}{{position="{position}"}} {count}')
        return "text/plain", "".join(f"{line}\n" for line in lines).encode()

    def finished(self, generation) -> None:
        self.accepted += self.drafting.generate(generation.length)


def main() -> None:
    assert sys.argv[1:3] == ["serve", "--config"], sys.argv
    with open(sys.argv[3], encoding="utf-8") as stream:
        config = json.load(stream)
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stdout)
    logger = logging.getLogger("simulated-vllm")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("0.0.0.0", config["port"]))  # noqa: S104
    server = SimulatedVllm(
        listener, config["served-model-name"][0], config["model"], config["max-model-len"], logger
    )
    server.accepted = []
    server.take_signals()
    held = {}
    for gpu in simulated_gpu.gpus()[: config["tensor-parallel-size"]]:
        mib = int(gpu.total_mib * config["gpu-memory-utilization"])
        free = gpu.total_mib - gpu.used_mib()
        if free < mib:
            raise SystemExit(
                f"ValueError: Free memory on device cuda:{gpu.index} ({free} MiB) on startup is less than desired "
                f"GPU memory utilization ({mib} MiB). (simulated)"
            )
        held[f"VLLM::Worker_TP{gpu.index}"] = {gpu.index: mib}
    try:
        server.load(held, "VLLM::EngineCore")
        server.serve(grace_s=1)
    except RuntimeError as error:
        logger.error("simulated engine: %s", error)
        raise SystemExit(1) from error
    finally:
        server.workers.stop()
    logger.info("simulated: engine stopped")


if __name__ == "__main__":
    main()
