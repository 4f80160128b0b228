"""The drafter's config.json: tensor shapes + the target's config + what is known → config, sources.

Nothing is guessed. Every key has a source; what no source knows is refused, with all missing keys in one
message. Sources, best first: the tensors (nothing may contradict them), the operator's profile, the config
that came with the weights, a known drafter of this geometry and target, a derivation where one is allowed.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .drafter_facts import Facts, read_config
from .drafter_layout import SHARED_WITH_TARGET, Geometry, read_geometry
from .errors import RolloutError
from .known_drafters import FULL, KNOWN, SLIDING, KnownDrafter
from .safetensors import Tensor
from .vllm_versions import effects

#: Keys that are derived, with a warning, unless the operator says otherwise.
DERIVED_BY_DEFAULT = ("target_layer_ids", "rope_theta", "rms_norm_eps", "hidden_act")
#: Keys that are derived only where the operator names them: these derivations have been wrong.
DERIVABLE = (*DERIVED_BY_DEFAULT, "mask_token_id", "layer_types")

#: What tensors can't tell, and where each can come from, for the message that asks for it.
ELSEWHERE = {
    "mask_token_id": "dflash_config.mask_token_id of the published config.json; never pad or eos",
    "block_size": "the config.json published with the drafter; its name may say it (b16)",
    "target_layer_ids": "dflash_config.target_layer_ids of the published config.json",
    "layer_types": "the published config.json: sliding_attention or full_attention for each layer",
    "sliding_window": "the published config.json (tokens), since layer_types names sliding layers",
    "rope_theta": "the published config.json (rope_theta or rope_parameters)",
    "rms_norm_eps": "the published config.json",
    "hidden_act": "the published config.json (silu in every drafter seen)",
}

_GEOMETRY_SOURCE = {
    "hidden_size": "rows of fc.weight",
    "intermediate_size": "rows of mlp.gate_proj",
    "num_hidden_layers": "number of layers",
    "num_attention_heads": "rows of q_proj / head_dim",
    "num_key_value_heads": "rows of k_proj / head_dim",
    "head_dim": "length of q_norm",
    "attention_bias": "presence of biases",
    "dtype": "dtype in the header",
}

_TARGET_SOURCE = {
    "vocab_size": "vocab_size",
    "num_target_layers": "num_hidden_layers",
    "target_hidden_size": "hidden_size",
    "max_position_embeddings": "max_position_embeddings",
}

#: Facts that differ between a config and its weights without harm: the better source is written.
_MAY_DIFFER = ("dtype", "max_position_embeddings")

_PROFILE_KEYS = frozenset(
    {*_GEOMETRY_SOURCE, *_TARGET_SOURCE, *ELSEWHERE, "rope_parameters", "drafter"} - {*_MAY_DIFFER}
)

#: The order in which people know the keys from published configs.
_ORDER = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rope_parameters",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
    "attention_bias",
    "block_size",
    "num_target_layers",
    "dtype",
    "layer_types",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
)


@dataclass(frozen=True)
class Target:
    """What a drafter's config needs of the target's config.json (`text_config` first, else the top level)."""

    name: str
    section: str
    values: Mapping[str, Any]

    def get(self, key: str) -> Any:
        """The value of `key`, None where it is absent; rope_theta may stand in rope_parameters."""
        value = self.values.get(key)
        if value is None and key == "rope_theta":
            parameters = self.values.get("rope_parameters")
            value = parameters.get("rope_theta") if isinstance(parameters, Mapping) else None
        return value

    def size(self, key: str) -> int:
        """The whole number above 0 at `key`. Raises RolloutError where there is none."""
        value = self.get(key)
        if not _is_int(value) or value < 1:
            raise RolloutError(
                f"{self.name} has no usable {self.section}{key}",
                found=repr(value),
                expected="a whole number above 0",
                remedy="give the config.json of the target that this drafter was trained for",
            )
        return value


@dataclass(frozen=True)
class Rendered:
    """A config, a source for each key ("dflash_config.mask_token_id" for nested ones), and warnings.

    `environment`: variables that this vLLM version needs. `geometry`: what the tensors say.
    """

    config: dict[str, Any]
    provenance: dict[str, str]
    warnings: list[str]
    environment: dict[str, str]
    geometry: Geometry

    @property
    def text(self) -> str:
        """The file's content."""
        return json.dumps(self.config, indent=2) + "\n"


@dataclass
class _Draft:
    """Values as they are found, each with its source."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def put(self, key: str, value: Any, source: str) -> None:
        self.values[key], self.sources[key] = value, source


def read_target(path: str) -> dict[str, Any]:
    """The target's config.json; `path` may be its folder. Raises RolloutError."""
    return read_config(path, "the target's config")


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a target's config that describes its language model: `text_config`, or all of it."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def target_of(config: Mapping[str, Any], name: str) -> Target:
    """The target that `config` (its config.json, parsed) describes; `name` is what messages call it."""
    text = text_section(config)
    return Target(name, "" if text is config else "text_config.", text)


def default_taps(target_layers: int, taps: int) -> list[int]:
    """The reference implementation's choice of tap layers, counted from 0, when a checkpoint names none.

    `target_layers` n and `taps` k: round(1 + i·(n − 4)/(k − 1)) for i = 0 … k−1; n // 2 for k = 1.
    Source: z-lab/dflash. 64 layers and 5 taps give 1, 16, 31, 46, 61.
    """
    if taps == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)]


def render(
    tensors: Mapping[str, Tensor],
    target_config: Mapping[str, Any],
    profile: Mapping[str, Any] | None = None,
    vllm_version: str = "0.20.1",
    *,
    shipped: Facts | None = None,
    allow_derived: Collection[str] = DERIVED_BY_DEFAULT,
    first_free_token: Callable[[], int] | None = None,
    where: str = "the drafter",
    target_name: str = "the target's config.json",
) -> Rendered:
    """The config.json that vLLM needs for a drafter with these `tensors` beside this target.

    Args:
        tensors: name → dtype and shape, from safetensors.read_checkpoint.
        target_config: the target's config.json, parsed.
        profile: what the operator knows: mask_token_id, block_size, target_layer_ids, layer_types,
            sliding_window (tokens), rope_theta, rope_parameters, rms_norm_eps, hidden_act; or `drafter`, the
            name of a known one.
        vllm_version: the version that will serve; decides which warnings apply.
        shipped: the facts of the config.json that came with the weights.
        allow_derived: the keys that may be derived, out of DERIVABLE.
        first_free_token: the first id after the last token of the target's tokenizer; asked only when
            mask_token_id may be derived and nothing else knows it.
        where: how messages call the drafter (its path).
        target_name: how messages call the target's config; its path tells known targets apart.

    Raises RolloutError: another family, a contradiction (naming both sides), values out of range, or keys
    that no source knows (all of them in one message).
    """
    stated = [_profile_facts(profile or {}), *([shipped] if shipped else [])]
    _check_allowed(allow_derived)
    geometry = read_geometry(tensors, where)
    target = target_of(target_config, target_name)
    taps = _tap_count(geometry, target, where)
    extra = [name for name in SHARED_WITH_TARGET if name in tensors]
    for name in extra:
        if tensors[name].shape[0] != target.size("vocab_size"):
            raise RolloutError(
                f"{name} of {where} is for another vocabulary",
                found=f"{tensors[name].shape[0]} rows",
                expected=f"{target.size('vocab_size')} ({target.section}vocab_size of {target.name})",
                remedy="pair the drafter with its own target",
            )

    draft = _Draft()
    for key, how in _GEOMETRY_SOURCE.items():
        draft.put(key, getattr(geometry, key), f"tensors: {how}")
    for key, target_key in _TARGET_SOURCE.items():
        draft.put(key, target.size(target_key), f"target: {target.section}{target_key}")
    for facts in stated:
        _refuse_contradictions(facts, draft, where)
        draft.warnings += facts.notes
    for key in (*ELSEWHERE, "rope_parameters"):
        _take_best(key, stated, draft)
    ambiguous = _take_known(geometry, target, profile or {}, draft)
    _derive(target, taps, allow_derived, first_free_token, draft)
    _drop_foreign_window(draft)
    _refuse_missing(draft, where, ambiguous)
    _check_values(draft.values, taps, target)
    warnings, environment = effects(
        vllm_version, draft.values["layer_types"], draft.values.get("sliding_window")
    )
    draft.warnings += warnings + _doubtful_mask(draft, target_config)
    if extra:
        draft.warnings.append(
            f"{where} is of an older revision that carries {' and '.join(extra)} of its target again: vLLM "
            "loads them, so they may take GPU memory twice."
        )
    config, provenance = _assemble(draft, target, shipped)
    return Rendered(config, provenance, draft.warnings, environment, geometry)


def _profile_facts(profile: Mapping[str, Any]) -> Facts:
    for key in profile:
        if key not in _PROFILE_KEYS:
            near = difflib.get_close_matches(str(key), _PROFILE_KEYS, 1)
            raise RolloutError(
                f"the profile has an unknown key {key}",
                expected=near[0] if near else "some of " + ", ".join(sorted(_PROFILE_KEYS)),
                remedy=f"did you mean {near[0]}?" if near else "remove it",
            )
    rope = profile.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise RolloutError(
            "rope_parameters in the profile is no table",
            found=repr(rope),
            remedy="write it as published: rope_type, factor, original_max_position_embeddings",
        )
    values = {key: value for key, value in profile.items() if value is not None and key != "rope_parameters"}
    return Facts("profile", values, {key: key for key in values}, rope_parameters=dict(rope))


def _check_allowed(allow_derived: Collection[str]) -> None:
    for key in allow_derived:
        if key not in DERIVABLE:
            raise RolloutError(
                f"allow_derived names {key}, for which there is no derivation",
                expected="some of " + ", ".join(DERIVABLE),
                remedy=f"remove {key} there and give its value in the profile",
            )


def _tap_count(geometry: Geometry, target: Target, where: str) -> int:
    width = target.size("hidden_size")
    if geometry.fc_columns % width:
        raise RolloutError(
            f"{where} was not trained for this target: fc.weight does not fit its hidden size",
            found=f"{geometry.fc_columns} columns, {target.section}hidden_size {width} in {target.name}",
            expected="taps × hidden size of the target",
            remedy="pair the drafter with its own target",
        )
    return geometry.fc_columns // width


def _refuse_contradictions(facts: Facts, draft: _Draft, where: str) -> None:
    """Compare what a source states about the tensors and the target with the tensors and the target."""
    for key in (*_GEOMETRY_SOURCE, *_TARGET_SOURCE):
        stated = facts.values.get(key)
        if stated is None or stated == draft.values[key]:
            continue
        if key in _MAY_DIFFER:
            draft.warnings.append(
                f"{key}: {facts.source(key)} says {stated}, {draft.sources[key]} says {draft.values[key]}; "
                "the latter is written."
            )
            continue
        raise RolloutError(
            f"two sources contradict each other about {key}",
            found=f"{stated!r} in {facts.source(key)}",
            expected=f"{draft.values[key]!r} ({draft.sources[key]})",
            remedy=f"use {facts.name} with the weights and the target that it belongs to"
            if key in _GEOMETRY_SOURCE
            else f"pair {where} with the target that it was trained for",
        )


def _take_best(key: str, stated: list[Facts], draft: _Draft) -> None:
    """The value of the best source that has one; a worse one that differs is named in a warning."""
    for facts in stated:
        value = facts.rope_parameters or None if key == "rope_parameters" else facts.values.get(key)
        source = facts.name if key == "rope_parameters" else key in facts.places and facts.source(key)
        if value is None:
            continue
        if key not in draft.values:
            draft.put(key, value, str(source))
        elif draft.values[key] != value:
            draft.warnings.append(
                f"{key}: {draft.sources[key]} says {draft.values[key]}, {source} says {value}; "
                "the former is written."
            )


def _take_known(
    geometry: Geometry, target: Target, profile: Mapping[str, Any], draft: _Draft
) -> dict[str, list[KnownDrafter]]:
    """Fill gaps from the known drafters of this geometry and target.

    Returns the keys that several of them state differently. Raises RolloutError when the operator names a
    drafter that this one is not.
    """
    found = known_drafters(geometry, target)
    named = profile.get("drafter")
    if named is not None:
        names = [known.name for known in KNOWN]
        if named not in names:
            near = difflib.get_close_matches(str(named), names, 1)
            raise RolloutError(
                f"the profile names a drafter that is not known here: {named}",
                expected="one of " + ", ".join(names),
                remedy=f"did you mean {near[0]}?" if near else "leave `drafter` out and give the values",
            )
        found = [known for known in found if known.name == named]
        if not found:
            raise RolloutError(
                f"this drafter can't be {named}",
                found="tensors of another geometry, or another target",
                remedy="correct `drafter` in the profile, or leave it out and give the values",
            )
    else:
        by_target = [known for known in found if known.target_name.lower() in target.name.lower()]
        found = by_target or found
        agreeing = [known for known in found if not _conflicts(known, draft)]
        found = agreeing or found
    ambiguous: dict[str, list[KnownDrafter]] = {}
    taken = set()
    for key in ELSEWHERE:
        candidates = [known for known in found if key in known.facts]
        if not candidates:
            continue
        first = candidates[0].facts[key]
        if key in draft.values:
            if len(candidates) == 1 and draft.values[key] != first:
                draft.warnings.append(
                    f"{key}: {draft.sources[key]} says {draft.values[key]}, "
                    f"{candidates[0].name} as published says {first}; the former is written."
                )
        elif len(candidates) == len(found) and all(known.facts[key] == first for known in candidates):
            names = " and ".join(known.name for known in candidates)
            draft.put(key, first, f"known drafter {names}: {candidates[0].source}")
            taken.add(names)
        else:
            ambiguous[key] = candidates
    draft.warnings += [
        f"this drafter was taken for {names} by its geometry and target; pin its sha256 to be sure."
        for names in sorted(taken)
        if named is None
    ]
    return ambiguous


def known_drafters(geometry: Geometry, target: Target) -> list[KnownDrafter]:
    """The published drafters that have this geometry and were made for a target of these sizes."""
    shape = (
        geometry.hidden_size,
        geometry.intermediate_size,
        geometry.num_hidden_layers,
        geometry.num_attention_heads,
        geometry.num_key_value_heads,
        geometry.head_dim,
        geometry.fc_columns,
    )
    sizes = tuple(target.size(key) for key in ("hidden_size", "num_hidden_layers", "vocab_size"))
    return [known for known in KNOWN if known.geometry == shape and known.target == sizes]


def _conflicts(known: KnownDrafter, draft: _Draft) -> bool:
    stated = draft.values
    if stated.get("sliding_window") is not None and SLIDING not in known.facts.get("layer_types", (SLIDING,)):
        return True
    return any(key in stated and stated[key] != value for key, value in known.facts.items())


def _derive(
    target: Target,
    taps: int,
    allowed: Collection[str],
    first_free_token: Callable[[], int] | None,
    draft: _Draft,
) -> None:
    depth, layers = draft.values["num_target_layers"], draft.values["num_hidden_layers"]
    derivations: dict[str, Callable[[], tuple[Any, str]]] = {
        "target_layer_ids": lambda: (
            default_taps(depth, taps),
            f"reference formula for {depth} target layers and {taps} taps",
        ),
        "layer_types": lambda: ([FULL] * layers, "all full, as allow_derived permits"),
        **{
            key: lambda key=key: (target.get(key), f"equal to the target's {target.section}{key}")
            for key in ("rope_theta", "rms_norm_eps", "hidden_act")
        },
    }
    if first_free_token is not None:
        derivations["mask_token_id"] = lambda: (
            first_free_token(),
            "first id after the last token of the target's tokenizer",
        )
    for key, derive in derivations.items():
        if key in draft.values or key not in allowed:
            continue
        value, how = derive()
        if value is not None:
            draft.put(key, value, f"derived: {how}")
            draft.warnings.append(
                f"{key} {value} is derived ({how}), not known: compare with the published config."
            )


def _drop_foreign_window(draft: _Draft) -> None:
    """A window goes with the layer_types of its own source; where a better one says all full, it is moot."""
    kinds = draft.values.get("layer_types")
    if (
        isinstance(kinds, list)
        and SLIDING not in kinds
        and draft.sources.get("sliding_window") != draft.sources["layer_types"]
    ):
        draft.values.pop("sliding_window", None)


def _refuse_missing(draft: _Draft, where: str, ambiguous: Mapping[str, list[KnownDrafter]]) -> None:
    values = draft.values
    missing = [key for key in ELSEWHERE if key not in values and key != "sliding_window"]
    kinds = values.get("layer_types")
    if "sliding_window" not in values and isinstance(kinds, list) and SLIDING in kinds:
        missing.append("sliding_window")
    if not missing:
        return
    doubtful = [
        f"{key}: " + ", ".join(f"{known.name} {known.facts[key]}" for known in ambiguous[key])
        for key in missing
        if key in ambiguous
    ]
    raise RolloutError(
        f"the tensors of {where} don't say everything and no other source does: "
        f"{', '.join(missing)} unknown; a guess could be wrong without any error showing",
        found="candidates of the same shape: " + "; ".join(doubtful) if doubtful else "",
        remedy=("name one of them as `drafter` in the profile, or " if doubtful else "")
        + "add to the profile: "
        + "; ".join(f"{key} from {ELSEWHERE[key]}" for key in missing),
    )


def _check_values(values: dict[str, Any], taps: int, target: Target) -> None:
    def refuse(key: str, expected: str, remedy: str = "correct it where it comes from") -> None:
        raise RolloutError(
            f"{key} is out of range", found=repr(values[key]), expected=expected, remedy=remedy
        )

    vocab, layers = values["vocab_size"], values["num_hidden_layers"]
    if not _is_int(values["mask_token_id"]) or not 0 <= values["mask_token_id"] < vocab:
        refuse("mask_token_id", f"a whole number from 0 to {vocab - 1} (vocab_size {vocab} of {target.name})")
    if not _is_int(values["block_size"]) or values["block_size"] < 2:
        refuse("block_size", "a whole number of at least 2 (one known token and the masks)")

    ids, depth = values["target_layer_ids"], values["num_target_layers"]
    if not isinstance(ids, list) or not all(_is_int(i) and 0 <= i < depth for i in ids):
        refuse("target_layer_ids", f"layers from 0 to {depth - 1} ({depth} layers in {target.name})")
    if len(ids) != taps:
        refuse(
            "target_layer_ids",
            f"{taps} layers: fc.weight has {taps} × {target.size('hidden_size')} columns",
            "use the taps of this very drafter",
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(ids)):
        refuse("target_layer_ids", "ascending layers: vLLM joins them in that order, whatever the list says")

    kinds = values["layer_types"]
    known = {SLIDING, FULL}
    if (
        not isinstance(kinds, list)
        or len(kinds) != layers
        or any(not isinstance(kind, str) or kind not in known for kind in kinds)
    ):
        refuse("layer_types", f"{layers} entries, one a layer, sliding_attention or full_attention")
    if SLIDING in kinds:
        if not _is_int(values["sliding_window"]) or values["sliding_window"] < 1:
            refuse("sliding_window", "a whole number of tokens above 0")
    elif values.get("sliding_window") is not None:
        raise RolloutError(
            "sliding_window and layer_types contradict each other",
            found=f"sliding_window {values['sliding_window']} and no sliding_attention among layer_types",
            expected="both or neither",
            remedy="take both from the same published config.json",
        )
    for key in ("rope_theta", "rms_norm_eps"):
        value = values[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            refuse(key, "a number above 0")
        values[key] = float(values[key])
    if not isinstance(values["hidden_act"], str):
        refuse("hidden_act", "the name of an activation, such as silu")


def _doubtful_mask(draft: _Draft, target_config: Mapping[str, Any]) -> list[str]:
    """A mask that is the target's eos or pad: measured, it made drafting slower than none at all."""
    mask = draft.values["mask_token_id"]
    for section in (target_config, text_section(target_config)):
        for key in ("eos_token_id", "pad_token_id"):
            ids = section.get(key)
            if mask in (ids if isinstance(ids, list) else [ids]):
                return [
                    f"mask_token_id {mask} ({draft.sources['mask_token_id']}) is the target's {key}: hardly "
                    "any drafter was trained so, and a wrong mask makes drafting slower than none."
                ]
    return []


def _assemble(draft: _Draft, target: Target, shipped: Facts | None) -> tuple[dict[str, Any], dict[str, str]]:
    values, sources = draft.values, draft.sources
    sliding = SLIDING in values["layer_types"]
    draft.put("architectures", ["DFlashDraftModel"], "constant: the name in vLLM's registry")
    draft.put("model_type", "qwen3", "constant: vLLM's DFlash is a Qwen3 decoder")
    draft.put("tie_word_embeddings", False, "constant: a drafter uses the target's embedding and head")
    draft.put("use_sliding_window", sliding, "layer_types: without it transformers drops sliding_window")
    draft.put(
        "max_window_layers", values["num_hidden_layers"], "number of layers: layer_types decides instead"
    )
    if not sliding:
        draft.put("sliding_window", None, "layer_types: no sliding layer")
    if "rope_parameters" in values:
        values["rope_parameters"] = {"rope_theta": values["rope_theta"], **values["rope_parameters"]}

    config: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for key in _ORDER:
        if key in values:
            config[key], provenance[key] = values[key], sources[key]
    config["dflash_config"] = {}
    for key in ("mask_token_id", "target_layer_ids"):
        config["dflash_config"][key], provenance[f"dflash_config.{key}"] = values[key], sources[key]
    if shipped:
        for key, value in shipped.dflash_config.items():
            config["dflash_config"][key] = value
            provenance[f"dflash_config.{key}"] = f"{shipped.name}, kept as it is"
    # 0.20 captures the output of layer L-1 for target_layer_ids L, but takes these ids as they are; both
    # keys together are right on every version.
    config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in values["target_layer_ids"]]
    provenance["eagle_aux_hidden_state_layer_ids"] = f"target_layer_ids + 1 ({sources['target_layer_ids']})"
    if values["target_hidden_size"] != values["hidden_size"]:
        config["target_hidden_size"] = values["target_hidden_size"]
        provenance["target_hidden_size"] = sources["target_hidden_size"] + ": vLLM sizes fc by it"
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RolloutError(
            "a value can't be written as JSON",
            found=str(error),
            remedy="look for NaN or Infinity in rope_parameters and dflash_config",
        ) from error
    return config, provenance


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
