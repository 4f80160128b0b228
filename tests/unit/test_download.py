"""Downloads that go on, against a real server with Range requests: what is asked, what is refused, what people read."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import sys
from pathlib import Path

import pytest
from dflash_rollout import download as module
from dflash_rollout.download import DownloadError, download, fetch_range, shown_url
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranges import serving

CONTENT = random.Random(5).randbytes(3_000_001)  # noqa: S311, three chunks and a byte


@pytest.fixture
def server():
    with serving(CONTENT) as running:
        yield running


class Fetch:
    """One download into `path`; `reports` and `waits` are what it told."""

    def __init__(self, path: Path, server, **config):
        self.path, self.reports, self.waits = path, [], []
        self.config = {"url": server.url, "path": str(path), "size": len(server.content), **config}

    def run(self) -> bytes:
        download(self.config, lambda *counts: self.reports.append(counts), self.waits.append)
        return self.path.read_bytes()

    def error(self) -> str:
        with pytest.raises(DownloadError) as caught:
            self.run()
        return str(caught.value)


@pytest.fixture
def fetch(server, tmp_path):
    """`fetch(there=b"", **config)`: a download over a file that holds `there`."""

    def make(there: bytes = b"", **config) -> Fetch:
        path = tmp_path / "model.safetensors.incoming"
        path.write_bytes(there)
        return Fetch(path, server, **config)

    return make


def test_all_of_it(fetch, server):
    one = fetch()
    assert one.run() == CONTENT
    assert server.parts == ["0-3000000"]
    assert one.reports[-1] == (3_000_001, 3_000_001)
    assert one.reports == sorted(one.reports)
    assert len(one.reports) == 4
    assert one.waits == []


def test_it_goes_on_with_what_arrived(fetch, server):
    one = fetch(CONTENT[:2_000_000])
    assert one.run() == CONTENT
    assert server.parts == ["2000000-3000000"]
    assert one.reports[-1] == (3_000_001, 1_000_001)


def test_a_partial_with_holes_is_not_taken_for_whole(fetch, server):
    """As a swarm leaves it: of its full length, with pieces here and there."""
    one = fetch()
    with one.path.open("r+b") as stream:
        stream.write(CONTENT[: 1 << 20])
        stream.seek(2_900_000)
        stream.write(CONTENT[2_900_000:])
    assert one.run() == CONTENT
    assert server.parts == ["1048576-3000000"]


@pytest.mark.parametrize("ranges", [None, []])
def test_nothing_is_asked_for_what_is_there(fetch, server, ranges):
    one = fetch(CONTENT, ranges=ranges)
    assert one.run() == CONTENT
    assert server.asked == []
    assert one.reports == [(3_000_001, 0)]


def test_ranges_are_mended_and_nothing_else_is_fetched(fetch, server):
    damaged = bytearray(CONTENT)
    damaged[5], damaged[2_000_000], damaged[2_500_000] = (
        byte ^ 1 for byte in (damaged[5], damaged[2_000_000], 7)
    )
    one = fetch(damaged, ranges=[[0, 10], [2_000_000, 2_000_001], [2_500_000, 3_000_001]])
    assert one.run() == CONTENT
    assert server.parts == ["0-9", "2000000-2000000", "2500000-3000000"]
    assert one.reports[-1] == (3_000_001, 500_012)


def test_ranges_beyond_what_is_there(fetch, server):
    assert fetch(CONTENT[:1000], ranges=[[2_000_000, 3_000_001], [1000, 2_000_000]]).run() == CONTENT


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4999), min_size=1, max_size=5))
def test_whatever_breaks_off_it_goes_on(tmp_path_factory, breaks):
    content = CONTENT[:5000]
    path = tmp_path_factory.mktemp("download") / "x"
    path.touch()
    with serving(content) as server:
        server.break_after = list(breaks)
        one = Fetch(path, server)
        assert hashlib.sha256(one.run()).digest() == hashlib.sha256(content).digest()
        assert one.reports[-1] == (5000, 5000)


def test_a_connection_that_breaks_goes_on_where_it_broke(fetch, server):
    server.break_after = [1_200_000, 0, 100]
    one = fetch()
    assert one.run() == CONTENT
    assert server.parts == ["0-3000000", "1200000-3000000", "1200000-3000000", "1200100-3000000"]
    assert one.waits == [1, 2, 1], "longer while nothing comes, short again after something came"


def test_a_server_that_is_busy_is_asked_again(fetch, server):
    server.statuses = [503, 429, 500]
    one = fetch()
    assert one.run() == CONTENT
    assert one.waits == [1, 2, 4]


def test_what_can_not_be_reached_is_given_up(fetch, server):
    server.statuses = [503] * 100
    one = fetch(CONTENT[:7])
    message = one.error()
    assert message == (
        f"{server.url} can't be reached. Found: HTTP 503 Service Unavailable. What to do: see whether this host has a "
        "route to it, then run again: it goes on with what arrived."
    )
    assert len(server.asked) == module.ATTEMPTS == len(one.waits) + 1
    assert one.path.read_bytes() == CONTENT[:7]


def test_nobody_there(fetch):
    assert (
        "can't be reached. Found: <urlopen error [Errno 111] Connection refused>"
        in fetch(url="http://127.0.0.1:9/x").error()
    )


@pytest.mark.parametrize(
    ("status", "found", "remedy"),
    [
        (401, "HTTP 401 Unauthorized", "give the token that it wants in the headers"),
        (403, "HTTP 403 Forbidden", "see whether the token in the headers may read it"),
        (404, "HTTP 404 Not Found", "correct the URL"),
        (410, "HTTP 410 Gone", "open the URL on this host by hand"),
    ],
)
def test_refusals_are_not_tried_again(fetch, server, status, found, remedy):
    server.statuses = [status] * 9
    assert fetch().error() == f"{server.url} is refused. Found: {found}. What to do: {remedy}."
    assert len(server.asked) == 1


def test_a_server_without_ranges_is_refused(fetch, server):
    server.ranges = False
    one = fetch(CONTENT[:10])
    assert "can't be resumed. Found: an answer with the whole file (HTTP 200)" in one.error()
    assert one.path.read_bytes() == CONTENT[:10]


def test_another_file_is_refused_before_a_byte_is_written(fetch, server):
    server.total = 3_000_002
    one = fetch()
    assert "is another file. Found: 3000002 bytes. Expected: 3000001 bytes." in one.error()
    assert one.path.read_bytes() == b""
    server.total, server.content = None, CONTENT[:5]
    assert "is refused. Found: HTTP 416" in fetch(CONTENT[:10], size=3_000_001).error()


def test_another_part_than_the_one_asked_for_is_refused(fetch, server):
    server.shift = 1
    one = fetch(CONTENT[:10])
    assert "sends another part. Found: bytes 11-3000000/3000001. Expected: bytes from 10 on." in one.error()
    assert one.path.read_bytes() == CONTENT[:10]


def test_more_than_was_asked_for_is_not_written(fetch, server):
    server.too_much = 2_000_000
    damaged = bytearray(CONTENT)
    damaged[3] ^= 1
    damaged[50] ^= 1
    one = fetch(damaged, ranges=[[0, 10]])
    assert one.run() == CONTENT[:50] + damaged[50:51] + CONTENT[51:]
    assert one.reports == [(3_000_001, 10), (3_000_001, 10)]


def test_headers_reach_the_server(fetch, server):
    fetch(headers={"Authorization": "Bearer abc", "X-Number": 7}).run()
    assert server.asked[0]["authorization"] == "Bearer abc"
    assert server.asked[0]["x-number"] == "7"
    assert server.asked[0]["accept-encoding"] == "identity"


def test_a_redirect_to_another_host_has_no_token(fetch, server):
    headers = {"Authorization": "Bearer abc", "Cookie": "a=b", "X-Api-Key": "c"}
    with serving(CONTENT) as store:  # another port is another server
        server.redirect = f"{store.url}?signature=s"
        assert fetch(CONTENT[:5], headers=headers).run() == CONTENT
    assert server.asked[0]["authorization"] == "Bearer abc"
    assert store.parts == ["5-3000000"]
    assert store.paths == ["/d/model.safetensors?signature=s"]
    assert store.asked[0].keys() & {"authorization", "cookie", "x-api-key"} == set()


@pytest.mark.parametrize(
    ("to", "kept"),
    [("https://a.example/other", True), ("http://a.example/x", False), ("https://b.example/x", False)],
)
def test_a_token_stays_with_its_host_and_its_encryption(to, kept):
    request = module.urllib.request.Request(
        "https://a.example/x", headers={"Authorization": "Bearer abc", "Range": "bytes=0-1"}
    )
    new = module._Redirect().redirect_request(request, None, 302, "Found", {}, to)
    assert new.get_header("Range") == "bytes=0-1"
    assert (new.get_header("Authorization") == "Bearer abc") == kept


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "/etc/passwd", "", "model", "http://[::1/x"]
)
def test_only_http(fetch, url):
    assert "can't be fetched. Expected: an http or https URL." in fetch(url=url).error()


def test_a_redirect_to_a_file_is_not_followed(fetch, server):
    server.redirect = "file:///etc/hostname"
    one = fetch()
    assert "is refused. Found: HTTP 302" in one.error()
    assert one.path.read_bytes() == b""


SECRET = "hunter2"  # noqa: S105, it must show nowhere


@pytest.mark.parametrize("status", [401, 404, 503, 200])
def test_a_secret_in_the_url_is_not_shown(fetch, server, status):
    server.statuses = [status] * 9 if status != 200 else []
    server.ranges = False
    message = fetch(url=f"{server.url}?token={SECRET}#{SECRET}").error()
    assert SECRET not in message
    assert server.url in message
    assert SECRET in server.paths[0]


@pytest.mark.parametrize(
    "url",
    [
        f"http://me:{SECRET}@127.0.0.1:9/x",
        f"http://127.0.0.1:{SECRET}/x?{SECRET}",
        f"http://127.0.0.1:9/x?a b={SECRET}",
        f"http://127.0.0.1:9/x?\n={SECRET}",
        f"http://[{SECRET}/x",
    ],
)
def test_a_secret_in_a_url_that_is_none_is_not_shown(fetch, url):
    message = fetch(url=url).error()
    assert SECRET not in message.replace(f":{SECRET}/x is", ""), "a port is no place for one"
    assert "What to do: correct it" in message


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {SECRET}\n"},
        {"Authorization": f"Bearer {SECRET}…"},
        {"Authorization": f"{SECRET}\r\nX-Evil: 1"},
        {"a b": SECRET},
        {"a:": SECRET},
    ],
)
def test_a_header_that_can_not_be_sent_is_named_without_its_value(fetch, server, headers):
    message = fetch(headers=headers).error()
    assert message.startswith(f"The header {next(iter(headers))!r} can't be sent.")
    assert SECRET not in message
    assert server.asked == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://u:p@h:1/a/b?c=d#e", "https://h:1/a/b"),
        ("http://h/", "http://h/"),
        ("http://[::1]:8/x?y", "http://[::1]:8/x"),
    ],
)
def test_shown_url(url, shown):
    assert shown_url(url) == shown


def test_fetch_range_says_the_size_of_the_whole(server):
    total, chunks = fetch_range(server.url, {}, 10, 20)
    assert (total, b"".join(chunks)) == (3_000_001, CONTENT[10:20])


class FullDisk:
    """A stream that takes `room` bytes, some at a time."""

    def __init__(self, room: int):
        self.room, self.written = room, b""

    def write(self, view) -> int:
        if len(self.written) >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        data = bytes(view[: min(7, self.room - len(self.written))])
        self.written += data
        return len(data)


def test_a_full_disk_is_no_broken_network():
    stream = FullDisk(20)
    with pytest.raises(DownloadError) as caught:
        module._write("/d/x.incoming", stream, memoryview(CONTENT[:100]))
    assert str(caught.value) == (
        "/d/x.incoming can't be written. Found: No space left on device. What to do: see whether the disk is full (df), "
        "then run again: it goes on with what arrived."
    )
    assert stream.written == CONTENT[:20]


def test_a_short_write_is_written_on():
    stream = FullDisk(1000)
    module._write("/d/x", stream, memoryview(CONTENT[:100]))
    assert stream.written == CONTENT[:100]


def test_a_full_disk_in_a_download_is_not_tried_again(fetch, server, monkeypatch):
    def full(path, stream, view):
        raise module._unwritable(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(module, "_write", full)
    one = fetch()
    assert "can't be written. Found: No space left on device" in one.error()
    assert (len(server.asked), one.waits) == (1, [])


def test_what_only_fsync_finds_is_said(fetch, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    assert "can't be written. Found: Input/output error" in fetch().error()


# -- as a transfer job


@pytest.fixture
def job(tmp_path, server, monkeypatch):
    """`job(**changes) -> (exit status, progress)`: run as the unit runs it."""
    path = tmp_path / "model.safetensors.incoming"
    path.touch()
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(module, "REPORT_S", 0.0)

    def run(**changes):
        config = {"url": server.url, "headers": {}, "path": str(path), "size": len(CONTENT), "ranges": None}
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        status = module.main()
        return status, json.loads((tmp_path / "progress.json").read_text())

    return run


def test_the_job_reports_what_a_follower_reads(job, tmp_path):
    from dflash_rollout.transfer_job import PROGRESS, parse_progress

    status, progress = job()
    assert status == 0
    assert progress.keys() == PROGRESS.keys() - {"bytes_sent"}
    assert parse_progress(json.dumps(progress))["state"] == "complete"
    assert {key: progress[key] for key in ("bytes_done", "bytes_total", "bytes_received", "error")} == {
        "bytes_done": 3_000_001, "bytes_total": 3_000_001, "bytes_received": 3_000_001, "error": "",
    }  # fmt: skip
    assert (tmp_path / "model.safetensors.incoming").read_bytes() == CONTENT
    assert not (tmp_path / "progress.json.new").exists()


def test_the_job_says_why_it_failed_and_how_far_it_came(job, server):
    server.break_after = [1000]
    server.statuses = [206, 404]
    status, progress = job()
    assert (status, progress["state"]) == (1, "failed")
    assert (progress["bytes_done"], progress["bytes_received"]) == (1000, 1000)
    assert "is refused. Found: HTTP 404" in progress["error"]
