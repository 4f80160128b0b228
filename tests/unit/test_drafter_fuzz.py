"""Whatever is in the files: a config or a refusal in words, never a traceback."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_config import DERIVABLE, Rendered, read_target, render
from dflash_rollout.drafter_facts import PLACES, facts_of
from dflash_rollout.errors import RolloutError
from dflash_rollout.pairing import check_pair
from dflash_rollout.safetensors import read_header, tensors_from_json
from dflash_rollout.vram import cache_layout
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import PROFILE_27B, QWEN3_6_27B, as_json, drafter_shapes, write_sparse
from published_pairs import PAIRS

SHAPES = drafter_shapes(hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, fc=128)
TARGET = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "vocab_size": 300,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
PROFILE = {"mask_token_id": 299, "block_size": 8, "layer_types": ["full_attention"] * 2, "rope_theta": 1e6}
PROFILE |= {"rms_norm_eps": 1e-6, "hidden_act": "silu"}

VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-2, 300),
        st.floats(),
        st.sampled_from(["", "silu", "bfloat16", "full_attention", "sliding_attention", "DFlashDraftModel"]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "rope_type"]), inner),
    max_leaves=4,
)


def keys(*more):
    top = {place.partition(".")[0] for places in PLACES.values() for place in places}
    return st.sampled_from(sorted(top | set(more)))


def answer(call):
    """What `call` returns, or None for a refusal; any other exception fails the test."""
    try:
        return call()
    except RolloutError:
        return None


SECTION = st.dictionaries(
    st.sampled_from(["mask_token_id", "block_size", "target_layer_ids", "causal", "use_swa", "x"]), VALUES
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(keys("architectures", "use_sliding_window", "eagle_aux_hidden_state_layer_ids"), VALUES),
    SECTION | st.none(),
)
def test_any_shipped_config(document, section):
    if section is not None:
        document = {**document, "dflash_config": section}
    tensors = tensors_from_json(as_json(SHAPES))
    rendered = answer(lambda: render(tensors, TARGET, None, shipped=facts_of(document, "shipped")))
    if rendered:
        json.loads(rendered.text)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(keys(), VALUES, max_size=3))
def test_any_profile(change):
    tensors = tensors_from_json(as_json(SHAPES))
    rendered = answer(lambda: render(tensors, TARGET, {**PROFILE, **change}, allow_derived=DERIVABLE))
    if rendered:
        # NaN and Infinity are no JSON.
        json.loads(rendered.text, parse_constant=pytest.fail)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*TARGET, "text_config", "rope_parameters"]), VALUES, max_size=3))
def test_any_target(change):
    tensors = tensors_from_json(as_json(SHAPES))
    target = {**TARGET, **change}
    rendered = answer(lambda: render(tensors, target, PROFILE))
    if rendered:
        answer(lambda: check_pair(target, rendered.geometry, 8, {}))
        answer(lambda: cache_layout(target, rendered.geometry))


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "speculative-config",
                "kv-cache-dtype",
                "tensor-parallel-size",
                "max-num-seqs",
                "max_num_batched_tokens",
            ]
        ),
        VALUES,
    ),
    st.dictionaries(st.sampled_from(["kv_cache_scheme", "quant_method", "quantization"]), VALUES),
)
def test_any_launch(launch, quantization):
    geometry = render(tensors_from_json(as_json(SHAPES)), TARGET, PROFILE).geometry
    answer(lambda: check_pair({**TARGET, "quantization_config": quantization}, geometry, 8, launch))


@pytest.fixture(scope="module")
def drafter_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz")
    return write_sparse(folder / "good.safetensors", SHAPES).read_bytes(), folder / "bad.safetensors"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_damage_to_the_file(drafter_file, data):
    """Bytes changed, cut or put in: refused, or the drafter that was there."""
    good, path = drafter_file
    begin = data.draw(st.integers(0, 7000))
    end = begin + data.draw(st.integers(0, 3))
    path.write_bytes(good[:begin] + data.draw(st.binary(max_size=3)) + good[end:])
    rendered = answer(lambda: render(read_header(str(path)).tensors, TARGET, PROFILE))
    if rendered:
        assert rendered.config == render(tensors_from_json(as_json(SHAPES)), TARGET, PROFILE).config


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_target_file(drafter_file, content):
    path = drafter_file[1].with_name("config.json")
    path.write_bytes(content)
    answer(lambda: read_target(str(path)))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PAIRS), st.data())
def test_published_pairs_with_one_value_changed(pair, data):
    shipped = copy.deepcopy(pair.shipped)
    key = data.draw(st.sampled_from(sorted(shipped)))
    shipped[key] = data.draw(VALUES)
    tensors = tensors_from_json(as_json(pair.shapes))
    rendered = answer(
        lambda: render(tensors, pair.target, pair.profile, shipped=facts_of(shipped, "shipped"))
    )
    assert rendered is None or isinstance(rendered, Rendered)


def test_the_profile_of_this_pair_is_the_one_that_is_tested():
    """The other tests change PROFILE_27B; unchanged it renders."""
    tensors = tensors_from_json(as_json(drafter_shapes()))
    assert render(tensors, QWEN3_6_27B, PROFILE_27B).config["num_hidden_layers"] == 5
