"""Published drafters and their targets, as public configs state them: for tests, with and without vLLM.

`shipped` is written in the dialect of its publisher. `aux` is what vLLM's runner has to capture.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from drafters import PROFILE_27B, QWEN3_6_27B, drafter_shapes

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Pair:
    """One drafter beside its target; what it takes to render its config, and what has to come out."""

    name: str
    target_name: str
    target: dict[str, Any]
    shapes: dict[str, list[int]]
    shipped: dict[str, Any]
    taps: list[int]
    mask_token_id: int
    layer_types: list[str]
    profile: dict[str, Any] = field(default_factory=dict)

    @property
    def aux(self) -> list[int]:
        """The layers that vLLM's runner has to capture."""
        return [tap + 1 for tap in self.taps]


def moe_target(**text) -> dict[str, Any]:
    """A Qwen3.5-MoE target: the keys that differ between sizes, and those that don't."""
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "dtype": "bfloat16",
            "vocab_size": 248320,
            "head_dim": 256,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 262144,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000,
                "partial_rotary_factor": 0.25,
            },
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "mamba_ssm_dtype": "float32",
            "tie_word_embeddings": False,
            **text,
        },
    }


QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

PAIRS = (
    Pair(
        name="z-lab/Qwen3.6-27B-DFlash",
        target_name="Qwen3.6-27B",
        target=QWEN3_6_27B,
        shapes=drafter_shapes(),
        shipped={
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "layer_types": PROFILE_27B["layer_types"],
            "num_attention_heads": 32,
            "num_hidden_layers": 5,
            "num_key_value_heads": 8,
            "num_target_layers": 64,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000000,
            "sliding_window": 2048,
            "use_sliding_window": True,
            "vocab_size": 248320,
        },
        taps=[1, 16, 31, 46, 61],
        mask_token_id=248070,
        layer_types=[SLIDING] * 4 + [FULL],
    ),
    Pair(
        name="z-lab/Qwen3.5-27B-DFlash",
        target_name="Qwen3.5-27B",
        target=copy.deepcopy(QWEN3_6_27B),
        shapes=drafter_shapes(),
        shipped={
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "block_size": 16,
            "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
            "layer_types": [FULL] * 5,
            "sliding_window": None,
            "torch_dtype": "bfloat16",
            "num_target_layers": 64,
            "vocab_size": 248320,
        },
        taps=[1, 16, 31, 46, 61],
        mask_token_id=248070,
        layer_types=[FULL] * 5,
    ),
    Pair(
        name="z-lab/Qwen3.6-35B-A3B-DFlash",
        target_name="Qwen3.6-35B-A3B",
        target=moe_target(
            hidden_size=2048,
            num_hidden_layers=40,
            num_attention_heads=16,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
            num_experts=256,
            num_experts_per_tok=8,
            linear_num_value_heads=32,
        ),
        shapes=drafter_shapes(hidden=2048, inner=6144, layers=6, fc=8 * 2048),
        shipped={
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            },
            "layer_types": [SLIDING] * 5 + [FULL],
            "sliding_window": 4096,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        },
        taps=[1, 6, 11, 16, 22, 27, 32, 37],
        mask_token_id=248077,
        layer_types=[SLIDING] * 5 + [FULL],
    ),
    Pair(
        name="z-lab/Qwen3.5-122B-A10B-DFlash",
        target_name="Qwen3.5-122B-A10B",
        target=moe_target(
            hidden_size=3072,
            num_hidden_layers=48,
            num_attention_heads=32,
            moe_intermediate_size=1024,
            shared_expert_intermediate_size=1024,
            num_experts=256,
            num_experts_per_tok=8,
            linear_num_value_heads=64,
        ),
        shapes=drafter_shapes(hidden=3072, inner=9216, layers=6, fc=8 * 3072),
        shipped={
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dflash_config": {
                "block_size": 16,
                "mask_token_id": 248077,
                "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
            },
            "sliding_window": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0},
        },
        taps=[1, 7, 14, 20, 26, 32, 39, 45],
        mask_token_id=248077,
        # Its layer_types were not seen in public: the operator has to say them.
        profile={"layer_types": [SLIDING] * 5 + [FULL]},
        layer_types=[SLIDING] * 5 + [FULL],
    ),
    Pair(
        name="a derivative of z-lab/Qwen3-4B-DFlash-b16",
        target_name="Qwen3-4B",
        target=QWEN3_4B,
        shapes=drafter_shapes(hidden=2560, inner=9728, layers=3, heads=16, fc=5 * 2560),
        shipped={
            "architectures": ["DFlashDraftModel"],
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
            "model_type": "qwen3",
            "block_size": 16,
            "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
            "layer_types": [FULL] * 3,
            "max_window_layers": 5,
            "num_target_layers": 36,
            "vocab_size": 151936,
        },
        taps=[1, 9, 17, 25, 33],
        mask_token_id=151669,
        layer_types=[FULL] * 3,
    ),
    Pair(
        # As its recipe describes it: YaRN, and the mask at the top level too.
        name="recipe kimi-k2.7",
        target_name="Kimi-K2.7",
        target={
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "torch_dtype": "bfloat16",
            "vocab_size": 163840,
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-05,
            "rope_theta": 50000.0,
            "hidden_act": "silu",
        },
        shapes=drafter_shapes(hidden=7168, inner=18432, layers=6, heads=64, fc=6 * 7168),
        shipped={
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": 8,
            "mask_token_id": 163838,
            "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
            "layer_types": [FULL] * 6,
            "rope_theta": 50000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 4096,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            "rms_norm_eps": 1e-05,
            "hidden_act": "silu",
        },
        taps=[1, 12, 24, 35, 47, 58],
        mask_token_id=163838,
        layer_types=[FULL] * 6,
    ),
)
