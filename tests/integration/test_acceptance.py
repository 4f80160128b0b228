"""The acceptance gate on a booted host: what is measured is the simulated engine's drafting, by vLLM's own counters."""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading

import pytest

from .conftest import RUN, Fleet, fresh_hosts

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

BED = "accept"
UNITS = "systemctl list-units --no-legend --plain 'vllm-dflash@*' | cut -d ' ' -f 1"
KEPT = "/var/lib/vllm-dflash/acceptance/*.json"


@pytest.fixture(scope="module")
def fleet(bootable, small_drafter):
    """One fresh host for the whole file: its tests are the steps of one story, in order."""
    with fresh_hosts(BED, 1, "--layer", "--small") as hosts:
        yield Fleet(hosts, small_drafter)


def kept(host) -> dict:
    return json.loads(host.run(f"cat {KEPT}"))


def said(play) -> str:
    return " ".join(play.output.split())


def test_observing_measures_both_sets_and_commits_them(fleet):
    play = fleet.play()
    assert play.status == 0, play.output
    record = kept(fleet.hosts[0])
    assert (record["verdict"], record["mode"], record["reference_from"]) == ("passed", "observe", "canary")
    short, long = record["sets"]["short"], record["sets"]["long"]
    assert short["length"] == pytest.approx(4.2, abs=0.03)
    assert long["length"] == pytest.approx(4.0, abs=0.03)
    assert min(long["prompt_tokens"]) > 2048 > max(short["prompt_tokens"])
    assert len(short["per_position"]) == 15
    assert short["own_share"] == long["own_share"] == 1
    assert f"{short['length']:.2f} / {long['length']:.2f}" in play.output, "the report has both"
    [reference] = json.loads((RUN / BED / "records/acceptance-references.json").read_text()).values()
    assert reference["lengths"] == {"short": short["length"], "long": long["length"]}
    assert reference["host"] == fleet.hosts[0].name
    proof = json.loads(fleet.hosts[0].run("cat /var/lib/vllm-dflash/switch/record.json"))["proof"]
    assert (proof["chat"], proof["tools"]) == ("reasoning", "tool calls")


def test_the_second_run_measures_nothing(fleet):
    host = fleet.hosts[0]
    before = host.run(f"stat -c '%Y %i' {KEPT}")
    for options in ([], ["--check", "--diff"]):
        play = fleet.play("site.yml", *options)
        assert play.status == 0, play.output
        assert play.recap[host.name]["changed"] == 0, play.output
        assert "acceptance length 4.2" in said(play)
    assert host.run(f"stat -c '%Y %i' {KEPT}") == before


def test_other_clients_are_never_a_reason_to_go_back(fleet):
    host = fleet.hosts[0]
    stop = threading.Event()

    def client():
        while not stop.is_set():
            with contextlib.suppress(subprocess.CalledProcessError):
                host.get(
                    # Short ones: the simulated engine counts a completion at its end, vLLM at each step.
                    ":30000/v1/completions",
                    body={"model": "Qwen3.6-27B", "prompt": "x", "max_tokens": 40},
                )

    clients = [threading.Thread(target=client) for _ in range(4)]
    for thread in clients:
        thread.start()
    try:
        # A reference that can't be reached: were it judged, it would go back.
        play = fleet.play(
            switchover_acceptance="enforce", switchover_acceptance_reference={"short": 9.0, "long": 9.0}
        )
    finally:
        stop.set()
        for thread in clients:
            thread.join()
    assert play.status == 0, play.output
    assert "other clients were generating" in said(play)
    assert kept(host)["verdict"] == "not judged"
    assert kept(host)["sets"]["short"]["attempts"] == 3
    assert host.show(host.run(UNITS), "ActiveState") == "active"
    assert host.show("sglang.service", "ActiveState") == "inactive"


def test_a_wrong_mask_is_rolled_back_to_sglang_which_is_proved(fleet):
    host = fleet.hosts[0]
    back = fleet.play("playbooks/rollback.yml")
    assert back.status == 0, back.output
    expected = {"mask_token_id": 248044, "aux_layers": [2, 17, 32, 47, 62], "acceptance_length": 4.2}
    host.put(json.dumps(expected), "/etc/simulated-gpu/drafter.json")
    play = fleet.play(
        switchover_acceptance="enforce", switchover_acceptance_reference={"short": 4.2, "long": 4.0}
    )
    assert play.status != 0, play.output
    text = said(play)
    assert "Short prompts: acceptance length 2.73, at least 3.78 expected (90% of 4.20)" in text
    assert "long prompts: acceptance length 2.53, at least 3.60 expected (90% of 4.00)" in text
    assert "Rolled back: sglang.service serves, proved and confirmed." in text
    assert kept(host)["verdict"] == "below"
    assert host.show("sglang.service", "ActiveState") == "active"
    assert host.run(UNITS) == ""
    answer = host.get(":30000/v1/completions", body={"model": "Qwen3.6-27B", "prompt": "x", "max_tokens": 2})
    assert answer["choices"][0]["text"]
    status = fleet.play("playbooks/status.yml")
    assert "doesn't serve because of how it drafts: short prompts: acceptance length 2.73" in said(status)


def test_observing_the_same_only_says_so(fleet):
    play = fleet.play()
    assert play.status == 0, play.output
    assert "[WARNING]: Acceptance of vllm-dflash@" in play.output
    host = fleet.hosts[0]
    assert kept(host)["verdict"] == "below", "the canary's reference is there"
    assert host.show(host.run(UNITS), "ActiveState") == "active"
    status = fleet.play("playbooks/status.yml")
    assert "how well it drafts: below" in said(status)


def test_without_a_server_before_there_is_no_way_back(fleet):
    host = fleet.hosts[0]
    serving = json.loads(host.run("cat /var/lib/vllm-dflash/serving.json"))
    host.put(json.dumps({**serving, "previous": None}), "/var/lib/vllm-dflash/serving.json")
    play = fleet.play(switchover_acceptance="enforce")
    assert play.status != 0, play.output
    assert "There is no server before it to go back to: it goes on serving." in said(play)
    assert host.show(host.run(UNITS), "ActiveState") == "active"


def test_an_untrained_drafter_is_not_measured(fleet):
    host = fleet.hosts[0]
    play = fleet.play(switchover_acceptance="enforce", drafter_trained=False)
    assert play.status == 0, play.output
    assert kept(host)["verdict"] == "off"
    assert "marked as untrained" in kept(host)["text"]
