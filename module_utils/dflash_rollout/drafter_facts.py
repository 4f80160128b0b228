"""What a config says of a drafter, in one vocabulary, whatever dialect it was written in.

Published configs put block_size, mask and taps at the top level or in `dflash_config`, say `dtype` or
`torch_dtype`, `rope_theta` or `rope_parameters`. Here they become flat keys, each with the place where it
stood, and configs of other families are refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import RolloutError

#: Flat key → where it may stand in a config, best first.
PLACES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_hidden_layers": ("num_hidden_layers",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "attention_bias": ("attention_bias",),
    "dtype": ("dtype", "torch_dtype"),
    "vocab_size": ("vocab_size",),
    "num_target_layers": ("num_target_layers", "dflash_config.num_target_layers"),
    "target_hidden_size": ("target_hidden_size", "dflash_config.target_hidden_size"),
    "max_position_embeddings": ("max_position_embeddings",),
    "mask_token_id": ("dflash_config.mask_token_id", "mask_token_id"),
    "block_size": ("block_size", "dflash_config.block_size"),
    "target_layer_ids": ("dflash_config.target_layer_ids", "target_layer_ids"),
    "layer_types": ("layer_types", "dflash_config.layer_types"),
    "sliding_window": ("sliding_window", "dflash_config.sliding_window", "dflash_config.swa_window_size"),
    "rope_theta": ("rope_theta", "rope_parameters.rope_theta", "rope_scaling.rope_theta"),
    "rms_norm_eps": ("rms_norm_eps",),
    "hidden_act": ("hidden_act",),
}

#: Names that mean a plain DFlash drafter. vLLM knows the first; the rendered config says that one.
ARCHITECTURES = ("DFlashDraftModel", "Qwen3DFlashDraftModel")

_OTHER_ARCHITECTURES = (
    (r"DFlash2", "a DFlash2 drafter", "no released vLLM runs DFlash2; take the target's DFlash drafter"),
    (r"DSpark", "a DSpark drafter", "run as DFlash its drafts are shifted by one; take the DFlash drafter"),
    (
        r"Speculator",
        "in the speculators format",
        "serve its folder as it is; this module never merges formats",
    ),
    (r"Eagle", "an EAGLE drafter", "serve it with vLLM's method eagle or eagle3"),
    (r"Medusa", "a Medusa drafter", "serve it with vLLM's method medusa"),
    (r"MTP", "an MTP head", "serve it with vLLM's method mtp"),
    (
        r"For(CausalLM|ConditionalGeneration)$",
        "a full model, not a drafter",
        "give the drafter's config.json",
    ),
)

_NOT_CAUSAL = "vLLM's DFlash pass is not causal, so it would draft badly; take a DFlash drafter"
_SHIFTED = "run as DFlash its drafts are shifted by one; take the target's DFlash drafter"

#: Settings that make of the same tensors something that vLLM would run wrongly: (place, bad?, what, remedy).
_FOREIGN_SETTINGS = (
    ("quantization_config", bool, "a quantized drafter", "take the unquantized drafter"),
    ("is_causal", bool, "a causal drafter", _NOT_CAUSAL),
    ("dflash_config.causal", bool, "a causal drafter", _NOT_CAUSAL),
    ("causal_head", bool, "a JetSpec drafter (causal)", _NOT_CAUSAL),
    ("dflash_config.causal_head", bool, "a JetSpec drafter (causal)", _NOT_CAUSAL),
    ("markov_rank", bool, "a DSpark drafter", _SHIFTED),
    ("enable_confidence_head", bool, "a DSpark drafter", _SHIFTED),
    (
        "dflash_config.use_aux_hidden_state",
        lambda value: value is False,
        "a drafter without taps",
        "vLLM would leave fc.weight out; take a drafter with taps",
    ),
)


@dataclass(frozen=True)
class Facts:
    """`values` by flat key; `places` says where each stood; the rest is carried verbatim.

    `rope_parameters`: RoPE settings besides theta (YaRN and the like). `dflash_config`: keys of that section
    that no rule here reads.
    """

    name: str
    values: Mapping[str, Any]
    places: Mapping[str, str]
    rope_parameters: Mapping[str, Any] = field(default_factory=dict)
    dflash_config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def source(self, key: str) -> str:
        """How provenance and messages call the source of `key`."""
        place = self.places[key]
        return self.name if place == key else f"{self.name}: {place}"


def read_config(path: str, what: str) -> dict[str, Any]:
    """The config.json at `path` (or in the folder `path`); `what` is what messages call it.

    Raises RolloutError when it can't be read or is no JSON object.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        with open(path, "rb") as stream:
            text = stream.read()
    except OSError as error:
        raise RolloutError(
            f"{what} {path} can't be read: {error.strerror}", remedy="put it in place or correct the path"
        ) from error
    return parse_config(text, f"{what} {path}")


def parse_config(text: str | bytes, what: str) -> dict[str, Any]:
    """The JSON object that `text` is; `what` is what messages call it. Raises RolloutError for all else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RolloutError(
            f"{what} is not JSON",
            found=f"{str(text[:40])!r}: {error}" if text else "an empty file",
            expected="a JSON object",
            remedy="fetch it again",
        ) from error
    if not isinstance(document, dict):
        raise RolloutError(
            f"{what} is not a JSON object", found=json.dumps(document)[:40], remedy="fetch it again"
        )
    return document


def shipped_facts(path: str | None, weights: str | None = None, dest: str | None = None) -> Facts | None:
    """The facts of the config.json that came with the weights.

    `path` None means the one beside `weights`, unless that is `dest`, which we wrote ourselves; "" means none.
    Raises RolloutError as read_config and facts_of do.
    """
    if path is None and weights:
        folder = weights if os.path.isdir(weights) else os.path.dirname(weights)
        path = os.path.join(folder, "config.json")
        if not os.path.exists(path) or (dest and os.path.realpath(dest) == os.path.realpath(path)):
            return None
    return facts_of(read_config(path, "the shipped config"), f"shipped config {path}") if path else None


def first_free_token(target: str) -> int:
    """The first id after the last token of the tokenizer.json in the target's folder, or beside its config.

    Some published drafters mask with it, others don't: a derivation to be allowed explicitly.
    """
    folder = target if os.path.isdir(target) else os.path.dirname(target)
    document = read_config(os.path.join(folder, "tokenizer.json"), "the target's tokenizer")
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, Mapping) else range(len(vocabulary or ()))
    added = [token.get("id") for token in document.get("added_tokens") or [] if isinstance(token, Mapping)]
    known = [token for token in (*ids, *added) if isinstance(token, int)]
    if not known:
        raise RolloutError(
            f"the tokenizer in {folder} lists no tokens", remedy="give mask_token_id in the profile"
        )
    return max(known) + 1


def facts_of(document: Mapping[str, Any], name: str) -> Facts:
    """The facts that `document` (a config.json, parsed) states; `name` is what messages call it.

    Raises RolloutError when it describes another family, or states a key twice with two values.
    """
    _refuse_other_families(document, name)
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for key, alternatives in PLACES.items():
        for place in alternatives:
            value = _at(document, place)
            if value is None:
                continue
            if key in values and values[key] != value:
                raise RolloutError(
                    f"{name} contradicts itself about {key}",
                    found=f"{places[key]} {values[key]!r} and {place} {value!r}",
                    remedy="correct the wrong one, or leave this config out and give a profile",
                )
            if key not in values:
                values[key], places[key] = value, place
    notes = _taps_from_aux(document, name, values, places)
    _windows(document, values, places)
    rope, rope_note = _rope(document)
    section = document.get("dflash_config")
    read = {
        place.partition(".")[2] for alternatives in PLACES.values() for place in alternatives if "." in place
    }
    extra = (
        # swa_* are read above and kept all the same: other runtimes look for them.
        {key: value for key, value in section.items() if key not in read or key.startswith("swa_")}
        if isinstance(section, Mapping)
        else {}
    )
    return Facts(name, values, places, rope, extra, tuple(notes + rope_note))


def _refuse_other_families(document: Mapping[str, Any], name: str) -> None:
    if any(
        key in document
        for key in ("speculators_config", "speculators_model_type", "transformer_layer_config")
    ):
        raise RolloutError(
            f"{name} is in the speculators format",
            found="speculators_model_type or transformer_layer_config",
            expected="a plain DFlash config",
            remedy="serve that folder as it is; formats are never merged. Without it, give a profile",
        )
    architectures = document.get("architectures") or []
    for architecture in architectures if isinstance(architectures, list) else [architectures]:
        if architecture in ARCHITECTURES:
            continue
        for pattern, what, remedy in _OTHER_ARCHITECTURES:
            if re.search(pattern, str(architecture)):
                raise RolloutError(f"{name} is {what}", found=f"architectures {architecture}", remedy=remedy)
        raise RolloutError(
            f"{name} names an unknown architecture",
            found=str(architecture),
            expected=" or ".join(ARCHITECTURES),
            remedy="take the target's DFlash drafter with its own config.json",
        )
    for place, bad, what, remedy in _FOREIGN_SETTINGS:
        value = _at(document, place)
        if value is not None and bad(value):
            raise RolloutError(f"{name} is {what}", found=f"{place} {json.dumps(value)}", remedy=remedy)
    draft, vocab = document.get("draft_vocab_size"), document.get("vocab_size")
    if draft is not None and draft != vocab:
        raise RolloutError(
            f"{name} has a vocabulary of its own",
            found=f"draft_vocab_size {draft}, vocab_size {vocab}",
            remedy="it needs d2t tensors, which the plain DFlash layout has not; take another drafter",
        )


def _taps_from_aux(
    document: Mapping[str, Any], name: str, values: dict[str, Any], places: dict[str, str]
) -> list[str]:
    """eagle_aux_hidden_state_layer_ids are taps + 1; older configs carry only these."""
    key = "eagle_aux_hidden_state_layer_ids"
    aux = document.get(key)
    if not isinstance(aux, list) or not all(isinstance(i, int) for i in aux):
        return []
    taps = [i - 1 for i in aux]
    known = values.setdefault("target_layer_ids", taps)
    places.setdefault("target_layer_ids", f"{key} - 1")
    if known == taps:
        return []
    if known == aux:
        return [f"{name} repeats target_layer_ids as {key}, which captures one layer too early: corrected."]
    raise RolloutError(
        f"{name} contradicts itself about the taps",
        found=f"target_layer_ids {known}, {key} {aux}",
        expected=f"{key} = target_layer_ids + 1",
        remedy="give target_layer_ids in the profile and leave this config out",
    )


def _windows(document: Mapping[str, Any], values: dict[str, Any], places: dict[str, str]) -> None:
    layers = values.get("num_hidden_layers")
    if (
        "layer_types" not in values
        and document.get("use_sliding_window") is False
        and isinstance(layers, int)
    ):
        # transformers reads it so: without windows every layer is full attention.
        values["layer_types"], places["layer_types"] = ["full_attention"] * layers, "use_sliding_window false"
    kinds = values.get("layer_types")
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        # Qwen configs carry an unused window.
        values.pop("sliding_window", None)
        places.pop("sliding_window", None)


def _rope(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    settings = document.get("rope_parameters") or document.get("rope_scaling") or {}
    if not isinstance(settings, Mapping):
        return {}, []
    rope = {key: value for key, value in settings.items() if key not in ("rope_theta", "type")}
    rope["rope_type"] = settings.get("rope_type", settings.get("type", "default"))
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if document.get(key) is not None:
            rope.setdefault(key, document[key])
    notes = []
    if any(key.startswith("mrope") for key in rope) or rope["rope_type"] == "mrope":
        # With text all three position axes are equal, and vLLM's DFlash has one axis only.
        rope = {key: value for key, value in rope.items() if not key.startswith("mrope")}
        rope["rope_type"] = "default" if rope["rope_type"] == "mrope" else rope["rope_type"]
        notes.append(
            "the drafter's multimodal RoPE is written as plain RoPE: the same for text, not for images."
        )
    return ({} if rope == {"rope_type": "default"} else rope), notes


def _at(document: Mapping[str, Any], place: str) -> Any:
    section, _, key = place.rpartition(".")
    holder = document.get(section) if section else document
    return holder.get(key) if isinstance(holder, Mapping) else None
