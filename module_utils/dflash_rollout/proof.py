"""Is a server ready, and does it really serve? A health page proves nothing: a dead engine answers it for an
hour. The proof is completions, within a deadline, from the model that was promised. Speaks only HTTP."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from .errors import RolloutError
from .secret_files import api_key

PROMPTS = (
    "The capital of France is",
    "Count to ten: one, two, three,",
    "def fibonacci(n):\n    ",
)
MAX_TOKENS = 16
CHAT = "Say hello."
TOOL_CHAT = "What is the weather in Oslo? Use the tool."
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town now",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}
# Room for a whole call, where the model makes one at once.
TOOL_MAX_TOKENS = 96
READY_TIMEOUT_S = 5.0
# Nothing that we ask for answers with more than this.
LARGEST_ANSWER = 4 * 1024 * 1024

# A proxy in the environment has no business between us and the server on this host.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoProof(Exception):
    """Why a server could not be proved; the text is for the operator."""


@dataclass
class Proof:
    """The outcome of a proof. `first_good_s`: seconds from its begin to the end of the first completion.

    `chat` and `tools`: what answered there ("content", "reasoning" or "tool calls"), where they were asked.
    """

    proved: bool
    problem: str | None
    model_id: str | None
    seconds: float
    completions: list[dict] = field(default_factory=list)
    first_good_s: float | None = None
    chat: str | None = None
    tools: str | None = None

    def as_dict(self) -> dict:
        """For a record or a module's answer."""
        return asdict(self)


class Deadline:
    """One limit, in seconds from now, for everything that is asked under it."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.ends = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left. Raises NoProof when there are none."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise NoProof(f"no complete answer within {self.seconds:g} s")
        return left


def _address(server: dict) -> str:
    """Host and port as in a URL: an address of IPv6 stands in brackets."""
    host = f"[{server['host']}]" if ":" in server["host"] else server["host"]
    return f"{host}:{server['port']}"


def _open(
    server: dict, path: str, deadline: Deadline, body: dict | None, key: str | None
) -> http.client.HTTPResponse:
    """The answer, with its body yet to be read. `key`: the API key, where there is one."""
    request = urllib.request.Request(
        f"http://{_address(server)}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={} if body is None else {"Content-Type": "application/json"},
    )
    if key:
        # Not to whoever the server redirects to.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    return _OPENER.open(request, timeout=deadline.left())


def _parts(response: http.client.HTTPResponse, deadline: Deadline) -> Iterator[bytes]:
    """The body as it comes. A socket's own timeout starts anew with each byte: mind the deadline too."""
    size = 0
    while part := response.read1(65536):
        size += len(part)
        if size > LARGEST_ANSWER:
            raise NoProof(f"an answer of more than {LARGEST_ANSWER} bytes")
        deadline.left()
        yield part


def _read(response: http.client.HTTPResponse, deadline: Deadline) -> bytes:
    return b"".join(_parts(response, deadline))


def ask(server: dict, path: str, deadline: Deadline, body: dict | None = None, read=_read):
    """What `read` makes of the answer to one request. Raises NoProof for whatever else happens."""
    try:
        key = api_key(server)
    except RolloutError as error:
        raise NoProof(str(error)) from error
    try:
        with _open(server, path, deadline, body, key) as response:
            return read(response, deadline)
    except urllib.error.HTTPError as error:
        text = ""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text = " ".join(error.read(2000).decode(errors="replace").split())[:300]
        if error.code == 401:
            text = f"{text}. Its API key is {'another one' if key else 'needed: set it in the inventory'}".lstrip(
                ". "
            )
        if key:
            text = text.replace(key, "***")
        raise NoProof(f"{path} answered {error.code} {error.reason}: {text}".rstrip(": ")) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise NoProof(f"{path}: no complete answer within {deadline.seconds:g} s") from error
        raise NoProof(f"http://{_address(server)}{path} can't be reached: {error.reason}") from error
    except TimeoutError as error:
        raise NoProof(f"{path}: no complete answer within {deadline.seconds:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoProof(f"{path}: the connection broke off: {error!r}") from error


def ask_json(server: dict, path: str, deadline: Deadline, body: dict | None = None) -> dict:
    """The JSON object that a server answers. Raises NoProof for whatever else it does."""
    raw = ask(server, path, deadline, body)
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise NoProof(f"{path} answered something that is not JSON: {raw[:100]!r}") from error
    if not isinstance(value, dict):
        raise NoProof(f"{path} answered JSON of the wrong shape: {raw[:100]!r}")
    return value


def model_ids(server: dict, timeout: float = READY_TIMEOUT_S) -> list[str]:
    """The ids that /v1/models names, at least one. Raises NoProof when it doesn't answer so."""
    answer = ask_json(server, "/v1/models", Deadline(timeout))
    try:
        ids = [model["id"] for model in answer["data"]]
    except (KeyError, TypeError) as error:
        raise NoProof(f"/v1/models answered without model ids: {str(answer)[:200]}") from error
    if not ids:
        raise NoProof("/v1/models names no model")
    return ids


def not_ready(server: dict, timeout: float = READY_TIMEOUT_S) -> str | None:
    """None when the server says that it is ready, otherwise why it isn't.

    Ready is /v1/models with 200, and /health with 200 where there is one. It is a reason to try the proof.
    """
    try:
        model_ids(server, timeout)
        ask(server, "/health", Deadline(timeout))
    except NoProof as reason:
        return None if str(reason).startswith("/health answered 404") else str(reason)
    return None


def _text_of(answer: dict) -> str:
    try:
        return answer["choices"][0].get("text") or ""
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoProof(f"/v1/completions answered without choices: {str(answer)[:200]}") from error


def _read_stream(response: http.client.HTTPResponse, deadline: Deadline) -> str:
    """The text of a streamed completion (server-sent events). Without [DONE] at its end it broke off."""
    text, rest = "", b""
    for part in _parts(response, deadline):
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            field_name, _, data = line.decode(errors="replace").partition(":")
            if field_name != "data":
                continue
            if data.strip() == "[DONE]":
                return text
            try:
                event = json.loads(data)
            except ValueError as error:
                raise NoProof(f"the stream of /v1/completions holds no JSON: {data[:100]!r}") from error
            if not isinstance(event, dict) or "error" in event:
                raise NoProof(f"the stream of /v1/completions says: {data.strip()[:300]}")
            # An event may carry usage alone.
            text += _text_of(event) if event.get("choices") else ""
    raise NoProof("the stream of /v1/completions broke off before [DONE]")


def _complete(server: dict, model: str, prompt: str, stream: bool, deadline: Deadline) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    if stream:
        text = ask(server, "/v1/completions", deadline, {**body, "stream": True}, _read_stream)
    else:
        text = _text_of(ask_json(server, "/v1/completions", deadline, body))
    if not text:
        raise NoProof("/v1/completions answered with an empty text")
    return text


def _chat(server: dict, model: str, deadline: Deadline, text: str, max_tokens: int, **more: object) -> dict:
    """The first choice of one chat."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }
    answer = ask_json(server, "/v1/chat/completions", deadline, body)
    try:
        choice = answer["choices"][0]
        if not isinstance(choice["message"], dict):
            raise TypeError("message")
    except (KeyError, IndexError, TypeError) as error:
        raise NoProof(f"/v1/chat/completions answered without a message: {str(answer)[:200]}") from error
    return choice


def _answered(message: dict) -> str:
    """What of a message is an answer. A model that thinks first has said nothing yet after few tokens, and one
    that calls a tool says nothing at all; servers differ in what they call the thoughts."""
    if message.get("tool_calls"):
        return "tool calls"
    if message.get("content"):
        return "content"
    if message.get("reasoning") or message.get("reasoning_content"):
        return "reasoning"
    raise NoProof("/v1/chat/completions answered with neither content nor reasoning nor a tool call")


def _check_calls(choice: dict) -> None:
    """Tool calls have to be well formed; whether the model should have made them is not the server's affair."""
    calls = choice["message"].get("tool_calls") or []
    try:
        for call in calls:
            if not call["function"]["name"]:
                raise ValueError("a tool call without a name")
            # Where the answer was cut off, its last call may be too.
            if choice.get("finish_reason") != "length":
                json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError) as error:
        raise NoProof(f"/v1/chat/completions answered with a broken tool call: {str(calls)[:200]}") from error


def _prove_chat(server: dict, proof: Proof, deadline: Deadline) -> None:
    """Chats, only where they are promised: a base model has no template for them."""
    model = proof.model_id or ""
    if server.get("chat"):
        proof.chat = _answered(_chat(server, model, deadline, CHAT, MAX_TOKENS)["message"])
    if server.get("tools"):
        # Templates that know no thinking ignore the last one.
        more = {"tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"enable_thinking": False}}
        choice = _chat(server, model, deadline, TOOL_CHAT, TOOL_MAX_TOKENS, **more)
        _check_calls(choice)
        proof.tools = _answered(choice["message"])


def _prove_closed(server: dict, deadline: Deadline) -> None:
    """A server that shall ask for a key refuses who has none. Raises NoProof when it answers."""
    try:
        ids = model_ids({**server, "api_key_file": None}, deadline.left())
    except NoProof as refusal:
        if isinstance(refusal.__cause__, urllib.error.HTTPError) and refusal.__cause__.code == 401:
            return
        raise
    raise NoProof(f"it names {', '.join(ids)} to whoever asks without the API key")


def prove(server: dict, *, completions: int = 3, timeout_s: float = 120.0) -> Proof:
    """Prove a server by completions, the last one streamed, and by chats where they are promised, all within
    `timeout_s` seconds.

    Never raises for what a server does: that is in `problem`.
    """
    begin = time.monotonic()
    proof = Proof(False, None, None, 0.0)
    deadline = Deadline(timeout_s)
    try:
        ids = model_ids(server, deadline.left())
        if server["model_id"] is not None and server["model_id"] not in ids:
            raise NoProof(f"it serves {', '.join(ids)} and not {server['model_id']} as promised")
        proof.model_id = server["model_id"] or ids[0]
        for number in range(completions):
            started = time.monotonic()
            stream = number == completions - 1
            text = _complete(server, proof.model_id, PROMPTS[number % len(PROMPTS)], stream, deadline)
            finished = time.monotonic()
            if number == 0:
                proof.first_good_s = round(finished - begin, 3)
            proof.completions.append(
                {"seconds": round(finished - started, 3), "characters": len(text), "stream": stream}
            )
        _prove_chat(server, proof, deadline)
        if server.get("release") and server.get("api_key_file"):
            _prove_closed(server, deadline)
        if server["metrics"] and not ask(server, "/metrics", deadline):
            raise NoProof("/metrics is empty")
        proof.proved = True
    except NoProof as reason:
        done = len(proof.completions)
        proof.problem = f"{reason} (after {done} of {completions} completions)" if done else str(reason)
    proof.seconds = round(time.monotonic() - begin, 3)
    return proof
