"""The benchmarks' own reckoning: what they count, mirror and print. They run by hand; this holds them right."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import second_run
from common import ROOT, Bed, Play, machine, network, table
from transfers import transfer_start

HOSTS = ["a", "b", "c"]


def task(name: str, kinds: dict[str, str], *, start: float = 0.0, run_once: bool = False, action="x") -> dict:
    hosts = {
        host: {"kind": kind, "changed": False, "failed": False, "seconds": 1.0}
        for host, kind in kinds.items()
    }
    return {"name": name, "action": action, "run_once": run_once, "start": start, "hosts": hosts}


def everywhere(kind: str) -> dict[str, str]:
    return dict.fromkeys(HOSTS, kind)


def results(plays: list[dict]) -> Counter[str]:
    """What Ansible would count of these plays, as far as they use what the empty play uses."""
    counted: Counter[str] = Counter()
    for play in plays:
        for made in play["tasks"]:
            kind = made["name"].partition(":")[0]
            hosts = play["hosts"].split(",")
            if made.get("run_once"):
                hosts = hosts[:1]
            for host in hosts:
                when = made.get("when", True)
                runs = eval(when, {"inventory_hostname": host}) if isinstance(when, str) else when  # noqa: S307
                counted[kind if runs else "skipped"] += 1
    return counted


BENCH = Path(second_run.__file__).parent


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.py")), ids=lambda path: path.name)
def test_a_bench_asks_a_bed_only_for_what_it_has(path):
    # They run by hand, so a name that a merge took away would show only there.
    has = set(dir(Bed)) | {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(Bed)))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    asked = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bed"
    }
    assert asked <= has


@pytest.mark.parametrize(
    "tasks",
    [
        [task("every kind", everywhere(kind)) for kind in ("host", "local", "control", "skipped")],
        [task("some skip", {"a": "host", "b": "skipped", "c": "host"})],
        [task("some skip", {"a": "control", "b": "skipped", "c": "skipped"})],
        [task("all", everywhere("host")), task("once", {"a": "local"}, run_once=True)],
        [task("all", everywhere("host")), task("once", {"a": "skipped"}, run_once=True)],
    ],
)
def test_the_empty_play_has_as_many_results_of_each_kind(tasks):
    batches = [{"play": "p", "tasks": tasks}]
    assert results(second_run.empty_plays(batches)) == second_run.count(batches)


def test_the_empty_play_goes_in_the_same_batches():
    batches = [{"play": "switch", "tasks": [task("t", {host: "host"})]} for host in HOSTS]
    assert [play["hosts"] for play in second_run.empty_plays(batches)] == HOSTS


def test_the_empty_play_leaves_the_hosts_alone_where_the_control_node_works():
    (play,) = second_run.empty_plays([{"play": "p", "tasks": [task("t", everywhere("local"))]}])
    (made,) = play["tasks"]
    assert made["delegate_to"] == "localhost"
    assert made["become"] is False


def run(*batches: dict, end: float) -> Play:
    return Play(0, "", 0.0, end, 0.0, 0.0, list(batches))


def test_a_task_lasts_until_the_next_one_or_the_next_batch():
    first = {
        "play": "p",
        "start": 1.0,
        "tasks": [task("t", everywhere("host"), start=2), task("u", {}, start=5)],
    }
    second = {"play": "p", "start": 6.0, "tasks": [task("t", everywhere("host"), start=7)]}
    watched = run(first, second, end=10.0)
    assert [seconds for _, _, seconds in watched.tasks()] == [3, 1, 3]
    top = second_run.profile(watched).splitlines()[2]
    assert top.split("|")[1:4] == ["   6.00 ", "           2.00 ", "     2 "]


def test_a_transfer_begins_after_the_role_has_looked_on_the_hosts():
    tasks = [
        task("digest", everywhere("local"), start=1, action="model_source"),
        task("look", everywhere("host"), start=2, action="model_files"),
        task("bring", everywhere("control"), start=3),
        task("verify", everywhere("host"), start=4, action="model_files"),
    ]
    assert transfer_start(run({"play": "p", "start": 0.0, "tasks": tasks}, end=9.0)) == 3
    with pytest.raises(SystemExit, match="no task"):
        transfer_start(run({"play": "p", "start": 0.0, "tasks": tasks[:2]}, end=9.0))


def test_a_table_is_markdown_with_numbers_to_the_right():
    assert table(["what", "s"], [["one", 1.234], ["two", 123.4], ["none", None]]).splitlines() == [
        "| what |     s |",
        "|------|------:|",
        "| one  |  1.23 |",
        "| two  | 123.4 |",
        "| none |     – |",
    ]


@pytest.mark.parametrize(
    ("rate", "bits"), [("200mbit", 200_000_000), ("5000kbit", 5_000_000), ("1gbit", 10**9)]
)
def test_a_rate_is_what_tc_understands(rate, bits):
    assert network.bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "200", "0mbit", "1.5gbit", "200 mbit", "200MBit"])
def test_another_rate_is_refused(rate):
    with pytest.raises(machine.BedError, match="expected for example 200mbit"):
        network.bits_per_second(rate)


def test_one_runs_by_make_and_its_table_comes_onto_the_page(tmp_path):
    env = {**os.environ, "BENCH_RESULTS": str(tmp_path / "results")}
    make = ["make", "bench", "BENCH=header_cost"]
    done = subprocess.run(make, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = tmp_path / "page.md"
    subprocess.run([sys.executable, ROOT / "bench/collect.py", page], env=env, check=True)
    assert re.search(r"^\| header +\| +[\d.]+ \| +[\d.]+ \| +\d+ \| +\d+ \|$", page.read_text(), re.M)
