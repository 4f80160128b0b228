"""The memory table against what vLLM 0.20.1 said on a real card."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_layout import read_geometry
from dflash_rollout.errors import RolloutError
from dflash_rollout.safetensors import tensors_from_json
from dflash_rollout.vram import FIXED_OVERHEAD, GIB, CacheLayout, cache_layout, capacity, fit, weight_bytes
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import QWEN3_6_27B, as_json, drafter_shapes, qwen3_6_27b_shapes

DRAFTER = tensors_from_json(as_json(drafter_shapes()))
TARGET = tensors_from_json(as_json(qwen3_6_27b_shapes()))
GEOMETRY = read_geometry(DRAFTER)
A6000_MIB = 49140

ROLLOUT = {
    "tensor_parallel_size": 2,
    "max_model_len": 32768,
    "max_num_seqs": 16,
    "language_model_only": True,
}


def fit_27b(gpus=(A6000_MIB, A6000_MIB), **changes):
    return fit(QWEN3_6_27B, TARGET, DRAFTER, gpus, **{**ROLLOUT, **changes})


def test_reproduces_the_log_of_the_h200_run():
    """66.43 GiB for the cache: 4031 blocks, 350 a request, 377,393 tokens, 11.52 requests."""
    layout = cache_layout(QWEN3_6_27B, GEOMETRY)
    held = capacity(layout, 66.43 * GIB, 32768)
    assert held.blocks == 4031
    assert held.blocks_per_request == 350
    assert held.tokens == 377_393
    assert round(held.requests, 2) == 11.52


def test_states_are_what_a_request_costs():
    layout = cache_layout(QWEN3_6_27B, GEOMETRY)
    assert layout.state_blocks * layout.block_bytes == 2_831_155_200  # 2.83 GB, whatever its length
    assert layout.token_bytes == 102_400
    assert layout.blocks_of_request(1) == 160 + 5


@pytest.mark.parametrize(("drafted", "short", "full"), [(15, 10, 5), (7, 21, 6), (3, 39, 8)])
def test_fewer_drafted_tokens_make_room(drafted, short, full):
    """15 GiB on each of two cards."""
    layout = cache_layout(QWEN3_6_27B, GEOMETRY, 2, drafted)
    blocks = 15 * GIB // layout.block_bytes
    assert blocks // layout.blocks_of_request(1024) == short
    assert blocks // layout.blocks_of_request(32768) == full


def test_loaded_weights_agree_with_the_h200_run():
    """vLLM said 53.5 GiB for the text part and the drafter on one card."""
    result = fit_27b(gpus=[143771], tensor_parallel_size=1)
    assert (result.target + result.drafter) / GIB == pytest.approx(53.5, abs=0.3)


def test_table_of_two_a6000():
    result = fit_27b()
    assert result.gpu_bytes == 51527024640
    assert result.cache / GIB == pytest.approx(9, abs=0.3)
    assert result.table["requests_short"] == 6
    assert result.table["requests_max_model_len"] == 3
    rest = result.usable - result.target - result.drafter - result.workspace - result.graphs
    assert rest == result.cache
    text = "\n".join(result.lines)
    assert "fit at a time: 6 requests of 1,024 tokens, 3 of 32,768" in text
    assert "if the estimates are 1 GiB too low: 5 and 2" in text
    assert max(map(len, result.lines)) <= 100


def test_the_cache_agrees_with_the_h200_runs():
    """vLLM had 65.73 GiB left without a compile cache and 67.40 with one (docs/gpu-results.md, 14 and 15)."""
    result = fit_27b(gpus=[143771], tensor_parallel_size=1, max_num_batched_tokens=8448)
    assert result.cache / GIB == pytest.approx((65.73 + 67.40) / 2, rel=0.015)
    # What PyTorch held at the peak of the profile run: 2,005,926,176 bytes.
    logits = 16 * QWEN3_6_27B["text_config"]["vocab_size"] * 8
    assert result.workspace - FIXED_OVERHEAD - logits == pytest.approx(2_005_926_176, rel=0.02)


def test_without_graphs_the_cache_has_their_memory():
    """As with enforce-eager, or VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0."""
    with_graphs, without = fit_27b(), fit_27b(graphs_set_aside=False)
    assert without.cache - with_graphs.cache == with_graphs.graphs > 5 * GIB
    assert without.table["requests_short"] == 10
    small = {"gpus": [33000, 33000]}
    with pytest.raises(RolloutError, match="VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"):
        fit_27b(**small)
    with pytest.raises(RolloutError) as caught:
        fit_27b(**small, graphs_set_aside=False)
    assert "CUDAGRAPHS" not in caught.value.remedy


def test_promising_too_many_requests_is_a_warning():
    assert (
        "max-num-seqs 64 promises more than the cache holds: 6 requests"
        in fit_27b(max_num_seqs=64).warnings[0]
    )
    assert fit_27b(max_num_seqs=6).warnings == []


def test_language_model_only_and_mtp_are_not_loaded():
    text_only, whole = fit_27b(), fit_27b(language_model_only=False)
    vision = 2 * (4608 * 4608 + 1152 * 3 * 2 * 16 * 16)
    mtp = 2 * 5120 * 10240
    assert text_only.not_loaded == vision + mtp
    assert whole.not_loaded == mtp
    assert whole.target - text_only.target == vision // 2


def test_prefix_caching_costs_a_state():
    assert cache_layout(QWEN3_6_27B, GEOMETRY, 2, 15, prefix_caching=True).states == 17


@pytest.mark.parametrize(
    ("gpus", "changes", "fragments"),
    [
        ([24564, 24564], {}, ["not one request of 32,768 tokens", "fewer speculative tokens", "GiB"]),
        ([41500, 41500], {}, ["not one request", "max-model-len up to "]),
        ([A6000_MIB], {}, ["tensor-parallel-size 2", "1 GPU(s)"]),
        ([A6000_MIB, 24564], {}, ["not one request"]),
    ],
)
def test_what_cannot_serve_is_refused(gpus, changes, fragments):
    with pytest.raises(RolloutError) as caught:
        fit_27b(gpus=gpus, **changes)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_the_longest_length_named_in_a_refusal_does_fit():
    with pytest.raises(RolloutError) as caught:
        fit_27b(gpus=[41500, 41500])
    longest = int(caught.value.remedy.split(" fits")[0].split()[-1].replace(",", ""))
    assert fit_27b(gpus=[41500, 41500], max_model_len=longest).requests(longest) == 1
    with pytest.raises(RolloutError):
        fit_27b(gpus=[41500, 41500], max_model_len=longest + 864)


def test_target_without_linear_attention():
    """12 layers × 2 heads × 64 and 5 drafter layers × 2 × 64: 17 layers, 512 bytes a token and layer."""
    target = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    target |= {"num_hidden_layers": 12, "dtype": "bfloat16"}
    drafter = dataclasses.replace(GEOMETRY, num_key_value_heads=2, head_dim=64)
    layout = cache_layout(target, drafter)
    assert layout == CacheLayout(16 * 17 * 512, (16,), 0, 0)
    assert layout.blocks_of_request(33) == 3


def test_groups_of_nearly_equal_kinds_are_padded_to_the_largest():
    """7 linear, 6 full and 5 drafter layers: vLLM makes three groups of up to 7, not four of 5."""
    target = copy.deepcopy(QWEN3_6_27B)
    target["text_config"]["layer_types"] = ["linear_attention"] * 7 + ["full_attention"] * 6
    layout = cache_layout(target, GEOMETRY)
    assert layout.block_bytes == 7 * 864 * 4096
    assert layout.attention_tokens == (864, 864)
    assert layout.state_groups == 1


def test_page_sizes_that_vllm_cannot_unify_are_refused():
    with pytest.raises(RolloutError, match="cache blocks of one size"):
        cache_layout(QWEN3_6_27B, dataclasses.replace(GEOMETRY, num_key_value_heads=12))


def test_a_config_without_a_needed_key_is_refused():
    target = copy.deepcopy(QWEN3_6_27B)
    del target["text_config"]["linear_num_key_heads"]
    with pytest.raises(RolloutError, match="linear_num_key_heads"):
        cache_layout(target, GEOMETRY)


def test_fc_and_vectors_are_on_every_gpu():
    one, two = weight_bytes(DRAFTER, 1), weight_bytes(DRAFTER, 2)
    assert one == 3_460_426_240
    replicated = 5120 * 25600 * 2 + 12 * 5120 * 2 + 10 * 128 * 2
    assert two == (one - replicated) // 2 + replicated


@given(st.integers(1, 300_000), st.integers(1, 300_000), st.integers(1, 31))
def test_longer_requests_never_take_less(length, other, drafted):
    layout = cache_layout(QWEN3_6_27B, GEOMETRY, 2, drafted)
    short, long = sorted((length, other))
    assert layout.blocks_of_request(short) <= layout.blocks_of_request(long)
