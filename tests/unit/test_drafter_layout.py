"""Families by their tensor names: every other one is refused, named, with what would serve it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_layout import FAMILIES, family_of, read_geometry
from dflash_rollout.errors import RolloutError
from dflash_rollout.safetensors import tensors_from_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import as_json, drafter_shapes, qwen3_6_27b_shapes

DFLASH = drafter_shapes(hidden=64, inner=96, layers=2, heads=4, kv_heads=2, head_dim=16, fc=128)
LAYER = "layers.0."
DECODER = {
    f"{LAYER}self_attn.{name}_proj.weight": [64, 64] for name in "qkvo"
} | {f"{LAYER}mlp.{name}_proj.weight": [64, 64] for name in ("gate", "up", "down")}  # fmt: skip

#: Family → tensors as such checkpoints name them, and the name that gives it away.
CHECKPOINTS = {
    "DFlash2": (
        {**DFLASH, f"{LAYER}attention_conv.base_kernel": [64, 4]},
        f"{LAYER}attention_conv.base_kernel",
    ),
    "DSpark": ({**DFLASH, "markov_head.markov_w1.weight": [300, 8]}, "markov_head.markov_w1.weight"),
    "Medusa": ({"0.0.linear.weight": [64, 64], "0.1.weight": [300, 64]}, "0.0.linear.weight"),
    "MTP": ({"mtp.fc.weight": [64, 128], "mtp.layers.0.mlp.up_proj.weight": [96, 64]}, "mtp.fc.weight"),
    "quantized": ({**DFLASH, f"{LAYER}mlp.up_proj.weight_scale": [1]}, f"{LAYER}mlp.up_proj.weight_scale"),
    "EAGLE-3": ({"fc.weight": [64, 192], "midlayer.mlp.up_proj.weight": [96, 64], "d2t": [300]}, "midlayer."),
    "speculators": ({**DFLASH, "d2t": [300], "t2d": [300], "lm_head.weight": [300, 64]}, "d2t"),
    "mask embedding": ({**DFLASH, "mask_hidden": [64]}, "mask_hidden"),
    "norms before fc": ({**DFLASH, "pre_fc_norms.0.weight": [64]}, "pre_fc_norms.0.weight"),
    "prefixed `model.`": ({f"model.{name}": shape for name, shape in DFLASH.items()}, "model.fc.weight"),
    "fused": ({**DFLASH, f"{LAYER}self_attn.qkv_proj.weight": [128, 64]}, "qkv_proj"),
    "renamed": ({"fc.weight": [64, 128], "blk.0.attn_q.weight": [64, 64]}, "blk.0.attn_q.weight"),
    "EAGLE": ({**DECODER, "fc.weight": [64, 128], "embed_tokens.weight": [300, 64]}, "fc.weight"),
    "full model": (qwen3_6_27b_shapes(), "this is the big model"),
}


@pytest.mark.parametrize("family", CHECKPOINTS)
def test_other_families_are_named(family):
    shapes, evidence = CHECKPOINTS[family]
    with pytest.raises(RolloutError) as caught:
        read_geometry(tensors_from_json(as_json(shapes)), "/models/drafter.safetensors")
    message = str(caught.value)
    assert "/models/drafter.safetensors is not a plain DFlash drafter but" in message
    assert family in message
    assert evidence in message
    assert "What to do: " in message


def test_every_row_of_the_table_has_an_example():
    seen = {family_of(shapes)[0].name for shapes, _ in CHECKPOINTS.values()}
    assert seen == {family.name for family in FAMILIES}


def test_plain_dflash_is_no_other_family():
    assert family_of(DFLASH) is None
    assert family_of({**DFLASH, "embed_tokens.weight": [300, 64], "lm_head.weight": [300, 64]}) is None
    geometry = read_geometry(tensors_from_json(as_json(DFLASH)))
    assert (geometry.num_attention_heads, geometry.num_key_value_heads, geometry.head_dim) == (4, 2, 16)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U8", "F64"])
def test_quantized_dtypes_are_refused(dtype):
    with pytest.raises(RolloutError, match=f"quantized: its tensors are {dtype}"):
        read_geometry(tensors_from_json(as_json(DFLASH, dtype)))


def test_a_gap_between_layers_is_named():
    shapes = {name: shape for name, shape in drafter_shapes(layers=4).items() if "layers.2." not in name}
    with pytest.raises(RolloutError, match="has no layer 2"):
        read_geometry(tensors_from_json(as_json(shapes)))


def test_heads_are_never_divided_by_guess():
    """4 heads of 256 and 8 of 128 have the same k_proj."""
    for kv_heads, head_dim in ((4, 256), (8, 128)):
        shapes = drafter_shapes(heads=kv_heads * 4, kv_heads=kv_heads, head_dim=head_dim)
        geometry = read_geometry(tensors_from_json(as_json(shapes)))
        assert (geometry.num_key_value_heads, geometry.head_dim) == (kv_heads, head_dim)
