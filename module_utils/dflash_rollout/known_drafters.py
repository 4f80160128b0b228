"""Published DFlash drafters: what their tensors don't say. Data, in Python since Ansible ships no other file.

An entry is looked up by geometry and target together. Two may share both (the drafters of Qwen3.5-27B and
Qwen3.6-27B do); then the target's folder name or the operator has to tell them apart. A key that was not
seen published is left out: it stays unknown.

`geometry`: hidden, intermediate, layers, heads, key/value heads, head_dim, fc columns.
`target`: hidden size, layers, vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class KnownDrafter:
    """A published drafter. `source` says where its values were read."""

    name: str
    target_name: str
    geometry: tuple[int, int, int, int, int, int, int]
    target: tuple[int, int, int]
    facts: dict[str, Any]
    source: str


KNOWN = (
    KnownDrafter(
        name="z-lab/Qwen3.6-27B-DFlash",
        target_name="Qwen3.6-27B",
        geometry=(5120, 17408, 5, 32, 8, 128, 25600),
        target=(5120, 64, 248320),
        facts={
            "mask_token_id": 248070,
            "block_size": 16,
            "target_layer_ids": [1, 16, 31, 46, 61],
            "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL],
            "sliding_window": 2048,
            "rope_theta": 10000000.0,
        },
        source="its published config.json",
    ),
    KnownDrafter(
        name="z-lab/Qwen3.5-27B-DFlash",
        target_name="Qwen3.5-27B",
        geometry=(5120, 17408, 5, 32, 8, 128, 25600),
        target=(5120, 64, 248320),
        facts={
            "mask_token_id": 248070,
            "block_size": 16,
            "target_layer_ids": [1, 16, 31, 46, 61],
            "layer_types": [FULL, FULL, FULL, FULL, FULL],
        },
        source="its published config.json",
    ),
    KnownDrafter(
        name="z-lab/Qwen3.6-35B-A3B-DFlash",
        target_name="Qwen3.6-35B-A3B",
        geometry=(2048, 6144, 6, 32, 8, 128, 16384),
        target=(2048, 40, 248320),
        facts={
            "mask_token_id": 248077,
            "block_size": 16,
            "target_layer_ids": [1, 6, 11, 16, 22, 27, 32, 37],
            "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL],
            "sliding_window": 4096,
            "rope_theta": 10000000.0,
        },
        source="its published config.json as public tests quote it",
    ),
    KnownDrafter(
        # Its layer_types were not seen, so a profile or the shipped config.json has to give them.
        name="z-lab/Qwen3.5-122B-A10B-DFlash",
        target_name="Qwen3.5-122B-A10B",
        geometry=(3072, 9216, 6, 32, 8, 128, 24576),
        target=(3072, 48, 248320),
        facts={
            "mask_token_id": 248077,
            "block_size": 16,
            "target_layer_ids": [1, 7, 14, 20, 26, 32, 39, 45],
            "rope_theta": 10000000.0,
        },
        source="its published config.json as public code quotes it",
    ),
)
