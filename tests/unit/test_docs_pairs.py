"""What docs/other-pairs.md says of Qwen3-8B is what the code does with a drafter of these shapes."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from dflash_rollout import drafter_cli
from dflash_rollout.drafter_layout import read_geometry
from dflash_rollout.errors import RolloutError
from dflash_rollout.pairing import check_pair
from dflash_rollout.safetensors import read_checkpoint

sys.path.insert(0, str(Path(__file__).parents[1]))
from drafters import drafter_shapes, write_sparse
from published_pairs import QWEN3_4B

DOC = (Path(__file__).parents[2] / "docs/other-pairs.md").read_text()
VARIABLES = yaml.safe_load(re.search(r"```yaml\n(.*?)```", DOC, re.DOTALL)[1])


@pytest.fixture
def models(tmp_path):
    (tmp_path / "Qwen3-8B-DFlash").mkdir()
    (tmp_path / "Qwen3-8B").mkdir()
    shapes = drafter_shapes(hidden=4096, inner=12288, fc=5 * 4096)
    write_sparse(tmp_path / "Qwen3-8B-DFlash/model.safetensors", shapes)
    target = {**QWEN3_4B, "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
    (tmp_path / "Qwen3-8B/config.json").write_text(json.dumps(target))
    return tmp_path


def commands(models):
    lines = re.findall(r"^python3 -m dflash_rollout.drafter_cli (.*)$", DOC, re.MULTILINE)
    return [shlex.split(line.replace("/root/models", str(models))) for line in lines]


def test_the_commands_say_what_the_page_says(models, capsys):
    inspect, render = commands(models)
    assert drafter_cli.main(inspect) == 0
    said = " ".join(capsys.readouterr().out.split())
    for wanted in ("layers 5", "32 heads, 8 key/value heads of 128", "hidden size 4096", "fc columns 20480"):
        assert wanted in said
    assert drafter_cli.main(render) == 1
    refusal = " ".join(capsys.readouterr().err.split())
    quoted = re.search(r"names what no source knows:\n```text\n(.*?)\n```", DOC, re.DOTALL)[1]
    assert quoted in refusal


def test_with_the_profile_of_the_page_there_is_a_config(models, capsys):
    profile = models / "profile.json"
    profile.write_text(json.dumps(VARIABLES["drafter_profile"]))
    render = commands(models)[1]
    assert drafter_cli.main([*render, "--profile", str(profile)]) == 0
    config = json.loads(capsys.readouterr().out)
    assert config["dflash_config"] == {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 10, 18, 26, 34]


def test_the_launch_of_the_page_passes(models):
    geometry = read_geometry(read_checkpoint(str(models / "Qwen3-8B-DFlash")).tensors)
    launch = {
        **VARIABLES["vllm_service_args"],
        "speculative-config": VARIABLES["vllm_service_speculative_config"],
    }
    target = json.loads((models / "Qwen3-8B/config.json").read_text())
    block_size = VARIABLES["drafter_profile"]["block_size"]
    assert check_pair(target, geometry, block_size, launch) == []
    with pytest.raises(RolloutError, match="max-num-batched-tokens"):
        check_pair(target, geometry, block_size, {**launch, "max-num-batched-tokens": 224})


@pytest.mark.parametrize("page", ["other-pairs", "upgrading"])
def test_what_a_page_names_is_there(page):
    root = Path(__file__).parents[2]
    text = (root / f"docs/{page}.md").read_text()
    for path in set(re.findall(r"(?:playbooks|docs|examples|module_utils)/[\w./-]*\w", text)):
        assert (root / path).exists(), path
    known = set(re.findall(r"^\| `(\w+)` \|", (root / "docs/variables.md").read_text(), re.MULTILINE))
    named = set(re.findall(r"\b(?:vllm|drafter|switchover|rollout)_[a-z_]+\b", text))
    assert named - known - {"drafter_cli", "dflash_rollout"} == set()
    assert len(text.splitlines()) <= 62
