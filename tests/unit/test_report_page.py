"""From records to figures of the page."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
from dflash_rollout import report_page
from dflash_rollout.switch_state import END_STATES, TRANSITIONS
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1]))
from report_records import RATES, VLLM, fleet, measured, switch


def test_without_a_record_there_is_no_page():
    assert report_page.page({}) is None
    assert report_page.page({"gpu1": None}) is None


def test_the_page_counts_ends_and_is_named_by_the_newest_of_them():
    page = report_page.page(fleet())
    assert page["name"] == "roll-out-20261202T095131Z"
    assert {count["state"]: count["hosts"] for count in page["counts"]} == {
        "CONFIRMED": 1,
        "ROLLED_BACK": 1,
        "REFUSED": 1,
        "STRANDED": 1,
    }
    assert page["without"] == ["gpu5.example.net"]
    assert [host["name"][:4] for host in page["hosts"]] == ["gpu1", "gpu2", "gpu3", "gpu4"]


def test_the_same_records_are_the_same_page():
    records = fleet()
    before = copy.deepcopy(records)
    assert report_page.page(records) == report_page.page(fleet())
    assert records == before


def test_every_state_has_a_meaning_and_each_end_a_colour():
    assert set(report_page.MEANING) == set(TRANSITIONS) - {None}
    assert set(report_page._END_KIND) == set(END_STATES)


def test_places_follow_from_seconds():
    record = switch(0, [("PREPARED", 0.0), ("OLD_STOPPED", 20.0), ("GPU_FREE", 50.0)])
    record |= {"outage_s": 30.0, "outage_begin_s": 410.0}
    drawn = report_page.timeline(record, 100.0)
    assert [(part["left"], part["width"]) for part in drawn["segments"] if part["drawn"]] == [
        (0, 20),
        (20, 30),
    ]
    assert drawn["segments"][-1]["seconds"] is None, "where it stands, nobody knows how long"
    assert drawn["outage"] == {"left": 10, "width": 30, "text": "30.0 s"}
    assert (drawn["end"], drawn["total"]) == (50, "50.0 s")


def test_a_state_that_a_reboot_cut_short_is_measured_by_the_clock():
    record = switch(0, [("PREPARED", 0.0), ("OLD_STOPPED", 4.0), ("ROLLING_BACK", 34.0), ("NEW_GONE", 35.0)])
    for entry in record["states"][2:]:
        entry["boot_s"] -= 425  # the counter began anew
    parts = report_page.timeline(record, 100.0)["segments"]
    assert [(part["seconds"], part["exact"]) for part in parts] == [
        ("4.00 s", True),
        ("30.0 s", False),
        ("1.00 s", True),
        (None, False),
    ]


def test_what_is_too_short_to_be_seen_is_drawn_and_not_numbered():
    record = switch(0, [("PREPARED", 0.0), ("OLD_STOPPED", 0.001), ("GPU_FREE", 90.0)])
    first, second, _ = report_page.timeline(record, 90.0)["segments"]
    assert first["width"] == report_page.THINNEST
    assert (first["numbered"], second["numbered"]) == (False, True)


@given(
    st.lists(st.floats(0, 5000), min_size=1, max_size=5),
    st.floats(0, 9000),
    st.floats(0, 9000),
    st.floats(0.001, 20000),
)
def test_nothing_is_drawn_outside(lengths, begin, outage, scale):
    states = ["PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED", "CONFIRMED"]
    steps = [(state, sum(lengths[:number])) for number, state in enumerate(states[: len(lengths) + 1])]
    record = switch(0, steps, outage_s=outage, outage_begin_s=400 + begin)
    drawn = report_page.timeline(record, scale)
    for part in [*drawn["segments"], drawn["outage"]]:
        assert 0 <= part["left"] <= 100
        assert part["width"] >= 0
        assert part["left"] + part["width"] <= 100.002


@given(st.floats(1, 1e6))
def test_the_axis_has_few_marks_and_begins_at_nought(scale):
    marks = report_page.marks(scale)
    assert marks[0] == {"left": 0, "text": "0 s"}
    assert len(marks) <= report_page.MARKS + 1
    assert all(0 <= mark["left"] <= 100 for mark in marks)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, None), (0.0, "0.00 s"), (68.25, "68.2 s"), (119.9, "119.9 s"), (1207, "20 min 7 s")],
)
def test_seconds_for_people(seconds, text):
    assert report_page.seconds_text(seconds) == text


def test_bars_stand_on_the_line_side_by_side():
    chart = report_page.positions(RATES)
    assert len(chart["bars"]) == 30
    for bar in chart["bars"]:
        assert bar["top"] + bar["height"] == pytest.approx(chart["bottom"], abs=0.11)
        assert 0 <= bar["left"] < bar["left"] + bar["width"] <= 100
    first, other = (bar for bar in chart["bars"] if bar["position"] == 1)
    assert first["height"] == pytest.approx(0.83 * report_page.PLOT_HEIGHT, abs=0.1)
    assert first["left"] + first["width"] == pytest.approx(other["left"], abs=0.01)
    assert chart["rows"][0] == {"position": 1, "rates": ["83.0%", "79.0%"]}


def test_sets_of_different_length_and_none():
    chart = report_page.positions({"short": [0.5, 0.25], "long": [1.5]})
    assert chart["rows"][1]["rates"] == ["25.0%", None]
    assert max(bar["height"] for bar in chart["bars"]) == report_page.PLOT_HEIGHT, (
        "what can't be stays inside"
    )
    assert report_page.positions({}) is None
    assert len(report_page.positions({"short": [0.1] * 63})["labels"]) <= 16


def test_a_set_that_was_left_out_says_why():
    record = measured("not judged")
    record["sets"]["long"] = {"left_out": "no prompt fits"}
    record["reference"] = None
    shown = report_page.acceptance(record)
    short, long = shown["sets"]
    assert (short["reference"], long["length"], long["note"]) == (None, None, "no prompt fits")
    assert shown["chart"]["sets"] == ["short"]
    assert report_page.acceptance({**record, "verdict": "off", "sets": {}})["chart"] is None


def test_each_key_of_the_drafters_config_has_value_and_source():
    rows = {row["key"]: row for row in report_page.page(fleet())["hosts"][0]["drafter"]["rows"]}
    assert rows["dflash_config.mask_token_id"]["value"] == "248070"
    assert rows["eagle_aux_hidden_state_layer_ids"]["source"] == "target_layer_ids + 1 (drafter_profile)"
    assert report_page.drafter({"provenance": {"a.b": "x"}, "config": {"a": 1}})["rows"][0]["value"] == "null"


def test_records_of_before_have_neither_acceptance_nor_drafter():
    record = switch(0, [("PREPARED", 0.0), ("OLD_STOPPED", 1.0)], old=None)
    for name in ("acceptance", "drafter", "advice"):
        del record[name]
    (host,) = report_page.page({"gpu1": record})["hosts"]
    assert (host["old"], host["acceptance"], host["drafter"], host["new"]) == (None, None, None, VLLM["unit"])
    assert host["meaning"] == "the switch had not ended when this was recorded"


def test_every_text_is_escaped_however_deep_it_stands():
    found = report_page.escaped({"a": ["<b>", {"c": "\"'&"}], "n": 1.5, "none": None, "yes": True})
    assert found == {"a": ["&lt;b&gt;", {"c": "&quot;&#x27;&amp;"}], "n": 1.5, "none": None, "yes": True}


RUN = {
    "at": "2026-12-02T11:00:00+00:00",
    "line": "0 done, 1 did not pass preflight (gpu1), 1 untouched (gpu2).",
    "reasons": ["gpu1 did not pass preflight"],
    "hosts": {
        "gpu1": {
            "end": "did not pass preflight",
            "reasons": [
                {
                    "task": "Say what is in the way",
                    "phase": "preflight",
                    "text": "NVIDIA driver: found 570\n\nNo file. Found: a link. Expected: a file. What to do: copy it.",
                }
            ],
        },
        "gpu2": {"end": "untouched", "reasons": []},
    },
}


def test_a_refusal_is_shown_part_by_part_also_where_no_switch_ever_was():
    page = report_page.page({"gpu1": None, "gpu2": None}, RUN)
    assert page["name"] == "roll-out-20261202T110000Z"
    assert page["without"] == ["gpu1", "gpu2"]
    assert page["run"]["line"] == RUN["line"]
    (reason,) = page["run"]["hosts"][0]["reasons"]
    assert reason["where"] == "preflight: Say what is in the way"
    assert [(line["label"], line["text"]) for line in reason["lines"]] == [
        (None, "NVIDIA driver: found 570"),
        (None, "No file."),
        ("Found", "a link."),
        ("Expected", "a file."),
        ("What to do", "copy it."),
    ]


def test_what_did_not_end_well_takes_no_page_of_before():
    before, after = report_page.page(fleet()), report_page.page(fleet(), RUN)
    assert before["run"] is None
    assert before["name"] != after["name"]
    assert before["hosts"] == after["hosts"]
