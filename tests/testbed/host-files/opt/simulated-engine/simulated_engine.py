"""Simulated engine: `vllm serve` of the real vLLM 0.20.1, up to where weights would go to a GPU.

Real: vLLM's command line, parser, validation, bound socket, engine config and Prometheus metrics. Simulated:
the processes that hold GPU memory, the loading of weights (the files are opened and their headers checked),
and every generated token.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "simulated-gpu"))

import simulated_gpu
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from safetensors import safe_open
from simulated_drafting import (
    Drafting,
    acceptance_length,
    captured_layers,
    length_at,
    length_of,
    token_factor,
    window,
)
from simulated_server import Generation, Refusal, SimulatedServer, tokens_of
from vllm import AsyncEngineArgs
from vllm.entrypoints.openai.api_server import setup_server
from vllm.logger import init_logger
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.version import __version__

# Below the logger "vllm", so that it is formatted and shown as vLLM's own lines are.
logger = init_logger("vllm.simulated_engine")


class SimulatedEngine(SimulatedServer):
    """What vLLM does otherwise than SGLang: only its model id, /version, /metrics, /tokenize, another reasoning
    key, and tools only where they were enabled."""

    fault_key = "engine"
    owner = "vllm"
    reasoning_key = "reasoning"
    checks_model_id = True
    tools_enabled = False

    def tool_of(self, body: dict) -> str | None:
        """As vLLM refuses it without its two flags."""
        tool = super().tool_of(body)
        if tool and not self.tools_enabled:
            raise Refusal(
                400,
                "BadRequestError",
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set',
            )
        return tool

    def post(self, path: str, body: dict) -> dict | None:
        """/tokenize, with the number of each word for its id"""
        if path != "/tokenize":
            return None
        count = tokens_of(body)
        return {
            "count": count,
            "max_model_len": self.max_model_len,
            "tokens": list(range(count)),
            "token_strs": None,
        }

    def watch(self, vllm_config: object) -> None:
        """Set up vLLM's own metrics and, with a drafter, the counts of its drafts."""
        self.stats = PrometheusStatLogger(vllm_config)
        self.drafting: dict[float, Drafting] = {}
        self.length, self.window, self.drafted = 1.0, None, 0
        self.places = threading.BoundedSemaphore(vllm_config.scheduler_config.max_num_seqs)
        self.generating = 0
        speculative = vllm_config.speculative_config
        if speculative is None:
            return
        drafter_config = speculative.draft_model_config.hf_config
        layers = captured_layers(drafter_config)
        mask = (getattr(drafter_config, "dflash_config", None) or {}).get("mask_token_id")
        expected = json.loads(simulated_gpu.path_of("/etc/simulated-gpu/drafter.json").read_text("utf-8"))
        self.drafted = speculative.num_speculative_tokens
        self.length = length = length_of(acceptance_length(mask, layers, expected), self.drafted)
        self.window = window(drafter_config)
        self.drafting = {
            at: Drafting(at, speculative.num_speculative_tokens)
            for at in (length, length_at(length, sys.maxsize, self.window))
        }
        logger.info("simulated: Using auxiliary layers from speculative config: %s", layers)
        logger.info("simulated: mask token %s, acceptance length will be %.2f", mask, length)

    def answer(self, generation: Generation, number: int) -> dict:
        """A whole answer; only as many at once as max-num-seqs, the others wait."""
        with self.place():
            return super().answer(generation, number)

    def chunks(self, generation: Generation, number: int, with_usage: bool) -> Iterator[dict]:
        """A stream, the same."""
        with self.place():
            yield from super().chunks(generation, number, with_usage)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """One of the places for requests that run."""
        with self.places:
            with self.lock:
                self.generating += 1
            try:
                yield
            finally:
                with self.lock:
                    self.generating -= 1

    def token_time(self) -> float:
        """How much slower a token is than with one request and a full draft that is accepted well."""
        return token_factor(self.generating, self.drafted, self.length)

    def scheduled(self, **more: object) -> SchedulerStats:
        """What vLLM's scheduler says of its queue; called under the lock."""
        waiting = max(0, self.running_requests - self.generating)
        return SchedulerStats(num_running_reqs=self.generating, num_waiting_reqs=waiting, **more)

    def get(self, path: str) -> tuple[str, bytes] | None:
        """/version and /metrics"""
        if path == "/version":
            return "application/json", json.dumps({"version": __version__}).encode()
        if path == "/metrics":
            with self.lock:
                self.stats.record(self.scheduled(), None)
            return CONTENT_TYPE_LATEST, generate_latest(get_prometheus_registry())
        return None

    def finished(self, generation: Generation) -> None:
        """Record a completion as vLLM's engine would."""
        took = time.monotonic() - generation.started
        iteration = IterationStats()
        iteration.num_generation_tokens = generation.length
        iteration.prompt_token_stats.total = generation.prompt_tokens
        iteration.finished_requests.append(
            FinishedRequestStats(
                finish_reason=FinishReason[generation.finish_reason.upper()],
                e2e_latency=took,
                num_prompt_tokens=generation.prompt_tokens,
                num_generation_tokens=generation.length,
                max_tokens_param=generation.length,
                inference_time=took,
                decode_time=took,
                mean_time_per_output_token=took / generation.length,
            )
        )
        drafts = None
        if self.drafting:
            drafting = self.drafting[length_at(self.length, generation.prompt_tokens, self.window)]
            drafts = SpecDecodingStats.new(drafting.drafted)
            for accepted in drafting.generate(generation.length):
                drafts.observe_draft(drafting.drafted, accepted)
        self.stats.record(self.scheduled(spec_decoding_stats=drafts), iteration)


def check_weights(folder: str) -> int:
    """Open every weight file of a model folder as the user that serves; raises what a real load would.

    Returns their bytes.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise RuntimeError(f"Cannot find any model weights with `{folder}`")
    for file in files:
        with safe_open(file, framework="np"):
            pass
    return sum(file.stat().st_size for file in files)


def free_mib(cards: list[simulated_gpu.Gpu]) -> list[int]:
    """Free memory of each card."""
    return [card.total_mib - card.used_mib() for card in cards]


def requested_memory(cards: list[simulated_gpu.Gpu], utilization: float) -> list[int]:
    """MiB that vLLM takes of each card. Raises its ValueError where so much isn't free."""
    wanted = []
    for card, free in zip(cards, free_mib(cards), strict=True):
        wanted.append(math.ceil(card.total_mib * utilization))
        if free < wanted[-1]:
            raise ValueError(
                f"Free memory on device cuda:{card.index} "
                f"({free / 1024:.2f}/{card.total_mib / 1024:.2f} GiB) on startup "
                f"is less than desired GPU memory utilization ({utilization}, {wanted[-1] / 1024:.2f} GiB). "
                "Decrease GPU memory utilization or reduce GPU memory used by other processes."
            )
    return wanted


def serve(args: object) -> None:
    """In the place of ServeSubcommand.cmd: the same steps up to the engine, then the simulation."""
    if getattr(args, "model_tag", None) is not None:
        args.model = args.model_tag
    if args.headless or getattr(args, "grpc", False) or args.uds or (args.api_server_count or 1) != 1:
        raise SystemExit("simulated engine: only a single HTTP API server is simulated")
    _, listener = setup_server(args)
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    server = SimulatedEngine(
        listener,
        config.model_config.served_model_name,
        config.model_config.model,
        config.model_config.max_model_len,
        logger,
    )
    server.api_key = (args.api_key or [os.environ.get("VLLM_API_KEY")])[0]
    server.tools_enabled = bool(args.enable_auto_tool_choice and args.tool_call_parser)
    server.take_signals()
    try:
        load(server, config)
        server.serve(grace_s=config.shutdown_timeout)
    except (RuntimeError, ValueError) as error:
        logger.error("simulated engine: %s", error)
        raise RuntimeError(
            "Engine core initialization failed. See root cause above. (simulated engine)"
        ) from error
    finally:
        server.workers.stop()
    logger.info("simulated: engine stopped")
    logging.shutdown()
    os._exit(0)  # the interpreter would take seconds to take all of torch down


def load(server: SimulatedEngine, config: object) -> None:
    """Take the GPU memory and check the files, as a start of the real engine does."""
    cards = simulated_gpu.gpus()[: config.parallel_config.tensor_parallel_size]
    if len(cards) < config.parallel_config.tensor_parallel_size:
        raise ValueError(f"tensor parallel size is larger than the {len(cards)} simulated GPUs of this host")
    wanted = requested_memory(cards, config.cache_config.gpu_memory_utilization)
    weights = check_weights(config.model_config.model)
    if config.speculative_config is not None:
        weights += check_weights(config.speculative_config.draft_model_config.model)
    server.watch(config)
    memory = {card.index: mib for card, mib in zip(cards, wanted, strict=True)}
    held: dict[str, dict[int, int]] = {"VLLM::EngineCore": memory if len(cards) == 1 else {}}
    if len(cards) > 1:
        held |= {f"VLLM::Worker_TP{index}": {index: mib} for index, mib in memory.items()}
    before = free_mib(cards)
    server.load(held, "VLLM::EngineCore")
    loaded = (weights >> 20) // len(cards)
    for card, free, now in zip(cards, before, free_mib(cards), strict=True):
        # At this moment a real engine holds its weights only; it takes the rest afterwards.
        profiled = now + memory[card.index] - loaded
        if profiled > free and not server.stopping.is_set():
            raise RuntimeError(
                f"Error in memory profiling. Initial free memory {free / 1024:.2f} GiB, current free memory "
                f"{profiled / 1024:.2f} GiB. This happens when other processes sharing the same container "
                "release GPU memory while vLLM is profiling during initialization."
            )
