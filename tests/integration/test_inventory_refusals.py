"""A wrong inventory is refused before any host is touched: these hosts don't even exist."""

from __future__ import annotations

import html
import os
import subprocess

import pytest

from .conftest import ROOT

HOST = "  hosts: {gpu1.invalid: {ansible_host: 127.0.0.1, ansible_port: 1}}\n"
GOOD = "drafter_source: /nowhere/model.safetensors, vllm_service_target: /root/models/Qwen3.6-27B"


def play(tmp_path, inventory: str, *options: str) -> str:
    path = tmp_path / "hosts.yml"
    path.write_text(inventory)
    done = subprocess.run(
        [
            "ansible-playbook",
            "-i",
            str(path),
            "site.yml",
            "-e",
            f"rollout_records={tmp_path}/records",
            *options,
        ],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    assert "UNREACHABLE" not in done.stdout, "a host was touched"
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ("drafter_sorce: /x", ["drafter_sorce", "drafter_source"]),
        ("drafer_profile: {block_size: 16}", ["drafer_profile", "drafter_profile"]),
        ("vllm_service_shutdown_timeout: soon", ["vllm_service_shutdown_timeout", "soon"]),
        ("drafter_profile: {mask_token: 1}", ["mask_token", "mask_token_id"]),
        ("drafter_verify: sometimes", ["drafter_verify", "stamp", "full"]),
    ],
)
def test_variable_refused(tmp_path, variables, words):
    said = play(tmp_path, f"gpu_hosts:\n{HOST}  vars: {{{GOOD}, {variables}}}\n")
    for word in words:
        assert word in said
    (page,) = (tmp_path / "records").glob("*.html")
    text = html.unescape(page.read_text())
    assert str(page) in said
    assert "0 done, 1 untouched (gpu1.invalid)." in text
    for word in words:
        assert word in text


def test_required_variable_missing(tmp_path):
    said = play(tmp_path, f"gpu_hosts:\n{HOST}")
    assert "drafter_source" in said
    assert "vllm_service_target" in said


def test_empty_group(tmp_path):
    assert "gpu_hosts" in play(tmp_path, "gpu_hosts: {}\n")


def test_group_missing(tmp_path):
    assert "gpu_hosts" in play(tmp_path, "others:\n" + HOST)


def test_limit_does_not_go_round_the_check(tmp_path):
    said = play(
        tmp_path, f"gpu_hosts:\n{HOST}  vars: {{{GOOD}, drafter_sorce: /x}}\n", "--limit", "gpu1.invalid"
    )
    assert "drafter_source" in said
