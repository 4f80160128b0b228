"""Fetch one file by HTTP(S), going on from what is there; a program of its own, standard library only.

As a transfer job (module `transfer_job`) it reads `$CREDENTIALS_DIRECTORY/config.json` with url, headers, path, size,
and ranges ([first, end] pairs to mend, or null for what is missing at the end), and reports in
`$RUNTIME_DIRECTORY/progress.json`. Whether the bytes are right is for who verifies the file to say.
"""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60  # without a byte
ATTEMPTS = 8  # in a row that brought nothing
REPORT_S = 0.5


class DownloadError(Exception):
    """Why the file won't come, and what to do; for people."""


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Headers of ours (tokens) stay with the host that they are for; a file store's own link has its own signature."""

    def redirect_request(self, request, fp, code, msg, headers, newurl):
        new = super().redirect_request(request, fp, code, msg, headers, newurl)
        # The scheme too: from https to http of the same host a token would travel in the clear.
        if (
            new is not None
            and urllib.parse.urlsplit(newurl)[:2] != urllib.parse.urlsplit(request.full_url)[:2]
        ):
            new.headers = {key: value for key, value in new.headers.items() if key in ("Range", "User-agent")}
        return new


def fetch_range(url: str, headers: dict[str, str], first: int, end: int) -> tuple[int, Iterator[bytes]]:
    """Bytes `first` to before `end` of what is at `url`: the whole's size in bytes, and the bytes in chunks.

    Raises DownloadError where the server refuses or can't send parts, OSError where the network breaks.
    """
    shown = shown_url(url)
    if not shown.startswith(("http://", "https://")):
        raise DownloadError(
            f"{shown} can't be fetched. Expected: an http or https URL. What to do: correct it."
        )
    if "@" in urllib.parse.urlsplit(url).netloc:
        raise DownloadError(
            f"{shown} has a user in front of its host, which would be taken for a part of the host's name. "
            "What to do: correct it, and give what authorizes in the headers."
        )
    for name, value in headers.items():
        # Looked at here: what Python says of a wrong one has the value in it, which may be a token.
        if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name) or not re.fullmatch(
            r"[\t -~]*", str(value)
        ):
            raise DownloadError(
                f"The header {name!r} can't be sent. Expected: one line of ASCII. "
                "What to do: take line breaks (a token read from a file has one at its end) out of its value."
            )
    part = {"Range": f"bytes={first}-{end - 1}", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**headers, **part})  # noqa: S310, looked at above
    try:
        answer = urllib.request.build_opener(_Redirect).open(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code in (408, 425, 429) or error.code >= 500:
            raise OSError(f"HTTP {error.code} {error.reason}") from error
        remedy = {
            401: "give the token that it wants in the headers",
            403: "see whether the token in the headers may read it",
            404: "correct the URL",
            416: "see whether the file there is the one of the pinned SHA-256",
        }.get(error.code, "open the URL on this host by hand")
        raise DownloadError(
            f"{shown} is refused. Found: HTTP {error.code} {error.reason}. What to do: {remedy}."
        ) from error
    except (ValueError, http.client.InvalidURL) as error:
        # What Python says of it has the query in it.
        raise DownloadError(
            f"{shown} is no URL. Found: a port, host or character that can't be. What to do: correct it."
        ) from error
    sent = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", answer.headers.get("Content-Range", ""))
    if answer.status == 206 and sent and int(sent[1]) != first:
        answer.close()
        raise DownloadError(
            f"{shown} sends another part. Found: {sent[0]}. Expected: bytes from {first} on. "
            "What to do: see what stands between this host and the server, or use another transport."
        )
    if answer.status != 206 or not sent:
        answer.close()
        raise DownloadError(
            f"{shown} can't be resumed. Found: an answer with the whole file (HTTP {answer.status}) to a request for a part. "
            "What to do: use a server that knows Range requests, as nginx, Apache and object stores do, or another transport."
        )
    return int(sent[2]), _chunks(answer)


def _chunks(answer) -> Iterator[bytes]:
    with answer:
        while chunk := answer.read(CHUNK_BYTES):
            yield chunk


def shown_url(url: str) -> str:
    """The URL without what may be secret in it: user, password, query."""
    try:
        parts = urllib.parse.urlsplit(url)
    except ValueError:
        return "The URL"
    return urllib.parse.urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def download(config: dict, report: Callable[..., None], sleep: Callable[[float], None] = time.sleep) -> None:
    """Bring what is missing of the file `config["path"]`, which exists, by as many requests as it takes.

    `report(done, received)` is told bytes that are there and bytes that came. Raises DownloadError.
    """
    path, size = config["path"], config["size"]
    received = 0
    with open(path, "r+b", buffering=0) as stream:
        # A swarm's partial has its full length at once, and holes in it; without one this is the end of the file.
        there = os.lseek(stream.fileno(), 0, os.SEEK_HOLE) if os.fstat(stream.fileno()).st_size else 0
        todo = (
            [tuple(pair) for pair in config["ranges"]]
            if config.get("ranges") is not None
            else [(min(there, size), size)]
        )
        missing = sum(end - first for first, end in todo)
        for first, end in todo:
            stream.seek(first)
            failures = 0
            while first < end:
                try:
                    total, chunks = fetch_range(config["url"], config.get("headers") or {}, first, end)
                    if total != size:
                        raise DownloadError(
                            f"{shown_url(config['url'])} is another file. Found: {total} bytes. Expected: {size} bytes. "
                            "What to do: see whether URL and SHA-256 belong together."
                        )
                    for chunk in chunks:
                        view = memoryview(chunk)[: end - first]
                        _write(path, stream, view)
                        first, received = first + len(view), received + len(view)
                        failures = 0
                        report(size - missing + received, received)
                        if first >= end:  # a server may send more than it was asked for
                            break
                    if first < end:
                        raise ConnectionError("the connection ended early")
                except (OSError, http.client.HTTPException) as error:
                    failures += 1
                    if failures >= ATTEMPTS:
                        raise DownloadError(
                            f"{shown_url(config['url'])} can't be reached. Found: {error}. What to do: see whether "
                            "this host has a route to it, then run again: it goes on with what arrived."
                        ) from error
                    sleep(min(2**failures, 30) / 2)
        try:
            os.fsync(stream.fileno())
        except OSError as error:
            raise _unwritable(path, error) from error
    report(size, received)


def _write(path: str, stream: io.RawIOBase, view: memoryview) -> None:
    try:
        while view:
            view = view[stream.write(view) :]
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str, error: OSError) -> DownloadError:
    return DownloadError(
        f"{path} can't be written. Found: {error.strerror}. What to do: see whether the disk is full (df), then run "
        "again: it goes on with what arrived."
    )


def main() -> int:
    """Run as a transfer job."""
    with open(os.path.join(os.environ["CREDENTIALS_DIRECTORY"], "config.json"), encoding="utf-8") as stream:
        config = json.load(stream)
    progress_path = os.path.join(os.environ["RUNTIME_DIRECTORY"], "progress.json")
    begin = time.monotonic()
    last = 0.0

    def write(state: str, done: int = 0, received: int = 0, error: str = "") -> None:
        progress = {
            "state": state,
            "bytes_done": done,
            "bytes_total": config["size"],
            "bytes_received": received,
            "peers": 1,
            "seconds": round(time.monotonic() - begin, 2),
            "error": error,
        }
        with open(f"{progress_path}.new", "w", encoding="utf-8") as stream:
            json.dump(progress, stream)
        os.replace(f"{progress_path}.new", progress_path)

    counts = (0, 0)

    def report(done: int, received: int) -> None:
        nonlocal last, counts
        counts = (done, received)
        if time.monotonic() - last >= REPORT_S:
            last = time.monotonic()
            write("running", done, received)

    try:
        download(config, report)
    except DownloadError as error:
        write("failed", *counts, str(error))
        return 1
    write("complete", *counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
