"""Target, drafter and launch together."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_layout import read_geometry
from dflash_rollout.errors import RolloutError
from dflash_rollout.pairing import check_pair
from dflash_rollout.safetensors import tensors_from_json

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import QWEN3_6_27B, as_json, drafter_shapes

GEOMETRY = read_geometry(tensors_from_json(as_json(drafter_shapes())))
LAUNCH = {
    "tensor-parallel-size": 2,
    "max-num-seqs": 16,
    "max-num-batched-tokens": 8448,
    "speculative-config": {"method": "dflash", "num_speculative_tokens": 15},
}


def check(launch=None, target=QWEN3_6_27B, geometry=GEOMETRY, block_size=16):
    return check_pair(target, geometry, block_size, {**LAUNCH, **(launch or {})})


def refused(*fragments, **options):
    with pytest.raises(RolloutError) as caught:
        check(**options)
    for fragment in fragments:
        assert fragment in str(caught.value)


def with_text(**change):
    target = copy.deepcopy(QWEN3_6_27B)
    target["text_config"].update(change)
    return target


def test_the_launch_of_this_pair_passes_without_a_warning():
    assert check() == []


def test_the_seeds_own_command_is_refused_before_the_outage():
    refused(
        "-1536 tokens a step",
        "max-num-batched-tokens 2048 (vLLM's default on cards under 70 GiB)",
        "max-num-seqs 256",
        "at least 4096",
        launch={"max-num-seqs": None, "max-num-batched-tokens": None},
    )


def test_the_smallest_value_that_works_does_work():
    refused("at least 896", launch={"max-num-seqs": 56, "max-num-batched-tokens": 700})
    assert check({"max-num-seqs": 56, "max-num-batched-tokens": 896})[0].startswith("only 112 tokens a step")
    refused("at least 896", launch={"max-num-seqs": 56, "max-num-batched-tokens": 895})


def test_few_tokens_a_step_is_a_warning_with_the_value_to_set():
    warnings = check({"max-num-seqs": 64, "max-num-batched-tokens": 8192})
    assert "only 7296 tokens a step" in warnings[0]
    assert warnings[0].endswith("max-num-batched-tokens 9088.")
    assert check({"max-num-seqs": 64, "max-num-batched-tokens": 9088}) == []


@pytest.mark.parametrize(
    ("launch", "fragments"),
    [
        ({"kv-cache-dtype": "fp8"}, ["no quantized KV cache", "kv-cache-dtype fp8"]),
        ({"kv_cache_dtype": "fp8_e5m2"}, ["kv-cache-dtype fp8_e5m2"]),
        ({"tensor-parallel-size": 3}, ["tensor-parallel-size 3", "linear_num_key_heads", "16"]),
        ({"speculative-config": {"num_speculative_tokens": 16}}, ["at most 15", "block_size 16"]),
        (
            {"speculative-config": {"speculative_token_tree": "[(0,)]"}},
            ["speculative_token_tree has no effect"],
        ),
        ({"max-num-seqs": "16"}, ["max-num-seqs is no number", "'16'"]),
    ],
)
def test_flags_that_are_refused(launch, fragments):
    refused(*fragments, launch=launch)


def test_drafter_heads_have_to_divide_too():
    refused("of the drafter", "num_attention_heads", launch={"tensor-parallel-size": 4},
            geometry=dataclasses.replace(GEOMETRY, num_attention_heads=6, num_key_value_heads=2))  # fmt: skip
    # Two key/value heads on four GPUs are repeated, not split.
    assert (
        check({"tensor-parallel-size": 4}, geometry=dataclasses.replace(GEOMETRY, num_key_value_heads=2))
        == []
    )


@pytest.mark.parametrize(
    ("heads", "refusal"),
    [
        # Attention heads are split, never repeated; key/value heads that are fewer than GPUs are repeated.
        ({"num_attention_heads": 2, "num_key_value_heads": 2}, "a multiple of 4."),
        ({"num_attention_heads": 32, "num_key_value_heads": 3}, "a multiple of 4 or a divisor of 4"),
        ({"num_attention_heads": 32, "num_key_value_heads": 6}, "a multiple of 4 or a divisor of 4"),
    ],
)
def test_what_heads_can_be_split_or_repeated(heads, refusal):
    refused(refusal, launch={"tensor-parallel-size": 4}, geometry=dataclasses.replace(GEOMETRY, **heads))


def test_one_gpu_one_request_and_one_drafted_token_are_numbers():
    flags = {
        "tensor-parallel-size": 1,
        "max-num-seqs": 1,
        "speculative-config": {"num_speculative_tokens": 1},
    }
    assert check(flags) == []


def test_no_token_left_is_said_as_such():
    # 15 drafted tokens: 14 a request are kept free, so 16 requests use up 224.
    refused("drafting leaves 0 tokens a step", launch={"max-num-batched-tokens": 224})
    refused("too small for one draft", launch={"max-num-batched-tokens": 225})


def test_target_types():
    refused(
        "no DFlash beside a target of type mistral",
        "text_config.model_type",
        target=with_text(model_type="mistral"),
    )
    assert check(target={**QWEN3_6_27B["text_config"], "model_type": "qwen3_next"}) == []


@pytest.mark.parametrize(
    ("quantization", "launch", "refusal"),
    [
        (
            {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
            {},
            "quantization_config.kv_cache_quant_algo FP8",
        ),
        (
            {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
            {},
            "kv-cache-dtype: bfloat16",
        ),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, {"kv-cache-dtype": "bfloat16"}, None),
        (
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}},
            {"kv-cache-dtype": "bfloat16"},
            "leaves the KV cache alone",
        ),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, {}, None),
        ({"quant_method": "awq"}, {}, None),
    ],
)
def test_kv_cache_asked_for_by_the_targets_quantization(quantization, launch, refusal):
    target = {**QWEN3_6_27B, "quantization_config": quantization}
    if refusal:
        refused("DFlash goes with none", refusal, target=target, launch=launch)
    else:
        assert check(launch, target=target) == []
