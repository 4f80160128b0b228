"""dflash_config as a process: writing, check mode, diff mode, refusals."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import PROFILE_27B, QWEN3_6_27B, as_json, drafter_shapes, write_sparse
from published_pairs import PAIRS


@pytest.fixture
def args(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN3_6_27B))
    return {
        "weights": str(write_sparse(tmp_path / "model.safetensors", drafter_shapes())),
        "target_config": str(target / "config.json"),
        "dest": str(tmp_path / "config.json"),
        "profile": PROFILE_27B,
    }


def test_writes_once_and_then_changes_nothing(run_module, args):
    dest = Path(args["dest"])
    first = run_module("dflash_config", args, diff=True)
    assert first["changed"] is True
    assert json.loads(dest.read_text()) == first["config"]
    assert list(first["config"])[:3] == ["architectures", "model_type", "vocab_size"]
    assert first["config"]["eagle_aux_hidden_state_layer_ids"] == [2, 17, 32, 47, 62]
    assert first["provenance"]["hidden_size"] == "tensors: rows of fc.weight"
    assert first["diff"]["before"] == ""
    assert first["diff"]["before_header"] == f"{dest} (absent)"
    assert first["diff"]["after"] == dest.read_text()
    assert "ignores the drafter's sliding window" in str(first["warnings"])
    assert dest.stat().st_mode & 0o777 == 0o644

    before = dest.stat()
    second = run_module("dflash_config", args, diff=True)
    assert second["changed"] is False
    assert second["diff"]["before"] == second["diff"]["after"]
    assert (dest.stat().st_mtime_ns, dest.stat().st_ino) == (before.st_mtime_ns, before.st_ino)


def test_check_mode_shows_and_writes_nothing(run_module, args):
    result = run_module("dflash_config", args, check=True, diff=True)
    assert result["changed"] is True
    assert '"mask_token_id": 248070' in result["diff"]["after"]
    assert not Path(args["dest"]).exists()


def test_check_mode_on_a_fresh_host_takes_header_and_target_from_the_control_node(run_module, tmp_path):
    args = {
        "tensors": as_json(drafter_shapes()),
        "target": QWEN3_6_27B,
        "dest": str(tmp_path / "not" / "there" / "config.json"),
        "profile": PROFILE_27B,
        "mode": "0640",
    }
    result = run_module("dflash_config", args, check=True, diff=True)
    assert result["changed"] is True
    assert result["config"]["hidden_size"] == 5120
    failed = run_module("dflash_config", args)
    assert "can't be written" in failed["msg"]
    assert "create" in failed["msg"]


def test_without_dest_it_only_returns(run_module, args, tmp_path):
    del args["dest"]
    before = sorted(os.listdir(tmp_path))
    result = run_module("dflash_config", args)
    assert result["changed"] is False
    assert result["config"]["num_hidden_layers"] == 5
    assert sorted(os.listdir(tmp_path)) == before


def test_mode_is_kept_right(run_module, args):
    run_module("dflash_config", {**args, "mode": "0640"})
    assert os.stat(args["dest"]).st_mode & 0o777 == 0o640
    os.chmod(args["dest"], 0o600)
    assert run_module("dflash_config", {**args, "mode": "0640"})["changed"] is True
    assert run_module("dflash_config", {**args, "mode": "0640"})["changed"] is False


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (
            {"profile": {}},
            ["layer_types unknown", "z-lab/Qwen3.5-27B-DFlash", "name one of them as `drafter`"],
        ),
        ({"profile": {**PROFILE_27B, "mask_token_id": 248320}}, ["mask_token_id is out of range"]),
        ({"weights": "/nowhere/model.safetensors"}, ["/nowhere/model.safetensors is not there"]),
        ({"target_config": "/nowhere"}, ["target's config /nowhere can't be read"]),
        ({"tensors": {"a": {}}}, ["mutually exclusive"]),
        ({"vllm_version": "new"}, ["vllm_version is no version"]),
    ],
)
def test_refusals_leave_dest_alone(run_module, args, tmp_path, change, fragments):
    Path(args["dest"]).write_text("the config before")
    before = sorted(os.listdir(tmp_path))
    result = run_module("dflash_config", {**args, **change})
    assert result["failed"] is True
    for fragment in fragments:
        assert fragment in result["msg"]
    assert Path(args["dest"]).read_text() == "the config before"
    assert sorted(os.listdir(tmp_path)) == before


def test_a_failed_write_leaves_no_partial_file(run_module, args, tmp_path):
    Path(args["dest"]).mkdir()
    before = sorted(os.listdir(tmp_path))
    result = run_module("dflash_config", args)
    assert "can't be read" in result["msg"]
    assert sorted(os.listdir(tmp_path)) == before


def small(tmp_path):
    """Weights small enough to be hashed in a test."""
    shapes = drafter_shapes(hidden=64, inner=96, layers=5, heads=4, kv_heads=2, head_dim=16, fc=5 * 5120)
    return write_sparse(tmp_path / "small.safetensors", shapes)


def test_the_config_beside_the_weights_is_a_source(run_module, args, tmp_path):
    shipped = tmp_path / "config.json"
    shipped.write_text(json.dumps(PAIRS[0].shipped))
    args = {**args, "dest": str(tmp_path / "rendered.json"), "profile": {}}
    result = run_module("dflash_config", args)
    assert result["provenance"]["layer_types"] == f"shipped config {shipped}"
    assert result["config"]["dflash_config"]["mask_token_id"] == 248070
    control = {key: value for key, value in args.items() if key != "weights"}
    control |= {"tensors": as_json(drafter_shapes()), "shipped_config": str(shipped)}
    elsewhere = run_module("dflash_config", {**control, "shipped": shipped.read_text()})
    assert (elsewhere["config"], elsewhere["provenance"]) == (result["config"], result["provenance"])
    failed = run_module("dflash_config", {**control, "shipped": "<html>404</html>"})["msg"]
    assert f"the shipped config {shipped} is not JSON" in failed
    assert "<html>404" in failed
    # Left out, it is not read, and what it knew is missing.
    assert "layer_types unknown" in run_module("dflash_config", {**args, "shipped_config": ""})["msg"]


def test_what_it_wrote_itself_is_no_source(run_module, args):
    run_module("dflash_config", args)
    again = run_module("dflash_config", {**args, "profile": {}})
    assert "layer_types unknown" in again["msg"]


def test_a_shipped_config_of_another_family_is_refused(run_module, args, tmp_path):
    shipped = tmp_path / "shipped.json"
    shipped.write_text(json.dumps({**PAIRS[0].shipped, "architectures": ["DSparkDraftModel"]}))
    result = run_module("dflash_config", {**args, "shipped_config": str(shipped)})
    assert f"shipped config {shipped} is a DSpark drafter" in result["msg"]
    assert not Path(args["dest"]).exists()


def test_expected_digest(run_module, args, tmp_path):
    weights = small(tmp_path)
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    args = {**args, "weights": str(weights), "expect_sha256": digest}
    assert run_module("dflash_config", args)["changed"] is True
    Path(args["dest"]).unlink()
    result = run_module("dflash_config", {**args, "expect_sha256": "0" * 64})
    assert "has the wrong SHA-256" in result["msg"]
    assert digest in result["msg"]
    assert not Path(args["dest"]).exists()


def test_the_launch_is_checked_with_the_pair(run_module, args):
    launch = {"tensor-parallel-size": 2, "speculative-config": {"num_speculative_tokens": 15}}
    result = run_module("dflash_config", {**args, "launch": launch})
    assert "drafting leaves -1536 tokens a step" in result["msg"]
    launch |= {"max-num-seqs": 16, "max-num-batched-tokens": 8448}
    assert run_module("dflash_config", {**args, "launch": launch})["changed"] is True


def test_derivations_have_to_be_allowed(run_module, args, tmp_path):
    tokenizer = {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 248069, "content": "</think>"}]}
    (tmp_path / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    profile = {key: value for key, value in PROFILE_27B.items() if key != "mask_token_id"}
    args = {**args, "weights": str(small(tmp_path)), "profile": profile}
    assert "mask_token_id unknown" in run_module("dflash_config", args)["msg"]
    allowed = ["mask_token_id", "rms_norm_eps", "hidden_act"]
    result = run_module("dflash_config", {**args, "allow_derived": allowed})
    assert result["config"]["dflash_config"]["mask_token_id"] == 248070
    assert result["provenance"]["dflash_config.mask_token_id"].startswith("derived: first id after")
    assert "value of allow_derived must be one" in run_module(
        "dflash_config", {**args, "allow_derived": ["block_size"]}
    )["msg"]  # fmt: skip
