"""A small HTTP server with Range requests, for tests: on a port of 127.0.0.1 of its own, with faults as asked."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Server:
    """What it serves under any path, what it was asked, and how it misbehaves."""

    content: bytes
    port: int = 0
    asked: list[dict[str, str]] = field(default_factory=list)  # headers of each request, names in lower case
    paths: list[str] = field(default_factory=list)
    ranges: bool = True  # False: sends the whole file whatever is asked
    statuses: list[int] = field(default_factory=list)  # answers of the next requests instead of the file
    break_after: list[int] = field(
        default_factory=list
    )  # of the next answers, bytes until the connection ends
    redirect: str = ""  # answer with a redirect to this URL
    total: int | None = None  # what it says the size of the whole is
    shift: int = 0  # sends a part that begins as many bytes later
    too_much: int = 0  # bytes that are sent beyond the end of the part

    @property
    def url(self) -> str:
        """Of the file."""
        return f"http://127.0.0.1:{self.port}/d/model.safetensors"

    @property
    def parts(self) -> list[str]:
        """The parts that were asked for."""
        return [headers.get("range", "").removeprefix("bytes=") for headers in self.asked]


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        known: Server = self.server.known
        known.asked.append({name.lower(): value for name, value in self.headers.items()})
        known.paths.append(self.path)
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        status = known.statuses.pop(0) if known.statuses else 302 if known.redirect else 206
        if part and status == 206 and int(part[1]) >= len(known.content):
            status = 416
        if status != 206 or not part:
            self.send_response(status)
            if known.redirect:
                self.send_header("Location", known.redirect)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if not known.ranges:
            self._send(200, known.content, {})
            return
        first = int(part[1]) + known.shift
        end = min(int(part[2]) + 1 + known.too_much, len(known.content))
        total = len(known.content) if known.total is None else known.total
        self._send(206, known.content[first:end], {"Content-Range": f"bytes {first}-{end - 1}/{total}"})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        known: Server = self.server.known
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if known.break_after:
            data = data[: known.break_after.pop(0)]
            self.close_connection = True
        with contextlib.suppress(ConnectionError):  # who asked may have read enough
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Tests look at what was asked instead."""


@contextlib.contextmanager
def serving(content: bytes) -> Iterator[Server]:
    """A running server of `content`; ends with the block."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        server.known = Server(content, server.server_port)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.known
        finally:
            server.shutdown()
            thread.join()
