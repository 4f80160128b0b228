"""Which family a drafter is of, and its geometry, from nothing but tensor names and shapes.

Only the plain DFlash layout is served. Every tensor must be accounted for: one too many and one too few
are refused by name, whatever `architectures` in a config says.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from .errors import RolloutError
from .safetensors import Tensor

#: Header dtype → config dtype, for what vLLM's DFlash loader takes unquantized.
CONFIG_DTYPE = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}

_LAYER = re.compile(r"layers\.(0|[1-9][0-9]*)\.(.+)\Z")
_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class Geometry:
    """What the shapes of a DFlash drafter fix. Sizes are in elements.

    `fc_columns` is taps × the target's hidden size; how many taps that is only the target can say.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    fc_columns: int
    attention_bias: bool
    dtype: str


@dataclass(frozen=True)
class Family:
    """A row of the recogniser: what has a tensor that matches `has`, and none that matches `lacks`, is one.

    `remedy` says what would serve it.
    """

    name: str
    has: str
    remedy: str
    lacks: str = "$^"


_OTHER_DRAFTER = "take the target's DFlash drafter"

#: First match wins: what is built upon DFlash stands before what merely resembles it.
FAMILIES = (
    Family("DFlash2", r"(^|\.)candidate_selector\.|\.(attention|mlp)_conv\.",
           f"no released vLLM runs DFlash2; {_OTHER_DRAFTER}"),
    Family("DSpark (DFlash with a Markov head)", r"(^|\.)(markov|confidence)_head\.",
           f"run as DFlash its drafts are shifted by one; {_OTHER_DRAFTER}"),
    Family("Medusa", r"(^|\.)medusa_heads?\.|^\d+\.\d+\.linear\.|^heads?\.\d+\.",
           f"serve it with vLLM's method medusa, or {_OTHER_DRAFTER}"),
    Family("a full model", r"^(model\.)?(language_model\.)?(model\.)?embed_tokens\.weight$",
           "this is the big model; the drafter is a file of its own", lacks=r"^(model\.)?(fc|hidden_norm)\."),
    Family("MTP layers", r"(^|\.)mtp(_layers)?\.|\.(eh_proj|enorm|hnorm|shared_head)\.",
           f"they belong to the target: serve them with vLLM's method mtp, or {_OTHER_DRAFTER}"),
    Family("quantized", r"[._](scale|scale_inv|scale_2|input_scale|weight_packed|weight_shape|qweight|qzeros|"
           r"scales|biases|g_idx|zero_point|global_scale|absmax|quant_map)$",
           "take the unquantized drafter: vLLM 0.20.1 loads DFlash weights only as they were trained"),
    Family("EAGLE-3", r"(^|\.)midlayer\.|(^|\.)layers\.0\.hidden_norm\.",
           f"serve it with vLLM's method eagle3, or {_OTHER_DRAFTER}"),
    Family("DFlash in the speculators format (a vocabulary of its own)", r"(^|\.)(t2d|d2t)$",
           "serve its folder as it is, with its own config.json; formats are never merged"),
    Family("DFlash with a learned mask embedding", r"mask_hidden|mask_embed",
           "vLLM embeds mask_token_id instead and stops at this tensor; take a revision without it"),
    Family("DFlash with norms before fc", r"(^|\.)(pre_fc_norm\w*|fc_norm\w*)\.",
           f"vLLM 0.20.1 has no place for them; {_OTHER_DRAFTER} without fc_layernorm"),
    Family("DFlash with names prefixed `model.`", r"^model\.(fc|hidden_norm)\.",
           "vLLM adds that prefix itself and finds no such tensor; write the file anew without `model.`"),
    Family("a drafter with fused projections", r"\.(qkv_proj|gate_up_proj|wqkv|W_pack|query_key_value)\.",
           "export it with q_proj, k_proj, v_proj, gate_proj and up_proj apart"),
    Family("a drafter with renamed tensors",
           r"^blk\.\d+\.|^token_embd\.|^(transformer\.h|decoder\.layers)\.\d+\.|"
           r"\.(wq|wk|wv|wo|w1|w2|w3)\.weight$|\.attn_(q|k|v|output)\.",
           "get the original safetensors checkpoint"),
    Family("EAGLE", r"^(model\.)?fc\.weight$",
           f"serve it with vLLM's method eagle, or {_OTHER_DRAFTER}", lacks=r"hidden_norm|q_norm"),
)  # fmt: skip

#: Tensors that an older revision of a drafter carries although they are the target's; vLLM loads them.
SHARED_WITH_TARGET = ("embed_tokens.weight", "lm_head.weight")


def read_geometry(tensors: Mapping[str, Tensor], where: str = "the drafter") -> Geometry:
    """The geometry of a plain DFlash drafter.

    Checks every name, every shape and every dtype against the layout. Raises RolloutError naming the first
    tensor that does not fit, the family if it is another one's, and what would serve it.
    """
    _refuse_families(tensors, where)
    layers = sorted({int(match[1]) for match in map(_LAYER.match, tensors) if match})
    if not layers or "fc.weight" not in tensors:
        absent = "fc.weight" if layers else "layers.0.input_layernorm.weight"
        raise RolloutError(
            f"{where} is not a DFlash drafter: {absent} is missing",
            found=f"{len(tensors)} tensors, such as {', '.join(sorted(tensors)[:3])}",
            expected="fc.weight, hidden_norm.weight, norm.weight and layers.N.* (11 tensors a layer)",
            remedy="give the drafter's own weights file",
        )
    if layers != list(range(len(layers))):
        gap = next(index for index, layer in enumerate(layers) if index != layer)
        raise RolloutError(
            f"{where} has no layer {gap}",
            found="layers " + ", ".join(map(str, layers)),
            expected="layers counted from 0 without a gap",
            remedy="the file is incomplete; fetch it again",
        )
    bias = any(name.endswith("_proj.bias") for name in tensors)
    shared = {name for name in SHARED_WITH_TARGET if name in tensors}
    _check_names(tensors, _names(len(layers), bias) | shared, where)

    def size(name: str, axis: int, rank: int) -> int:
        shape = tensors[name].shape
        if len(shape) != rank or shape[axis] < 1:
            raise RolloutError(
                f"{where}: {name} has an impossible shape",
                found=str(list(shape)),
                expected=f"{rank} dimension{'s' if rank > 1 else ''}, none of them 0",
                remedy="the file is damaged or of another layout; fetch the published drafter again",
            )
        return shape[axis]

    geometry = Geometry(
        hidden_size=size("fc.weight", 0, 2),
        fc_columns=size("fc.weight", 1, 2),
        intermediate_size=size("layers.0.mlp.gate_proj.weight", 0, 2),
        num_hidden_layers=len(layers),
        head_dim=(head_dim := size("layers.0.self_attn.q_norm.weight", 0, 1)),
        num_attention_heads=_heads(tensors, "q_proj", head_dim, size, where),
        num_key_value_heads=_heads(tensors, "k_proj", head_dim, size, where),
        attention_bias=bias,
        dtype=_common_dtype(tensors, where),
    )
    if geometry.num_attention_heads % geometry.num_key_value_heads:
        raise RolloutError(
            f"{where}: {geometry.num_attention_heads} attention heads can't share "
            f"{geometry.num_key_value_heads} key/value heads",
            found=f"q_proj {list(tensors['layers.0.self_attn.q_proj.weight'].shape)}, "
            f"k_proj {list(tensors['layers.0.self_attn.k_proj.weight'].shape)}, head_dim {head_dim}",
            expected="a whole number of attention heads to each key/value head",
        )
    expected = expected_shapes(geometry)
    for name in shared:
        # How many rows there must be only the target can say.
        expected[name] = (size(name, 0, 2), geometry.hidden_size)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise RolloutError(
                f"{where}: {name} does not fit the other tensors",
                found=str(list(tensors[name].shape)),
                expected=str(list(shape)),
                remedy="the file is damaged or mixes two drafters; fetch the published one again",
            )
    return geometry


def expected_shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every tensor of the plain DFlash layout with its shape: 11 a layer (15 with biases) and 3."""
    hidden, inner, head_dim = geometry.hidden_size, geometry.intermediate_size, geometry.head_dim
    rows = {
        "q_proj": geometry.num_attention_heads * head_dim,
        "k_proj": geometry.num_key_value_heads * head_dim,
        "v_proj": geometry.num_key_value_heads * head_dim,
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "mlp.down_proj.weight": (hidden, inner),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.k_norm.weight": (head_dim,),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, rows["q_proj"]),
        **{f"self_attn.{name}.weight": (count, hidden) for name, count in rows.items()},
    }
    if geometry.attention_bias:
        # vLLM gives o_proj a bias whenever q, k and v have one.
        layer.update({f"self_attn.{name}.bias": (count,) for name, count in rows.items()})
        layer["self_attn.o_proj.bias"] = (hidden,)
    return {
        "fc.weight": (hidden, geometry.fc_columns),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{
            f"layers.{index}.{name}": shape
            for index in range(geometry.num_hidden_layers)
            for name, shape in layer.items()
        },
    }


def _names(layers: int, bias: bool) -> set[str]:
    return set(expected_shapes(Geometry(1, 1, layers, 1, 1, 1, 1, bias, "bfloat16")))


def family_of(names: Collection[str]) -> tuple[Family, str] | None:
    """The other family that a checkpoint with these tensor names is of, and the name that shows it."""
    for family in FAMILIES:
        hit = next((name for name in sorted(names) if re.search(family.has, name)), None)
        if hit is not None and not any(re.search(family.lacks, name) for name in names):
            return family, hit
    return None


def _refuse_families(tensors: Mapping[str, Tensor], where: str) -> None:
    found = family_of(tensors)
    if found:
        family, name = found
        raise RolloutError(
            f"{where} is not a plain DFlash drafter but {family.name}",
            found=f"tensor {name}",
            remedy=family.remedy,
        )


def _check_names(tensors: Mapping[str, Tensor], expected: set[str], where: str) -> None:
    surplus = sorted(set(tensors) - expected)
    missing = sorted(expected - set(tensors))
    if surplus:
        raise RolloutError(
            f"{where} holds a tensor that the DFlash layout does not account for: {surplus[0]}",
            found=_some(surplus) + (f"; missing: {_some(missing)}" if missing else ""),
            expected=f"exactly the {len(expected)} tensors of the layout",
            remedy="it is damaged or of another family, and vLLM would ignore or crash on it: "
            "take the target's published DFlash drafter",
        )
    if missing:
        raise RolloutError(
            f"{where} lacks the tensor {missing[0]}",
            found=f"{len(tensors)} tensors, missing: {_some(missing)}",
            expected=f"{len(expected)} tensors",
            remedy="the file is incomplete; fetch the published drafter again",
        )


def _common_dtype(tensors: Mapping[str, Tensor], where: str) -> str:
    dtype = tensors["fc.weight"].dtype
    # fc.weight itself may be the odd one: then most of the others agree against it.
    others = [tensor.dtype for name, tensor in tensors.items() if name != "fc.weight"]
    if others.count(dtype) * 2 < len(others):
        dtype = max(set(others), key=others.count)
    odd = next((name for name in sorted(tensors) if tensors[name].dtype != dtype), None)
    if odd is not None:
        raise RolloutError(
            f"{where}: {odd} has another dtype than the other tensors",
            found=tensors[odd].dtype,
            expected=dtype,
            remedy="the file is damaged or partly quantized; take the published drafter",
        )
    if dtype not in CONFIG_DTYPE:
        raise RolloutError(
            f"{where} is quantized: its tensors are {dtype}",
            expected=", ".join(CONFIG_DTYPE),
            remedy="take the unquantized drafter: vLLM 0.20.1 loads DFlash weights only as they were trained",
        )
    return CONFIG_DTYPE[dtype]


def _heads(tensors: Mapping[str, Tensor], projection: str, head_dim: int, size, where: str) -> int:
    name = f"layers.0.self_attn.{projection}.weight"
    rows = size(name, 0, 2)
    if rows % head_dim:
        raise RolloutError(
            f"{where}: {name} does not divide into heads of {head_dim} (the length of q_norm)",
            found=f"{rows} rows",
            expected=f"a multiple of {head_dim}",
            remedy="the file is damaged or mixes two drafters; fetch the published one again",
        )
    return rows // head_dim


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
