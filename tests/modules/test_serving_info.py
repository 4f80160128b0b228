"""serving_info against a simulated systemctl and a simulated server in this process."""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "module_utils"))

from dflash_rollout.gpus import process_details


class SimulatedServer(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        """Nothing on the terminal."""

    def _answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.send_response(200)
        self.end_headers()
        if self.path == "/v1/models":
            self.wfile.write(b'{"data": [{"id": "M"}]}')
        elif b'"stream": true' in body:
            self.wfile.write(b'data: {"choices": [{"text": "x"}]}\n\ndata: [DONE]\n\n')
        else:
            self.wfile.write(b'{"choices": [{"text": "x"}]}')

    do_GET = do_POST = _answer


@pytest.fixture
def port():
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimulatedServer)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@pytest.fixture
def environment(tmp_path):
    """A simulated systemctl for which every unit runs, in the control group of this test."""
    group = process_details(os.getpid())["cgroup"]
    program = tmp_path / "systemctl"
    program.write_text(
        f"#!/bin/sh\nprintf 'LoadState=loaded\\nActiveState=active\\nControlGroup={group}\\n'\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_before_the_first_switch(run_module, tmp_path, environment, port):
    arguments = {"unit": "sglang.service", "port": port, "state_dir": str(tmp_path), "prove": True}
    for check in (False, True):
        result = run_module("serving_info", arguments, check=check, env=environment)
        assert result["changed"] is False
        assert result["serving"] is None
        assert result["previous"] is None
        assert result["unit"]["unit"] == "sglang.service"
        assert result["unit"]["running"] is True
        (listener,) = result["listeners"]
        assert (listener["address"], listener["pid"]) == ("127.0.0.1", os.getpid())
        assert result["listens_in_unit"] is True
        assert result["model_ids"] == ["M"]
        assert result["proof"]["proved"] is True
        assert len(result["proof"]["completions"]) == 3
        assert result["switch"] is None
        assert result["switch_running"] is False
        assert result["advice"] == ""


def test_serving_json_goes_before_the_unit(run_module, tmp_path, environment, port):
    server = {
        "unit": "vllm-dflash@a.service",
        "port": port,
        "host": "127.0.0.1",
        "model_id": "M",
        "metrics": False,
    }
    (tmp_path / "serving.json").write_text(json.dumps({"serving": server, "previous": None}))
    result = run_module(
        "serving_info", {"unit": "sglang.service", "state_dir": str(tmp_path)}, env=environment
    )
    assert result["serving"] == server
    assert result["unit"]["unit"] == "vllm-dflash@a.service"
    assert result["model_ids"] == ["M"]


def test_nothing_serves(run_module, tmp_path, environment):
    arguments = {"unit": "sglang.service", "port": 9, "state_dir": str(tmp_path), "prove": True}
    result = run_module("serving_info", arguments, env=environment)
    assert result["listeners"] == []
    assert result["listens_in_unit"] is False
    assert result["model_ids"] is None
    assert "can't be reached" in result["no_answer"]
    assert result["proof"]["proved"] is False
    assert "127.0.0.1:9" in result["no_answer"]
    assert "sglang.service runs, but" in result["advice"]
    assert "127.0.0.1:9" in result["advice"] or "listens nowhere" in result["advice"]


def test_a_state_that_is_broken_is_said(run_module, tmp_path, environment):
    (tmp_path / "serving.json").write_text("{")
    result = run_module("serving_info", {"state_dir": str(tmp_path)}, env=environment)
    assert result["failed"]
    assert "serving.json can't be read" in result["msg"]
