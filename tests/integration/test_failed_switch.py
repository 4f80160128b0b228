"""A new server that can't be proved: the one before serves again, and the play fails saying so."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"exit_at_start": True}, ["ROLLED_BACK", "simulated fault: exit_at_start"]),
        ({"never_ready": True}, ["ROLLED_BACK", "ready", "NEW_STARTED for"]),
        ({"broken_tool_call": True}, ["ROLLED_BACK", "broken tool call"]),
    ],
    ids=["exits at start", "never ready", "broken tool calls"],
)
def test_sglang_serves_again(fleet, fault, words):
    host = fleet.hosts[0]
    host.put(json.dumps({"engine": fault}), "/etc/simulated-gpu/faults.json")
    # Not measuring must not change the switch: the first of these is the first one on its host.
    # On a busy machine vLLM's imports alone take 36 s; only what never gets ready may be cut off.
    timeout = 40 if "never_ready" in fault else 240
    play = fleet.play(vllm_service_ready_timeout=timeout, switchover_acceptance="off")
    assert play.status != 0, play.output
    for word in words:
        assert word in play.output, play.output
    # Without a second command: the page and the record, with what the drafter's config is made of.
    records = host.inventory.parent / "records"
    (page,) = records.glob("roll-out-*.html")
    assert play.pages == [page], play.output
    text = page.read_text()
    assert f"0 done, 1 rolled back ({host.name})." in text
    assert "the old server serves again, proved" in text
    record = json.loads((records / f"{host.name}.json").read_text())
    assert record["state"] == "ROLLED_BACK"
    assert record["outage_s"] > 0
    assert record["drafter"]["provenance"].keys() >= {"hidden_size", "block_size"}
    assert len(record["drafter"]["drafter_sha256"]) == 64
    assert host.show("sglang.service", "ActiveState") == "active"
    answer = host.get(":30000/v1/completions", body={"model": "Qwen3.6-27B", "prompt": "x", "max_tokens": 2})
    assert answer["choices"][0]["text"]
    assert host.run("systemctl list-units --no-legend --state=active 'vllm-dflash@*'") == ""
    holders = host.run("nvidia-smi --query-compute-apps=process_name --format=csv,noheader").splitlines()
    assert holders, "SGLang holds its GPU memory again"
    assert all("sglang" in holder for holder in holders)
