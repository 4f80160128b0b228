"""Flags → YAML → what vLLM's reader makes of it. PyYAML is the oracle; vLLM reads its config file with it."""

from __future__ import annotations

import json

import pytest
import yaml
from dflash_rollout.errors import RolloutError
from dflash_rollout.vllm_yaml import to_yaml
from hypothesis import given
from hypothesis import strategies as st

LAUNCH = {
    "model": "/root/models/Qwen3.6-27B",
    "port": 30000,
    "tensor-parallel-size": 2,
    "max_model_len": 32768,
    "reasoning-parser": "qwen3",
    "enable-auto-tool-choice": True,
    "language-model-only": True,
    "trust-remote-code": False,
    "enable-prefix-caching": False,
    "disable-log-stats": False,
    "quantization": None,
    "served-model-name": ["Qwen3.6-27B", "default"],
    "speculative-config": {"method": "dflash", "model": "/opt/x/drafter", "num_speculative_tokens": 15},
}

TEXT = """\
model: "/root/models/Qwen3.6-27B"
port: 30000
tensor-parallel-size: 2
max-model-len: 32768
reasoning-parser: "qwen3"
enable-auto-tool-choice: true
language-model-only: true
no-trust-remote-code: true
no-enable-prefix-caching: true
served-model-name: ["Qwen3.6-27B", "default"]
speculative-config:
  method: "dflash"
  model: "/opt/x/drafter"
  num_speculative_tokens: 15
"""


def test_launch_of_the_pair():
    assert to_yaml(LAUNCH) == TEXT


@pytest.mark.parametrize(
    "text",
    ["no", "null", "~", "", "1e3", "0123", "1_000", "2026-12-02", "0x1f", "a: b", "# c", "{", "&a", "1:30"],
)
def test_text_stays_text(text):
    assert yaml.safe_load(to_yaml({"chat-template": text})) == {"chat-template": text}


@pytest.mark.parametrize("number", [1e-6, 1e16, 0.92, 1e-300, 5.0, -1, 0, 10**30])
def test_numbers_stay_numbers(number):
    assert yaml.safe_load(to_yaml({"override": {"x": number}})) == {"override": {"x": number}}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"max_model_len": 1, "max-model-len": 2}, "given twice"),
        ({"enable-prefix-caching": True, "no-enable-prefix-caching": True}, "given twice"),
        ({"--port": 1}, "without --"),
        ({"Port": 1}, "without --"),
        ({"compilation-config.mode": 3}, "without --"),
        ({"config": "other.yaml"}, "no flag"),
        ({"on": True}, "no flag"),
        ({1: 2}, "no flag"),
        ({"no-enable-prefix-caching": False}, "write enable-prefix-caching: true"),
        ({"speculative-config": {"speculative_token_tree": "[(0,)]"}}, "speculative_token_tree"),
        ({"speculative_config": {"speculative_token_tree": "[(0,)]"}}, "speculative_token_tree"),
        ({"speculative-config": '{"method": "dflash"}'}, "no mapping"),
        ({"served-model-name": []}, "empty list"),
        ({"served-model-name": [True]}, "bool"),
        ({"served-model-name": [{"a": 1}]}, "dict"),
        ({"chat-template": "--port"}, "for a flag"),
        ({"cpu-offload-gb": -0.5}, "negative fraction"),
        ({"cpu-offload-gb": float("nan")}, "nothing that YAML can hold"),
        ({"x": {"y": float("inf")}}, "nothing that YAML can hold"),
        ({"x": {"y": {1, 2}}}, "nothing that YAML can hold"),
        ({"x": {1: 2}}, "no text"),
        ({"x": b"y"}, "bytes"),
    ],
)
def test_refused(flags, words):
    with pytest.raises(RolloutError, match=words.replace("(", r"\(")):
        to_yaml(flags)


@pytest.mark.parametrize("name", ["grpc", "headless", "disable-log-stats", "aggregate-engine-logging"])
def test_flags_without_a_negative_form(name):
    assert to_yaml({name: False}) == ""
    assert yaml.safe_load(to_yaml({name: True})) == {name: True}


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=10,
)


@given(st.dictionaries(TEXTS, JSON))
def test_any_json_inside_a_mapping_comes_back(value):
    document = to_yaml({"compilation-config": value})
    # vLLM hands the mapping on as json.dumps of it; -0.0 == 0.0 but they print differently.
    assert json.dumps(yaml.safe_load(document)["compilation-config"]) == json.dumps(value)


@given(
    st.lists(TEXTS.filter(lambda text: not text.startswith("-")), min_size=1),
    NUMBERS.filter(lambda n: n >= 0),
)
def test_any_list_of_texts_and_any_number_comes_back(texts, number):
    document = to_yaml({"served-model-name": texts, "seed": number})
    assert yaml.safe_load(document) == {"served-model-name": texts, "seed": number}
