"""The command line: what it prints, what it writes, how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_rollout.drafter_cli import main

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import PROFILE_27B, QWEN3_6_27B, drafter_shapes, write_sparse
from published_pairs import PAIRS
from test_drafter_config import EXPECTED_27B


@pytest.fixture
def files(tmp_path):
    target = tmp_path / "Qwen3.6-27B"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(QWEN3_6_27B))
    (tmp_path / "profile.json").write_text(json.dumps(PROFILE_27B))
    weights = write_sparse(tmp_path / "model.safetensors", drafter_shapes())
    return {"weights": str(weights), "target": str(target), "profile": str(tmp_path / "profile.json")}


def test_inspect_says_what_is_known_and_what_is_not(files, capsys):
    assert main(["inspect", files["weights"], "--target", files["target"]]) == 0
    out = capsys.readouterr().out
    for fragment in (
        "a plain DFlash drafter",
        "58 of bfloat16, 3,460,426,240 bytes",
        "32 heads, 8 key/value heads of 128",
        "5 (fc columns / target's 5120)",
        "z-lab/Qwen3.6-27B-DFlash or z-lab/Qwen3.5-27B-DFlash",
        "not in the file     mask_token_id, block_size, target_layer_ids,",
    ):
        assert fragment in out
    assert max(map(len, out.splitlines()[1:])) <= 100


def test_render_prints_the_config_and_its_sources(files, capsys):
    arguments = ["render", files["weights"], "--target", files["target"], "--profile", files["profile"]]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == EXPECTED_27B
    assert "4 sliding_attention + 1 full_attention" in printed.err
    assert "tensors: length of q_norm" in printed.err
    assert "warning: vLLM 0.20.1 ignores the drafter's sliding window" in printed.err


def test_the_published_config_beside_the_weights_is_a_source(files, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PAIRS[0].shipped))
    arguments = ["render", files["weights"], "--target", files["target"]]
    assert main(arguments) == 0
    assert f"shipped config {tmp_path / 'config.json'}" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(arguments) == 1
    assert "is not JSON" in capsys.readouterr().err
    assert main([*arguments, "--shipped-config", "", "--drafter", PAIRS[0].name]) == 0


def test_render_writes_once(files, tmp_path, capsys):
    dest = tmp_path / "config.json"
    arguments = [
        "render",
        files["weights"],
        "--target",
        f"{files['target']}/config.json",
        "--dest",
        str(dest),
    ]
    assert main(arguments) == 0  # the target's name tells the published drafter
    assert json.loads(dest.read_text()) == EXPECTED_27B
    assert "wrote" in capsys.readouterr().err
    assert main(arguments) == 0
    assert "already so" in capsys.readouterr().err


def test_refusals_are_one_message_and_exit_1(files, tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nothing.safetensors")]) == 1
    assert "nothing.safetensors is not there. What to do:" in capsys.readouterr().err
    arguments = ["render", files["weights"], "--target", files["target"], "--drafter", "z-lab/other"]
    assert main(arguments) == 1
    assert "is not known here: z-lab/other" in capsys.readouterr().err


def test_runs_with_nothing_but_python(files):
    module_utils = Path(__file__).parents[2] / "module_utils"
    process = subprocess.run(
        [sys.executable, "-S", "-m", "dflash_rollout.drafter_cli", "inspect", files["weights"]],
        cwd=module_utils,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "a plain DFlash drafter" in process.stdout
