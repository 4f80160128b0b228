#!/usr/bin/python3
"""Simulated SGLang: the server before the roll-out, started with the flags of the real one."""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "simulated-gpu"))

import simulated_gpu
from simulated_server import SimulatedServer

# CUDA graphs and communication buffers, beside the static part.
EXTRA_MIB = 800


class SimulatedSglang(SimulatedServer):
    """What SGLang does otherwise than vLLM: it accepts any model id, has /generate, another reasoning key."""

    fault_key = "sglang"
    owner = "sglang"
    reasoning_key = "reasoning_content"
    checks_model_id = False

    def get(self, path: str) -> tuple[str, bytes] | None:
        """/get_model_info and /health_generate, which generates a token like a completion."""
        if path == "/get_model_info":
            info = {"model_path": self.model_path, "tokenizer_path": self.model_path, "is_generation": True}
            return "application/json", json.dumps(info).encode()
        if path == "/health_generate":
            self.pause()
            return "text/plain", b""
        return None

    def post(self, path: str, body: dict) -> dict | None:
        """/generate"""
        if path != "/generate":
            return None
        asked = body.get("sampling_params", {}).get("max_new_tokens", 128)
        generation = self.plan("completion", {"prompt": body.get("text"), "max_tokens": asked})
        self.crash_if_asked()
        usage = generation.usage()
        return {
            "text": "".join(generation.words(self.pause)),
            "meta_info": {
                "id": f"simulated-{self.completions}",
                "finish_reason": {"type": "length", "length": asked},
                "prompt_tokens": usage["prompt_tokens"],
                "completion_tokens": usage["completion_tokens"],
            },
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--tp", "--tp-size", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--mem-fraction-static", type=float, default=0.88)
    parser.add_argument("--reasoning-parser")
    parser.add_argument("--tool-call-parser")
    parser.add_argument("--api-key")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s] %(message)s", stream=sys.stdout)
    logger = logging.getLogger("simulated-sglang")
    # The real one prints them all, the key too.
    logger.info("simulated: server_args=%s", args)
    config = json.loads((Path(args.model_path) / "config.json").read_text(encoding="utf-8"))
    context = args.context_length or config.get("text_config", config)["max_position_embeddings"]
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((args.host, args.port))  # clients are refused until it listens, which is after loading
    model_id = args.served_model_name or args.model_path
    server = SimulatedSglang(listener, model_id, args.model_path, context, logger)
    server.api_key = args.api_key
    server.take_signals()
    held = {}
    for gpu in simulated_gpu.gpus()[: args.tp]:
        mib = int(gpu.total_mib * args.mem_fraction_static) + EXTRA_MIB
        if gpu.used_mib() + mib > gpu.total_mib:
            raise SystemExit(
                f"RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. (simulated: "
                f"{gpu.used_mib()} of {gpu.total_mib} MiB of GPU {gpu.index} are in use, {mib} wanted)"
            )
        held[f"sglang::scheduler_TP{gpu.index}"] = {gpu.index: mib}
    try:
        server.load(held, "sglang::detokenizer")
        server.serve(grace_s=1)
    finally:
        server.workers.stop()
    logger.info("simulated: SGLang stopped")


if __name__ == "__main__":
    main()
