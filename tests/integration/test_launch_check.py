"""What vLLM 0.20.1 itself, real wheel and simulated 2x RTX A6000, says of launches of the pair.

As a user without rights, in a sandbox like the server's, over ssh, and first of all with nothing cached.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from drafters import drafter_shapes, write_sparse

sys.path.insert(0, str(Path(__file__).parents[2] / "module_utils"))

from dflash_rollout.vllm_yaml import to_yaml

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

TARGET = "/root/models/Qwen3.6-27B"
FOLDER = "/opt/launch-check"
CACHE = "/var/cache/launch-check"
ROLE = yaml.safe_load(
    (Path(__file__).parents[2] / "roles/vllm_service/vars/main.yml").read_text(encoding="utf-8")
)
# The role's own list, but for what it fills in: user and folders are others here.
SANDBOX = [
    "User=nobody",
    "CacheDirectory=launch-check",
    f"Environment=HOME={CACHE}",
    f"BindReadOnlyPaths={TARGET}",
    *(line for line in ROLE["__vllm_service_sandbox"] if "{{" not in line),
]

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "block_size": 16,
    "num_target_layers": 64,
    "dtype": "bfloat16",
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
    "sliding_window": 2048,
    "use_sliding_window": True,
    "max_window_layers": 5,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "eagle_aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
}

FLAGS = {
    "model": TARGET,
    "served-model-name": ["Qwen3.6-27B"],
    "host": "0.0.0.0",  # noqa: S104
    "port": 30000,
    "tensor-parallel-size": 2,
    "max-model-len": 32768,
    "reasoning-parser": "qwen3",
    "enable-auto-tool-choice": True,
    "tool-call-parser": "qwen3_coder",
    "language-model-only": True,
    "trust-remote-code": False,
    "max-num-seqs": 16,
    "max-num-batched-tokens": 8448,
    "shutdown-timeout": 30,
    "speculative-config": {"method": "dflash", "model": f"{FOLDER}/drafter", "num_speculative_tokens": 15},
}


@pytest.fixture(scope="module")
def python(layer_host) -> str:
    """The Python of the one venv in the release layer."""
    return layer_host.run("ls -d /opt/vllm-dflash/venvs/*/bin/python")


def put_drafter(host, tmp_path, config: dict, shapes: dict) -> None:
    """A drafter folder on the host, whose weights are a true header and a hole."""
    local = write_sparse(tmp_path / "model.safetensors", shapes)
    with local.open("rb") as stream:
        length = stream.read(8)
        header = length + stream.read(int.from_bytes(length, "little"))
    host.run(f"mkdir -p {FOLDER}/drafter")
    host.put(json.dumps(config), f"{FOLDER}/drafter/config.json")
    host.put(header, f"{FOLDER}/drafter/model.safetensors")
    host.run(f"truncate -s {local.stat().st_size} {FOLDER}/drafter/model.safetensors")


@pytest.fixture
def check(layer_host, python, tmp_path):
    """`check(config={…}, shapes={…}, flags={…})` → what the module says of the launch with these changes."""

    def ask(config: dict | None = None, shapes: dict | None = None, flags: dict | None = None) -> dict:
        put_drafter(layer_host, tmp_path, DRAFTER | (config or {}), shapes or drafter_shapes())
        layer_host.put(to_yaml(FLAGS | (flags or {})), f"{FOLDER}/vllm.yaml")
        return layer_host.module(
            "vllm_launch_check", python=python, config=f"{FOLDER}/vllm.yaml", unit_properties=SANDBOX
        )

    return ask


@pytest.fixture
def empty_caches(layer_host):
    layer_host.run(f"rm -rf {CACHE} /var/cache/private/launch-check")


def refused(result: dict, phase: str, *words: str) -> None:
    assert result.get("failed"), result
    assert result["phase"] == phase, result
    for word in words:
        assert word in result["msg"], result["msg"]
    assert "Traceback" not in result["msg"]
    assert "\n" not in result["msg"]


def test_budget_of_the_original_launch(check, empty_caches):
    """vLLM's defaults on cards under 70 GiB, which the original command left as they are."""
    result = check(flags={"max-num-batched-tokens": 2048, "max-num-seqs": 256})
    refused(
        result, "engine config", "max_num_scheduled_tokens is set to -1536", "Increase max_num_batched_tokens"
    )


def test_shipped_launch(check, empty_caches):
    result = check()
    assert not result.get("failed"), result
    found = {key: result[key] for key in ("checked", "changed", "vllm_version", "cuda_initialized")}
    assert found == {"checked": True, "changed": False, "vllm_version": "0.20.1", "cuda_initialized": False}
    assert (result["tensors_loaded"], result["tensors_expected"]) == (58, 58)
    assert result["scheduled_tokens"] == 8448 - 14 * 16 == 8224
    assert result["aux_layers"] == [2, 17, 32, 47, 62]
    assert result["mask_token_id"] == 248070
    assert result["attention_backend"] == "FLASH_ATTN"
    assert (result["tensor_parallel_size"], result["max_model_len"]) == (2, 32768)
    assert 200 < result["max_rss_mib"] < 4096


def test_wrong_head_count(check):
    """vLLM would take half of the rows of q_proj and say nothing."""
    refused(
        check(config={"num_attention_heads": 16}), "weights", "self_attn.q_proj.weight", "of 20971520 values"
    )


def test_wrong_head_dim(check):
    refused(
        check(config={"head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 4}),
        "weights",
        "_norm.weight",
        "256",
    )


def test_missing_tensor(check):
    """The half of a fused parameter: vLLM's own set of loaded names would not miss it."""
    shapes = drafter_shapes()
    del shapes["layers.3.mlp.up_proj.weight"]
    refused(
        check(shapes=shapes), "weights", "layers.3.mlp.gate_up_proj.weight", "layers.3.mlp.gate_proj.weight"
    )


def test_tensor_too_many(check):
    shapes = drafter_shapes() | {"layers.5.mlp.up_proj.weight": [17408, 5120]}
    refused(check(shapes=shapes), "weights", "no place for layers.5.mlp.up_proj.weight")


def test_three_taps(check):
    """In both keys, the drafter's fc does not fit; in one of them it does, and would be fed too little."""
    both = {
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 31, 61]},
        "eagle_aux_hidden_state_layer_ids": [2, 32, 62],
    }
    refused(check(config=both), "weights", "fc.weight", "15360")
    refused(check(config={"eagle_aux_hidden_state_layer_ids": [2, 32, 62]}), "weights", "15360", "25600")


def test_aux_layer_beyond_the_target(check):
    config = {"eagle_aux_hidden_state_layer_ids": [2, 17, 32, 47, 99]}
    refused(check(config=config), "aux layers", "[2, 17, 32, 47, 99]", "64 layers")


@pytest.mark.parametrize("mask", [None, 248320])
def test_mask_token_outside_the_vocabulary(check, mask):
    config = {"dflash_config": {"mask_token_id": mask, "target_layer_ids": [1, 16, 31, 46, 61]}}
    refused(check(config=config), "mask token", f"mask_token_id {mask}", "248320")


def test_unknown_tool_call_parser(check):
    refused(check(flags={"tool-call-parser": "qwen4_coder"}), "parse", "qwen4_coder", "qwen3_coder")


def test_misspelt_flag(check):
    refused(check(flags={"max-model-length": 32768}), "parse", "--max-model-length")


def test_target_missing(check):
    refused(check(flags={"model": "/root/models/absent"}), "parse", "target's folder /root/models/absent")


READ_BACK = """
import json, sys
from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
make_arg_parser(parser.add_subparsers().add_parser("serve"))
args = vars(parser.parse_args(["serve", "--config", sys.argv[1]]))
print("READ", json.dumps({name: args[name] for name in json.loads(sys.argv[2])}))
"""


def test_every_flag_comes_back_as_meant(layer_host, python):
    """vLLM's own reader on what vllm_yaml renders, with values that YAML is known to twist."""
    flags = FLAGS | {
        "enable-prefix-caching": False,
        "enable-chunked-prefill": True,
        "disable-log-stats": False,
        "gpu-memory-utilization": 0.9,
        "cpu-offload-gb": 1e-06,
        "served-model-name": ["1e3", "yes", "2026-12-02"],
        "chat-template": 'a: {b}\n"q" é😀 -- #x',
        "hf-overrides": {"factor": 1e-06, "text": "yes", "n": None, "off": False, "deep": {"list": [1, "2"]}},
    }
    wanted = {key.replace("-", "_"): value for key, value in flags.items()}
    layer_host.run(f"mkdir -p {FOLDER}")
    layer_host.put(to_yaml(flags), f"{FOLDER}/read.yaml")
    layer_host.put(READ_BACK, f"{FOLDER}/read.py")
    names = json.dumps(list(wanted))
    output = layer_host.run(f"{python} -B {FOLDER}/read.py {FOLDER}/read.yaml '{names}'")
    line = next(line for line in output.splitlines() if line.startswith("READ "))
    assert json.loads(line.removeprefix("READ ")) == wanted


def test_shipped_launch_without_bytecode_either(check, empty_caches, layer_host):
    """As on a host where nothing ever ran: no model-info, no Triton, no bytecode. The last one here, since all are slow then."""
    assert "ProtectSystem=strict" in SANDBOX
    assert "SystemCallFilter=~@privileged" in SANDBOX
    layer_host.run("find /opt/vllm-dflash/venvs -name __pycache__ -prune -exec rm -rf {} +")
    result = check()
    assert result.get("checked"), result
    assert (result["tensors_loaded"], result["tensors_expected"]) == (58, 58)
    assert layer_host.run("find /opt/vllm-dflash/venvs -name __pycache__ | wc -l") == "0"
