"""Acceptance: counters, judgement and the gate, against a simulated server over real HTTP."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from dflash_rollout import acceptance, acceptance_record
from dflash_rollout.acceptance import (
    BELOW,
    LEFT_OUT,
    NOT_DRAFTING,
    NOT_JUDGED,
    OFF,
    PASSED,
    LeftOut,
    difference,
    figures_of,
    fit_long,
    judge,
    judge_set,
)
from dflash_rollout.acceptance_prompts import QUESTIONS, SHORT, long_prompts, long_text
from dflash_rollout.errors import RolloutError
from dflash_rollout.metrics_text import parse
from hypothesis import given
from hypothesis import strategies as st

# ---- counters --------------------------------------------------------------------------------------------


def metrics(drafts=0, accepted=0, generated=0, positions=(), engine=0, drafting=True, created=1.0):
    """What one engine exports."""
    labels = f'engine="{engine}",model_name="M"'
    lines = [
        f"vllm:generation_tokens_total{{{labels}}} {generated}",
        f"vllm:generation_tokens_created{{{labels}}} {created}",
        f'vllm:prompt_tokens_total{{engine="{engine}"}} 5',
    ]
    if drafting:
        lines += [
            f"vllm:spec_decode_num_drafts_total{{{labels}}} {drafts}",
            f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {drafts * 15}",
            f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {accepted}",
        ]
        lines += [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {value}'
            for place, value in enumerate(positions)
        ]
    return "\n".join(lines) + "\n"


def test_growth_is_summed_over_engines_and_positions_are_in_order():
    before = metrics(10, 20, 40, [9] * 11) + metrics(1, 1, 3, [1] * 11, engine=1)
    after = metrics(110, 340, 480, [19] * 10 + [9]) + metrics(26, 81, 123, [2] * 11, engine=1)
    grown = difference(parse(before), parse(after))
    assert grown == {
        "drafts": 125,
        "draft_tokens": 1875,
        "accepted": 400,
        "generated": 560,
        "per_position": [11] * 10 + [1],  # the eleventh is "10", which sorts before "2" as text
    }
    figures = figures_of(grown, 448, 4.0)
    assert figures["length"] == 4.2
    assert figures["per_position"] == [0.088] * 10 + [0.008]
    assert figures["tokens_per_s"] == 112
    assert figures["own_share"] == 0.8


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (metrics(10, 20, 40), metrics(9, 20, 45)),
        (metrics(10, 20, 40), metrics(11, 19, 45)),
        (metrics(10, 20, 40), metrics(11, 21, 39)),
        (metrics(10, 20, 40), metrics(11, 21, 45, created=2.0)),
        (metrics(10, 20, 40) + metrics(0, 0, 0, engine=1), metrics(11, 21, 45)),
        (metrics(10, 20, 40, [3, 2]), metrics(11, 21, 45, [3, 1])),
    ],
    ids=["drafts", "accepted", "generated", "overtaken", "an engine less", "a position"],
)
def test_a_reset_is_seen(before, after):
    assert difference(parse(before), parse(after)) is None


def test_without_drafting_there_are_no_counters_of_it():
    grown = difference(parse(metrics(drafting=False)), parse(metrics(drafting=False, generated=300)))
    assert grown["drafts"] is None
    assert judge_set(figures_of(grown, 300, 1.0), None, 0.9) == (
        NOT_DRAFTING,
        "the server has no counters of drafts in 300 tokens",
    )


@given(st.integers(1, 10**6), st.lists(st.integers(0, 10**6), min_size=15, max_size=15))
def test_rates_of_positions_add_up_to_the_length(drafts, counts):
    counts = [min(count, drafts) for count in sorted(counts, reverse=True)]
    grown = difference(
        parse(metrics(7, 7, 7, [1] * 15)),
        parse(metrics(7 + drafts, 7 + sum(counts), 9, [1 + count for count in counts])),
    )
    figures = figures_of(grown, 1, 1.0)
    assert figures["length"] == pytest.approx(1 + sum(figures["per_position"]), abs=0.001)
    assert 1 <= figures["length"] <= 16


# ---- judgement -------------------------------------------------------------------------------------------


def figures(length=4.2, share=1.0, tokens=512, drafts=125):
    return {"length": length, "own_share": share, "tokens": tokens, "drafts": drafts}


@pytest.mark.parametrize(
    ("found", "reference", "verdict"),
    [
        (figures(), None, PASSED),
        (figures(), 4.2, PASSED),
        (figures(3.78), 4.2, PASSED),
        (figures(3.7799), 4.2, BELOW),
        (figures(3.9), 4.2, PASSED),  # one layer off: inside, see docs/decisions/acceptance.md
        (figures(2.73), 4.2, BELOW),
        (figures(2.73), None, PASSED),
        (figures(1.2), None, PASSED),
        (figures(1.1999), None, NOT_DRAFTING),
        (figures(1.1999), 1.2, NOT_DRAFTING),
        (figures(1.0), 4.2, NOT_DRAFTING),
        (figures(None, drafts=0), None, NOT_DRAFTING),
        (figures(None, drafts=None), 4.2, NOT_DRAFTING),
        (figures(share=0.8), 4.2, PASSED),
        (figures(1.0, share=0.7999), 4.2, NOT_JUDGED),
        (figures(None, share=0.5, drafts=0), None, NOT_JUDGED),
        (figures(share=None), None, NOT_JUDGED),
        (figures(share=1.01), None, NOT_JUDGED),
        (figures(1.0, tokens=127), 4.2, LEFT_OUT),
        (figures(1.0, tokens=128), 4.2, NOT_DRAFTING),
        ({"problem": "hung"}, 4.2, NOT_JUDGED),
        ({"left_out": "no room"}, 4.2, LEFT_OUT),
    ],
)
def test_every_verdict(found, reference, verdict):
    assert judge_set(found, reference, 0.9)[0] == verdict


@pytest.mark.parametrize(
    ("short", "long", "verdict"),
    [
        (figures(), figures(), PASSED),
        (figures(), {"left_out": "no room"}, PASSED),
        ({"left_out": "no room"}, {"left_out": "no room"}, NOT_JUDGED),
        (figures(), {"problem": "hung"}, NOT_JUDGED),
        (figures(2.7), {"problem": "hung"}, BELOW),
        (figures(2.7), figures(1.0), NOT_DRAFTING),
        (figures(), figures(3.0), BELOW),
    ],
)
def test_the_worst_set_decides(short, long, verdict):
    assert judge({"short": short, "long": long}, {"short": 4.2, "long": 3.9}, 0.9)[0] == verdict


def test_a_verdict_says_what_was_measured_and_expected_for_each_set():
    _, text = judge({"short": figures(2.73), "long": figures()}, {"short": 4.2, "long": 3.9}, 0.9)
    assert text == (
        "short prompts: acceptance length 2.73, at least 3.78 expected (90% of 4.20); "
        "long prompts: acceptance length 4.20, at least 3.51 expected (90% of 3.90)"
    )


# ---- prompts ---------------------------------------------------------------------------------------------


def count_of(length, per_word=1.3):
    return lambda prompt: (int(len(prompt.split()) * per_word), length)


@pytest.mark.parametrize("per_word", [0.7, 1.3, 5.5], ids=["words", "as usual", "bytes"])
@pytest.mark.parametrize("window", [None, 512, 2048, 4096, 16384])
def test_long_prompts_go_beyond_the_window_and_fit(per_word, window):
    count = count_of(32768, per_word)
    found = fit_long(count, window, 128)
    counts = [count(prompt)[0] for prompt in found]
    assert len(found) == len(QUESTIONS)
    assert min(counts) > (window or acceptance.SMALLEST_LONG)
    assert max(counts) <= 32768 - 128
    wanted = 1.5 * window if window else acceptance.NO_WINDOW_TOKENS
    assert min(counts) == pytest.approx(wanted, rel=0.35)


def test_a_model_that_ends_just_beyond_the_window():
    count = count_of(2048 + 128 + 300)
    counts = [count(prompt)[0] for prompt in fit_long(count, 2048, 128)]
    assert 2048 < min(counts) <= max(counts) <= 2348


@pytest.mark.parametrize(("length", "window"), [(2048, 2048), (2176, 2048), (2180, 2048), (300, None)])
def test_no_room_beyond_the_window(length, window):
    with pytest.raises(LeftOut, match="fits beside 128 tokens"):
        fit_long(count_of(length), window, 128)


def test_no_two_entries_are_alike():
    lines = long_text(400).splitlines()[2:]
    assert len({line.partition(". ")[2] for line in lines}) == len(lines) == 400
    assert len({*SHORT, *long_prompts(3)}) == 8


# ---- a simulated server ----------------------------------------------------------------------------------


class SimulatedEngine(BaseHTTPRequestHandler):
    """Drafts with the length that its class says; one word is one token."""

    state: dict
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments):
        """Nothing on the terminal."""

    def reply(self, status, answer):
        raw = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self):
        state = self.state
        state["asked"].append((self.path, None))
        if self.path == "/v1/models":
            return self.reply(200, {"data": [{"id": "M"}]})
        drafting, created = state["length"] is not None, state["starts"]
        generated = state["shown"] if state["lag_s"] and time.monotonic() < state["until"] else state["own"]
        return self.reply(
            200,
            metrics(
                state["drafts"],
                state["accepted"],
                generated + state["others"],
                [state["accepted"]],
                drafting=drafting,
                created=created,
            ),
        )

    def do_POST(self):
        state = self.state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state["asked"].append((self.path, body))
        text = body.get("prompt") or body["messages"][0]["content"]
        words = len(text.split())
        if self.path == "/tokenize":
            return self.reply(200, {"count": words, "max_model_len": state["max_model_len"], "tokens": []})
        if state["fails_at"] is not None and len(state["asked"]) >= state["fails_at"]:
            return self.reply(500, {"error": "simulated fault"})
        if state["restarts"]:
            state.update(own=0, drafts=0, accepted=0, starts=state["starts"] + 1)
        tokens = min(body["max_tokens"], state["says"])
        state.update(shown=state["own"], until=time.monotonic() + state["lag_s"])
        state["own"] += tokens
        state["others"] += int(tokens * state["busy"])
        if state["length"]:
            length = state["length_beyond"] if words > 2048 else state["length"]
            # Enough tokens that whole numbers of drafts and accepted ones give the very length.
            state["drafts"] += 100
            state["accepted"] += round(100 * (length - 1))
        usage = {"prompt_tokens": words, "completion_tokens": tokens}
        choice = {"message": {"content": "x"}} if "messages" in body else {"text": "x"}
        return self.reply(200, {"choices": [choice], **({"usage": usage} if state["usage"] else {})})


class Bench:
    """A simulated server, a host's state and the calls of the gate."""

    def __init__(self, tmp_path):
        self.state = {
            "asked": [], "length": 4.2, "length_beyond": 4.0, "own": 5, "drafts": 3, "accepted": 2, "others": 0,
            "busy": 0.0, "says": 1000, "max_model_len": 32768, "fails_at": None, "restarts": False, "starts": 1,
            "usage": True, "lag_s": 0.0, "shown": 0, "until": 0.0,
        }  # fmt: skip
        handler = type("Simulated", (SimulatedEngine,), {"state": self.state})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.directory = tmp_path
        self.server = {
            "name": "vllm-dflash", "unit": "vllm-dflash@r1.service", "release": "r1", "host": "127.0.0.1", "model_id": "M",
            "port": self.http.server_address[1], "chat": True,
        }  # fmt: skip
        self.drafting = {
            "drafter_sha256": "0" * 64, "target": "/m/T", "vllm_version": "0.20.1",
            "num_speculative_tokens": 15, "sliding_window": 2048, "trained": True,
        }  # fmt: skip
        self.references = {}
        self.confirm("switch-1")

    def confirm(self, switch_id, server=None):
        document = {"serving": server or self.server, "previous": None, "switch_id": switch_id}
        (self.directory / "serving.json").write_text(json.dumps(document))

    def gate(self, **changes):
        self.state["asked"].clear()
        arguments = {
            "check_mode": False, "server": self.server, "mode": "observe", "drafting": self.drafting,
            "reference": {"short": None, "long": None}, "references": self.references, "ratio": 0.9,
            "tokens": 128, "timeout_s": 20.0, "state_dir": str(self.directory), **changes,
        }  # fmt: skip
        return acceptance.gate(**arguments)

    @property
    def record(self):
        path = Path(acceptance_record.path_of(str(self.directory), "r1"))
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def bench(tmp_path, monkeypatch):
    monkeypatch.setattr(acceptance, "PAUSE_S", 0.0)
    monkeypatch.setattr(acceptance, "SETTLE_S", 1.0)
    made = Bench(tmp_path)
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_a_canary_measures_and_commits(bench):
    found = bench.gate()
    assert (found["verdict"], found["changed"], found["roll_back"]) == (PASSED, True, False)
    assert bench.record == found["record"]
    sets = bench.record["sets"]
    assert {name: figures["length"] for name, figures in sets.items()} == {"short": 4.2, "long": 4.0}
    assert sets["short"]["tokens"] == 6 * 128
    assert sets["long"]["tokens"] == 2 * 128
    assert min(sets["long"]["prompt_tokens"]) > 2048
    assert all(figures["own_share"] == 1 for figures in sets.values())
    asked = [body for path, body in bench.state["asked"] if path == "/v1/chat/completions"]
    assert len(asked) == 8
    assert {(body["temperature"], body["max_tokens"], body["model"]) for body in asked} == {(0, 128, "M")}
    [(key, committed)] = found["commit"].items()
    assert key == bench.record["key"]
    assert committed["lengths"] == {"short": 4.2, "long": 4.0}
    assert "at least 3.78 expected" in found["msg"]


def test_the_second_run_asks_nothing_and_changes_nothing(bench):
    bench.references = bench.gate()["commit"]
    before = Path(acceptance_record.path_of(str(bench.directory), "r1")).stat()
    for check_mode in (False, True):
        found = bench.gate(check_mode=check_mode)
        assert (found["changed"], found["verdict"], found["commit"]) == (False, PASSED, {})
        assert bench.state["asked"] == []
    assert Path(acceptance_record.path_of(str(bench.directory), "r1")).stat() == before


@pytest.mark.parametrize(
    "change",
    [
        {"mode": "enforce"},
        {"tokens": 64},
        {"drafting": {"num_speculative_tokens": 7}},
        {"drafting": {"drafter_sha256": "1" * 64}},
        {"switch_id": "switch-2"},
    ],
    ids=str,
)
def test_what_was_measured_under_other_conditions_is_measured_again(bench, change):
    bench.gate()
    bench.confirm(change.pop("switch_id", "switch-1"))
    if "drafting" in change:
        change["drafting"] = {**bench.drafting, **change["drafting"]}
    assert bench.gate(**change)["changed"]
    assert bench.state["asked"]


def test_another_reference_is_a_new_verdict_without_a_new_measurement(bench):
    bench.gate(mode="enforce")
    found = bench.gate(mode="enforce", reference={"short": 5.0, "long": None})
    assert (found["verdict"], found["roll_back"], found["changed"]) == (BELOW, True, True)
    assert bench.state["asked"] == []
    assert bench.record["reference_from"] == "inventory"


def test_the_hand_goes_before_the_canary(bench):
    bench.references = bench.gate()["commit"]
    bench.confirm("switch-2")
    bench.state["length"] = 2.73
    found = bench.gate(mode="enforce", reference={"short": 2.8, "long": 4.0})
    assert found["verdict"] == PASSED
    bench.confirm("switch-3")
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"]) == (BELOW, True)
    assert bench.record["reference_from"] == "canary"
    assert "2.73, at least 3.78 expected" in found["msg"]


def test_below_is_rolled_back_only_when_enforced(bench):
    bench.state["length"] = 2.73
    for mode in ("observe", "enforce"):
        found = bench.gate(mode=mode, reference={"short": 4.2, "long": 3.9})
        assert (found["verdict"], found["roll_back"]) == (BELOW, mode == "enforce")
        assert found["commit"] == {}


@pytest.mark.parametrize("length", [None, 0, 1.0, 1.19])
def test_not_drafting_needs_no_reference(bench, length):
    bench.state.update(length=length, length_beyond=length)
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"], found["commit"]) == (NOT_DRAFTING, True, {})


def test_a_drop_beyond_the_window_alone_is_seen(bench):
    bench.state["length_beyond"] = 2.0
    found = bench.gate(mode="enforce", reference={"short": 4.2, "long": 4.0})
    assert found["verdict"] == BELOW
    assert "long prompts: acceptance length 2.00, at least 3.60" in found["msg"]


def test_other_clients_are_no_verdict_and_it_is_tried_again(bench):
    bench.state.update(length=1.0, busy=0.5)
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"]) == (NOT_JUDGED, False)
    assert bench.record["sets"]["short"]["attempts"] == 3
    assert "67% of the tokens were ours" in found["msg"]
    again = bench.gate(mode="enforce")
    assert bench.state["asked"], "what was not judged is asked again"
    assert not again["changed"]
    bench.state.update(length=4.2, busy=0.0)
    assert bench.gate(mode="enforce")["verdict"] == PASSED


def test_a_restart_meanwhile_is_no_verdict(bench):
    bench.state["restarts"] = True
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"]) == (NOT_JUDGED, False)
    assert "started again" in found["msg"]


def test_counters_that_lag_are_waited_for(bench):
    bench.state["lag_s"] = 0.3
    assert bench.gate()["verdict"] == PASSED
    assert bench.record["sets"]["short"]["own_share"] == 1


def test_counters_that_never_come_are_no_verdict(bench):
    bench.state["busy"] = -0.5
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"]) == (NOT_JUDGED, False)
    assert "doesn't account for ours" in found["msg"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fails_at": 1}, "answered 500"),
        ({"usage": False}, "without usage"),
    ],
)
def test_a_server_that_fails_is_no_verdict(bench, change, words):
    bench.state.update(change)
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"]) == (NOT_JUDGED, False)
    assert words in found["msg"]


def test_what_was_measured_before_a_failure_still_counts(bench):
    bench.state.update(length=2.73, fails_at=13)
    found = bench.gate(mode="enforce", reference={"short": 4.2, "long": 4.0})
    assert found["verdict"] == BELOW
    assert "not judged, /v1/chat/completions answered 500" in found["msg"]


def test_the_deadline_holds(bench):
    begin = time.monotonic()
    bench.state["lag_s"] = 60.0
    found = bench.gate(timeout_s=0.5)
    assert found["verdict"] == NOT_JUDGED
    assert time.monotonic() - begin < 3


def test_a_model_without_room_beyond_the_window(bench):
    bench.state["max_model_len"] = 2048
    found = bench.gate(mode="enforce")
    assert found["verdict"] == PASSED
    assert "left out, no prompt beyond the drafter's window (2048) fits" in found["msg"]
    assert found["commit"][bench.record["key"]]["lengths"] == {"short": 4.2}


def test_answers_that_end_early_commit_no_reference(bench):
    bench.state["says"] = 30
    found = bench.gate()
    assert found["verdict"] == PASSED
    assert "the answers ended after 60 tokens" in found["msg"]
    assert found["commit"][bench.record["key"]]["lengths"] == {"short": 4.2}


def test_a_base_model_is_asked_by_completions(bench):
    bench.server["chat"] = False
    bench.confirm("switch-1")
    assert bench.gate()["verdict"] == PASSED
    assert {path for path, body in bench.state["asked"] if body} == {"/v1/completions", "/tokenize"}


def test_an_untrained_drafter_sets_it_off_and_the_record_says_so(bench):
    bench.drafting["trained"] = False
    found = bench.gate(mode="enforce")
    assert (found["verdict"], found["roll_back"], found["changed"]) == (OFF, False, True)
    assert bench.state["asked"] == []
    assert bench.record["verdict"] == OFF
    assert "untrained" in bench.record["text"]
    assert not bench.gate(mode="enforce")["changed"]


def test_check_mode_asks_nothing_and_writes_nothing(bench):
    found = bench.gate(check_mode=True)
    assert found["changed"]
    assert "Would measure" in found["msg"]
    other = {**bench.server, "unit": "vllm-dflash@r2.service"}
    bench.confirm("switch-1", {**other, "unit": "sglang.service"})
    assert "once vllm-dflash@r2.service serves" in bench.gate(check_mode=True, server=other)["msg"]
    assert bench.state["asked"] == []
    assert bench.record is None


def test_status_says_why_a_release_was_taken_back(bench):
    state = str(bench.directory)
    sglang = {"unit": "sglang.service", "release": None}
    serving = {"serving": bench.server, "previous": sglang, "switch_id": "switch-1"}
    (bench.directory / "serving.json").write_text(json.dumps(serving))
    back = {"serving": sglang, "previous": bench.server, "switch_id": "switch-2"}
    bench.state["length"] = 2.73
    bench.gate(reference={"short": 4.2, "long": 4.0})
    assert acceptance_record.taken_back(state, back) == "", "observing takes nothing back"
    bench.gate(mode="enforce", reference={"short": 4.2, "long": 4.0})
    assert "acceptance length 2.73, at least 3.78" in acceptance_record.taken_back(state, back)
    # Not while it serves, and not after a switch from it to something else.
    assert acceptance_record.taken_back(state, serving) == ""
    other = {"unit": "vllm-dflash@r2.service", "release": "r2"}
    assert acceptance_record.taken_back(state, {**back, "serving": other}) == ""
    assert acceptance_record.taken_back(state, None) == ""


def test_only_what_serves_is_measured(bench):
    with pytest.raises(RolloutError, match="Only what serves can be measured"):
        bench.gate(server={**bench.server, "unit": "vllm-dflash@r2.service"})


def test_what_is_kept_belongs_to_the_switch_that_serves(bench):
    bench.gate()
    serving = json.loads((bench.directory / "serving.json").read_text())
    state = str(bench.directory)
    assert acceptance_record.kept(state, serving) == bench.record
    assert acceptance_record.kept(state, {**serving, "switch_id": "another"}) is None
    assert acceptance_record.kept(state, {**serving, "serving": {"unit": "sglang.service"}}) is None
    assert acceptance_record.kept(state, None) is None
    Path(acceptance_record.path_of(state, "r1")).write_text("{")
    with pytest.raises(RolloutError, match="can't be read"):
        acceptance_record.kept(state, serving)
