"""Do target, drafter and launch go together? What vLLM would say only after the old server is gone, or never.

`launch` is the table of flags that `vllm serve --config` reads: names with hyphens, `speculative-config`
nested. Only the flags that decide something here are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .drafter_config import text_section
from .drafter_layout import Geometry
from .errors import RolloutError

#: Target types that DFlash in vLLM 0.20.1 takes (a part of text_config.model_type); config/speculative.py.
TARGET_TYPES = (
    "llama", "qwen", "minicpm", "gpt_oss", "hunyuan_vl", "hunyuan_v1_dense", "afmoe", "nemotron_h",
    "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "minimax_m2", "gemma4",
)  # fmt: skip

#: vLLM's defaults for the API server on cards under 70 GiB.
DEFAULT_BATCHED_TOKENS = 2048
DEFAULT_SEQS = 256
#: Under this many tokens a step vLLM warns that speculation is slow.
FEW_TOKENS = 8192


def check_pair(
    target_config: Mapping[str, Any],
    drafter: Geometry,
    block_size: int,
    launch: Mapping[str, Any],
    target_name: str = "the target's config.json",
) -> list[str]:
    """Warnings about the pair under this launch.

    `block_size`: the drafter's, in tokens. Raises RolloutError naming the flag or the key that has to change.
    """
    text = text_section(target_config)
    section = "" if text is target_config else "text_config."
    model_type = str(text.get("model_type") or "")
    if not any(known in model_type for known in TARGET_TYPES):
        raise RolloutError(
            f"vLLM 0.20.1 runs no DFlash beside a target of type {model_type or 'unknown'}",
            found=f"{section}model_type {model_type!r} in {target_name}",
            expected="a type with one of " + ", ".join(TARGET_TYPES),
            remedy="serve this target without a drafter",
        )
    flags = {str(key).replace("_", "-"): value for key, value in launch.items()}
    speculative = flags.get("speculative-config") or {}
    if not isinstance(speculative, Mapping):
        raise RolloutError(
            "speculative-config is no table",
            found=repr(speculative),
            remedy="give keys and values, such as num_speculative_tokens: 15",
        )
    if speculative.get("speculative_token_tree") is not None:
        raise RolloutError(
            "speculative_token_tree has no effect with DFlash: vLLM 0.20.1 drafts a chain without a word",
            found=repr(speculative["speculative_token_tree"]),
            remedy="remove it from speculative-config",
        )
    _check_kv_cache(flags, target_config, target_name)
    _check_parallel(flags, text, section, drafter, target_name)
    drafted = _number(speculative, "num_speculative_tokens", block_size - 1)
    if drafted > block_size - 1:
        raise RolloutError(
            "num_speculative_tokens is more than the drafter's block holds",
            found=str(drafted),
            expected=f"at most {block_size - 1} (block_size {block_size}, of which one token is known)",
            remedy=f"set num_speculative_tokens to {block_size - 1} or less",
        )
    return _check_budget(flags, drafted)


def _check_kv_cache(flags: Mapping[str, Any], target_config: Mapping[str, Any], target_name: str) -> None:
    """fp8 caches don't go with the non-causal pass, wherever the wish for one comes from."""
    wanted = str(flags.get("kv-cache-dtype") or "auto")
    if wanted not in ("auto", "bfloat16", "float16"):
        raise RolloutError(
            "DFlash goes with no quantized KV cache",
            found=f"kv-cache-dtype {wanted}",
            expected="auto, bfloat16 or float16",
            remedy="remove kv-cache-dtype",
        )
    quantization = target_config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return
    inner = quantization.get("quantization")
    for holder in (quantization, inner if isinstance(inner, Mapping) else {}):
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            asked = holder.get(key)
            # A scheme of llm-compressor overrides even an explicit flag.
            if asked and (wanted == "auto" or "modelopt" not in str(quantization.get("quant_method"))):
                raise RolloutError(
                    "the target's quantization asks for a quantized KV cache, and DFlash goes with none",
                    found=f"quantization_config.{key} {asked} in {target_name}",
                    expected="no such key",
                    remedy="set kv-cache-dtype: bfloat16"
                    if "modelopt" in str(quantization.get("quant_method"))
                    else "use a target whose quantization leaves the KV cache alone",
                )


def _check_parallel(
    flags: Mapping[str, Any], text: Mapping[str, Any], section: str, drafter: Geometry, target_name: str
) -> None:
    size = _number(flags, "tensor-parallel-size", 1)

    def check(whose: str, key: str, value: Any, may_repeat: bool = False) -> None:
        if not isinstance(value, int) or value % size == 0 or (may_repeat and size % value == 0):
            return
        raise RolloutError(
            f"tensor-parallel-size {size} does not divide the {key} of the {whose}",
            found=str(value),
            expected=f"a multiple of {size}" + (f" or a divisor of {size}" if may_repeat else ""),
            remedy="choose a tensor-parallel-size that divides both models",
        )

    for key in ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads"):
        check(f"target ({section}{key} in {target_name})", key, text.get(key))
    check("target", "num_key_value_heads", text.get("num_key_value_heads"), may_repeat=True)
    check("drafter", "num_attention_heads", drafter.num_attention_heads)
    check("drafter", "num_key_value_heads", drafter.num_key_value_heads, may_repeat=True)
    check("drafter", "intermediate_size", drafter.intermediate_size)


def _check_budget(flags: Mapping[str, Any], drafted: int) -> list[str]:
    """vLLM keeps K − 1 slots a request free of the tokens of a step; a draft of every request needs K + 1."""
    batched = _number(flags, "max-num-batched-tokens", DEFAULT_BATCHED_TOKENS)
    seqs = _number(flags, "max-num-seqs", DEFAULT_SEQS)
    schedulable = batched - (drafted - 1) * seqs
    least = seqs * (drafted + 1)
    settings = (
        f"max-num-batched-tokens {batched}{_default(flags, 'max-num-batched-tokens')}, "
        f"max-num-seqs {seqs}{_default(flags, 'max-num-seqs')}, num_speculative_tokens {drafted}"
    )
    if batched < least:
        raise RolloutError(
            f"drafting leaves {schedulable} tokens a step to schedule"
            if schedulable < 1
            else "a step is too small for one draft of every request",
            found=settings,
            expected=f"max-num-batched-tokens of at least {least}",
            remedy=f"set max-num-batched-tokens to {least} or more, or lower one of the other two",
        )
    if schedulable < FEW_TOKENS:
        return [
            f"only {schedulable} tokens a step are left to schedule ({settings}); vLLM recommends "
            f"{FEW_TOKENS}: max-num-batched-tokens {FEW_TOKENS + (drafted - 1) * seqs}."
        ]
    return []


def _default(flags: Mapping[str, Any], key: str) -> str:
    return "" if flags.get(key) is not None else " (vLLM's default on cards under 70 GiB)"


def _number(table: Mapping[str, Any], key: str, default: int) -> int:
    value = table.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RolloutError(
            f"{key} is no number",
            found=repr(value),
            expected="a whole number above 0",
            remedy="correct it in the flags of the launch",
        )
    return value
