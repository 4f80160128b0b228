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

PROMPTS = (
    "The capital of France is",
    "Count to ten: one, two, three,",
    "def fibonacci(n):\n    ",
)
MAX_TOKENS = 16
READY_TIMEOUT_S = 5.0
# Nothing that we ask for answers with more than this.
LARGEST_ANSWER = 4 * 1024 * 1024

# A proxy in the environment has no business between us and the server on this host.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoProof(Exception):
    """Why a server could not be proved; the text is for the operator."""


@dataclass
class Proof:
    """The outcome of a proof. `first_good_s`: seconds from its begin to the end of the first completion."""

    proved: bool
    problem: str | None
    model_id: str | None
    seconds: float
    completions: list[dict] = field(default_factory=list)
    first_good_s: float | None = None

    def as_dict(self) -> dict:
        """For a record or a module's answer."""
        return asdict(self)


class _Deadline:
    def __init__(self, seconds: float):
        self.seconds = seconds
        self.ends = time.monotonic() + seconds

    def left(self) -> float:
        left = self.ends - time.monotonic()
        if left <= 0:
            raise NoProof(f"no complete answer within {self.seconds:g} s")
        return left


def _open(server: dict, path: str, deadline: _Deadline, body: dict | None = None) -> http.client.HTTPResponse:
    request = urllib.request.Request(
        f"http://{server['host']}:{server['port']}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={} if body is None else {"Content-Type": "application/json"},
    )
    return _OPENER.open(request, timeout=deadline.left())


def _parts(response: http.client.HTTPResponse, deadline: _Deadline) -> Iterator[bytes]:
    """The body as it comes. A socket's own timeout starts anew with each byte: mind the deadline too."""
    size = 0
    while part := response.read1(65536):
        size += len(part)
        if size > LARGEST_ANSWER:
            raise NoProof(f"an answer of more than {LARGEST_ANSWER} bytes")
        deadline.left()
        yield part


def _read(response: http.client.HTTPResponse, deadline: _Deadline) -> bytes:
    return b"".join(_parts(response, deadline))


def _ask(server: dict, path: str, deadline: _Deadline, body: dict | None = None, read=_read):
    """What `read` makes of the answer to one request. Raises NoProof for whatever else happens."""
    try:
        with _open(server, path, deadline, body) as response:
            return read(response, deadline)
    except urllib.error.HTTPError as error:
        text = ""
        with error, contextlib.suppress(OSError, http.client.HTTPException):
            text = " ".join(error.read(2000).decode(errors="replace").split())[:300]
        raise NoProof(f"{path} answered {error.code} {error.reason}: {text}".rstrip(": ")) from error
    except urllib.error.URLError as error:
        if isinstance(error.reason, TimeoutError):
            raise NoProof(f"{path}: no complete answer within {deadline.seconds:g} s") from error
        where = f"http://{server['host']}:{server['port']}{path}"
        raise NoProof(f"{where} can't be reached: {error.reason}") from error
    except TimeoutError as error:
        raise NoProof(f"{path}: no complete answer within {deadline.seconds:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise NoProof(f"{path}: the connection broke off: {error!r}") from error


def _json(server: dict, path: str, deadline: _Deadline, body: dict | None = None) -> dict:
    raw = _ask(server, path, deadline, body)
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise NoProof(f"{path} answered something that is not JSON: {raw[:100]!r}") from error
    if not isinstance(value, dict):
        raise NoProof(f"{path} answered JSON of the wrong shape: {raw[:100]!r}")
    return value


def model_ids(server: dict, timeout: float = READY_TIMEOUT_S) -> list[str]:
    """The ids that /v1/models names, at least one. Raises NoProof when it doesn't answer so."""
    answer = _json(server, "/v1/models", _Deadline(timeout))
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
        _ask(server, "/health", _Deadline(timeout))
    except NoProof as reason:
        return None if str(reason).startswith("/health answered 404") else str(reason)
    return None


def _text_of(answer: dict) -> str:
    try:
        return answer["choices"][0].get("text") or ""
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise NoProof(f"/v1/completions answered without choices: {str(answer)[:200]}") from error


def _read_stream(response: http.client.HTTPResponse, deadline: _Deadline) -> str:
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


def _complete(server: dict, model: str, prompt: str, stream: bool, deadline: _Deadline) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    if stream:
        text = _ask(server, "/v1/completions", deadline, {**body, "stream": True}, _read_stream)
    else:
        text = _text_of(_json(server, "/v1/completions", deadline, body))
    if not text:
        raise NoProof("/v1/completions answered with an empty text")
    return text


def prove(server: dict, *, completions: int = 3, timeout_s: float = 120.0) -> Proof:
    """Prove a server by completions, the last one streamed, all within `timeout_s` seconds.

    Never raises for what a server does: that is in `problem`.
    """
    begin = time.monotonic()
    proof = Proof(False, None, None, 0.0)
    deadline = _Deadline(timeout_s)
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
        if server["metrics"] and not _ask(server, "/metrics", deadline):
            raise NoProof("/metrics is empty")
        proof.proved = True
    except NoProof as reason:
        done = len(proof.completions)
        proof.problem = f"{reason} (after {done} of {completions} completions)" if done else str(reason)
    proof.seconds = round(time.monotonic() - begin, 3)
    return proof
