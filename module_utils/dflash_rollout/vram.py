"""Does the pair fit on the GPUs, and for how many requests at a time?

The arithmetic of vLLM 0.20.1's cache (v1/core/kv_cache_utils.py, v1/kv_cache_interface.py and
platforms/interface.py of the wheel), from the two configs and the headers of the weights. All sizes are
bytes per GPU unless a name says otherwise.

Two things surprise people. With speculation every running request pins 1 + K states in each
linear-attention layer, whatever its length. And the pool is cut into blocks of one size for all groups of
layers, so a request of one token still takes a block in each group.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .drafter_config import text_section
from .drafter_layout import Geometry, read_geometry
from .errors import RolloutError
from .safetensors import Tensor

GIB = 2**30
MIB = 2**20
#: A short request, in tokens, for the second column of the table.
SHORT_TOKENS = 1024
#: Tokens in a block of a model without linear attention, and the step in which hybrid blocks grow.
BLOCK_TOKENS = 16
#: What grows outside PyTorch while vLLM measures: 0.25 GiB on one H200 with a compile cache, 1.4 without one.
FIXED_OVERHEAD = 1.25 * GIB
#: What vLLM sets aside for its CUDA graphs, for each layer of target and drafter. It reckons with the second graph
#: times their number, and on an H200 came to 6.1 GiB (69 layers, no compile cache), 5.6 (with one) and 1.0 (17
#: layers); the graphs themselves took 0.9 and 0.2 (docs/gpu-results.md, 14 and 15).
GRAPHS_A_LAYER = 0.085 * GIB
#: By how much the estimates of graphs and workspace may be off on a GPU; the table shows what that costs.
MARGIN = 1 * GIB

#: By this in vllm_service_environment vLLM leaves the cache what it would set aside.
GRAPHS_KEPT_BY = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0"

_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}
_NOT_TEXT = re.compile(r"(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.")
_MTP = re.compile(r"(^|\.)mtp\.")
#: Not split between GPUs although they have two dimensions: the drafter's fc, routers of experts.
_REPLICATED = re.compile(r"(^fc|\.gate|\.shared_expert_gate)\.weight$")


@dataclass(frozen=True)
class CacheLayout:
    """How vLLM cuts the cache: one pool of equal blocks that all groups of layers draw from.

    A request of n tokens takes attention_groups · ⌈n / block_tokens⌉ + state_groups · states blocks.
    """

    block_bytes: int
    attention_tokens: tuple[int, ...]
    state_groups: int
    states: int

    def blocks_of_request(self, tokens: int) -> int:
        """Blocks that one running request of `tokens` tokens holds."""
        return self.state_blocks + sum(-(-tokens // size) for size in self.attention_tokens)

    @property
    def state_blocks(self) -> int:
        """Blocks of a running request that do not depend on its length."""
        return self.state_groups * self.states

    @property
    def token_bytes(self) -> float:
        """Bytes of one more token of context, on average."""
        return self.block_bytes * sum(1 / size for size in self.attention_tokens)


@dataclass(frozen=True)
class Capacity:
    """What a cache of some size holds; `tokens` and `requests` are the two numbers that vLLM logs."""

    blocks: int
    blocks_per_request: int
    max_model_len: int

    @property
    def requests(self) -> float:
        """Requests of max_model_len tokens (vLLM's "maximum concurrency")."""
        return self.blocks / self.blocks_per_request

    @property
    def tokens(self) -> int:
        """vLLM's "GPU KV cache size"; a product of the two above, not a count of token slots."""
        return int(self.requests * self.max_model_len)


@dataclass(frozen=True)
class Fit:
    """The table: where the memory of one GPU goes and how many requests fit. Sizes in bytes."""

    tensor_parallel_size: int
    gpu_bytes: int
    utilization: float
    usable: int
    target: int
    not_loaded: int
    drafter: int
    workspace: int
    graphs: int
    cache: int
    layout: CacheLayout
    max_model_len: int
    max_num_seqs: int
    speculative_tokens: int

    def requests(self, tokens: int, less: float = 0) -> int:
        """Requests of `tokens` tokens that run at a time with `less` bytes less cache than estimated."""
        blocks = max(0, int(self.cache - less)) // self.layout.block_bytes
        return blocks // self.layout.blocks_of_request(tokens)

    @property
    def longest(self) -> int:
        """The longest request, in tokens, that fits when it is alone; 0 where not even its states fit."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.requests(middle) else (low, middle - 1)
        return low

    @property
    def table(self) -> dict[str, Any]:
        """The numbers, for a registered variable. GiB per GPU, and requests."""
        return {
            "usable_gib": _gib(self.usable),
            "target_gib": _gib(self.target),
            "not_loaded_gib": _gib(self.not_loaded),
            "drafter_gib": _gib(self.drafter),
            "workspace_gib": _gib(self.workspace),
            "graphs_gib": _gib(self.graphs),
            "cache_gib": _gib(self.cache),
            "request_state_gib": _gib(self.layout.state_blocks * self.layout.block_bytes),
            "token_kib": round(self.layout.token_bytes / 1024, 1),
            "requests_short": self.requests(SHORT_TOKENS),
            "requests_max_model_len": self.requests(self.max_model_len),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
        }

    @property
    def lines(self) -> list[str]:
        """The table as text, at most 100 columns."""
        short, full = self.requests(SHORT_TOKENS), self.requests(self.max_model_len)
        less_short, less_full = self.requests(SHORT_TOKENS, MARGIN), self.requests(self.max_model_len, MARGIN)
        rows = [
            (f"GPU memory {self.gpu_bytes / GIB:.2f} × utilization {self.utilization:g}", self.usable),
            ("target's weights", -self.target),
            ("drafter's weights", -self.drafter),
            ("workspace (an estimate)", -self.workspace),
            ("set aside by vLLM for CUDA graphs (an estimate)", -self.graphs),
            ("left for the cache", self.cache),
        ]
        state = self.layout.state_blocks * self.layout.block_bytes
        return [
            f"GiB on each of {self.tensor_parallel_size} GPU(s):",
            *(f"  {label:<48}{size / GIB:>9.2f}" for label, size in rows),
            f"  a running request: {state / GIB:.2f} for its states (1 + {self.speculative_tokens} drafted), "
            f"{self.layout.token_bytes / 1024:.0f} KiB a token",
            f"  fit at a time: {short} requests of {SHORT_TOKENS:,} tokens, {full} of {self.max_model_len:,}",
            f"  if the estimates are {MARGIN / GIB:.0f} GiB too low: {less_short} and {less_full}",
        ]

    @property
    def warnings(self) -> list[str]:
        """What is promised and will not be held."""
        short = self.requests(SHORT_TOKENS)
        if self.max_num_seqs > short:
            return [
                f"max-num-seqs {self.max_num_seqs} promises more than the cache holds: {short} requests of "
                f"{SHORT_TOKENS:,} tokens run at a time, {self.requests(self.max_model_len)} of "
                f"{self.max_model_len:,}; the others wait. Fewer speculative tokens make room for more."
            ]
        return []


def cache_layout(
    target_config: Mapping[str, Any],
    drafter: Geometry,
    tensor_parallel_size: int = 1,
    speculative_tokens: int = 15,
    prefix_caching: bool = False,
) -> CacheLayout:
    """vLLM 0.20.1's blocks for this pair. Drafter windows count as full attention, as that version does.

    Raises RolloutError where the target's config lacks a key, or vLLM itself would stop because the
    blocks of target and drafter can't be made equal.
    """
    text = text_section(target_config)
    element = _ELEMENT_BYTES.get(str(text.get("dtype") or text.get("torch_dtype") or "auto"), 2)
    kinds = _layer_kinds(text)
    linear = kinds.count("linear_attention")
    full = len(kinds) - linear

    def token_bytes(heads: int, head_dim: int) -> int:
        return 2 * max(1, heads // tensor_parallel_size) * head_dim * element

    heads = _size(text, "num_key_value_heads")
    head_dim = text.get("head_dim") or _size(text, "hidden_size") // _size(text, "num_attention_heads")
    target_token = token_bytes(heads, head_dim)
    drafter_token = token_bytes(drafter.num_key_value_heads, drafter.head_dim)
    if not linear:
        # One kind of layer: one group, each layer with its own size of page.
        every = full * target_token + drafter.num_hidden_layers * drafter_token
        return CacheLayout(BLOCK_TOKENS * every, (BLOCK_TOKENS,), 0, 0)

    state = _state_bytes(text, tensor_parallel_size, speculative_tokens, element)
    tokens = BLOCK_TOKENS * -(-state // (BLOCK_TOKENS * target_token))
    page = tokens * target_token
    if page % (tokens * drafter_token):
        raise RolloutError(
            "vLLM 0.20.1 can't give target and drafter cache blocks of one size",
            found=f"{target_token} bytes a token and layer in the target, {drafter_token} in the drafter",
            expected="a multiple of the drafter's",
            remedy="this drafter can't be served beside this target on this version",
        )
    drafter_tokens = page // drafter_token
    same = (heads, head_dim) == (drafter.num_key_value_heads, drafter.head_dim)
    attention = (
        [(full + drafter.num_hidden_layers, tokens)]
        if same
        else [(full, tokens), (drafter.num_hidden_layers, drafter_tokens)]
    )
    counts = [linear, *(layers for layers, _ in attention)]
    size = max(counts) if max(counts) < min(counts) * 1.5 else min(counts)
    return CacheLayout(
        block_bytes=page * size,
        attention_tokens=tuple(span for layers, span in attention for _ in range(-(-layers // size))),
        state_groups=-(-linear // size),
        # With prefix caching vLLM keeps one state more ("align" mode).
        states=(2 if prefix_caching else 1) + speculative_tokens,
    )


def capacity(layout: CacheLayout, cache_bytes: float, max_model_len: int) -> Capacity:
    """What `cache_bytes` on each GPU hold, in the numbers that vLLM logs at start."""
    return Capacity(
        int(cache_bytes // layout.block_bytes), layout.blocks_of_request(max_model_len), max_model_len
    )


def fit(
    target_config: Mapping[str, Any],
    target_tensors: Mapping[str, Tensor],
    drafter_tensors: Mapping[str, Tensor],
    gpu_memory_mib: Sequence[int],
    *,
    tensor_parallel_size: int = 1,
    gpu_memory_utilization: float = 0.92,
    speculative_tokens: int = 15,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int = 8448,
    language_model_only: bool = False,
    prefix_caching: bool = False,
    graphs_set_aside: bool = True,
) -> Fit:
    """The table for this pair on these GPUs (`gpu_memory_mib`: total of each, as nvidia-smi says it).

    `graphs_set_aside` is false where vLLM keeps nothing for CUDA graphs: with enforce-eager, or with
    VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 in its environment.

    Raises RolloutError when not even one request of max_model_len tokens fits, with what would.
    """
    if len(gpu_memory_mib) < tensor_parallel_size:
        raise RolloutError(
            f"tensor-parallel-size {tensor_parallel_size} needs as many GPUs",
            found=f"{len(gpu_memory_mib)} GPU(s)",
            remedy="lower tensor-parallel-size or use a host with more GPUs",
        )
    drafter = read_geometry(drafter_tensors)
    layout = cache_layout(target_config, drafter, tensor_parallel_size, speculative_tokens, prefix_caching)
    # The drafter takes the place of the target's own MTP layers: vLLM does not load them.
    skipped = {
        name
        for name in target_tensors
        if _MTP.search(name) or (language_model_only and _NOT_TEXT.search(name))
    }
    loaded = {name: tensor for name, tensor in target_tensors.items() if name not in skipped}
    gpu_bytes = min(gpu_memory_mib[:tensor_parallel_size]) * MIB
    usable = int(gpu_bytes * gpu_memory_utilization)
    target = weight_bytes(loaded, tensor_parallel_size)
    draft = weight_bytes(drafter_tensors, tensor_parallel_size)
    text = text_section(target_config)
    workspace = workspace_bytes(text, drafter, tensor_parallel_size, max_num_batched_tokens, max_num_seqs)
    layers = len(_layer_kinds(text)) + drafter.num_hidden_layers
    graphs = int(layers * GRAPHS_A_LAYER) if graphs_set_aside else 0
    result = Fit(
        tensor_parallel_size=tensor_parallel_size,
        gpu_bytes=gpu_bytes,
        utilization=gpu_memory_utilization,
        usable=usable,
        target=target,
        not_loaded=sum(target_tensors[name].nbytes for name in skipped),
        drafter=draft,
        workspace=workspace,
        graphs=graphs,
        cache=usable - target - draft - workspace - graphs,
        layout=layout,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        speculative_tokens=speculative_tokens,
    )
    if result.requests(max_model_len) < 1:
        raise RolloutError(
            f"not one request of {max_model_len:,} tokens fits into GPU memory",
            found=f"{result.cache / GIB:.2f} GiB left for the cache on each GPU "
            f"({usable / GIB:.2f} usable - {target / GIB:.2f} target - {draft / GIB:.2f} drafter "
            f"- {workspace / GIB:.2f} workspace - {graphs / GIB:.2f} for CUDA graphs)",
            expected=f"{layout.blocks_of_request(max_model_len) * layout.block_bytes / GIB:.2f} GiB",
            remedy=(f"max-model-len up to {result.longest:,} fits; or " if result.longest else "")
            + "fewer speculative tokens, a higher gpu-memory-utilization, or more GPUs"
            + (f"; {GRAPHS_KEPT_BY}, if the graphs fit beside the cache" if graphs else ""),
        )
    return result


def weight_bytes(tensors: Mapping[str, Tensor], tensor_parallel_size: int) -> int:
    """Bytes of weights on each GPU: matrices are split between the GPUs, vectors and fc are on each."""
    total = 0
    for name, tensor in tensors.items():
        split = len(tensor.shape) > 1 and not _REPLICATED.search(name)
        total += -(-tensor.nbytes // tensor_parallel_size) if split else tensor.nbytes
    return total


def workspace_bytes(
    text: Mapping[str, Any],
    drafter: Geometry,
    tensor_parallel_size: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """An estimate of activations, logits and libraries; vLLM measures it at start.

    Live at the peak of vLLM's profile run, a token of the largest batch and in 16 bit (seen in PyTorch's own
    history of Qwen3.6-27B on an H200, docs/gpu-results.md, 15: 1.87 GiB at 8448 tokens; this says 1.84): both
    halves of the MLP and their product, what goes into a layer's attention and twice what comes out, the taps
    and two states more. Beside these one row of logits a request in 32 bit and a copy, and FIXED_OVERHEAD.
    """
    hidden = _size(text, "hidden_size")
    inner = text.get("intermediate_size") or drafter.intermediate_size
    if "linear_num_value_heads" in text:
        values = _size(text, "linear_num_value_heads") * _size(text, "linear_value_head_dim")
        keys = _size(text, "linear_num_key_heads") * _size(text, "linear_key_head_dim")
        mixed = 2 * keys + 2 * values
    else:
        heads = _size(text, "num_attention_heads")
        values = heads * (text.get("head_dim") or hidden // heads)
        mixed = values + 2 * values * _size(text, "num_key_value_heads") // heads
    split = 3 * inner + mixed + 2 * values
    a_token = 2 * (split // tensor_parallel_size + drafter.fc_columns + 2 * hidden)
    logits = max_num_seqs * _size(text, "vocab_size") * 8
    return int(max_num_batched_tokens * a_token + logits + FIXED_OVERHEAD)


def _state_bytes(text: Mapping[str, Any], parallel: int, speculative_tokens: int, element: int) -> int:
    """Bytes of one state of one gated-delta-net layer: convolution window and recurrent matrix."""
    keys, values = _size(text, "linear_num_key_heads"), _size(text, "linear_num_value_heads")
    key_dim, value_dim = _size(text, "linear_key_head_dim"), _size(text, "linear_value_head_dim")
    channels = (2 * keys * key_dim + values * value_dim) // parallel
    # The window keeps the drafted tokens as well, since any prefix of them may be accepted.
    window = _size(text, "linear_conv_kernel_dim") - 1 + speculative_tokens
    recurrent = _ELEMENT_BYTES.get(str(text.get("mamba_ssm_dtype", "auto")), element)
    return channels * window * element + values // parallel * value_dim * key_dim * recurrent


def _layer_kinds(text: Mapping[str, Any]) -> list[str]:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return [str(kind) for kind in kinds]
    layers = _size(text, "num_hidden_layers")
    if "linear_num_value_heads" not in text:
        return ["full_attention"] * layers
    step = text.get("full_attention_interval", 4)
    return ["linear_attention" if (index + 1) % step else "full_attention" for index in range(layers)]


def _size(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RolloutError(
            f"the target's config.json has no usable {key}, so its memory can't be reckoned",
            found=repr(value),
            expected="a whole number above 0",
            remedy="use the target's own config.json",
        )
    return value


def _gib(size: float) -> float:
    return round(size / GIB, 2)
