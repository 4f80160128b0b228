"""Each published pair on the real wheel: vLLM's loader takes its header under the config rendered for it.

The targets are configs built from public facts, with the test bed's tokenizer and no weights.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from drafters import as_json, write_sparse
from published_pairs import PAIRS

sys.path.insert(0, str(Path(__file__).parents[2] / "module_utils"))

from dflash_rollout.drafter_config import render
from dflash_rollout.drafter_facts import facts_of
from dflash_rollout.safetensors import tensors_from_json
from dflash_rollout.vllm_yaml import to_yaml

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

SIMULATED_TARGET = "/root/models/Qwen3.6-27B"
FOLDER = "/opt/published-pairs"
SANDBOX = [
    "User=nobody",
    "CacheDirectory=published-pairs",
    "Environment=HOME=/var/cache/published-pairs",
    "ProtectSystem=strict",
    "PrivateTmp=yes",
]
QWEN3_4B = PAIRS[4]
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32768,
}


@pytest.fixture
def ask(layer_host, tmp_path):
    """`ask(pair, shipped={…}, shapes={…})` → what vLLM says of the pair with these changes."""
    python = layer_host.run("ls -d /opt/vllm-dflash/venvs/*/bin/python")

    def run(pair, shipped: dict | None = None, shapes: dict | None = None) -> dict:
        shapes = pair.shapes | (shapes or {})
        rendered = render(
            tensors_from_json(as_json(shapes)),
            pair.target,
            pair.profile,
            shipped=facts_of(pair.shipped | (shipped or {}), "the published config"),
            target_name=pair.target_name,
        )
        place = f"{FOLDER}/{re.sub('[^A-Za-z0-9.]+', '-', pair.name)}"
        layer_host.run(f"mkdir -p {place}/target {place}/drafter")
        layer_host.run(f"cp {SIMULATED_TARGET}/tokenizer*.json {place}/target/")
        layer_host.put(json.dumps(pair.target), f"{place}/target/config.json")
        layer_host.put(rendered.text, f"{place}/drafter/config.json")
        local = write_sparse(tmp_path / "model.safetensors", shapes)
        with local.open("rb") as stream:
            length = stream.read(8)
            header = length + stream.read(int.from_bytes(length, "little"))
        layer_host.put(header, f"{place}/drafter/model.safetensors")
        layer_host.run(f"truncate -s {local.stat().st_size} {place}/drafter/model.safetensors")
        flags = {
            "model": f"{place}/target",
            "tensor-parallel-size": 2,
            "max-model-len": 8192,
            "max-num-seqs": 16,
            "max-num-batched-tokens": 8448,
            "language-model-only": True,
            "speculative-config": {
                "method": "dflash",
                "model": f"{place}/drafter",
                "num_speculative_tokens": rendered.config["block_size"] - 1,
            },
        }
        layer_host.put(to_yaml(flags), f"{place}/vllm.yaml")
        return layer_host.module(
            "vllm_launch_check", python=python, config=f"{place}/vllm.yaml", unit_properties=SANDBOX
        )

    return run


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_vllm_takes_the_published_pair(ask, pair):
    result = ask(pair)
    assert not result.get("failed"), result
    assert result["aux_layers"] == pair.aux
    assert result["mask_token_id"] == pair.mask_token_id
    assert (result["tensors_loaded"], result["tensors_expected"]) == (len(pair.shapes), len(pair.shapes))


def test_vllm_loads_the_embedding_and_head_of_an_older_revision(ask):
    vocab, hidden = QWEN3_4B.target["vocab_size"], QWEN3_4B.target["hidden_size"]
    extra = {"embed_tokens.weight": [vocab, hidden], "lm_head.weight": [vocab, hidden]}
    result = ask(QWEN3_4B, shapes=extra)
    assert not result.get("failed"), result
    assert result["tensors_loaded"] == len(QWEN3_4B.shapes) + 2


def test_vllm_takes_yarn_as_it_is_rendered(ask):
    result = ask(QWEN3_4B, shipped={"rope_parameters": YARN})
    assert not result.get("failed"), result
