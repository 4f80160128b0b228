"""Published configs in their dialects, known drafters, precedence and contradictions."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_config import render
from dflash_rollout.drafter_facts import facts_of, first_free_token
from dflash_rollout.errors import RolloutError
from dflash_rollout.safetensors import tensors_from_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import PROFILE_27B, QWEN3_6_27B, as_json, drafter_shapes
from published_pairs import FULL, PAIRS, SLIDING

QWEN3_6, QWEN3_5 = PAIRS[0], PAIRS[1]
SHIPPED = "shipped config /x/config.json"


def render_pair(pair, profile=None, shipped=None, target=None, target_name="a target", **options):
    return render(
        tensors_from_json(as_json(options.pop("shapes", pair.shapes))),
        target or pair.target,
        profile,
        shipped=None if shipped is None else facts_of(shipped, SHIPPED),
        target_name=target_name,
        **options,
    )


def refused(*fragments, **options):
    with pytest.raises(RolloutError) as caught:
        render_pair(options.pop("pair", QWEN3_6), **options)
    for fragment in fragments:
        assert fragment in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_each_published_config_is_understood(pair):
    rendered = render_pair(pair, pair.profile, pair.shipped)
    config = rendered.config
    assert config["dflash_config"]["target_layer_ids"] == pair.taps
    assert config["dflash_config"]["mask_token_id"] == pair.mask_token_id
    assert config["eagle_aux_hidden_state_layer_ids"] == pair.aux
    assert config["layer_types"] == pair.layer_types
    assert config["architectures"] == ["DFlashDraftModel"]
    assert "auto_map" not in config
    assert set(rendered.provenance) == {
        *(key for key in config if key != "dflash_config"),
        *(f"dflash_config.{key}" for key in config["dflash_config"]),
    }


@pytest.mark.parametrize("pair", PAIRS[:3], ids=lambda pair: pair.name)
def test_a_known_drafter_needs_no_profile_when_its_target_is_named(pair):
    rendered = render_pair(pair, target_name=f"/root/models/{pair.target_name}/config.json")
    assert rendered.config["dflash_config"]["mask_token_id"] == pair.mask_token_id
    assert rendered.config["layer_types"] == pair.layer_types
    assert rendered.provenance["layer_types"].startswith(f"known drafter {pair.name}: ")
    assert any(f"taken for {pair.name}" in warning for warning in rendered.warnings)


def test_twins_are_told_apart_or_refused():
    message = refused("layer_types unknown", QWEN3_6.name, QWEN3_5.name, "name one of them as `drafter`")
    assert "mask_token_id from" not in message  # both say the same
    for pair in (QWEN3_6, QWEN3_5):
        config = render_pair(pair, {"drafter": pair.name}).config
        assert config["layer_types"] == pair.layer_types
    # What the operator says of one key tells the rest.
    assert render_pair(QWEN3_6, {"layer_types": [FULL] * 5}).config["sliding_window"] is None
    rendered = render_pair(QWEN3_6, {"sliding_window": 2048})
    assert rendered.config["layer_types"] == QWEN3_6.layer_types


@pytest.mark.parametrize("shipped", [None, QWEN3_6.shipped])
def test_all_full_from_a_better_source_leaves_no_window(shipped):
    profile = {"layer_types": [FULL] * 5}
    rendered = render_pair(QWEN3_6, profile, shipped, target_name="/models/Qwen3.6-27B")
    assert rendered.config["sliding_window"] is None
    assert rendered.config["use_sliding_window"] is False
    assert any(w.startswith("layer_types: profile says") for w in rendered.warnings)


def test_a_drafter_that_this_is_not_is_refused():
    refused("did you mean z-lab/Qwen3.6-27B-DFlash?", profile={"drafter": "Qwen3.6-27B-DFlash"})
    refused("can't be z-lab/Qwen3.6-35B-A3B-DFlash", profile={"drafter": "z-lab/Qwen3.6-35B-A3B-DFlash"})


def test_an_unknown_geometry_gets_nothing_from_known_drafters():
    message = refused("mask_token_id, block_size, layer_types unknown", shapes=drafter_shapes(inner=17152))
    assert "candidates" not in message


def test_precedence_and_both_names_in_the_warning():
    profile = {**PROFILE_27B, "rope_theta": 5e6}
    rendered = render_pair(QWEN3_6, profile, QWEN3_6.shipped)
    assert rendered.config["rope_theta"] == 5e6
    assert rendered.provenance["rope_theta"] == "profile"
    assert rendered.provenance["rms_norm_eps"] == SHIPPED
    warning = next(w for w in rendered.warnings if w.startswith("rope_theta"))
    assert "profile says 5000000.0" in warning
    assert f"{SHIPPED} says 10000000" in warning


def test_shipped_differing_from_the_known_drafter_is_named():
    shipped = {**QWEN3_6.shipped, "sliding_window": 1024}
    rendered = render_pair(QWEN3_6, None, shipped, target_name="/models/Qwen3.6-27B")
    assert rendered.config["sliding_window"] == 1024
    assert any("as published says 2048" in w for w in rendered.warnings)


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"hidden_size": 4096}, ["contradict", "hidden_size", "4096", "5120", "rows of fc.weight"]),
        ({"num_hidden_layers": 8, "layer_types": None}, ["num_hidden_layers", "8", "number of layers"]),
        ({"head_dim": 256}, ["head_dim", "256", "length of q_norm"]),
        ({"num_target_layers": 40}, ["num_target_layers", "40", "64", "trained for"]),
        ({"vocab_size": 151936}, ["vocab_size", "151936", "248320", "trained for"]),
    ],
)
def test_a_config_of_another_revision_is_refused(change, fragments):
    refused(SHIPPED, *fragments, shipped={**QWEN3_6.shipped, **change})


def test_dtype_comes_from_the_header():
    rendered = render_pair(QWEN3_6, None, {**QWEN3_6.shipped, "dtype": "float32"})
    assert rendered.config["dtype"] == "bfloat16"
    assert any(w.startswith("dtype: ") and "float32" in w for w in rendered.warnings)


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, ["DFlash2", "no released vLLM"]),
        ({"architectures": ["DSparkDraftModel"]}, ["DSpark", "shifted by one"]),
        ({"architectures": ["DFlashSpeculator"]}, ["speculators format"]),
        ({"architectures": ["Eagle3LlamaForCausalLM"]}, ["EAGLE"]),
        ({"architectures": ["Qwen3ForCausalLM"]}, ["full model"]),
        ({"architectures": ["Surprise"]}, ["unknown architecture", "Surprise"]),
        ({"transformer_layer_config": {}}, ["speculators format", "never merged"]),
        ({"is_causal": True}, ["causal drafter", "is_causal true"]),
        ({"causal_head": True}, ["JetSpec"]),
        ({"dflash_config": {"causal_head": True}}, ["JetSpec", "dflash_config.causal_head"]),
        ({"markov_rank": 64}, ["DSpark", "markov_rank 64"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantized"]),
        ({"draft_vocab_size": 32000}, ["vocabulary of its own", "32000"]),
        ({"dflash_config": {"use_aux_hidden_state": False}}, ["without taps"]),
        (
            {"dflash_config": {"block_size": 8}},
            ["contradicts itself", "block_size 16", "dflash_config.block_size 8"],
        ),
        ({"eagle_aux_hidden_state_layer_ids": [3, 18, 33, 48, 63]}, ["contradicts itself about the taps"]),
    ],
)
def test_configs_that_are_refused(change, fragments):
    document = copy.deepcopy(QWEN3_6.shipped)
    for key, value in change.items():
        if key == "dflash_config":
            document[key].update(value)
        else:
            document[key] = value
    with pytest.raises(RolloutError) as caught:
        facts_of(document, SHIPPED)
    for fragment in (SHIPPED, *fragments):
        assert fragment in str(caught.value)


def dialect(**change):
    """QWEN3_6's shipped config in other words."""
    document = copy.deepcopy(QWEN3_6.shipped)
    for key, value in change.items():
        if value is None:
            document.pop(key, None)
        else:
            document[key] = value
    return document


NESTED = {**QWEN3_6.shipped["dflash_config"], "block_size": 16}
DIALECTS = {
    "as published": dialect(),
    "the alias of NeMo": dialect(architectures=["Qwen3DFlashDraftModel"]),
    "no architectures": dialect(architectures=None),
    "block in dflash_config": dialect(block_size=None, dflash_config=NESTED),
    "block twice": dialect(dflash_config=NESTED),
    "taps and mask at the top": dialect(
        dflash_config=None, mask_token_id=248070, target_layer_ids=[1, 16, 31, 46, 61]
    ),
    "aux layers only": dialect(
        dflash_config={"mask_token_id": 248070}, eagle_aux_hidden_state_layer_ids=[2, 17, 32, 47, 62]
    ),
    "aux layers as well": dialect(eagle_aux_hidden_state_layer_ids=[2, 17, 32, 47, 62]),
    "aux layers off by one": dialect(eagle_aux_hidden_state_layer_ids=[1, 16, 31, 46, 61]),
    "rope_parameters": dialect(
        rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 10000000.0}
    ),
    "torch_dtype": dialect(torch_dtype="bfloat16"),
    "window in dflash_config": dialect(
        sliding_window=None, dflash_config={**QWEN3_6.shipped["dflash_config"], "sliding_window": 2048}
    ),
}


@pytest.mark.parametrize("name", DIALECTS)
def test_all_dialects_give_one_config(name):
    expected = render_pair(QWEN3_6, PROFILE_27B).config
    assert render_pair(QWEN3_6, None, DIALECTS[name]).config == expected


def test_unknown_keys_of_dflash_config_are_kept_as_they_are():
    document = dialect(sliding_window=None)
    document["dflash_config"] |= {"use_swa": True, "swa_window_size": 2048, "causal": False}
    rendered = render_pair(QWEN3_6, None, document)
    assert rendered.config["sliding_window"] == 2048
    assert rendered.config["dflash_config"] == {
        "mask_token_id": 248070,
        "target_layer_ids": [1, 16, 31, 46, 61],
        "use_swa": True,
        "swa_window_size": 2048,
        "causal": False,
    }
    assert rendered.provenance["dflash_config.use_swa"].endswith("kept as it is")


def test_mask_null_is_unknown_not_known():
    document = dialect()
    document["dflash_config"]["mask_token_id"] = None
    refused("mask_token_id unknown", shapes=drafter_shapes(inner=17152),
            shipped={**document, "intermediate_size": 17152})  # fmt: skip


def test_no_windows_means_full_attention_and_an_unused_window_is_dropped():
    facts = facts_of({"num_hidden_layers": 3, "use_sliding_window": False, "sliding_window": 4096}, SHIPPED)
    assert facts.values["layer_types"] == [FULL] * 3
    assert "sliding_window" not in facts.values
    assert facts.source("layer_types") == f"{SHIPPED}: use_sliding_window false"


def test_yarn_is_kept_with_its_theta():
    kimi = PAIRS[-1]
    config = render_pair(kimi, None, kimi.shipped).config
    assert config["rope_theta"] == 50000.0
    assert config["rope_parameters"] == {
        "rope_theta": 50000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "rope_type": "yarn",
    }


def test_multimodal_rope_becomes_plain_rope_for_text():
    document = dialect(
        rope_theta=None,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.25,
        },
    )
    rendered = render_pair(QWEN3_6, None, document)
    assert rendered.config["rope_parameters"] == {
        "rope_theta": 10000000.0,
        "rope_type": "default",
        "partial_rotary_factor": 0.25,
    }
    assert any("multimodal RoPE" in warning for warning in rendered.warnings)


def test_risky_derivations_only_when_allowed(tmp_path):
    tokenizer = {"model": {"vocab": {"a": 0, "b": 41}}, "added_tokens": [{"id": 42, "content": "<x>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = {
        "shapes": drafter_shapes(inner=17152),
        "profile": {"block_size": 16},
        "first_free_token": lambda: first_free_token(str(tmp_path)),
    }
    refused("mask_token_id, layer_types unknown", **options)
    allowed = ("mask_token_id", "layer_types", "target_layer_ids", "rope_theta", "rms_norm_eps", "hidden_act")
    rendered = render_pair(QWEN3_6, allow_derived=allowed, **options)
    assert rendered.config["dflash_config"]["mask_token_id"] == 43
    assert rendered.config["layer_types"] == [FULL] * 5
    assert sum("is derived" in warning for warning in rendered.warnings) == 6
    with pytest.raises(RolloutError, match="block_size, for which there is no derivation"):
        render_pair(QWEN3_6, allow_derived=("block_size",), **options)


def test_older_revision_with_embedding_and_head():
    shapes = {**drafter_shapes(), "embed_tokens.weight": [248320, 5120], "lm_head.weight": [248320, 5120]}
    rendered = render_pair(QWEN3_6, PROFILE_27B, shapes=shapes)
    assert rendered.config == render_pair(QWEN3_6, PROFILE_27B).config
    assert any("older revision" in w and "embed_tokens.weight" in w for w in rendered.warnings)
    refused("embed_tokens.weight", "another vocabulary", "151936 rows", profile=PROFILE_27B,
            shapes={**shapes, "embed_tokens.weight": [151936, 5120]})  # fmt: skip


def test_8_layers_with_5_taps():
    shapes = drafter_shapes(hidden=2048, inner=6144, layers=8, kv_heads=4, fc=5 * 2048)
    target = PAIRS[2].target
    profile = {"mask_token_id": 248070, "block_size": 16, "layer_types": [FULL] * 8}
    config = render(tensors_from_json(as_json(shapes)), target, profile).config
    assert config["num_hidden_layers"] == 8
    assert config["dflash_config"]["target_layer_ids"] == [1, 10, 19, 28, 37]


def test_target_width_differs_from_the_drafters():
    target = copy.deepcopy(QWEN3_6_27B)
    target["text_config"]["hidden_size"] = 2560
    profile = {**PROFILE_27B, "target_layer_ids": list(range(1, 11))}
    config = render_pair(QWEN3_6, profile, target=target).config
    assert config["target_hidden_size"] == 2560
    assert config["layer_types"] == [SLIDING] * 4 + [FULL]
