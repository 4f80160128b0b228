#!/usr/bin/env python3
"""Make a simulated target folder: Qwen3.6-27B as vLLM's engine config and the roll-out's checks see it.

    make_target.py DIR            real shapes; the 54 GB of weights are holes in sparse files
    make_target.py DIR --small    the same 64 layers, narrow, for a drafter made with --small

config.json states the published facts of the model. The tokenizer knows bytes and the published special
tokens under their published ids, nothing else.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from simulated_pair import REAL, SMALL, TARGET_LAYERS, VOCAB, Pair, Tensors, payload_bytes, write_safetensors

FULL_ATTENTION_INTERVAL = 4
SHARDS = 15
FIRST_SPECIAL_ID = 248044
SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
]
# Part of the text, not control tokens: the parsers of reasoning and of tool calls look for them.
PLAIN_TOKENS = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


def special_id(token: str) -> int:
    """The published id of a special token of this target."""
    return FIRST_SPECIAL_ID + SPECIAL_TOKENS.index(token)


def full_attention(layer: int) -> bool:
    """Every fourth layer attends fully, the others are linear attention (GDN)."""
    return layer % FULL_ATTENTION_INTERVAL == FULL_ATTENTION_INTERVAL - 1


def target_config(pair: Pair) -> dict:
    """config.json of the target."""
    heads, kv_heads, head_dim = pair.target_heads
    key_heads, value_heads, linear_dim = pair.linear_heads
    text = {
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": pair.hidden,
        "intermediate_size": pair.intermediate,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "full_attention_interval": FULL_ATTENTION_INTERVAL,
        "layer_types": [
            "full_attention" if full_attention(layer) else "linear_attention"
            for layer in range(TARGET_LAYERS)
        ],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear_dim,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": linear_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10] if head_dim == 256 else [3, 3, 2],
        },
        "rms_norm_eps": 1e-06,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "use_cache": True,
        "eos_token_id": special_id("<|endoftext|>"),
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": {
            "model_type": "qwen3_5",
            "depth": 27,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "in_channels": 3,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "out_hidden_size": pair.hidden,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.02,
            "deepstack_visual_indexes": [],
        },
        "image_token_id": special_id("<|image_pad|>"),
        "video_token_id": special_id("<|video_pad|>"),
        "vision_start_token_id": special_id("<|vision_start|>"),
        "vision_end_token_id": special_id("<|vision_end|>"),
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0",
    }


def target_tensors(pair: Pair) -> Tensors:
    """The text part of the target; in real shapes 53.8 GB."""
    hidden, wide = pair.hidden, pair.intermediate
    heads, kv_heads, head_dim = pair.target_heads
    key_heads, value_heads, linear_dim = pair.linear_heads
    value = value_heads * linear_dim
    mixed = 2 * key_heads * linear_dim + value
    linear = (
        ("linear_attn.A_log", (value_heads,)),
        ("linear_attn.dt_bias", (value_heads,)),
        ("linear_attn.conv1d.weight", (mixed, 1, 4)),
        ("linear_attn.in_proj_qkv.weight", (mixed, hidden)),
        ("linear_attn.in_proj_z.weight", (value, hidden)),
        ("linear_attn.in_proj_a.weight", (value_heads, hidden)),
        ("linear_attn.in_proj_b.weight", (value_heads, hidden)),
        ("linear_attn.norm.weight", (linear_dim,)),
        ("linear_attn.out_proj.weight", (hidden, value)),
    )
    full = (
        ("self_attn.q_proj.weight", (2 * heads * head_dim, hidden)),  # the second half is the output gate
        ("self_attn.k_proj.weight", (kv_heads * head_dim, hidden)),
        ("self_attn.v_proj.weight", (kv_heads * head_dim, hidden)),
        ("self_attn.o_proj.weight", (hidden, heads * head_dim)),
        ("self_attn.q_norm.weight", (head_dim,)),
        ("self_attn.k_norm.weight", (head_dim,)),
    )
    both = (
        ("input_layernorm.weight", (hidden,)),
        ("post_attention_layernorm.weight", (hidden,)),
        ("mlp.gate_proj.weight", (wide, hidden)),
        ("mlp.up_proj.weight", (wide, hidden)),
        ("mlp.down_proj.weight", (hidden, wide)),
    )
    tensors: Tensors = [("model.language_model.embed_tokens.weight", (VOCAB, hidden))]
    for layer in range(TARGET_LAYERS):
        for name, shape in (*both, *(full if full_attention(layer) else linear)):
            tensors.append((f"model.language_model.layers.{layer}.{name}", shape))
    return [*tensors, ("model.language_model.norm.weight", (hidden,)), ("lm_head.weight", (VOCAB, hidden))]


def tokenizer() -> dict:
    """tokenizer.json: byte-level BPE without merges, plus the special tokens under their published ids."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable}
    vocab |= {chr(256 + place): byte for place, byte in enumerate(others)}
    # Never produced, as there are no merges; without them the library complains of each missing id.
    vocab |= {f"simulated-{unused}": unused for unused in range(256, FIRST_SPECIAL_ID)}
    vocab |= {token: special_id(token) for token in SPECIAL_TOKENS}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": special_id(token), "content": token, **flags, "special": token not in PLAIN_TOKENS}
            for token in SPECIAL_TOKENS
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": []},
    }


def write_target(folder: Path, pair: Pair) -> None:
    """Write the whole folder, readable by everybody."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = target_tensors(pair)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        part = tensors[shard * len(tensors) // SHARDS : (shard + 1) * len(tensors) // SHARDS]
        name = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        write_safetensors(folder / name, part, seed=None)
        weight_map |= {tensor: name for tensor, _ in part}
    eos = [special_id("<|im_end|>"), special_id("<|endoftext|>")]
    files = {
        "config.json": target_config(pair),
        "generation_config.json": {
            "do_sample": True,
            "eos_token_id": eos,
            "pad_token_id": special_id("<|endoftext|>"),
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 0.95,
        },
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 262144,
            "chat_template": CHAT_TEMPLATE,
        },
        "model.safetensors.index.json": {
            "metadata": {"total_size": payload_bytes(tensors)},
            "weight_map": weight_map,
        },
    }
    for name, content in files.items():
        indent = None if name == "tokenizer.json" else 1
        (folder / name).write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    pair = SMALL if args.small else REAL
    write_target(args.folder, pair)
    print(f"simulated target: {payload_bytes(target_tensors(pair))} bytes of weights (sparse), {args.folder}")


if __name__ == "__main__":
    main()
