"""The whole job on two booted hosts: what a user types, and what they see."""

from __future__ import annotations

import hashlib
import re
import shlex

import pytest

from .conftest import Fleet, _boot, bed

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

WEIGHTS = "/opt/vllm-dflash/drafters/*/model.safetensors"
# Pages that are not written yet would stay.
DROP = """
import os, sys
for path in sys.argv[1:]:
    with open(path, "rb") as stream:
        os.fdatasync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
"""
UNITS = "systemctl list-units --no-legend --plain 'vllm-dflash@*' | cut -d ' ' -f 1"


@pytest.fixture(scope="module")
def fleet(bootable, full_drafter):
    """Two fresh hosts for the whole file: its tests are the steps of one story, in order."""
    bed("down", "site")
    hosts = _boot("site", 2, "--layer")
    for host in hosts:
        host.wait("curl -sf http://127.0.0.1:30000/v1/models")
    yield Fleet(hosts, full_drafter)
    bed("down", "site")


def weights_in_memory(host) -> int:
    """Bytes of the drafter's weights that are in the page cache, as util-linux counts them."""
    return int(host.run(f"fincore --bytes --noheadings --output RES {WEIGHTS}"))


def drop_weights(host) -> None:
    """Take them out of it, and be sure that they are."""
    host.run(f"python3 -c {shlex.quote(DROP)} {WEIGHTS}")
    assert weights_in_memory(host) == 0


def completion(host) -> dict:
    return host.get(
        ":30000/v1/completions", body={"model": "Qwen3.6-27B", "prompt": "Hello", "max_tokens": 8}
    )


def test_check_mode_shows_a_fresh_host_what_would_be_written(fleet):
    before = [host.show("sglang.service", "MainPID") for host in fleet.hosts]
    play = fleet.play("site.yml", "--check", "--diff")
    assert play.status == 0, play.output
    assert (
        '+  "mask_token_id": 248070' in play.output.replace("\t", "  ")
        or '"mask_token_id": 248070' in play.output
    )
    assert "+max-num-batched-tokens: 8448" in play.output
    assert "+ExecStart=/opt/vllm-dflash/releases/%i/venv/bin/vllm serve --config" in play.output
    assert "not checked" in play.output
    for host in fleet.hosts:
        assert host.run("ls /opt/vllm-dflash") == "uv\nuv-cache\nvenvs"  # the layer's, nothing of the play's
        assert host.run("ls /etc/systemd/system | grep -c ^llm-", check=False) == "0"
    assert [host.show("sglang.service", "MainPID") for host in fleet.hosts] == before


def test_one_command_takes_both_hosts_over(fleet):
    play = fleet.play()
    assert play.status == 0, play.output
    digest = hashlib.sha256()
    with fleet.drafter.open("rb") as stream:
        while piece := stream.read(1 << 24):
            digest.update(piece)
    for host in fleet.hosts:
        unit = host.run(UNITS)
        assert host.show(unit, "ActiveState") == "active"
        assert host.show(unit, "NRestarts") == "0"
        assert host.show("sglang.service", "ActiveState") == "inactive"
        answer = completion(host)
        assert answer["model"] == "Qwen3.6-27B"
        assert answer["choices"][0]["text"]
        weights = host.run("realpath /opt/vllm-dflash/releases/*/drafter/model.safetensors")
        assert host.run(f"sha256sum {weights}").split()[0] == digest.hexdigest()
        assert host.show(unit, "User") == "vllm-dflash"


def test_second_run_changes_nothing_and_restarts_nothing(fleet):
    units = [host.run(UNITS) for host in fleet.hosts]
    before = [host.show(unit, "MainPID") for host, unit in zip(fleet.hosts, units, strict=True)]
    for host in fleet.hosts:
        drop_weights(host)
    play = fleet.play()
    assert play.status == 0, play.output
    assert {host.name: play.recap[host.name]["changed"] for host in fleet.hosts} == {
        host.name: 0 for host in fleet.hosts
    }, play.output
    assert [host.show(unit, "MainPID") for host, unit in zip(fleet.hosts, units, strict=True)] == before
    for host in fleet.hosts:
        assert weights_in_memory(host) < 1 << 20, "a run that changes nothing read weights"


def test_check_mode_shows_nothing_on_deployed_hosts(fleet):
    play = fleet.play("site.yml", "--check", "--diff")
    assert play.status == 0, play.output
    assert all(counts["changed"] == 0 for counts in play.recap.values()), play.output
    assert "\n+++" not in play.output


def test_the_new_server_comes_back_at_boot_and_sglang_does_not(fleet):
    host = fleet.hosts[0]
    boot = host.run("cat /proc/sys/kernel/random/boot_id")
    host.run("systemd-run --no-block --on-active=0.2 systemctl reboot")
    host.wait(f'test "$(cat /proc/sys/kernel/random/boot_id)" != {boot}', 60)
    host.wait("curl -sf http://127.0.0.1:30000/version", 120)
    assert completion(host)["choices"][0]["text"]
    assert host.show("sglang.service", "ActiveState") in ("inactive", "failed")
    assert host.show("sglang.service", "UnitFileState") == "enabled"


def test_rollback_brings_sglang_back_host_by_host(fleet):
    play = fleet.play("playbooks/rollback.yml")
    assert play.status == 0, play.output
    for host in fleet.hosts:
        assert re.search(rf"{host.name} +sglang +yes .* CONFIRMED ", play.output), play.output
    for host in fleet.hosts:
        assert host.show("sglang.service", "ActiveState") == "active"
        assert host.run(UNITS) == ""
        assert completion(host)["choices"][0]["text"]


def test_a_switch_begins_with_the_weights_in_memory(fleet):
    host = fleet.hosts[0]
    drop_weights(host)
    # The engine is simulated and reads no weights. A small machine has no 8 GiB to leave alone.
    play = fleet.play("site.yml", "--limit", host.name, switchover_warm_reserve_mib=512)
    assert play.status == 0, play.output
    assert host.show(host.run(UNITS), "ActiveState") == "active"
    # The last line is the end; those before it say how far the reading is.
    said = re.findall(r"(\S+ GB) of (\S+ GB) of weights are in the page cache", play.output)
    assert said, play.output
    assert said[-1][0] == said[-1][1]
    assert "left where it is" not in play.output
    # Nearly all of it is still there after the switch; the kernel may take some back for others.
    assert weights_in_memory(host) > int(host.run(f"stat -c %s {WEIGHTS}")) / 2, play.output
