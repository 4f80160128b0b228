"""Every metric that rules and dashboard name exists in vLLM 0.20.1's /metrics, or is the probe's or our own rule's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from dflash_rollout import probe
from dflash_rollout.metrics_text import parse

REPOSITORY = Path(__file__).parents[2]
MONITORING = REPOSITORY / "examples/monitoring"
FIXTURE = REPOSITORY / "tests/fixtures/metrics-vllm-0.20.1.txt"
SAMPLES = parse(FIXTURE.read_text())
RULES = [
    rule
    for group in yaml.safe_load((MONITORING / "vllm-dflash.rules.yml").read_text())["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((MONITORING / "dashboard.json").read_text())
# What stands in an expression besides metrics.
WORDS = {
    "sum", "min", "max", "by", "on", "and", "unless", "rate", "changes", "deriv", "time", "offset", "ignoring", "group_left",
    "avg_over_time", "min_over_time", "histogram_quantile",
}  # fmt: skip


def expressions():
    """(where, PromQL) of everything that is asked."""
    yield from ((rule.get("alert") or rule["record"], rule["expr"]) for rule in RULES)
    for panel in DASHBOARD["panels"]:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))
    yield from ((note["name"], note["expr"]) for note in DASHBOARD["annotations"]["list"])


def metrics_of(expression: str) -> set[str]:
    """The names of metrics in it."""
    bare = re.sub(
        r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on|ignoring|group_left) \([^)]*\)|\b\d+(?:\.\d+)?[smhd]?\b",
        " ",
        expression,
    )
    return set(re.findall(r"[a-zA-Z_:][\w:]*", bare)) - WORDS


def labels_of(expression: str) -> set[str]:
    """The names of labels that it goes by."""
    lists = ",".join(re.findall(r"\b(?:by|on|ignoring|group_left) \(([^)]*)\)", expression))
    return set(re.findall(r"(\w+)(?==)", " ".join(re.findall(r"\{[^}]*\}", expression)))) | set(
        re.findall(r"\w+", lists)
    )


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_exists(where, expression):
    named = metrics_of(expression)
    assert named, expression
    ours = set(probe._METRICS) | {rule["record"] for rule in RULES if "record" in rule} | {"up"}
    theirs = {sample.name for sample in SAMPLES}
    assert named - ours - theirs == set(), where
    labels = {label for sample in SAMPLES if sample.name in named for label in sample.labels}
    # The scrape's own, and the probe's.
    assert labels_of(expression) - labels - {"job", "host", "unit"} == set(), where


def test_the_reader_of_expressions_finds_what_is_misspelt():
    assert metrics_of('rate(vllm:tokens_total{job="x"}[5m]) / sum by (host) (up) > 0.5') == {
        "vllm:tokens_total",
        "up",
    }
    assert labels_of('sum by (le, host) (x{job="y",engine=~"0"})') == {"le", "host", "job", "engine"}


def test_the_dashboard_has_no_panel_over_another_and_no_id_twice():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in panels if panel["type"] != "row")


def test_each_alert_is_explained():
    text = (MONITORING / "README.md").read_text()
    for rule in RULES:
        if "alert" in rule:
            assert f"| `{rule['alert']}` |" in text
            assert rule["annotations"].keys() == {"summary", "description"}
