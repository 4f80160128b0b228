"""A host that has nothing of ours yet, not even the venv."""

from __future__ import annotations

import pytest

from .conftest import Fleet, fresh_hosts

pytestmark = pytest.mark.booted


@pytest.fixture
def fleet(bootable, small_drafter):
    """One host on the bare base image."""
    with fresh_hosts("bare", 1, "--small") as hosts:
        yield Fleet(hosts, small_drafter)


def test_check_mode_shows_all_of_it_and_writes_nothing(fleet):
    host = fleet.hosts[0]
    before = host.show("sglang.service", "MainPID")
    play = fleet.play("site.yml", "--check", "--diff")
    assert play.status == 0, play.output
    assert "not checked (no release yet)" in play.output
    assert '+  "mask_token_id": 248070' in play.output
    assert "+max-num-batched-tokens: 8448" in play.output
    assert "+ExecStart=/opt/vllm-dflash/releases/%i/venv/bin/vllm serve --config" in play.output
    assert host.run("ls -d /opt/vllm-dflash /var/lib/vllm-dflash 2>/dev/null", check=False) == ""
    assert host.run("getent passwd vllm-dflash", check=False) == ""
    assert host.show("sglang.service", "MainPID") == before


def test_preflight_looks_into_the_wheelhouse(fleet, tmp_path):
    play = fleet.play("playbooks/preflight.yml", vllm_wheelhouse=str(tmp_path))
    assert play.status != 0
    output = " ".join(play.output.split())
    assert f"{tmp_path} has no complete" in output, play.output
    assert "Make it: ansible-playbook playbooks/wheelhouse.yml" in output
