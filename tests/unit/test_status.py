"""The line of a host in the table of all, from what was read."""

from __future__ import annotations

import os

import pytest
from dflash_rollout import release, status, units
from dflash_rollout.metrics_text import parse

METRICS = """\
vllm:num_requests_running{{engine="0"}} 3
vllm:num_requests_running{{engine="1"}} 1
vllm:num_requests_waiting{{engine="0"}} 2
vllm:generation_tokens_total{{engine="0"}} {generated}
vllm:spec_decode_num_drafts_total{{engine="0"}} 100
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} 312
vllm:something_else 9
"""
NOTHING = {"acceptance": None, "tokens_per_s": None, "running": None, "waiting": None}


def totals(generated: int) -> dict:
    return status.totals(parse(METRICS.format(generated=generated)))


def test_two_readings_say_how_it_does():
    assert status.load_of(totals(1000), totals(1080), 2.0) == {
        "acceptance": 4.12,
        "tokens_per_s": 40.0,
        "running": 4,
        "waiting": 2,
    }


def test_what_is_not_counted_is_none():
    assert status.load_of({}, {}, 0.0) == NOTHING
    # it was started anew in between, and has drafted nothing yet
    again = {**totals(5), status.DRAFTS: 0.0}
    assert status.load_of(totals(1000), again, 1.0)["tokens_per_s"] is None
    assert status.load_of(totals(1000), again, 1.0)["acceptance"] is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.4, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2.0 h"),
        (172800, "2 d"),
    ],
)
def test_a_time_as_it_is_read(seconds, text):
    assert status.span(seconds) == text


HAS = {"vllm": "0.20.1", "drafter_sha256": "a" * 64}
WANTED = {"release": "r2", "vllm": "0.26.0", "drafter_sha256": "b" * 64}


def test_drift_in_words():
    def drift(unit, release, has, differing, unit_differs):
        return status.drift(
            unit=unit, release=release, has=has, wanted=WANTED, differing=differing, unit_differs=unit_differs
        )

    assert drift("vllm-dflash@r2.service", "r2", HAS, [], False) == []
    assert drift("vllm-dflash@r2.service", "r2", HAS, [], True) == [
        "vllm-dflash@.service is not what this project installs"
    ]
    assert drift("sglang.service", None, {}, [], True) == [
        "sglang.service serves, the inventory wants release r2"
    ]
    assert drift(None, None, {}, [], False) == ["nothing serves, the inventory wants release r2"]
    assert drift("vllm-dflash@r1.service", "r1", HAS, ["vllm.yaml"], False) == [
        "release r1 serves, the inventory wants r2 (vllm.yaml)",
        "drafter aaaaaaaaaaaa serves, the inventory wants bbbbbbbbbbbb",
        "vLLM 0.20.1 serves, the inventory wants 0.26.0",
    ]


@pytest.fixture
def made(tmp_path):
    """(root, what the inventory wants, the description of the release that was made of it)."""
    target = tmp_path / "weights"
    target.write_text("")
    (tmp_path / "releases").mkdir()
    unit = tmp_path / "vllm-dflash@.service"
    unit.write_text("# one comment\n[Unit]\nDescription=x\n")
    wanted = {
        "files": {
            "vllm.yaml": {"model": "/m", "speculative-config": {"model": "@release@/drafter"}},
            "release.json": HAS,
        },
        "links": {"drafter/model.safetensors": str(target)},
        "secrets": {},
        "secrets_dir": str(tmp_path / "secrets"),
        "unit": "# another comment\n\n[Unit]\nDescription=x\n",
        "unit_path": str(unit),
    }
    content = release.read_content(wanted["files"], wanted["links"])
    made = release.make(str(tmp_path / "releases"), content)
    name = f"vllm-dflash@{made.digest}.service"
    return str(tmp_path), wanted, {"unit": name, "release": made.digest}


def test_a_host_that_serves_what_is_wanted_does_not_drift(made):
    root, wanted, serving = made
    assert status.compare(serving, serving["unit"], wanted, root) == []


def test_only_the_files_that_differ_are_named(made):
    root, wanted, serving = made
    flags = {**wanted["files"]["vllm.yaml"], "max-num-seqs": 8}
    other = {**wanted, "files": {**wanted["files"], "vllm.yaml": flags}, "unit": "[Unit]\nDescription=y\n"}
    [first, second] = status.compare(serving, serving["unit"], other, root)
    assert first.startswith(f"release {serving['release']} serves, the inventory wants ")
    assert first.endswith(" (vllm.yaml)"), "the path of the release in it is no difference"
    assert second == "vllm-dflash@.service is not what this project installs"


def test_a_host_with_a_server_of_others(made):
    root, wanted, _ = made
    found = {
        "unit": {"unit": "sglang.service", "running": True, "main_pid": os.getpid(), "restarts": 1},
        "serving": None,
        "proof": {"proved": True},
    }
    server = {"unit": "sglang.service", "metrics": False}
    seen = status.look(host="h", found=found, server=server, wanted=wanted, root=root, window_s=0.0)
    assert seen["uptime_s"] >= 0
    assert {name: seen[name] for name in NOTHING} == NOTHING
    assert seen["row"] == {
        "host": "h",
        "server": "sglang",
        "release": "-",
        "drafter": "-",
        "proved": "yes",
        "uptime": status.span(seen["uptime_s"]),
        "restarts": "1",
        "acceptance": "-",
        "short_long": "-",
        "tokens_per_s": "-",
        "queue": "-",
        "drift": "YES",
    }


def test_a_host_that_serves_nothing_and_an_inventory_that_says_nothing(tmp_path):
    found = {"unit": None, "serving": None, "acceptance": {"sets": {"short": {"length": 4.2}, "long": {}}}}
    seen = status.look(host="h", found=found, server=None, wanted=None, root=str(tmp_path), window_s=0.0)
    assert (seen["drift"], seen["row"]["drift"], seen["row"]["server"]) == ([], "?", "nothing")
    assert seen["row"]["short_long"] == "4.20 / -"


def test_the_age_of_this_process_is_short_and_that_of_none_unknown():
    assert 0 <= units.age_s(os.getpid()) < 36000
    assert units.age_s(2**22 + 1) is None
