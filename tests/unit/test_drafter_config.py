"""Shapes, target and profile → config.json, and what is refused."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_config import default_taps, render
from dflash_rollout.errors import RolloutError
from dflash_rollout.safetensors import tensors_from_json
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import PROFILE_27B, QWEN3_6_27B, as_json, drafter_shapes

# The config that vLLM 0.20.1 accepted on a GPU for z-lab/Qwen3.6-27B-DFlash.
EXPECTED_27B = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "block_size": 16,
    "num_target_layers": 64,
    "dtype": "bfloat16",
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 5,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "eagle_aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
}


# No published drafter has this geometry, so nothing is known about it.
UNKNOWN = drafter_shapes(inner=17152)


def shapes_to_tensors(shapes, dtype="BF16"):
    return tensors_from_json(as_json(shapes, dtype))


def render_27b(shapes=None, target=QWEN3_6_27B, profile=PROFILE_27B, **options):
    return render(shapes_to_tensors(shapes or drafter_shapes()), target, profile, **options)


def refused(*fragments, **options):
    with pytest.raises(RolloutError) as caught:
        render_27b(**options)
    for fragment in fragments:
        assert fragment in str(caught.value)
    return str(caught.value)


def test_qwen3_6_27b_equals_the_config_that_ran_on_a_gpu():
    rendered = render_27b()
    assert rendered.config == EXPECTED_27B
    assert list(rendered.config) == list(EXPECTED_27B)
    assert list(rendered.config["dflash_config"]) == ["mask_token_id", "target_layer_ids"]
    # == takes 1e7 for 10000000 and True for 1; JSON does not.
    assert isinstance(rendered.config["rope_theta"], float)
    assert rendered.config["use_sliding_window"] is True


def test_every_value_has_a_source():
    rendered = render_27b()
    leaves = [key for key in EXPECTED_27B if key != "dflash_config"]
    assert set(rendered.provenance) == {
        *leaves,
        "dflash_config.mask_token_id",
        "dflash_config.target_layer_ids",
    }
    assert rendered.provenance["head_dim"] == "tensors: length of q_norm"
    assert rendered.provenance["vocab_size"] == "target: text_config.vocab_size"
    assert rendered.provenance["sliding_window"] == "profile"
    assert rendered.provenance["rms_norm_eps"].startswith("derived: ")


def test_config_is_written_as_json_that_reads_back():
    text = render_27b().text
    assert text.endswith("}\n")
    assert json.loads(text) == EXPECTED_27B


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (40, 5, [1, 10, 19, 28, 37]),
        (61, 6, [1, 12, 24, 35, 47, 58]),
        (12, 5, [1, 3, 5, 7, 9]),
        (64, 1, [32]),
    ],
)
def test_default_taps_follow_the_reference(layers, taps, expected):
    assert default_taps(layers, taps) == expected


def test_derived_values_say_so():
    profile = {k: v for k, v in PROFILE_27B.items() if k not in ("target_layer_ids", "rope_theta")}
    rendered = render_27b(profile=profile, shapes=UNKNOWN)
    assert rendered.config == {**EXPECTED_27B, "intermediate_size": 17152}
    assert rendered.provenance["dflash_config.target_layer_ids"].startswith("derived: reference formula")
    derived = [warning.split()[0] for warning in rendered.warnings if "is derived" in warning]
    assert derived == ["target_layer_ids", "rope_theta", "rms_norm_eps", "hidden_act"]


def test_all_missing_keys_in_one_message_and_nothing_guessed():
    target = copy.deepcopy(QWEN3_6_27B)
    target["text_config"].update(pad_token_id=248044, eos_token_id=248046)
    message = refused(profile={}, target=target, shapes=UNKNOWN)
    for key in ("mask_token_id", "block_size", "layer_types"):
        assert f"{key} from " in message
    assert "never pad or eos" in message
    assert "target_layer_ids from" not in message


@pytest.mark.parametrize(
    ("section", "ids"),
    [
        ({"eos_token_id": 248070}, "eos"),
        ({"eos_token_id": [5, 248070]}, "eos"),
        ({"pad_token_id": 248070}, "pad"),
    ],
)
def test_a_mask_that_ends_or_pads_is_doubted(section, ids):
    target = {**QWEN3_6_27B, "text_config": {**QWEN3_6_27B["text_config"], **section}}
    assert any(f"is the target's {ids}_token_id" in w for w in render_27b(target=target).warnings)
    assert not any("is the target's" in warning for warning in render_27b().warnings if "mask" in warning)


@pytest.mark.parametrize("key", ["mask_token_id", "sliding_window"])
def test_null_is_unknown(key):
    refused(f"{key} unknown", profile={**PROFILE_27B, key: None}, shapes=UNKNOWN)


def test_derivations_can_be_forbidden():
    message = refused(profile={}, allow_derived=(), shapes=UNKNOWN)
    for key in ("target_layer_ids", "rope_theta", "rms_norm_eps", "hidden_act", "mask_token_id"):
        assert f"{key} from " in message


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"mask_token_id": 248320}, ["mask_token_id is out of range", "248320", "0 to 248319"]),
        ({"mask_token_id": True}, ["mask_token_id is out of range"]),
        ({"mask_token_id": "248070"}, ["mask_token_id is out of range"]),
        ({"block_size": 1}, ["block_size is out of range"]),
        ({"target_layer_ids": [1, 16, 31]}, ["target_layer_ids", "5 layers", "5 × 5120"]),
        ({"target_layer_ids": [1, 16, 31, 46, 64]}, ["target_layer_ids", "0 to 63"]),
        ({"target_layer_ids": [16, 1, 31, 46, 61]}, ["target_layer_ids", "ascending"]),
        ({"target_layer_ids": [1, 1, 31, 46, 61]}, ["target_layer_ids", "ascending"]),
        ({"layer_types": ["full_attention"] * 4}, ["layer_types", "5 entries"]),
        ({"layer_types": ["linear_attention"] * 5}, ["layer_types"]),
        ({"layer_types": ["full_attention"] * 5}, ["sliding_window and layer_types contradict"]),
        ({"sliding_window": 0}, ["sliding_window is out of range"]),
        ({"rope_theta": "1e7"}, ["rope_theta is out of range"]),
        (
            {"head_dim": 256},
            ["contradict each other about head_dim", "256 in profile", "128", "length of q_norm"],
        ),
        ({"num_target_layers": 40}, ["contradict each other about num_target_layers", "40 in profile", "64"]),
        ({"mask_tokn_id": 5}, ["unknown key mask_tokn_id", "did you mean mask_token_id"]),
    ],
)
def test_bad_profile_is_refused(change, fragments):
    refused(*fragments, profile={**PROFILE_27B, **change})


def test_drafter_of_another_target_is_refused():
    target = copy.deepcopy(QWEN3_6_27B)
    target["text_config"]["hidden_size"] = 4096
    refused("not trained for this target", "25600", "4096", target=target)


def test_target_without_a_needed_key_is_refused():
    target = copy.deepcopy(QWEN3_6_27B)
    del target["text_config"]["vocab_size"]
    refused("text_config.vocab_size", target=target)


def test_target_at_top_level_and_of_another_width():
    target = {"hidden_size": 2560, "vocab_size": 248320, "num_hidden_layers": 64}
    target |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    profile = {**PROFILE_27B, "target_layer_ids": list(range(1, 11))}
    rendered = render_27b(target=target, profile=profile)
    assert rendered.config["target_hidden_size"] == 2560
    assert rendered.provenance["vocab_size"] == "target: vocab_size"
    assert rendered.config["rms_norm_eps"] == 1e-5


@pytest.mark.parametrize(
    ("version", "ignored", "environment"),
    [
        ("0.20.1", True, {}),
        ("0.22.1", True, {}),
        ("0.26.0", False, {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    ],
)
def test_versions(version, ignored, environment):
    rendered = render_27b(vllm_version=version)
    assert any("ignores the drafter's sliding window" in w for w in rendered.warnings) is ignored
    assert rendered.environment == environment


def test_full_attention_drafter_has_no_window():
    profile = {**PROFILE_27B, "layer_types": ["full_attention"] * 5, "sliding_window": None}
    rendered = render_27b(profile=profile, vllm_version="0.26.0")
    assert rendered.config["sliding_window"] is None
    assert rendered.config["use_sliding_window"] is False
    assert rendered.environment == {}


GEOMETRIES = st.fixed_dictionaries(
    {
        "hidden": st.integers(1, 512),
        "inner": st.integers(1, 512),
        "layers": st.integers(1, 13),
        "kv_heads": st.integers(1, 4),
        "group": st.integers(1, 4),
        "head_dim": st.sampled_from([1, 32, 64, 128, 256]),
        "taps": st.integers(1, 8),
        "width": st.integers(1, 512),
        "bias": st.booleans(),
        "dtype": st.sampled_from(["BF16", "F16", "F32"]),
    }
)
DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def drawn(geometry):
    shapes = drafter_shapes(
        hidden=geometry["hidden"],
        inner=geometry["inner"],
        layers=geometry["layers"],
        heads=geometry["kv_heads"] * geometry["group"],
        kv_heads=geometry["kv_heads"],
        head_dim=geometry["head_dim"],
        fc=geometry["taps"] * geometry["width"],
        bias=geometry["bias"],
    )
    target = {"hidden_size": geometry["width"], "vocab_size": 300, "num_hidden_layers": 40}
    target |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    profile = {
        "mask_token_id": 299,
        "block_size": 8,
        "layer_types": ["full_attention"] * geometry["layers"],
        "rope_theta": 1e6,
    }
    return shapes, target, profile


@settings(max_examples=200, deadline=None)
@given(GEOMETRIES)
def test_any_geometry_comes_back(geometry):
    shapes, target, profile = drawn(geometry)
    config = render(shapes_to_tensors(shapes, geometry["dtype"]), target, profile).config
    assert {
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "layers": config["num_hidden_layers"],
        "kv_heads": config["num_key_value_heads"],
        "group": config["num_attention_heads"] // config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "taps": len(config["dflash_config"]["target_layer_ids"]),
        "width": config.get("target_hidden_size", config["hidden_size"]),
        "bias": config["attention_bias"],
    } == {key: value for key, value in geometry.items() if key != "dtype"}
    assert config["dtype"] == DTYPES[geometry["dtype"]]


@settings(max_examples=300, deadline=None)
@given(GEOMETRIES, st.data())
def test_any_single_damage_is_refused_by_name(geometry, data):
    shapes, target, profile = drawn(geometry)
    tensors = as_json(shapes, geometry["dtype"])
    victim = data.draw(st.sampled_from(sorted(tensors)))
    damage = data.draw(st.sampled_from(["drop", "rename", "extra", "rank", "dtype"]))
    entry = tensors[victim]
    if damage == "drop":
        del tensors[victim]
    elif damage == "rename":
        tensors[victim + "x"] = tensors.pop(victim)
    elif damage == "extra":
        tensors["surprise.weight"] = entry
        victim = "surprise.weight"
    elif damage == "rank":
        tensors[victim] = {**entry, "shape": [*entry["shape"], 1]}
    else:
        other = data.draw(st.sampled_from([d for d in ("BF16", "F16", "F32", "I8") if d != entry["dtype"]]))
        tensors[victim] = {**entry, "dtype": other}
    with pytest.raises(RolloutError) as caught:
        render(tensors_from_json(tensors), target, profile)
    # Without its only projection bias or its whole last layer a drafter is another valid one; what is
    # refused otherwise has to be named, by itself or by the layer that now has a hole.
    layer = victim.split(".")[1] if victim.startswith("layers.") else None
    assert victim in str(caught.value) or f"no layer {layer}" in str(caught.value)


@settings(max_examples=200, deadline=None)
@given(GEOMETRIES, st.data())
def test_a_reshaped_tensor_is_refused(geometry, data):
    """One axis longer by one: refused, with the tensor or one that no longer fits it."""
    shapes, target, profile = drawn({**geometry, "width": max(geometry["width"], 2)})
    victim = data.draw(st.sampled_from(sorted(shapes)))
    axis = data.draw(st.integers(0, len(shapes[victim]) - 1))
    shapes[victim] = [size + (position == axis) for position, size in enumerate(shapes[victim])]
    with pytest.raises(RolloutError):
        render(shapes_to_tensors(shapes), target, profile)
