"""Whatever is wrong before the switch: the play says what, and the server before never notices."""

from __future__ import annotations

import html
import json
import os
import re

import pytest

from .conftest import WORKER, Fleet, _boot, bed, fresh_hosts

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]


@pytest.fixture(scope="module")
def fleet(bootable, sparse_drafter):
    """One host for all refusals: none of them may leave a trace."""
    bed("down", "no")
    hosts = _boot("no", 1, "--layer")
    hosts[0].wait("curl -sf http://127.0.0.1:30000/v1/models")
    yield Fleet(hosts, sparse_drafter)
    bed("down", "no")


@pytest.fixture
def undisturbed(fleet):
    """SGLang's main process is the same after the test as before it, and it answers."""
    host = fleet.hosts[0]
    before = host.show("sglang.service", "MainPID")
    assert before != "0"
    yield host
    assert host.show("sglang.service", "MainPID") == before
    assert host.get(":30000/v1/completions", body={"model": "Qwen3.6-27B", "prompt": "x", "max_tokens": 2})[
        "choices"
    ][0]["text"]


def refused(play, *words: str, page: bool = True) -> None:
    """The play says these words, and so does the page that it names; a look alone (preflight.yml) makes none."""
    assert play.status != 0, play.output
    text = " ".join(play.output.split())
    for word in words:
        assert word in text, play.output
    assert len(play.pages) == page, play.output
    for path in play.pages:
        shown = " ".join(html.unescape(re.sub(r"<[^>]*>", "", path.read_text())).split())
        for word in words:
            assert word in shown, shown


def train(host) -> None:
    """A process that is nobody's server holds memory of a GPU."""
    # systemd-run makes $ of $$.
    host.run(
        "systemd-run --unit=training sh -c 'echo 1 2000 > /run/simulated-gpu/holds/$$$$; exec sleep 600'"
    )
    host.wait("nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader | grep -q 2000")


def test_drafter_missing(fleet, undisturbed, tmp_path):
    refused(fleet.play(drafter_source=str(tmp_path / "model.safetensors")), str(tmp_path), "What to do:")


def test_drafter_truncated(fleet, undisturbed, tmp_path):
    path = tmp_path / "model.safetensors"
    size = os.path.getsize(fleet.drafter)
    with fleet.drafter.open("rb") as source, path.open("wb") as target:
        target.write(source.read(20000))
        target.truncate(size - 1000)
    refused(fleet.play(drafter_source=str(path)), "1,000 bytes missing at its end", "What to do:")


def test_drafter_of_another_digest(fleet, undisturbed):
    refused(fleet.play(drafter_sha256="0" * 64), "0" * 64, "What to do:")


def test_target_folder_missing(fleet, undisturbed):
    refused(
        fleet.play(vllm_service_target="/root/models/absent"), "target: found no folder /root/models/absent"
    )


def test_not_enough_gpu_memory(fleet, undisturbed):
    host = fleet.hosts[0]
    host.run("cp /etc/simulated-gpu/gpus /tmp/gpus && sed -i 's/|49140|/|24564|/' /etc/simulated-gpu/gpus")
    try:
        refused(fleet.play(), "GPU memory", "What to do:")
    finally:
        host.run("cp /tmp/gpus /etc/simulated-gpu/gpus")


def test_port_held_by_something_else(fleet, undisturbed):
    host = fleet.hosts[0]
    host.run("systemd-run --unit=other-server python3 -m http.server 30001 --bind 127.0.0.1")
    try:
        host.wait("curl -sf http://127.0.0.1:30001/ -o /dev/null")
        refused(fleet.play(rollout_port=30001), "port 30001: found held by pid", "other-server.service")
    finally:
        host.run("systemctl stop other-server")


def test_foreign_process_on_a_gpu(fleet, undisturbed):
    host = fleet.hosts[0]
    train(host)
    try:
        refused(fleet.play(), "foreign process on a GPU", "2000 MiB on GPU 1", "training.service")
    finally:
        host.run("systemctl stop training")


def test_all_reasons_of_a_host_at_once(fleet, undisturbed):
    play = fleet.play(
        vllm_service_target="/root/models/absent", gpu_host_min_driver="999", vllm_python="/nowhere/python3"
    )
    refused(play, "NVIDIA driver: found 580", "Python: found /nowhere/python3", "target: found no folder")


SEEDS_FLAGS = {"tensor-parallel-size": 2, "max-model-len": 32768, "language-model-only": True}


def test_the_pair_is_judged_before_anything_travels(fleet, undisturbed):
    play = fleet.play(vllm_service_args=SEEDS_FLAGS, gpu_host_min_driver="999")
    refused(play, "NVIDIA driver: found 580", "drafter: drafting leaves -1536 tokens", "at least 4096")
    assert "TASK [vllm :" not in play.output.partition("PLAY [Stage]")[2]


def test_a_published_config_of_another_family_beside_the_drafter(fleet, undisturbed, tmp_path):
    (tmp_path / "model.safetensors").symlink_to(fleet.drafter)
    beside = tmp_path / "config.json"
    beside.write_text(json.dumps({"architectures": ["DSparkDraftModel"]}))
    refused(
        fleet.play("playbooks/preflight.yml", drafter_source=str(tmp_path / "model.safetensors")),
        f"drafter: shipped config {beside} is a DSpark drafter",
        "What to do:",
        page=False,
    )


def test_launch_check_failing(fleet, undisturbed):
    # What only vLLM itself knows.
    flags = {
        **SEEDS_FLAGS,
        "max-num-seqs": 16,
        "max-num-batched-tokens": 8448,
        "enable-auto-tool-choice": True,
        "tool-call-parser": "no_such_parser",
    }
    refused(fleet.play(vllm_service_args=flags), "no_such_parser")


def test_the_others_go_on_without_a_host_that_was_refused(bootable, small_drafter):
    with fresh_hosts(f"skip{WORKER}", 2, "--layer", "--small") as hosts:
        unfit, other = hosts
        before = unfit.show("sglang.service", "MainPID")
        train(unfit)
        play = Fleet(hosts, small_drafter).play(rollout_skip_unfit=True, switchover_acceptance="off")
        refused(
            play, f"1 done, 1 did not pass preflight ({unfit.name}).", "foreign process on a GPU", "CONFIRMED"
        )
        records = other.inventory.parent / "records"
        assert list(records.glob("*.html")) == play.pages
        assert not (records / f"{unfit.name}.json").exists()
        record = json.loads((records / f"{other.name}.json").read_text())
        assert record["state"] == "CONFIRMED"
        assert record["drafter"]["release"] == record["new"]["release"], "as the report asked the host for it"
        assert other.show("sglang.service", "ActiveState") == "inactive"
        assert unfit.show("sglang.service", "MainPID") == before
