"""What a calibration tries, what it concludes, and how it measures a server."""

from __future__ import annotations

import http.server
import json
import threading
import time

import pytest
from dflash_rollout import calibration
from dflash_rollout.errors import RolloutError


def result(name: str, rates: dict[int, float], *, speculation: bool = True, **changes) -> dict:
    loads = [
        {"concurrency": load, "tokens_per_s": rate, "length": 4.0 if speculation else None}
        for load, rate in rates.items()
    ]
    return {**calibration.candidate(name, speculation=speculation, **changes), "loads": loads}


OFF = result(calibration.OFF, {1: 10.0, 4: 40.0, 16: 160.0}, speculation=False)
FIFTEEN = result("15 tokens", {1: 40.0, 4: 80.0, 16: 100.0})
SEVEN = result("7 tokens", {1: 35.0, 4: 100.0, 16: 200.0}, speculative={"num_speculative_tokens": 7})
FEW = {"drafted": 15, "token_counts": [7, 15], "max_num_seqs": [16, 8], "seqs_now": 16}


def names(stage: str, results: list[dict], configs: list[dict] | None = None) -> list[str]:
    planned = calibration.plan(stage, configs=configs or [], results=results, **FEW)
    return [entry["name"] for entry in planned]


def test_each_stage_goes_on_with_the_best_of_the_one_before():
    mask = {"mask_token_id": 5}
    assert names("config", [], [mask]) == ["15 tokens", "15 tokens, mask_token_id 5"]
    other = result("15 tokens, mask_token_id 5", {1: 50.0, 4: 90.0, 16: 120.0}, profile=mask)
    assert names("drafting", [FIFTEEN, other]) == [calibration.OFF, "7 tokens, mask_token_id 5"]
    [_, seven] = calibration.plan("drafting", configs=[], results=[FIFTEEN, other], **FEW)
    assert (seven["profile"], seven["speculative"]) == (mask, {"num_speculative_tokens": 7})
    requests = calibration.plan("requests", configs=[], results=[FIFTEEN, OFF, SEVEN], **FEW)
    assert [entry["name"] for entry in requests] == ["7 tokens, 8 at once", "no drafter, 8 at once"]
    assert requests[0]["args"] == {"max-num-seqs": 8}
    assert requests[0]["speculative"] == {"num_speculative_tokens": 7}


def test_what_was_measured_is_not_planned_again():
    assert names("config", [FIFTEEN]) == []
    assert names("drafting", [FIFTEEN, OFF, SEVEN]) == []


def test_taps_are_tried_one_off_only_where_they_were_derived():
    config = {"dflash_config": {"target_layer_ids": [1, 16, 31]}}
    known, derived = "profile", "derived: evenly spaced"
    key = "dflash_config.target_layer_ids"
    assert calibration.uncertain_configs({key: known}, config, []) == []
    assert calibration.uncertain_configs({key: derived}, config, [{"mask_token_id": 7}]) == [
        {"mask_token_id": 7},
        {"target_layer_ids": [0, 15, 30]},
        {"target_layer_ids": [2, 17, 32]},
    ]
    first = {"dflash_config": {"target_layer_ids": [0, 15]}}
    assert calibration.uncertain_configs({key: derived}, first, []) == [{"target_layer_ids": [1, 16]}]


@pytest.mark.parametrize(
    ("rates", "crossing", "words"),
    [
        ({1: 40.0, 4: 80.0, 16: 100.0}, (4, 16), "somewhere between 4 and 16"),
        ({1: 40.0, 4: 80.0, 16: 200.0}, (16, None), "wins up to 16"),
        ({1: 9.0, 4: 8.0, 16: 7.0}, (None, 1), "at every load that was measured, from 1 on"),
        # noise at a low load is no crossing
        ({1: 9.0, 4: 80.0, 16: 100.0}, (4, 16), "between 4 and 16"),
    ],
)
def test_the_load_from_which_on_drafting_loses(rates, crossing, words):
    drafting = result("x", rates)
    assert calibration.crossing(drafting, OFF) == crossing
    assert words in calibration.crossing_text(drafting, OFF)


def test_the_best_over_all_loads_is_kept_if_it_beats_none_by_the_margin():
    chosen = calibration.choose([FIFTEEN, OFF, SEVEN], 0.05)
    assert (chosen["best"], chosen["kept"]) == (SEVEN, True)
    assert chosen["gain"] == pytest.approx((3.5 * 2.5 * 1.25) ** (1 / 3), abs=0.001)
    assert "7 tokens: 2.22 times as fast" in chosen["text"]
    [seven] = [line for line in chosen["table"] if "7 tokens" in line]
    assert seven.split() == ["*", "7", "tokens", "35.0", "100.0", "200.0", "2.22", "4.00", "-"]
    [fifteen] = [line for line in chosen["table"] if "15 tokens" in line]
    assert fifteen.split()[-1] == "16"
    not_kept = calibration.choose([FIFTEEN, OFF, SEVEN], 1.5)
    assert not not_kept["kept"]
    assert "vllm_service_speculation: false" in not_kept["text"]


def test_it_is_compared_with_no_drafter_at_its_own_best():
    better = result("no drafter, 32 at once", {1: 10.0, 4: 40.0, 16: 1000.0}, speculation=False)
    assert calibration.choose([OFF, better, SEVEN], 0.0)["off"] == better


@pytest.mark.parametrize(("faster", "best"), [(1.01, "7 tokens"), (1.05, "7 tokens, 8 at once")])
def test_what_is_as_fast_within_the_noise_changes_nothing(faster, best):
    rates = calibration.rates(SEVEN)
    more = result("7 tokens, 8 at once", {load: rate * faster for load, rate in rates.items()})
    assert calibration.choose([OFF, SEVEN, more], 0.05)["best"]["name"] == best
    as_fast_off = result("no drafter, 8 at once", calibration.rates(OFF), speculation=False)
    assert calibration.choose([OFF, SEVEN, as_fast_off], 0.05)["off"] == OFF
    [planned, _] = calibration.plan("requests", configs=[], results=[OFF, SEVEN, more], **FEW)
    assert planned["name"] == f"{best}, 8 at once"


def test_only_variables_that_change_are_written_and_each_of_them_whole():
    base = {
        "args": {"max-num-seqs": 16, "tensor-parallel-size": 2},
        "speculative": {"num_speculative_tokens": 15},
        "profile": {"mask_token_id": 5},
    }
    assert calibration.variables(FIFTEEN, base) == {}
    assert calibration.variables(SEVEN, base) == {
        "vllm_service_speculative_config": {"num_speculative_tokens": 7}
    }
    fewer = result("x", {1: 1.0}, args={"max-num-seqs": 8})
    assert calibration.variables(fewer, base) == {
        "vllm_service_args": {"max-num-seqs": 8, "tensor-parallel-size": 2}
    }


class Engine(http.server.BaseHTTPRequestHandler):
    """Answers after 20 ms with 10 tokens, three of four of them drafted; counts as vLLM does."""

    lock = threading.Lock()
    generated = drafts = strangers = at_once = most = 0
    broken = False

    def log_message(self, *_):
        pass

    def reply(self, body: bytes, status: int = 200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        cls = type(self)
        counters = {
            "vllm:generation_tokens_total": cls.generated + cls.strangers,
            "vllm:spec_decode_num_drafts_total": cls.drafts,
            "vllm:spec_decode_num_accepted_tokens_total": 3 * cls.drafts,
        }
        self.reply("".join(f"{name} {value}\n" for name, value in counters.items()).encode())

    def do_POST(self):
        cls = type(self)
        self.rfile.read(int(self.headers["Content-Length"]))
        with cls.lock:
            cls.at_once += 1
            cls.most = max(cls.most, cls.at_once)
        time.sleep(0.02)
        with cls.lock:
            several = cls.at_once > 1
            new = several not in cls.compiled
            cls.compiled.add(several)
        if new:
            time.sleep(1)  # kernels are compiled, for one and for several
        with cls.lock:
            cls.at_once -= 1
            cls.generated += 10
            cls.drafts += 5
            cls.strangers += 100 if cls.strangers else 0
        usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 10}}
        self.reply(json.dumps(usage).encode(), 500 if cls.broken else 200)


@pytest.fixture
def engine():
    handler = type("Fresh", (Engine,), {"lock": threading.Lock(), "compiled": set()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        yield handler, {"unit": "u", "host": "127.0.0.1", "port": port, "model_id": "m"}
        server.shutdown()


def test_each_load_has_so_many_clients_at_once(engine):
    handler, server = engine
    [one, four] = calibration.measure(server, [4, 1], 10, 60)
    assert (one["concurrency"], four["concurrency"], handler.most) == (1, 4, 4)
    assert one["tokens"] == four["tokens"] == 80
    assert one["length"] == four["length"] == 4.0
    assert four["tokens_per_s"] > 2 * one["tokens_per_s"]
    assert one["p50_s"] >= 0.02


def test_a_failed_request_and_other_clients_end_it(engine):
    handler, server = engine
    handler.strangers = 1
    with pytest.raises(RolloutError, match="other clients were generating"):
        calibration.measure(server, [1], 10, 60)
    handler.strangers, handler.broken = 0, True
    with pytest.raises(RolloutError, match="answered 500"):
        calibration.measure(server, [1], 10, 60)
