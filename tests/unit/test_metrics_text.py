"""The parser of /metrics against prometheus_client's own, which is the oracle."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from dflash_rollout.errors import RolloutError
from dflash_rollout.metrics_text import parse
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

# As a vLLM with two engines writes it.
VLLM = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="Qwen3.6-27B"} 125.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="Qwen3.6-27B"} 1.0e+06

vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="a,b}{=\\"c\\\\d\\ne"} NaN
process_start_time_seconds 1.76464512055e+09
with_time{a="b",} 3 1395066363000
bare   4
empty{} -Inf
"""


def by_oracle(text):
    return [
        (sample.name, sample.labels, repr(float(sample.value)))
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def ours(text):
    return [(sample.name, sample.labels, repr(sample.value)) for sample in parse(text)]


def test_an_answer_of_vllm():
    assert ours(VLLM) == by_oracle(VLLM)
    found = {sample.name: sample for sample in parse(VLLM)}
    assert found["bare"].value == 4
    assert found["vllm:e2e_request_latency_seconds_bucket"].labels["model_name"] == 'a,b}{="c\\d\ne'
    assert math.isnan(found["vllm:e2e_request_latency_seconds_bucket"].value)


def test_the_answer_of_a_server_on_a_gpu():
    text = (Path(__file__).parents[1] / "fixtures/metrics-vllm-0.20.1.txt").read_text()
    assert len(ours(text)) > 400
    assert ours(text) == by_oracle(text)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=12)
NUMBER = st.floats(min_value=0, allow_nan=False)


@given(st.lists(st.tuples(TEXT, TEXT, NUMBER), max_size=8), NUMBER)
def test_what_the_client_library_writes(rows, number):
    registry = CollectorRegistry()
    counter = Counter("vllm:tokens", "Tokens\nof \\ all", ["model_name", "engine"], registry=registry)
    for model, engine, value in rows:
        counter.labels(model, engine).inc(value)
    Gauge("plain", "", registry=registry).set(-number)
    Histogram("seconds", "", registry=registry, buckets=(0.5, 1)).observe(number)
    text = generate_latest(registry).decode()
    assert ours(text) == by_oracle(text)


@given(st.text(st.sampled_from('ab_:{}=",\\n 0.5eE+-#\n\t'), max_size=40))
def test_whatever_else_is_in_it(text):
    """What the oracle reads, we read the same way, or refuse; we never fail in another way."""
    try:
        expected = by_oracle(text)
    except Exception:
        expected = None  # it raises all kinds of things
    try:
        found = ours(text)
    except RolloutError:
        return
    if expected is not None:
        assert found == expected


@pytest.mark.parametrize(
    "line",
    [
        "no_value",
        "a{b=c} 1",
        'a{b="c} 1',
        'a{b="c"',
        "a 1 2 3",
        "1a 2",
        "a one",
        "<html>",
        'a{b="c" d="e"} 1',
    ],
)
def test_what_is_no_sample_is_refused(line):
    with pytest.raises(RolloutError, match="can't be read"):
        parse(f"good 1\n{line}\n")
