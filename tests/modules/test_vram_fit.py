"""vram_fit as a process, on a target folder with full-size headers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import QWEN3_6_27B, as_json, drafter_shapes, qwen3_6_27b_shapes, write_sparse


@pytest.fixture
def args(tmp_path):
    target = tmp_path / "Qwen3.6-27B"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN3_6_27B))
    shapes = qwen3_6_27b_shapes()
    halves = {"a.safetensors": list(shapes)[::2], "b.safetensors": list(shapes)[1::2]}
    for name, names in halves.items():
        write_sparse(target / name, {key: shapes[key] for key in names})
    weight_map = {key: name for name, names in halves.items() for key in names}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {
        "target": str(target),
        "drafter_tensors": as_json(drafter_shapes()),
        "gpus": [{"memory_total_mib": 49140}, {"memory_total_mib": 49140}],
        "tensor_parallel_size": 2,
        "max_model_len": 32768,
        "max_num_seqs": 16,
        "language_model_only": True,
    }


def test_table_for_the_real_pair(run_module, args):
    result = run_module("vram_fit", args, check=True)
    assert result["changed"] is False
    assert result["table"]["requests_max_model_len"] == 3
    assert result["table"]["usable_gib"] == 44.15
    assert any("left for the cache" in line for line in result["lines"])
    assert "max-num-seqs 16 promises more" in str(result["warnings"])


@pytest.mark.parametrize(
    ("change", "fragment"),
    [
        ({"gpus": [{"memory_total_mib": 24564}] * 2}, "not one request of 32,768 tokens fits"),
        ({"gpus": [{"memory_total_mib": None}] * 2}, "does not say how much memory"),
        ({"target": "/nowhere"}, "/nowhere"),
    ],
)
def test_refusals(run_module, args, change, fragment):
    result = run_module("vram_fit", {**args, **change})
    assert result["failed"] is True
    assert fragment in result["msg"]
