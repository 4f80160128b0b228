"""The drafter's config.json: tensor shapes + the target's config + what the operator knows → config, sources.

Nothing is guessed. Every key has a source; what no source knows is refused, with all missing keys in one
message. Sources, best first: the tensors (nothing may contradict them), the operator's profile, a
derivation where one is allowed.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .drafter_layout import Geometry, read_geometry
from .errors import RolloutError
from .safetensors import Tensor

#: Keys that may be derived when no source knows them; each derivation is a warning.
DERIVABLE = ("target_layer_ids", "rope_theta", "rms_norm_eps", "hidden_act")

#: Where a key that is not in the tensors can come from, for the message that asks for it.
_ELSEWHERE = {
    "mask_token_id": "dflash_config.mask_token_id of the published config.json; never pad or eos",
    "block_size": "the config.json published with the drafter; its name may say it (b16)",
    "target_layer_ids": "dflash_config.target_layer_ids of the published config.json",
    "layer_types": "the published config.json: sliding_attention or full_attention for each layer",
    "sliding_window": "the published config.json (tokens), since layer_types names sliding layers",
    "rope_theta": "the published config.json (rope_theta or rope_parameters)",
    "rms_norm_eps": "the published config.json",
    "hidden_act": "the published config.json (silu in every drafter seen)",
}

#: From which version on vLLM honours `layer_types: sliding_attention` in a DFlash drafter.
WINDOWS_SINCE = (0, 26)
#: The oldest version whose DFlash code these rules were read from.
KNOWN_SINCE = (0, 20)

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

_PROFILE_KEYS = frozenset({*_GEOMETRY_SOURCE, *_ELSEWHERE, "vocab_size", "num_target_layers"})


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
    """A config, a source for each key ("dflash_config.mask_token_id" for nested ones), and warnings."""

    config: dict[str, Any]
    provenance: dict[str, str]
    warnings: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The file's content."""
        return json.dumps(self.config, indent=2) + "\n"


def read_target(path: str) -> dict[str, Any]:
    """The target's config.json; `path` may be its folder. Raises RolloutError."""
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
    try:
        with open(path, encoding="utf-8") as stream:
            document = json.load(stream)
    except OSError as error:
        raise RolloutError(
            f"the target's config {path} can't be read: {error.strerror}",
            remedy="put the target model in place or correct the path",
        ) from error
    except (ValueError, RecursionError) as error:
        raise RolloutError(
            f"the target's config {path} is not JSON ({error})", remedy="fetch the target's config.json again"
        ) from error
    if not isinstance(document, dict):
        raise RolloutError(f"the target's config {path} is not a JSON object")
    return document


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
    where: str = "the drafter",
    target_name: str = "the target's config.json",
    allow_derived: Collection[str] = DERIVABLE,
) -> Rendered:
    """The config.json that vLLM needs for a drafter with these `tensors` beside this target.

    Args:
        tensors: name → dtype and shape, from safetensors.read_checkpoint.
        target_config: the target's config.json, parsed.
        profile: what the operator knows: mask_token_id, block_size, target_layer_ids, layer_types,
            sliding_window (tokens), rope_theta, rms_norm_eps, hidden_act.
        vllm_version: the version that will serve; decides which warnings apply.
        where: how messages call the drafter (its path).
        target_name: how messages call the target's config.
        allow_derived: the keys that may be derived, out of DERIVABLE.

    Raises RolloutError: another layout, a contradiction (naming both sides), values out of range, or keys
    that no source knows (all of them in one message).
    """
    profile = _checked_profile(profile or {})
    geometry = read_geometry(tensors, where)
    text = text_section(target_config)
    target = Target(target_name, "" if text is target_config else "text_config.", text)
    taps = _tap_count(geometry, target, where)

    sources: dict[str, str] = {}
    values: dict[str, Any] = {}
    warnings: list[str] = []

    def put(key: str, value: Any, source: str) -> None:
        values[key], sources[key] = value, source

    for key, how in _GEOMETRY_SOURCE.items():
        put(key, getattr(geometry, key), f"tensors: {how}")
    for key, target_key in (
        ("vocab_size", "vocab_size"),
        ("num_target_layers", "num_hidden_layers"),
        ("max_position_embeddings", "max_position_embeddings"),
    ):
        put(key, target.size(target_key), f"target: {target.section}{target_key}")
    for key in _PROFILE_KEYS & set(profile) & set(values):
        if profile[key] != values[key]:
            raise RolloutError(
                f"the profile contradicts the facts about {key}",
                found=f"profile: {profile[key]!r}",
                expected=f"{values[key]!r} ({sources[key]})",
                remedy="correct the profile, or use the drafter and target that it was written for",
            )
    for key in _ELSEWHERE:
        if profile.get(key) is not None:
            put(key, profile[key], "profile")

    derivations = {
        "target_layer_ids": lambda: (
            default_taps(values["num_target_layers"], taps),
            f"reference formula for {values['num_target_layers']} target layers and {taps} taps",
        ),
        **{
            key: lambda key=key: (target.get(key), f"equal to the target's {target.section}{key}")
            for key in ("rope_theta", "rms_norm_eps", "hidden_act")
        },
    }
    for key, derive in derivations.items():
        if key in values or key not in allow_derived:
            continue
        value, how = derive()
        if value is not None:
            put(key, value, f"derived: {how}")
            warnings.append(
                f"{key} {value} is derived ({how}), not known: compare with the published config."
            )

    _refuse_missing(values, where)
    _check_values(values, taps, target)
    _check_version(values, vllm_version, warnings, environment := {})
    return _assemble(values, sources, target, taps, warnings, environment)


def _checked_profile(profile: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in profile:
        if key not in _PROFILE_KEYS:
            near = difflib.get_close_matches(str(key), _PROFILE_KEYS, 1)
            raise RolloutError(
                f"the profile has an unknown key {key}",
                expected=", ".join(sorted(_PROFILE_KEYS)),
                remedy=f"did you mean {near[0]}?" if near else "remove it",
            )
    return profile


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a target's config that describes its language model: `text_config`, or all of it."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


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


def _refuse_missing(values: Mapping[str, Any], where: str) -> None:
    missing = [key for key in _ELSEWHERE if key not in values and key != "sliding_window"]
    if "sliding_window" not in values and "sliding_attention" in (values.get("layer_types") or ()):
        missing.append("sliding_window")
    if missing:
        raise RolloutError(
            f"the tensors of {where} don't say everything and no other source does: "
            f"{', '.join(missing)} unknown; a guess could be wrong without any error showing",
            remedy="add to the profile: " + "; ".join(f"{key} from {_ELSEWHERE[key]}" for key in missing),
        )


def _check_values(values: dict[str, Any], taps: int, target: Target) -> None:
    def refuse(key: str, expected: str, remedy: str = "correct the profile") -> None:
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
        refuse(
            "target_layer_ids",
            "ascending layers: vLLM concatenates them in that order, whatever the list says",
        )

    kinds = values["layer_types"]
    if (
        not isinstance(kinds, list)
        or set(kinds) - {"sliding_attention", "full_attention"}
        or len(kinds) != layers
    ):
        refuse("layer_types", f"{layers} entries, one a layer, sliding_attention or full_attention")
    if "sliding_attention" in kinds:
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
        if isinstance(values[key], bool) or not isinstance(values[key], (int, float)) or not values[key] > 0:
            refuse(key, "a number above 0")
        values[key] = float(values[key])
    if not isinstance(values["hidden_act"], str):
        refuse("hidden_act", "the name of an activation, such as silu")


def _check_version(
    values: Mapping[str, Any], vllm_version: str, warnings: list[str], environment: dict[str, str]
) -> None:
    match = re.match(r"(\d+)\.(\d+)", vllm_version)
    if not match:
        raise RolloutError("vllm_version is no version", found=repr(vllm_version), expected="such as 0.20.1")
    version = (int(match[1]), int(match[2]))
    kinds = set(values["layer_types"])
    if version < KNOWN_SINCE:
        warnings.append(
            f"vLLM {vllm_version} is older than any whose DFlash code these rules were read from "
            f"({'.'.join(map(str, KNOWN_SINCE))}): expect other behaviour."
        )
    if "sliding_attention" in kinds and version < WINDOWS_SINCE:
        warnings.append(
            f"vLLM {vllm_version} ignores the drafter's sliding window (all layers run as full attention): "
            f"acceptance falls once a context is longer than {values['sliding_window']} tokens "
            f"(vLLM {'.'.join(map(str, WINDOWS_SINCE))} honours it)."
        )
    if len(kinds) == 2 and version >= WINDOWS_SINCE:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        warnings.append(
            f"vLLM {vllm_version} wants VLLM_USE_V2_MODEL_RUNNER=1 for a drafter of sliding and full layers."
        )


def _assemble(
    values: dict[str, Any],
    sources: dict[str, str],
    target: Target,
    taps: int,
    warnings: list[str],
    environment: dict[str, str],
) -> Rendered:
    """Put keys in the order in which people know them from published configs."""
    sliding = "sliding_attention" in values["layer_types"]
    constants = {
        "architectures": (["DFlashDraftModel"], "constant: the name in vLLM's registry"),
        "model_type": ("qwen3", "constant: vLLM's DFlash is a Qwen3 decoder"),
        "tie_word_embeddings": (False, "constant: a drafter has no embedding of its own"),
        "use_sliding_window": (sliding, "layer_types: else transformers drops sliding_window"),
        "max_window_layers": (values["num_hidden_layers"], "number of layers: layer_types decides instead"),
    }
    if not sliding:
        constants["sliding_window"] = (None, "layer_types: no sliding layer")
    for key, (value, source) in constants.items():
        values[key], sources[key] = value, source

    config: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    for key in (
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
    ):
        config[key], provenance[key] = values[key], sources[key]
    config["dflash_config"] = {}
    for key in ("mask_token_id", "target_layer_ids"):
        config["dflash_config"][key], provenance[f"dflash_config.{key}"] = values[key], sources[key]
    # 0.20 captures the output of layer L-1 for target_layer_ids L, but takes these ids as they are; both
    # keys together are right on every version.
    config["eagle_aux_hidden_state_layer_ids"] = [tap + 1 for tap in values["target_layer_ids"]]
    provenance["eagle_aux_hidden_state_layer_ids"] = f"target_layer_ids + 1 ({sources['target_layer_ids']})"
    width = target.size("hidden_size")
    if width != values["hidden_size"]:
        config["target_hidden_size"] = width
        provenance["target_hidden_size"] = f"target: {target.section}hidden_size ({taps} taps fill fc.weight)"
    return Rendered(config, provenance, warnings, environment)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
