"""Calibration of a booted host: releases, switches and counters are real; the *simulated* engine's speed is made up."""

from __future__ import annotations

import json
import os
import re

import pytest
import yaml

from .conftest import RUN, Fleet, fresh_hosts

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

BED = os.environ.get("CALIBRATE_BED", "calib")
QUICK = {
    "calibrate_tokens": 16,
    "calibrate_concurrencies": [1, 16],
    "calibrate_num_speculative_tokens": [7, 15],
}
FILE = RUN / BED / "host_vars" / f"{BED}-gpu1" / "calibrated.yml"


@pytest.fixture(scope="module")
def fleet(bootable, small_drafter):
    """One fresh host with SGLang for the whole file: its tests are the steps of one story, in order."""
    with fresh_hosts(BED, 1, "--layer", "--small") as hosts:
        yield Fleet(hosts, small_drafter)


def serving(host) -> dict:
    state = host.run("cat /var/lib/vllm-dflash/serving.json", check=False)
    return json.loads(state) if state else {}


def faults(host, **engine) -> None:
    # So slow that the machine under the simulation has no say in it.
    host.put(json.dumps({"engine": {"token_s": 0.01, **engine}}), "/etc/simulated-gpu/faults.json")


def test_more_than_one_host_is_refused(fleet, tmp_path):
    inventory = json.loads(fleet.inventory.read_text())
    hosts = inventory["all"]["children"]["gpu_hosts"]["children"]["qwen3_6_27b_dflash"]["hosts"]
    hosts["another"] = {"ansible_host": "192.0.2.1"}
    (tmp_path / "inventory.yml").write_text(json.dumps(inventory))
    (tmp_path / "group_vars").symlink_to(RUN / BED / "group_vars")
    play = fleet.play("playbooks/calibrate.yml", "-i", str(tmp_path / "inventory.yml"))
    assert play.status != 0
    assert "Calibration takes one host, and here are 2" in play.output


def test_a_file_that_would_hide_the_result_is_refused(fleet):
    hidden = RUN / BED / "host_vars" / f"{BED}-gpu1.yml"
    hidden.parent.mkdir(exist_ok=True)
    hidden.write_text("{}\n")
    play = fleet.play("playbooks/calibrate.yml", "--check")
    hidden.unlink()
    assert play.status != 0
    assert "Ansible would read only the folder" in " ".join(play.output.split())


def test_a_candidate_that_fails_leaves_what_served(fleet):
    host = fleet.hosts[0]
    faults(host, exit_at_start=True)
    play = fleet.play("playbooks/calibrate.yml", host=host.name, **QUICK)
    assert play.status != 0, play.output
    assert "nothing is kept of this calibration" in play.output
    assert "1 rolled back" in play.output
    assert host.show("sglang.service", "ActiveState") == "active"
    assert host.get(":30000/v1/completions", body={"model": "Qwen3.6-27B", "prompt": "x", "max_tokens": 2})
    assert serving(host) == {}
    assert not FILE.exists()


def test_the_best_is_found_kept_and_written_down(fleet):
    host = fleet.hosts[0]
    faults(host)
    wrong = [{"mask_token_id": 248069}]
    more = {"calibrate_drafter_profiles": wrong, "calibrate_max_num_seqs": [4]}
    play = fleet.play("playbooks/calibrate.yml", host=host.name, **more, **QUICK)
    assert play.status == 0, play.output
    print(play.output[-4000:])
    text = FILE.read_text()
    print(text)
    assert yaml.safe_load(text) == {"vllm_service_speculative_config": {"num_speculative_tokens": 7}}
    rows = {name: row.split() for name, row in re.findall(r"^# [* ] (\S.*?) {2,}(\d.+)$", text, re.MULTILINE)}
    lost = {name: row[-1] for name, row in rows.items()}
    assert (lost["15 tokens"], lost["7 tokens"]) == ("16", "-")
    lengths = {name: row[-2] for name, row in rows.items()}
    assert float(lengths["15 tokens"]) == pytest.approx(4.2, abs=0.15)
    assert float(lengths["15 tokens, mask_token_id 248069"]) == pytest.approx(2.73, abs=0.15)
    assert lengths["no drafter"] == "-"
    # Sixteen clients of a server that answers four at a time: the others wait.
    at_16 = {name: float(row[1]) for name, row in rows.items()}
    assert at_16["no drafter, 4 at once"] < 0.7 * at_16["no drafter"]
    assert at_16["7 tokens, 4 at once"] < 0.8 * at_16["7 tokens"]
    state = serving(host)
    assert state["previous"]["unit"] == "sglang.service", "the way back leads past all trials"
    served = json.loads(host.run(f"cat /opt/vllm-dflash/releases/{state['serving']['release']}/release.json"))
    assert served["vllm"] == "0.20.1"
    flags = host.run(f"cat /opt/vllm-dflash/releases/{state['serving']['release']}/vllm.yaml")
    assert "num_speculative_tokens" in flags
    assert ": 7" in flags
    # What it wrote is what the inventory now says: there is nothing left to do.
    again = fleet.play("site.yml", switchover_acceptance="off")
    assert again.status == 0, again.output
    # but to keep the record of the switch on the control node
    changed = [line for line in again.output.splitlines() if line.startswith("changed:")]
    assert all("-> localhost]" in line for line in changed), again.output
    assert "\n1 done." in again.output
    assert serving(host) == state


def test_what_does_not_beat_no_drafter_by_the_margin_is_not_kept(fleet):
    host = fleet.hosts[0]
    before, text = serving(host), FILE.read_text()
    few = {**QUICK, "calibrate_num_speculative_tokens": [7], "calibrate_concurrencies": [16]}
    play = fleet.play("playbooks/calibrate.yml", host=host.name, calibrate_margin=9.0, **few)
    assert play.status == 0, play.output
    assert "Nothing beats serving without a drafter by 900%" in " ".join(play.output.split())
    after = serving(host)
    assert (after["serving"], after["previous"]["unit"]) == (before["serving"], "sglang.service")
    assert FILE.read_text() == text


def test_check_mode_says_what_would_be_measured(fleet):
    host = fleet.hosts[0]
    before = serving(host)
    play = fleet.play(
        "playbooks/calibrate.yml", "--check", host=host.name, calibrate_max_num_seqs=[4], **QUICK
    )
    assert play.status == 0, play.output
    for words in ("7 tokens", "no drafter; 15 tokens", "7 tokens, 4 at once; no drafter, 4 at once"):
        assert words in " ".join(play.output.split()), play.output
    assert serving(host) == before
