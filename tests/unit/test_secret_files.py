"""Secrets: files for root alone, and nothing else that could be tried against."""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from dflash_rollout import proof, servers
from dflash_rollout.errors import RolloutError
from dflash_rollout.secret_files import api_key, drop_orphans, fingerprints, line, put, read_environment

MARKER = "marker-0f8a$`x"


def test_read_environment(tmp_path):
    path = tmp_path / "environment"
    path.write_text('# caches\n\nHOME=/var/cache/x\nA="two words"\n B=b c=d \n;C=no\nEMPTY=\n')
    assert read_environment(str(path)) == {
        "HOME": "/var/cache/x",
        "A": "two words",
        "B": "b c=d",
        "EMPTY": "",
    }


@pytest.mark.parametrize("line", ["no equals", "1A=b", 'A="open', 'A="b" c', "A=b\\"])
def test_read_environment_refuses(tmp_path, line):
    path = tmp_path / "environment"
    path.write_text(f"OK=1\n{line}\n")
    with pytest.raises(RolloutError, match="Line 2"):
        read_environment(str(path))


def test_read_environment_missing(tmp_path):
    with pytest.raises(RolloutError, match="no environment file"):
        read_environment(str(tmp_path / "environment"))


@pytest.mark.parametrize(
    "value", ["plain", MARKER, 'quote"quote', "back\\slash", "$HOME", "`id`", "#no", "a=b"]
)
def test_what_is_written_is_what_is_read(tmp_path, value):
    put(str(tmp_path / "secrets"), "sglang", {"SGLANG_API_KEY": value})
    path = tmp_path / "secrets/sglang"
    assert read_environment(str(path)) == {"SGLANG_API_KEY": value}
    assert api_key({"name": "sglang", "api_key_file": str(path)}) == value


@pytest.mark.parametrize("value", ["", "two words", "new\nline", "schlüssel", "tab\t"])
def test_a_value_that_is_none_is_refused_without_being_shown(value):
    with pytest.raises(RolloutError) as refusal:
        line("VLLM_API_KEY", value)
    assert not value or value not in str(refusal.value)


def test_only_root_reads_them(tmp_path):
    folder = tmp_path / "secrets"
    old = os.umask(0)
    try:
        assert put(str(folder), "0" * 16, {"VLLM_API_KEY": MARKER})
        fingerprints(str(folder), {"VLLM_API_KEY": MARKER})
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert sorted(path.name for path in folder.iterdir()) == ["0" * 16, "salt"]


def test_put_changes_once_and_mends_a_mode(tmp_path):
    folder = str(tmp_path / "secrets")
    values = {"VLLM_API_KEY": MARKER}
    assert put(folder, "sglang", values, check=True)
    assert not os.path.exists(folder)
    assert put(folder, "sglang", values)
    assert not put(folder, "sglang", values)
    os.chmod(f"{folder}/sglang", 0o644)
    assert put(folder, "sglang", values, check=True)
    assert put(folder, "sglang", values)
    assert not put(folder, "sglang", values)
    assert put(folder, "sglang", {"VLLM_API_KEY": "another"})


def test_a_fingerprint_is_of_the_value_and_of_this_host(tmp_path):
    one = fingerprints(str(tmp_path / "one"), {"VLLM_API_KEY": MARKER, "HF_TOKEN": "t"})
    assert one == fingerprints(str(tmp_path / "one"), {"HF_TOKEN": "t", "VLLM_API_KEY": MARKER})
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in one.values())
    assert one["VLLM_API_KEY"] != fingerprints(str(tmp_path / "one"), {"VLLM_API_KEY": "x"})["VLLM_API_KEY"]
    assert one != fingerprints(str(tmp_path / "two"), {"VLLM_API_KEY": MARKER, "HF_TOKEN": "t"})


def test_secrets_of_releases_that_are_gone_go(tmp_path):
    folder, releases = tmp_path / "secrets", tmp_path / "releases"
    (releases / ("a" * 16)).mkdir(parents=True)
    for name in ("a" * 16, "b" * 16, "sglang"):
        put(str(folder), name, {"VLLM_API_KEY": MARKER})
    drop_orphans(str(folder), str(releases))
    assert sorted(path.name for path in folder.iterdir()) == ["a" * 16, "sglang"]


def test_an_address_of_ipv6_is_in_brackets():
    assert proof._address({"host": "::1", "port": 30000}) == "[::1]:30000"
    assert proof._address({"host": "127.0.0.1", "port": 1}) == "127.0.0.1:1"


def test_no_key(tmp_path):
    assert api_key({"name": "sglang"}) is None
    assert api_key({"name": "sglang", "api_key_file": None}) is None
    with pytest.raises(RolloutError, match="no environment file"):
        api_key({"name": "sglang", "api_key_file": str(tmp_path / "absent")})
    (tmp_path / "other").write_text("HF_TOKEN=x\n")
    with pytest.raises(RolloutError, match="holds no API key"):
        api_key({"name": "sglang", "api_key_file": str(tmp_path / "other")})


def test_a_key_that_the_server_prints_is_not_in_its_log_for_us(tmp_path, monkeypatch):
    put(str(tmp_path), "sglang", {"SGLANG_API_KEY": MARKER})
    monkeypatch.setattr(
        servers.units, "journal_tail", lambda *_: [f"server_args=(api_key='{MARKER}')", "ready"]
    )
    server = {"name": "sglang", "unit": "sglang.service", "api_key_file": str(tmp_path / "sglang")}
    assert servers.log_tail(server) == ["server_args=(api_key='***')", "ready"]


@pytest.fixture
def closed():
    """A simulated server that asks for a key, or with `open` True for none."""

    class Closed(BaseHTTPRequestHandler):
        open = False

        def log_message(self, *arguments):
            """Nothing on the terminal."""

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def do_GET(self):
            given = self.headers.get("Authorization")
            good = given == f"Bearer {MARKER}" or self.open
            body = {"error": f"Unauthorized: {given}"}
            if good:
                body = {"data": [{"id": "M"}], "choices": [{"text": " Paris."}]}
            raw = json.dumps(body).encode()
            if good and "completions" in self.path:
                raw = b"data: " + raw + b"\n\ndata: [DONE]\n\n"
            self.send_response(200 if good else 401)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Closed)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield (
        Closed,
        {
            "name": "vllm-dflash",
            "host": "127.0.0.1",
            "port": server.server_address[1],
            "model_id": "M",
            "metrics": False,
            "release": "0" * 16,
        },
    )
    server.shutdown()
    server.server_close()


def test_the_proof_brings_the_key(tmp_path, closed):
    _, server = closed
    put(str(tmp_path), "0" * 16, {"VLLM_API_KEY": MARKER})
    keyed = {**server, "api_key_file": str(tmp_path / ("0" * 16))}
    result = proof.prove(keyed, completions=1)
    assert result.proved, result.problem
    assert MARKER not in json.dumps(result.as_dict())
    without = proof.prove(server, completions=1)
    assert not without.proved
    assert "key is needed" in without.problem
    put(str(tmp_path), "wrong", {"VLLM_API_KEY": "wrong-key"})
    wrong = proof.prove({**server, "api_key_file": str(tmp_path / "wrong")}, completions=1)
    assert not wrong.proved
    assert "another one" in wrong.problem
    assert "wrong-key" not in wrong.problem
    gone = proof.prove({**server, "api_key_file": str(tmp_path / "gone")}, completions=1)
    assert not gone.proved
    assert "gone" in gone.problem


def test_a_server_that_should_ask_for_a_key_and_does_not_is_no_proof(tmp_path, closed):
    kind, server = closed
    put(str(tmp_path), "0" * 16, {"VLLM_API_KEY": MARKER})
    kind.open = True
    result = proof.prove({**server, "api_key_file": str(tmp_path / ("0" * 16))}, completions=1)
    assert not result.proved
    assert "without the API key" in result.problem
