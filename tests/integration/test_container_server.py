"""The old server is a container of a *simulated* docker on a booted host: found, replaced, brought back, refused.

The program that switches, systemd and the power cut are real; the new server is a unit with a simulated engine.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from .conftest import ROOT, Fleet, _boot, bed

pytestmark = pytest.mark.booted

SIMULATED_DOCKER = ROOT / "tests/testbed/simulated/docker"
SERVER = (
    "/usr/bin/python3 /opt/simulated-sglang/launch_server.py --model-path /root/models/Qwen3.6-27B "
    "--served-model-name Qwen3.6-27B --host 0.0.0.0 --port 30000 --tp 2 --context-length 32768"
)
DOCKER_UNIT = """\
[Unit]
Description=Simulated docker
[Service]
ExecStart=/usr/bin/docker daemon
KillMode=process
[Install]
WantedBy=multi-user.target
"""
# Its name is what makes it a server of ours; the layer with the real vLLM is not needed here.
NEW_UNIT = """\
[Unit]
Description=Simulated new server %i
[Service]
Type=exec
ExecCondition=+/usr/bin/python3 -IB /opt/vllm-dflash/program may-start %n
ExecStart=/bin/sh -c 'test %i = good || sleep 2; test %i = good || exit 3; exec {server}'
"""
GOOD, BAD = "vllm-dflash@good.service", "vllm-dflash@bad.service"
BOX = {"name": "sglang", "unit": "sglang", "runtime": "docker", "port": 30000, "model_id": "Qwen3.6-27B"}
INSTALL = """\
- hosts: gpu_hosts
  gather_facts: false
  tasks:
    - ansible.builtin.import_role:
        name: switchover
        tasks_from: install
"""


def new(unit: str) -> dict:
    return {"name": "new", "unit": unit, "port": 30000, "model_id": "Qwen3.6-27B", "ready_timeout_s": 60}


def install_docker(host) -> None:
    host.put(SIMULATED_DOCKER.read_bytes(), "/usr/bin/docker")
    host.put(DOCKER_UNIT, "/etc/systemd/system/docker.service")
    host.run("chmod 755 /usr/bin/docker && systemctl daemon-reload && systemctl enable --now docker")


@pytest.fixture(scope="module")
def booted(bootable, tmp_path_factory):
    """One host with the program and a simulated docker, for all tests."""
    bed("down", "habox")
    host = _boot("habox", 1, "--small", "--no-sglang")[0]
    host.put(NEW_UNIT.format(server=SERVER), "/etc/systemd/system/vllm-dflash@.service")
    install_docker(host)
    playbook = Path(tmp_path_factory.mktemp("play") / "install.yml")
    playbook.write_text(INSTALL)
    subprocess.run(["ansible-playbook", "-i", str(host.inventory), str(playbook)], cwd=ROOT, check=True)
    yield host
    bed("down", "habox")


@pytest.fixture
def host(booted):
    """SGLang serves in its container, and no switch was ever confirmed."""
    booted.run(
        "cd /var/lib/vllm-dflash; rm -f /run/simulated-docker/hangs serving.json switch/record.json; systemctl start docker;"
        f"systemctl stop {GOOD} {BAD}; docker kill --signal=SIGKILL sglang; rm -f /var/lib/simulated-docker/*.json;"
        "systemctl restart docker",
        check=False,
    )
    booted.wait("nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l | grep -qx 0", 30)
    booted.run(f"docker run --name sglang --restart unless-stopped {SERVER}")
    booted.wait("curl -sf http://127.0.0.1:30000/v1/models", 30)
    return booted


def container(host) -> dict:
    (found,) = json.loads(host.run("docker container inspect sglang"))
    return found


def policy(host) -> str:
    return container(host)["HostConfig"]["RestartPolicy"]["Name"]


def switch(host, unit: str, old: dict = BOX, **settings) -> dict:
    return host.module("switchover", old=old, new=new(unit), settings=settings, follow_timeout=200)


def serves(host) -> None:
    body = {"model": "Qwen3.6-27B", "prompt": "x", "max_tokens": 2}
    assert host.get(":30000/v1/completions", body=body)["choices"][0]["text"]


def test_to_a_unit_and_back_to_the_container(host):
    result = switch(host, GOOD)
    assert result["outcome"] == "CONFIRMED", result
    assert result["outage_s"] < 30
    assert host.show(GOOD, "ActiveState") == "active"
    assert (container(host)["State"]["Running"], policy(host)) == (False, "no")
    serves(host)
    serving = json.loads(host.run("cat /var/lib/vllm-dflash/serving.json"))
    assert serving["previous"]["restart_policy"] == "unless-stopped"
    back = host.module("switchover", old=serving["serving"], new=serving["previous"], follow_timeout=200)
    assert back["outcome"] == "CONFIRMED", back
    assert (container(host)["State"]["Running"], policy(host)) == (True, "unless-stopped")
    assert host.show(GOOD, "ActiveState") == "inactive"
    serves(host)
    # Of the two only the container comes up at a boot, by dockerd alone.
    host.run("systemctl reboot", check=False)
    time.sleep(3)
    host.wait("curl -sf http://127.0.0.1:30000/v1/models", 60)
    assert host.show(GOOD, "ActiveState") == "inactive"
    assert host.run("nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l") == "2"


def test_a_failing_new_server_gives_the_container_back(host):
    before = container(host)["State"]["Pid"]
    result = switch(host, BAD)
    assert result["outcome"] == "ROLLED_BACK", result
    assert "exited before it was ready" in result["msg"]
    assert (container(host)["State"]["Running"], policy(host)) == (True, "unless-stopped")
    assert container(host)["State"]["Pid"] != before
    serves(host)


def test_a_power_cut_while_nobody_serves(host):
    # A long wait for stable memory keeps the switch in OLD_STOPPED.
    order = {
        "old": BOX,
        "new": new(GOOD),
        "settings": {"gpu_free_stable_s": 600.0, "gpu_free_timeout_s": 600.0},
        "follow_timeout": 1,
    }
    host.module("switchover", **order)
    host.wait('grep -q \'"state": "OLD_STOPPED"\' /var/lib/vllm-dflash/switch/record.json', 60)
    assert policy(host) == "no"
    bed("power-cut", "habox", host.name)
    bed("power-on", "habox", host.name)
    host.wait("test ! -e /var/lib/vllm-dflash/switch/pending.json", 120)
    record = json.loads(host.run("cat /var/lib/vllm-dflash/switch/record.json"))
    assert record["state"] == "ROLLED_BACK", record
    assert "restarted in OLD_STOPPED" in record["cause"]
    assert (container(host)["State"]["Running"], policy(host)) == (True, "unless-stopped")
    serves(host)


def test_an_engine_that_hangs_is_refused_before_the_outage(host):
    before = container(host)["State"]["Pid"]
    host.run("touch /run/simulated-docker/hangs")
    result = switch(host, GOOD)
    host.run("rm /run/simulated-docker/hangs")
    assert result["outcome"] == "REFUSED", result
    assert "docker doesn't answer" in result["msg"]
    assert "What to do" in result["msg"]
    assert (container(host)["State"]["Pid"], policy(host)) == (before, "unless-stopped")
    serves(host)


def test_a_second_container_on_the_gpus_stops_everything_before_the_outage(host):
    before = container(host)["State"]["Pid"]
    host.run(
        "docker run --name training --restart no /bin/sh -c 'echo 1 2000 > /run/simulated-gpu/holds/$$; exec sleep 600'"
    )
    host.wait("nvidia-smi --query-compute-apps=used_memory --format=csv,noheader | grep -q 2000")
    try:
        result = switch(host, GOOD)
        assert result["outcome"] == "REFUSED", result
        for word in ("root: sleep 600", "2000 MiB on GPU 1"):
            assert word in result["msg"]
        assert container(host)["State"]["Pid"] == before
    finally:
        host.run("docker kill --signal=SIGKILL training")


# ---- what serves is found ----------------------------------------------------------------------------------


def test_the_container_is_found_by_itself(host):
    found = host.module("serving_info", port=30000, prove=True)
    assert found["unit"], found
    assert (found["unit"]["unit"], found["unit"]["runtime"]) == ("sglang", "docker"), found
    assert found["unit"]["control_group"] == f"/system.slice/docker-{container(host)['Id']}.scope"
    assert found["listens_in_unit"]
    assert found["proof"]["proved"]
    assert (found["refusal"], found["adopt"], found["advice"]) == (None, None, "")


def test_a_container_that_is_removed_when_it_stops_is_refused(host):
    host.run("docker kill --signal=SIGKILL sglang")
    host.wait("nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l | grep -qx 0", 30)
    host.run(f"docker run --name sglang --rm {SERVER}")
    host.wait("curl -sf http://127.0.0.1:30000/v1/models", 30)
    found = host.module("serving_info", port=30000)
    assert "--rm" in found["refusal"], found
    assert switch(host, GOOD)["outcome"] == "REFUSED"
    serves(host)


def test_a_server_of_a_login_session_is_refused_with_a_unit_that_systemd_takes(host):
    host.run("docker kill --signal=SIGKILL sglang")
    host.wait("nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l | grep -qx 0", 30)
    host.run(
        "cd /srv && HF_TOKEN=private HF_HOME='/data/50% x' "
        f"systemd-run --scope --unit=run-by-hand -- setsid {SERVER} --reasoning-parser 'a \"b\" $c' >/dev/null 2>&1 &"
    )
    try:
        host.wait("curl -sf http://127.0.0.1:30000/v1/models", 30)
        found = host.module("serving_info", port=30000)
        for word in ("scope run-by-hand.scope", "root", "launch_server.py", "adopt"):
            assert word in found["refusal"]
        text = found["adopt"]
        assert "private" not in text
        assert "install -m 0600" in text
        unit = text[text.index("[Unit]") : text.index("# 2.")]
        host.put(unit, "/etc/systemd/system/adopted.service")
        host.run("touch /etc/sglang.env")
        assert (
            host.run("systemd-analyze verify --man=no adopted.service 2>&1 | grep adopted", check=False) == ""
        )
        host.run("systemctl stop run-by-hand.scope")
        host.wait("nvidia-smi --query-compute-apps=pid --format=csv,noheader | wc -l | grep -qx 0", 30)
        host.run("systemctl daemon-reload && systemctl start adopted")
        host.wait("curl -sf http://127.0.0.1:30000/v1/models", 30)
        # Read back by systemd, the odd words are what they were.
        argv = host.run("cat /proc/$(systemctl show --value -p MainPID adopted)/cmdline").split("\0")
        assert 'a "b" $c' in argv
        environment = host.run("cat /proc/$(systemctl show --value -p MainPID adopted)/environ").split("\0")
        assert "HF_HOME=/data/50% x" in environment
        assert host.module("serving_info", port=30000)["unit"]["unit"] == "adopted.service"
    finally:
        host.run(
            "systemctl stop adopted run-by-hand.scope; rm -f /etc/systemd/system/adopted.service", check=False
        )


# ---- the whole play ----------------------------------------------------------------------------------------


@pytest.fixture
def fleet(bootable, small_drafter):
    """A host with the release layer, whose server is the container."""
    bed("down", "haplay")
    host = _boot("haplay", 1, "--layer", "--small", "--no-sglang")[0]
    install_docker(host)
    host.run(f"docker run --name sglang --restart always {SERVER}")
    host.wait("curl -sf http://127.0.0.1:30000/v1/models", 30)
    yield Fleet([host], small_drafter)
    bed("down", "haplay")


@pytest.mark.real_vllm
def test_the_play_takes_the_container_over_and_gives_it_back(fleet):
    (host,) = fleet.hosts
    play = fleet.play()
    assert play.status == 0, play.output
    assert (container(host)["State"]["Running"], policy(host)) == (False, "no")
    assert host.run("systemctl list-units --no-legend --state=active 'vllm-dflash@*' | wc -l") == "1"
    serves(host)
    back = fleet.play("playbooks/rollback.yml")
    assert back.status == 0, back.output
    assert (container(host)["State"]["Running"], policy(host)) == (True, "always")
    assert host.run("systemctl list-units --no-legend --state=active 'vllm-dflash@*' | wc -l") == "0"
    serves(host)
