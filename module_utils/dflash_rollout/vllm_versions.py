"""What the versions of vLLM do differently with a DFlash drafter; read in the published wheels.

Only what decides a warning or an environment variable is here. That the config writes both layer-id keys
makes the taps right on every version, so the off-by-one of 0.20 and 0.21 needs no entry.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import RolloutError


@dataclass(frozen=True)
class Behaviour:
    """From version `since` on (until the next entry)."""

    since: tuple[int, int]
    honours_windows: bool
    mixed_needs_v2_runner: bool


BEHAVIOURS = (
    Behaviour((0, 20), honours_windows=False, mixed_needs_v2_runner=False),
    Behaviour((0, 26), honours_windows=True, mixed_needs_v2_runner=True),
)


def effects(
    vllm_version: str, layer_types: Sequence[str], sliding_window: int | None
) -> tuple[list[str], dict[str, Any]]:
    """Warnings, and the environment variables that this version needs, for a drafter with these layers.

    Raises RolloutError for what is no version, and for one from before DFlash.
    """
    match = re.match(r"v?(\d+)\.(\d+)", vllm_version)
    if not match:
        raise RolloutError("vllm_version is no version", found=repr(vllm_version), expected="such as 0.20.1")
    version = (int(match[1]), int(match[2]))
    behaviour = next((entry for entry in reversed(BEHAVIOURS) if version >= entry.since), None)
    if behaviour is None:
        raise RolloutError(
            f"nothing is known about DFlash in vLLM {vllm_version}",
            expected=f"{_dotted(BEHAVIOURS[0].since)} or later",
            remedy="use the locked version",
        )
    warnings, environment = [], {}
    if "sliding_attention" in layer_types and not behaviour.honours_windows:
        honoured = next(entry.since for entry in BEHAVIOURS if entry.honours_windows)
        warnings.append(
            f"vLLM {vllm_version} ignores the drafter's sliding window (all layers run as full attention): "
            f"acceptance falls once a context is longer than {sliding_window} tokens "
            f"(vLLM {_dotted(honoured)} honours it)."
        )
    if len(set(layer_types)) == 2 and behaviour.mixed_needs_v2_runner:
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        warnings.append(
            f"vLLM {vllm_version} wants VLLM_USE_V2_MODEL_RUNNER=1 for a drafter of sliding and full layers."
        )
    return warnings, environment


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
