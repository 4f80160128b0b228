"""Drafters and targets for tests: published geometries as headers, and small real files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

#: Qwen3.6-27B: the keys of its config.json that this project reads.
QWEN3_6_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 248320,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 262144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25},
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "mamba_ssm_dtype": "float32",
        "tie_word_embeddings": False,
    },
}

#: What is published about z-lab/Qwen3.6-27B-DFlash and not in its tensors.
PROFILE_27B = {
    "mask_token_id": 248070,
    "block_size": 16,
    "target_layer_ids": [1, 16, 31, 46, 61],
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "rope_theta": 10000000.0,
}


def drafter_shapes(
    hidden=5120, inner=17408, layers=5, heads=32, kv_heads=8, head_dim=128, fc=25600, bias=False
) -> dict[str, list[int]]:
    """Name → shape of a DFlash drafter; the defaults are those of Qwen3.6-27B's."""
    shapes = {"fc.weight": [hidden, fc], "hidden_norm.weight": [hidden], "norm.weight": [hidden]}
    for layer in range(layers):
        for name, shape in {
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
            "self_attn.q_proj.weight": [heads * head_dim, hidden],
            "self_attn.k_proj.weight": [kv_heads * head_dim, hidden],
            "self_attn.v_proj.weight": [kv_heads * head_dim, hidden],
            "self_attn.o_proj.weight": [hidden, heads * head_dim],
            "self_attn.q_norm.weight": [head_dim],
            "self_attn.k_norm.weight": [head_dim],
        }.items():
            shapes[f"layers.{layer}.{name}"] = shape
        if bias:
            for name, size in {
                "q": heads * head_dim,
                "k": kv_heads * head_dim,
                "v": kv_heads * head_dim,
                "o": hidden,
            }.items():
                shapes[f"layers.{layer}.self_attn.{name}_proj.bias"] = [size]
    return shapes


def as_json(shapes: dict[str, list[int]], dtype: str = "BF16") -> dict[str, dict]:
    """The `tensors` that safetensors_info would return for `shapes`."""
    return {name: {"dtype": dtype, "shape": shape} for name, shape in shapes.items()}


def encode(header: dict | bytes, payload: bytes = b"") -> bytes:
    """A safetensors file from a header (a dictionary, or its very bytes) and a payload."""
    raw = header if isinstance(header, bytes) else json.dumps(header, ensure_ascii=False).encode()
    return struct.pack("<Q", len(raw)) + raw + payload


def write_sparse(path: Path, shapes: dict[str, list[int]], item_bytes: int = 2, dtype: str = "BF16") -> Path:
    """A file with a true header and a payload of holes: full size, no disk space."""
    header, offset = {}, 0
    for name, shape in shapes.items():
        size = item_bytes
        for axis in shape:
            size *= axis
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    path.write_bytes(encode(header))
    with open(path, "r+b") as stream:
        stream.truncate(path.stat().st_size + offset)
    return path


def qwen3_6_27b_shapes() -> dict[str, list[int]]:
    """Name → shape of Qwen3.6-27B itself, with two tensors of its vision part and one of its MTP layer."""
    hidden, inner, vocab = 5120, 17408, 248320
    prefix = "model.language_model."
    shapes = {
        "lm_head.weight": [vocab, hidden],
        prefix + "embed_tokens.weight": [vocab, hidden],
        prefix + "norm.weight": [hidden],
        "model.visual.merger.linear_fc1.weight": [4608, 4608],
        "model.visual.patch_embed.proj.weight": [1152, 3, 2, 16, 16],
        "mtp.fc.weight": [hidden, 2 * hidden],
    }
    for layer in range(64):
        parts = {
            "input_layernorm.weight": [hidden],
            "post_attention_layernorm.weight": [hidden],
            "mlp.gate_proj.weight": [inner, hidden],
            "mlp.up_proj.weight": [inner, hidden],
            "mlp.down_proj.weight": [hidden, inner],
        }
        if layer % 4 == 3:
            parts |= {
                "self_attn.q_proj.weight": [2 * 24 * 256, hidden],
                "self_attn.k_proj.weight": [4 * 256, hidden],
                "self_attn.v_proj.weight": [4 * 256, hidden],
                "self_attn.o_proj.weight": [hidden, 24 * 256],
                "self_attn.q_norm.weight": [256],
                "self_attn.k_norm.weight": [256],
            }
        else:
            parts |= {
                "linear_attn.in_proj_qkv.weight": [10240, hidden],
                "linear_attn.in_proj_z.weight": [6144, hidden],
                "linear_attn.in_proj_a.weight": [48, hidden],
                "linear_attn.in_proj_b.weight": [48, hidden],
                "linear_attn.conv1d.weight": [10240, 1, 4],
                "linear_attn.out_proj.weight": [hidden, 6144],
                "linear_attn.norm.weight": [128],
                "linear_attn.A_log": [48],
                "linear_attn.dt_bias": [48],
            }
        shapes |= {f"{prefix}layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes
