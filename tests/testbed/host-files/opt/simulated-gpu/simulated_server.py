"""What the simulated SGLang and the simulated engine share: an OpenAI-like HTTP server over workers.

One word is one token, and every answer is the same few words over and over.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import simulated_gpu

WORDS = (
    "This",
    " text",
    " was",
    " written",
    " by",
    " a",
    " simulated",
    " model",
    ".",
    " Nothing",
    " computed",
    " it",
    ".",
)
# A real start says more than a log tail keeps; vLLM 63 lines until it takes its memory (docs/gpu-results.md, section 11).
START_LINES = 40
# Until then of the time to load a server holds little memory, then all of it.
SMALL_UNTIL = 0.8
THINKING_TOKENS = 32
ANSWER_TOKENS = 16


@dataclass
class Refusal(Exception):
    """An HTTP error with the body of an OpenAI error."""

    status: int
    kind: str
    message: str
    param: str | None = None


@dataclass
class Generation:
    """One answer: its words so far, and what the client asked for."""

    kind: str  # "completion" or "chat"
    prompt_tokens: int
    length: int  # tokens to generate
    thinking: int  # of these, how many are reasoning
    finish_reason: str
    tool: str | None = None  # the name of a tool that the client offers: a chat then ends by calling it
    started: float = field(default_factory=time.monotonic)

    def words(self, pause: Callable[[], None]) -> Iterator[str]:
        """The words one after the other, each after the time a token takes."""
        for word in itertools.islice(itertools.cycle(WORDS), self.length):
            pause()
            yield word

    def usage(self) -> dict:
        """The `usage` of the answer."""
        total = self.prompt_tokens + self.length
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.length, "total_tokens": total}


def tokens_of(body: dict) -> int:
    """The tokens of a request's prompt: its words, and four more for each message of a chat."""
    if "messages" in body:
        return sum(4 + len(str(message.get("content", "")).split()) for message in body["messages"])
    prompt = body["prompt"]
    return len(prompt.split() if isinstance(prompt, str) else prompt)


class SimulatedServer:
    """An HTTP server on a bound socket. Subclasses say how the two real servers differ."""

    fault_key: str
    owner: str
    reasoning_key: str
    checks_model_id: bool

    def __init__(
        self,
        listener: socket.socket,
        model_id: str,
        model_path: str,
        max_model_len: int,
        logger: logging.Logger,
    ) -> None:
        self.listener = listener
        self.model_id = model_id
        self.model_path = model_path
        self.max_model_len = max_model_len
        self.logger = logger
        self.created = int(time.time())
        self.faults = simulated_gpu.faults(self.fault_key)
        self.workers = simulated_gpu.Workers(self.faults)
        self.stopping = threading.Event()
        self.lock = threading.Lock()
        self.running_requests = 0
        self.completions = 0
        self.api_key: str | None = None

    # --- what subclasses change ---

    def finished(self, generation: Generation) -> None:
        """Called under the lock after each completed generation."""

    def token_time(self) -> float:
        """How much longer than by default a token takes now."""
        return 1.0

    def get(self, path: str) -> tuple[str, bytes] | None:
        """(content type, body) for a path of this server alone, or None."""
        return None

    def post(self, path: str, body: dict) -> dict | None:
        """The answer to a POST of this server alone, or None."""
        return None

    # --- life ---

    def take_signals(self) -> None:
        """From here on SIGTERM and SIGINT ask for an orderly stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            if self.faults.get("ignore_sigterm"):
                signal.signal(number, signal.SIG_IGN)
            else:
                signal.signal(number, lambda *_: self.stopping.set())

    def load(self, held: dict[str, dict[int, int]], orphan_title: str) -> None:
        """Start workers, {title: {GPU index: MiB}}, and take the time to load; returns early when stopped."""
        for number in range(1, START_LINES + 1):
            self.logger.info("simulated: starting, line %d of %d", number, START_LINES)
        if self.faults.get("exit_at_start"):
            raise RuntimeError("simulated fault: exit_at_start")
        for title, memory in held.items():
            self.workers.start(title, memory)
        if self.faults.get("leave_orphan"):
            self.workers.start(orphan_title, {0: 2000}, escape=True)
        self.logger.info("simulated: workers %s hold some GPU memory, loading", ", ".join(held))
        begin, seconds = time.monotonic(), self.faults.get("load_s", 2)
        if not self.passes(begin + SMALL_UNTIL * seconds):
            return
        self.workers.take_all()
        self.logger.info("simulated: they hold all of it")
        self.passes(math.inf if self.faults.get("never_ready") else begin + seconds)

    def passes(self, until: float) -> bool:
        """Wait until that time (monotonic). False when stopped before; raises when a worker died."""
        while time.monotonic() < until:
            if self.stopping.wait(0.05):
                return False
            self.check_workers()
        return True

    def check_workers(self) -> None:
        """A server whose worker died can't go on, unless all of them were told to stop together."""
        if (dead := self.workers.dead()) and not self.stopping.wait(0.5):
            raise RuntimeError(f"simulated worker {dead[0]} died unexpectedly")

    def serve(self, grace_s: float) -> None:
        """Answer until asked to stop; requests that are running then get `grace_s` seconds to end."""
        handler = type("Handler", (Handler,), {"server_of": self})
        http = ThreadingHTTPServer(("", 0), handler, bind_and_activate=False)
        http.socket.close()
        http.socket = self.listener
        http.daemon_threads = True
        http.block_on_close = False
        if not self.stopping.is_set():
            self.listener.listen(128)
            self.logger.info(
                "simulated: serving %s on port %d", self.model_id, self.listener.getsockname()[1]
            )
            threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            while not self.stopping.wait(0.05):
                self.check_workers()
            http.shutdown()
        http.server_close()
        until = time.monotonic() + grace_s
        while self.running_requests and time.monotonic() < until:
            time.sleep(0.02)
        if self.running_requests:
            self.logger.warning("simulated: %d requests cut off", self.running_requests)

    # --- answers ---

    def served_id(self) -> str:
        """The model id this server answers to."""
        return simulated_gpu.faults(self.fault_key).get("wrong_model_id", self.model_id)

    def models(self) -> dict:
        """/v1/models"""
        card = {
            "id": self.served_id(),
            "object": "model",
            "created": self.created,
            "owned_by": self.owner,
            "root": self.model_path,
            "parent": None,
            "max_model_len": self.max_model_len,
        }
        return {"object": "list", "data": [card]}

    def pause(self) -> None:
        """The time of one token; for ever while completions are to hang."""
        asked = simulated_gpu.faults(self.fault_key)
        while asked.get("hang_completions"):
            time.sleep(0.1)
            asked = simulated_gpu.faults(self.fault_key)
        time.sleep(asked.get("token_s", 0.002) * self.token_time())

    def plan(self, kind: str, body: dict) -> Generation:
        """What is to be generated for this request. Raises Refusal."""
        model = body.get("model")
        if self.checks_model_id and model is not None and model != self.served_id():
            raise Refusal(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
        if simulated_gpu.faults(self.fault_key).get("completions_500"):
            raise Refusal(500, "InternalServerError", "simulated fault: completions_500")
        if kind == "chat":
            messages = body.get("messages")
            if not isinstance(messages, list) or not messages:
                raise Refusal(400, "BadRequestError", "messages: a list of messages is required", "messages")
            prompt_tokens = tokens_of(body)
            thinks = body.get("chat_template_kwargs", {}).get("enable_thinking", True)
            thinking = THINKING_TOKENS if thinks else 0
            # The more is asked, the more there is to say.
            natural = thinking + ANSWER_TOKENS * (1 + prompt_tokens // 8)
            if simulated_gpu.faults(self.fault_key).get("no_chat_template"):
                raise Refusal(400, "BadRequestError", "simulated fault: there is no chat template")
            tool = self.tool_of(body)
            asked = body.get("max_completion_tokens") or body.get("max_tokens") or natural
        else:
            prompt = body.get("prompt")
            if not isinstance(prompt, str | list) or not prompt:
                raise Refusal(
                    400, "BadRequestError", "prompt: a text or a list of token ids is required", "prompt"
                )
            prompt_tokens = tokens_of(body)
            thinking, natural, tool = 0, math.inf, None
            asked = body.get("max_tokens") or 16
        if prompt_tokens + asked > self.max_model_len:
            raise Refusal(
                400,
                "BadRequestError",
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{asked} output tokens and your prompt contains {prompt_tokens} input tokens.",
                "max_tokens",
            )
        length = min(asked, natural)
        finish = "length" if asked < natural else "stop"
        return Generation(kind, prompt_tokens, length, min(thinking, length), finish, tool)

    def tool_of(self, body: dict) -> str | None:
        """The name of the first tool that a chat offers, if it may be called."""
        offered = body.get("tools") or []
        return offered[0]["function"]["name"] if offered and body.get("tool_choice") != "none" else None

    def crash_if_asked(self) -> None:
        """Count a completion, and die in the one that was asked for."""
        with self.lock:
            self.completions += 1
            if self.completions == simulated_gpu.faults(self.fault_key).get("crash_on_nth_completion"):
                self.logger.error("simulated fault: crash_on_nth_completion")
                os._exit(1)

    def envelope(self, generation: Generation, number: int, streamed: bool) -> dict:
        """What stands around the choices of an answer."""
        chat = generation.kind == "chat"
        kind = ("chat.completion" if chat else "text_completion") + (".chunk" if chat and streamed else "")
        return {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-simulated-{number}",
            "object": kind,
            "created": int(time.time()),
            "model": self.served_id(),
        }

    def answer(self, generation: Generation, number: int) -> dict:
        """A whole answer at once."""
        words = list(generation.words(self.pause))
        choice: dict = {"index": 0, "logprobs": None, "finish_reason": generation.finish_reason}
        if generation.kind == "chat":
            thought, said = "".join(words[: generation.thinking]), "".join(words[generation.thinking :])
            faults = simulated_gpu.faults(self.fault_key)
            if faults.get("empty_chat"):
                thought = said = ""
            calls = []
            if generation.tool and generation.finish_reason == "stop":
                said, choice["finish_reason"] = "", "tool_calls"
                arguments = "{simulated" if faults.get("broken_tool_call") else '{"town": "simulated"}'
                function = {"name": generation.tool, "arguments": arguments}
                calls = [{"id": f"call-simulated-{number}", "type": "function", "function": function}]
            choice["message"] = {
                "role": "assistant",
                "content": said or None,
                self.reasoning_key: thought or None,
                "tool_calls": calls,
            }
        else:
            choice["text"] = "".join(words)
        return {**self.envelope(generation, number, False), "choices": [choice], "usage": generation.usage()}

    def chunks(self, generation: Generation, number: int, with_usage: bool) -> Iterator[dict]:
        """The same answer as the pieces of a stream."""
        frame = self.envelope(generation, number, True)
        for place, word in enumerate(generation.words(self.pause)):
            last = place == generation.length - 1
            choice: dict = {
                "index": 0,
                "logprobs": None,
                "finish_reason": generation.finish_reason if last else None,
            }
            if generation.kind == "chat":
                choice["delta"] = {self.reasoning_key if place < generation.thinking else "content": word}
            else:
                choice["text"] = word
            yield {**frame, "choices": [choice]}
        if with_usage:
            yield {**frame, "choices": [], "usage": generation.usage()}


class Handler(BaseHTTPRequestHandler):
    """HTTP for a SimulatedServer."""

    server_of: SimulatedServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """All requests of one connection; a client that goes away is its own affair."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            super().handle()

    def log_message(self, form: str, *values: object) -> None:
        """Into the server's own log."""
        self.server_of.logger.info("simulated: %s - %s", self.client_address[0], form % values)

    def reply(self, status: int, body: dict | bytes, kind: str = "application/json") -> None:
        """One answer with its length."""
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(payload)))
        if self.server_of.stopping.is_set():
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(payload)

    def refuse(self, refusal: Refusal) -> None:
        """An OpenAI error."""
        error = {
            "message": refusal.message,
            "type": refusal.kind,
            "param": refusal.param,
            "code": refusal.status,
        }
        self.reply(refusal.status, {"error": error})

    def closed(self, path: str) -> bool:
        """Refuse a request without the API key, where one is set. Both servers leave health and metrics open."""
        key = self.server_of.api_key
        if not key or path in ("/health", "/metrics", "/version"):
            return False
        if self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.reply(401, {"error": "Unauthorized"})
        return True

    def do_GET(self) -> None:
        """GET"""
        server, path = self.server_of, self.path.partition("?")[0]
        if self.closed(path):
            return
        if path == "/health":
            self.reply(200, b"", "text/plain")
        elif path == "/v1/models":
            self.reply(200, server.models())
        elif found := server.get(path):
            self.reply(200, found[1], found[0])
        else:
            self.reply(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        """POST"""
        server, path = self.server_of, self.path.partition("?")[0]
        with server.lock:
            server.running_requests += 1
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            if self.closed(path):
                return
            if path in ("/v1/completions", "/v1/chat/completions"):
                self.complete("chat" if "chat" in path else "completion", body)
            elif (found := server.post(path, body)) is not None:
                self.reply(200, found)
            else:
                self.reply(404, {"detail": "Not Found"})
        except json.JSONDecodeError as error:
            self.refuse(Refusal(400, "BadRequestError", f"not JSON: {error}"))
        except Refusal as refusal:
            self.refuse(refusal)
        finally:
            with server.lock:
                server.running_requests -= 1

    def complete(self, kind: str, body: dict) -> None:
        """A completion or a chat completion, streamed or not."""
        server = self.server_of
        generation = server.plan(kind, body)
        server.crash_if_asked()
        if not body.get("stream"):
            reply = server.answer(generation, server.completions)
            with server.lock:
                server.finished(generation)
            self.reply(200, reply)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with_usage = (body.get("stream_options") or {}).get("include_usage", False)
        for chunk in server.chunks(generation, server.completions, with_usage):
            self.piece(f"data: {json.dumps(chunk)}\n\n".encode())
        with server.lock:
            server.finished(generation)
        self.piece(b"data: [DONE]\n\n")
        self.piece(b"")

    def piece(self, data: bytes) -> None:
        """One chunk of a chunked answer."""
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
