"""The module release as Ansible runs it."""

from __future__ import annotations

import pytest


@pytest.fixture
def args(tmp_path):
    (tmp_path / "releases").mkdir()
    return {
        "root": str(tmp_path / "releases"),
        "files": {"vllm.yaml": "model: @release@/drafter\n", "drafter/config.json": "{}\n"},
        "links": {"venv": str(tmp_path)},
        "modes": {"drafter/config.json": "0640"},
    }


def test_plan_make_repeat(run_module, args, tmp_path):
    planned = run_module("release", args, check=True, diff=True)
    assert planned["changed"]
    assert list((tmp_path / "releases").iterdir()) == []
    assert planned["diff"][-1]["after"] == f"model: {planned['path']}/drafter\n"

    made = run_module("release", args)
    assert made["changed"]
    assert (made["path"], made["digest"]) == (planned["path"], planned["digest"])
    assert "diff" not in made
    text = (tmp_path / "releases" / made["digest"] / "vllm.yaml").read_text()
    assert text == f"model: {made['path']}/drafter\n"

    again = run_module("release", {**args, "compare_to": made["path"]}, diff=True)
    assert (again["changed"], again["diff"]) == (False, [])


def test_a_tampered_release_fails_and_names_the_file(run_module, args, tmp_path):
    path = tmp_path / "releases" / run_module("release", args)["digest"]
    (path / "vllm.yaml").write_text("model: /tmp/other\n")
    result = run_module("release", args)
    assert result["failed"]
    assert "vllm.yaml has another content" in result["msg"]
    assert (path / "vllm.yaml").read_text() == "model: /tmp/other\n"


def test_a_link_to_nothing_fails_but_not_in_check_mode(run_module, args, tmp_path):
    args["links"] = {"venv": str(tmp_path / "nowhere")}
    assert run_module("release", args, check=True)["changed"]
    result = run_module("release", args)
    assert result["failed"]
    assert f"no {tmp_path}/nowhere" in result["msg"]
