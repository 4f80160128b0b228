"""The proof against simulated servers: real HTTP, every way not to serve."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from dflash_rollout import proof


class SimulatedServer(BaseHTTPRequestHandler):
    """Answers as its class says: a path is a (status, body), or a function of the handler."""

    protocol_version = "HTTP/1.1"
    answers: dict
    asked: list

    def log_message(self, *arguments):
        """Nothing on the terminal."""

    def _answer(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.path, body))
        answer = self.answers.get(self.path, (404, "not here"))
        if callable(answer):
            answer = answer(self, body)
        if answer is None:
            self.close_connection = True
            return
        status, text = answer
        raw = (text if isinstance(text, str) else json.dumps(text)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_POST = _answer


def completion(handler, body):
    if not body.get("stream"):
        return 200, {"choices": [{"text": " Paris."}]}
    return stream(
        'data: {"choices": [{"text": " Pa"}]}\n\ndata: {"choices": [{"text": "ris."}]}\n\n: ping\n\n'
    )(handler, body)


def stream(events, done="data: [DONE]\n\n", pause=0.0):
    """A streamed answer, sent in parts that end in the middle of a line."""

    def send(handler, body):
        if not body.get("stream"):
            return 200, {"choices": [{"text": " Paris."}]}
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Connection", "close")
        handler.end_headers()
        raw = (events + done).encode()
        for offset in range(0, len(raw), 7):
            handler.wfile.write(raw[offset : offset + 7])
            handler.wfile.flush()
            time.sleep(pause)
        return None

    return send


def drip(handler, body):
    """A body that never ends, a byte at a time: each byte comes well within a socket's timeout."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    for _ in range(100):
        try:
            handler.wfile.write(b" ")
        except OSError:
            break
        time.sleep(0.1)


def hang(handler, body):
    time.sleep(3.0)


GOOD = {
    "/health": (200, ""),
    "/v1/models": (200, {"data": [{"id": "M"}]}),
    "/v1/completions": completion,
    "/metrics": (200, "vllm:num_requests_running 0\n"),
}


@pytest.fixture
def serve():
    """serve(**paths) -> (description, what was asked)."""
    running = []

    def start(**changes):
        answers = {**GOOD, **{f"/{key.replace('__', '/')}": value for key, value in changes.items()}}
        asked = []
        handler = type("Simulated", (SimulatedServer,), {"answers": answers, "asked": asked})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        running.append(server)
        port = server.server_address[1]
        return {"host": "127.0.0.1", "port": port, "model_id": "M", "metrics": True}, asked

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def test_a_good_server_is_proved(serve):
    server, asked = serve()
    found = proof.prove(server)
    assert found.proved, found.problem
    assert found.model_id == "M"
    assert [row["stream"] for row in found.completions] == [False, False, True]
    assert [row["characters"] for row in found.completions] == [7, 7, 7]
    assert 0 < found.first_good_s <= found.seconds
    bodies = [body for path, body in asked if path == "/v1/completions"]
    assert [body["model"] for body in bodies] == ["M"] * 3
    assert bodies[2]["stream"] is True
    assert len({body["prompt"] for body in bodies}) == 3


def test_a_proxy_in_the_environment_is_not_asked(serve, monkeypatch):
    server, _ = serve()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert proof.prove(server).proved


def test_without_a_promise_the_first_model_is_taken(serve):
    server, _ = serve(v1__models=(200, {"data": [{"id": "first"}, {"id": "second"}]}))
    assert proof.prove({**server, "model_id": None}).model_id == "first"


def third_fails(handler, body):
    return (500, "the engine died") if body.get("stream") else (200, {"choices": [{"text": "x"}]})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"v1__models": (200, {"data": [{"id": "X"}]})}, "it serves X and not M as promised"),
        ({"v1__models": (200, {"data": []})}, "names no model"),
        ({"v1__models": (200, {"models": 1})}, "without model ids"),
        ({"v1__models": (200, "<html>")}, "not JSON"),
        ({"v1__models": (200, "[1]")}, "wrong shape"),
        (
            {"v1__completions": (500, "the engine\ndied")},
            "answered 500 Internal Server Error: the engine died",
        ),
        ({"v1__completions": (200, {"choices": [{"text": ""}]})}, "empty text"),
        ({"v1__completions": (200, {"choices": []})}, "without choices"),
        ({"v1__completions": (200, {"error": "no"})}, "without choices"),
        ({"v1__completions": hang}, "no complete answer within 1 s"),
        ({"v1__completions": drip}, "no complete answer within 1 s"),
        ({"v1__completions": third_fails}, "the engine died (after 2 of 3 completions)"),
        ({"v1__completions": stream("", "")}, "broke off before [DONE] (after 2 of 3 completions)"),
        ({"v1__completions": stream("")}, "empty text"),
        ({"v1__completions": stream("data: {oops\n\n")}, "holds no JSON"),
        ({"v1__completions": stream('data: {"error": {"message": "dead"}}\n\n')}, "dead"),
        (
            {"v1__completions": stream('data: {"choices": []}\n\n' * 50, pause=0.1)},
            "no complete answer within 1 s",
        ),
        ({"metrics": (404, "no")}, "/metrics answered 404"),
        ({"metrics": (200, "")}, "/metrics is empty"),
    ],
)
def test_not_proved(serve, changes, words):
    server, _ = serve(**changes)
    begin = time.monotonic()
    found = proof.prove(server, timeout_s=1.0)
    assert not found.proved
    assert words in found.problem
    assert time.monotonic() - begin < 2.5


def test_metrics_are_asked_only_where_they_are_promised(serve):
    server, _ = serve(metrics=(404, "no"))
    assert proof.prove({**server, "metrics": False}).proved


def test_nobody_there():
    server = {"host": "127.0.0.1", "port": 9, "model_id": None, "metrics": False}
    found = proof.prove(server, timeout_s=1.0)
    assert "can't be reached" in found.problem
    assert "can't be reached" in proof.not_ready(server)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"health": (404, "no such page")}, None),
        ({"health": (503, "starting")}, "/health answered 503"),
        ({"v1__models": (503, "starting")}, "/v1/models answered 503"),
        ({"health": hang}, "no complete answer within 1 s"),
    ],
)
def test_ready(serve, changes, reason):
    server, _ = serve(**changes)
    found = proof.not_ready(server, timeout=1.0)
    assert found is None if reason is None else reason in found


def chat(message, finish_reason="stop"):
    return (200, {"choices": [{"message": message, "finish_reason": finish_reason}]})


def call(arguments, name="weather"):
    return {"content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def test_chats_are_asked_only_where_they_are_promised(serve):
    server, asked = serve(v1__chat__completions=(400, "there is no chat template"))
    found = proof.prove(server)
    assert found.proved, found.problem
    assert (found.chat, found.tools) == (None, None)
    assert not [path for path, _ in asked if "chat" in path]
    for promise in ("chat", "tools"):
        found = proof.prove({**server, promise: True})
        assert not found.proved
        assert "/v1/chat/completions answered 400" in found.problem
        assert "no chat template" in found.problem


@pytest.mark.parametrize(
    ("message", "answered"),
    [
        ({"content": "hello"}, "content"),
        ({"content": None, "reasoning": "hm"}, "reasoning"),
        ({"content": None, "reasoning_content": "hm"}, "reasoning"),
        ({"content": "", "reasoning": None, "tool_calls": [{"function": {}}]}, "tool calls"),
    ],
)
def test_what_counts_as_a_chat(serve, message, answered):
    server, asked = serve(v1__chat__completions=chat(message))
    found = proof.prove({**server, "chat": True})
    assert found.proved, found.problem
    assert (found.chat, found.tools) == (answered, None)
    [body] = [body for path, body in asked if "chat" in path]
    assert "tools" not in body
    assert body["model"] == "M"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (chat({"content": None, "reasoning": "", "tool_calls": []}), "neither content nor reasoning"),
        (chat(None), "without a message"),
        ((200, {"choices": []}), "without a message"),
        ((200, {"choices": [{"text": "x"}]}), "without a message"),
        ((500, "dead"), "answered 500"),
        (hang, "no complete answer within 1 s"),
    ],
)
def test_what_is_no_chat(serve, answer, words):
    server, _ = serve(v1__chat__completions=answer)
    for promise in ("chat", "tools"):
        found = proof.prove({**server, promise: True}, timeout_s=1.0)
        assert not found.proved
        assert words in found.problem


@pytest.mark.parametrize(
    ("answer", "answered"),
    [
        (chat(call('{"town": "Oslo"}')), "tool calls"),
        (chat({"content": "I have no tools."}), "content"),
        (chat({"content": None, "reasoning": "Let me see"}, "length"), "reasoning"),
        (chat(call('{"town": "Os'), "length"), "tool calls"),
    ],
    ids=["a call", "no call", "still thinking", "cut off"],
)
def test_the_tool_probe_wants_a_well_formed_answer_not_a_call(serve, answer, answered):
    server, asked = serve(v1__chat__completions=answer)
    found = proof.prove({**server, "tools": True})
    assert found.proved, found.problem
    assert found.tools == answered
    [body] = [body for path, body in asked if "chat" in path]
    assert body["tools"][0]["function"]["name"] == "weather"


@pytest.mark.parametrize(
    "message",
    [
        call('{"town": "Os'),
        call(None),
        call("{}", name=""),
        call("{}", name=None),
        {"tool_calls": [{"name": "weather"}]},
        {"tool_calls": ["weather"]},
        {"tool_calls": "weather"},
    ],
)
def test_a_broken_tool_call_is_no_proof(serve, message):
    server, _ = serve(v1__chat__completions=chat(message, "tool_calls"))
    found = proof.prove({**server, "tools": True})
    assert not found.proved
    assert "broken tool call" in found.problem
