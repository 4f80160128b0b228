"""acceptance as a module, against a simulated server in this process that drafts as it is told."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

DRAFTING = {
    "drafter_sha256": "0" * 64,
    "target": "/m/T",
    "vllm_version": "0.20.1",
    "num_speculative_tokens": 15,
}


class SimulatedEngine(BaseHTTPRequestHandler):
    counters: dict

    def log_message(self, *arguments):
        """Nothing on the terminal."""

    def _send(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        names = {"own": "generation_tokens", "drafts": "spec_decode_num_drafts"}
        names["accepted"] = "spec_decode_num_accepted_tokens"
        self._send("".join(f"vllm:{name}_total {self.counters[key]}\n" for key, name in names.items()))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = len(body["prompt"].split())
        if self.path == "/tokenize":
            self._send(json.dumps({"count": words, "max_model_len": 32768}))
            return
        tokens = body["max_tokens"]
        self.counters["own"] += tokens
        self.counters["drafts"] += tokens // 4
        self.counters["accepted"] += tokens // 4 * self.counters["more"]
        usage = {"prompt_tokens": words, "completion_tokens": tokens}
        self._send(json.dumps({"choices": [{"text": "x"}], "usage": usage}))


@pytest.fixture
def bench(tmp_path):
    """(arguments for the module, the counters of the simulated server)"""
    counters = {"own": 0, "drafts": 0, "accepted": 0, "more": 3}
    handler = type("Simulated", (SimulatedEngine,), {"counters": counters})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    server = {"name": "vllm", "unit": "vllm-dflash@r1.service", "release": "r1", "model_id": "M"}
    server["port"] = http.server_address[1]
    serving = {"serving": server, "previous": None, "switch_id": "s1"}
    (tmp_path / "serving.json").write_text(json.dumps(serving))
    yield {"server": server, "drafting": DRAFTING, "state_dir": str(tmp_path)}, counters
    http.shutdown()
    http.server_close()


def test_a_canary_and_the_run_after_it(run_module, bench):
    arguments, counters = bench
    would = run_module("acceptance", arguments, check=True)
    assert (would["changed"], would["record"], counters["own"]) == (True, None, 0)
    found = run_module("acceptance", arguments)
    assert (found["verdict"], found["changed"], found["roll_back"]) == ("passed", True, False)
    assert found["record"]["sets"]["short"]["length"] == 4
    assert "warnings" not in found
    spent = counters["own"]
    again = run_module("acceptance", {**arguments, "references": found["commit"]})
    assert (again["verdict"], again["changed"], again["commit"]) == ("passed", False, {})
    assert again["record"] == found["record"]
    assert counters["own"] == spent


@pytest.mark.parametrize(("more", "verdict"), [(1, "below"), (0, "not drafting")])
def test_a_bad_verdict_is_a_warning_and_with_enforce_a_rollback(run_module, bench, more, verdict):
    arguments, counters = bench
    counters["more"] = more
    for mode in ("observe", "enforce"):
        found = run_module("acceptance", {**arguments, "mode": mode, "reference": {"short": 4.2}})
        assert (found["verdict"], found["roll_back"]) == (verdict, mode == "enforce")
        assert "failed" not in found
        assert len(found["warnings"]) == 1
        assert f"vllm-dflash@r1.service: {verdict}" in json.dumps(found["warnings"])


def test_another_server_is_refused_in_words(run_module, bench):
    arguments, _ = bench
    server = {**arguments["server"], "unit": "vllm-dflash@r2.service"}
    found = run_module("acceptance", {**arguments, "server": server})
    assert found["failed"]
    assert "Only what serves can be measured" in found["msg"]


def test_what_determines_acceptance_has_to_be_said(run_module, bench):
    arguments, _ = bench
    found = run_module("acceptance", {**arguments, "drafting": {"target": "/m/T"}})
    assert found["failed"]
    assert "drafter_sha256" in found["msg"]


def test_a_misspelt_key_of_the_server_is_refused(run_module, bench):
    arguments, _ = bench
    found = run_module("acceptance", {**arguments, "server": {**arguments["server"], "modelid": "M"}})
    assert found["failed"]
    assert "unknown: modelid" in found["msg"]
