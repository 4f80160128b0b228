"""The probe's file: what it says of a server that serves, of a dead one, and while a switch runs."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from dflash_rollout import program
from dflash_rollout.metrics_text import parse
from dflash_rollout.probe import exposition
from prometheus_client.parser import text_string_to_metric_families


class SimulatedServer(BaseHTTPRequestHandler):
    """/v1/models and /health answer always, completions while `server.alive`."""

    protocol_version = "HTTP/1.1"

    def answer(self, text: str, status: int = 200, kind: str = "application/json"):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        self.answer('{"data": [{"id": "m"}]}')

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers["Authorization"]))
        if not self.server.alive:
            self.answer('{"error": "EngineDeadError"}', 500)
            return
        self.answer('data: {"choices": [{"text": "Paris"}]}\n\ndata: [DONE]\n\n', kind="text/event-stream")

    def log_message(self, *_):
        pass


@pytest.fixture
def host(tmp_path):
    """A state directory whose confirmed server is a simulated one: (the server, run the verb, read the file)."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), SimulatedServer)
    server.alive, server.asked = True, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    described = {
        "name": "vllm",
        "unit": "vllm-dflash@0123.service",
        "release": "0123",
        "host": "127.0.0.1",
        "port": server.server_port,
        "model_id": "m",
        "metrics": True,
        "chat": True,
        "tools": True,
    }
    key = tmp_path / "key"
    key.write_text('VLLM_API_KEY="secret"\n')
    described["api_key_file"] = str(key)
    state = {"serving": described, "previous": None, "switch_id": "x"}
    (tmp_path / "serving.json").write_text(json.dumps(state))
    file = tmp_path / "llm_probe.prom"
    place = ["--state", str(tmp_path), "--run", str(tmp_path / "run")]

    def read() -> dict[str, float]:
        samples = parse(file.read_text())
        assert {sample.labels["unit"] for sample in samples} == {described["unit"]}
        return {sample.name: sample.value for sample in samples}

    yield server, lambda: program.main([*place, "probe", str(file)]), read
    server.shutdown()
    server.server_close()


def test_one_completion_with_the_key_and_nothing_else(host, capsys):
    server, probe, read = host
    assert probe() == 0
    assert server.asked == [("/v1/completions", "Bearer secret")]
    found = read()
    assert (found["llm_probe_success"], found["llm_probe_health"], found["llm_probe_switching"]) == (1, 1, 0)
    assert found["llm_probe_time_seconds"] > 1.7e9
    assert "vllm-dflash@0123.service answered in" in capsys.readouterr().out


def test_a_dead_engine_behind_a_health_page(host, capsys):
    server, probe, read = host
    server.alive = False
    assert probe() == 1
    found = read()
    assert (found["llm_probe_success"], found["llm_probe_health"]) == (0, 1)
    assert "does not serve: /v1/completions answered 500" in capsys.readouterr().out


def test_while_a_switch_runs_nobody_is_asked_and_nothing_is_judged(host, tmp_path, capsys):
    server, probe, read = host
    (tmp_path / "switch").mkdir()
    (tmp_path / "switch/pending.json").write_text(json.dumps({"id": "order", "new": {}, "old": None}))
    assert probe() == 0
    assert server.asked == []
    assert read()["llm_probe_switching"] == 1
    assert "llm_probe_success" not in read()
    assert "A switch runs" in capsys.readouterr().out


def test_before_the_first_switch_there_is_no_file(tmp_path, capsys):
    assert program.main(["--state", str(tmp_path), "probe", str(tmp_path / "f.prom")]) == 0
    assert not (tmp_path / "f.prom").exists()
    assert "nothing to ask" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_said_in_words(host, tmp_path, capsys):
    assert (
        program.main(["--state", str(tmp_path), "probe", str(tmp_path / "none/f.prom")])
        == program.EXIT_REFUSED
    )
    assert "What the probe found can't be written" in capsys.readouterr().err


def test_a_unit_of_any_name_is_read_back_by_prometheus_own_parser():
    name = 'a"b\\c\nd'
    text = exposition(name, {"llm_probe_success": 1, "llm_probe_seconds": 0.25})
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families["llm_probe_seconds"].type == "gauge"
    assert families["llm_probe_success"].samples[0].labels == {"unit": name}
