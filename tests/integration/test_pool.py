"""Two booted hosts behind a real HAProxy, under load: whatever the roll-out does to them, no request fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .conftest import ROOT, Fleet, _boot, bed

sys.path.append(str(ROOT / "tests"))

import debian

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

BED = os.environ.get("POOL_BED", "pool")
MODEL = "Qwen3.6-27B"
EXAMPLES = ROOT / "examples" / "pool"
CONFIG = """\
global
    stats socket {folder}/admin.sock mode 600 level admin
defaults
    mode http
    # None: what fails shall be seen.
    retries 0
    timeout connect 2s
    timeout client 60s
    timeout server 60s
frontend clients
    bind 127.0.0.1:{port}
    default_backend llm
backend llm
    balance roundrobin
    option httpchk GET /v1/models
    default-server check inter 500ms rise 2 fall 2
{servers}
"""


@dataclass
class Load:
    """Four clients that ask all the time, two of them over one connection each."""

    port: int
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stop = threading.Event()
        self.clients = [
            threading.Thread(target=self._client, args=(keep,)) for keep in (True, True, False, False)
        ]
        for client in self.clients:
            client.start()

    def _ask(self, connection: http.client.HTTPConnection, keep: bool) -> None:
        body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": 40})
        headers = {"Content-Type": "application/json"} | ({} if keep else {"Connection": "close"})
        connection.request("POST", "/v1/completions", body, headers)
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != 200 or not json.loads(text)["choices"][0]["text"]:
            raise AssertionError(f"{answer.status}: {text[:200]!r}")

    def _client(self, keep: bool) -> None:
        connection = None
        while not self.stop.is_set():
            begin = time.monotonic()
            try:
                if connection is None or not keep:
                    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
                self._ask(connection, keep)
            except (OSError, http.client.HTTPException, AssertionError, ValueError) as error:
                self.failures.append(f"{time.strftime('%X')} keep-alive {keep}: {error!r}")
                connection = None
            self.seconds.append(time.monotonic() - begin)
            # The hosts share two cores with all this.
            self.stop.wait(0.1)

    def so_far(self) -> dict:
        """Requests sent and failed since the last call, and their 50th and 99th percentile in milliseconds."""
        taken, self.seconds = sorted(self.seconds), []
        failed, self.failures = self.failures, []
        assert len(taken) > 100, "there was no load to speak of"
        return {
            "sent": len(taken),
            "failed": failed,
            "p50_ms": round(1000 * taken[len(taken) // 2]),
            "p99_ms": round(1000 * taken[len(taken) * 99 // 100]),
        }

    def end(self) -> None:
        """Let every client end its request."""
        self.stop.set()
        for client in self.clients:
            client.join()


@dataclass
class Pool:
    """HAProxy, the load on it, and the hosts behind it."""

    fleet: Fleet
    folder: Path
    load: Load

    def play(self, playbook: str = "site.yml", *options: str, **variables):
        """The play, with the hooks of examples/pool; HAProxy runs on the control node."""
        hooks = {
            "rollout_drain_tasks": str(EXAMPLES / "haproxy-drain.yml"),
            "rollout_rejoin_tasks": str(EXAMPLES / "haproxy-rejoin.yml"),
            "pool_haproxy": "localhost",
            "pool_backend": "llm",
            "pool_socket": str(self.folder / "admin.sock"),
        }
        return self.fleet.play(playbook, *options, **{**hooks, **variables})

    def states(self) -> list[str]:
        """UP, DOWN, DRAIN, … of each server, in order."""
        with socket.socket(socket.AF_UNIX) as admin:
            admin.connect(str(self.folder / "admin.sock"))
            admin.sendall(b"show stat\n")
            lines = b"".join(iter(lambda: admin.recv(65536), b"")).decode().splitlines()
        rows = [line.split(",") for line in lines if line.startswith(f"llm,{BED}-gpu")]
        return [row[17] for row in rows]


@pytest.fixture(scope="module")
def pool(bootable, small_drafter, tmp_path_factory):
    """Two hosts with SGLang behind HAProxy, under load for the whole file: its tests are the steps of one story."""
    program, environment = debian.program("haproxy", r"lib(lua|opentracing)[a-z0-9.-]*")
    bed("down", BED)
    hosts = _boot(BED, 2, "--layer", "--small")
    for host in hosts:
        host.wait("curl -sf http://127.0.0.1:30000/v1/models")
    folder = tmp_path_factory.mktemp("haproxy")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    servers = "\n".join(f"    server {host.name} {host.address}:30000" for host in hosts)
    (folder / "haproxy.cfg").write_text(CONFIG.format(folder=folder, port=port, servers=servers))
    with subprocess.Popen([program, "-db", "-f", str(folder / "haproxy.cfg")], env=environment) as running:
        try:
            waited = Pool(Fleet(hosts, small_drafter), folder, None)
            until = time.monotonic() + 20
            while True:
                with contextlib.suppress(OSError):
                    if waited.states() == ["UP", "UP"]:
                        break
                assert time.monotonic() < until, "HAProxy doesn't see its servers"
                time.sleep(0.2)
            waited.load = Load(port)
            try:
                yield waited
            finally:
                waited.load.end()
        finally:
            running.terminate()
    bed("down", BED)


def unit(host) -> str:
    """What serves there, by the state of the switch; SGLang where there was none."""
    state = host.run("cat /var/lib/vllm-dflash/serving.json", check=False)
    return json.loads(state)["serving"]["unit"] if state else "sglang.service"


def quiet(pool, step: str) -> None:
    """No request failed since the last step, and both hosts are in the pool."""
    figures = pool.load.so_far()
    print(f"{step}: {figures}")
    assert figures["failed"] == [], figures
    assert pool.states() == ["UP", "UP"]


def test_a_canary_that_fails_is_rolled_back_and_comes_back_into_its_pool(pool):
    canary, other = pool.fleet.hosts
    before = other.show("sglang.service", "MainPID")
    # At once: the simulated servers read it with every request.
    canary.put(json.dumps({"engine": {"exit_at_start": True}}), "/etc/simulated-gpu/next")
    canary.run("mv /etc/simulated-gpu/next /etc/simulated-gpu/faults.json")
    play = pool.play()
    assert play.status != 0, play.output
    assert f"0 done, 1 rolled back ({canary.name}), 1 untouched ({other.name}). Mend" in play.output, (
        play.output
    )
    assert "Drain it in HAProxy" in play.output
    assert canary.run("ls /var/lib/vllm-dflash/out_of_pool", check=False) == ""
    assert other.show("sglang.service", "MainPID") == before
    quiet(pool, "canary rolled back")


def test_a_drain_that_fails_stops_nothing(pool, tmp_path):
    broken = tmp_path / "broken.yml"
    broken.write_text(
        "- ansible.builtin.import_tasks: " + str(EXAMPLES / "haproxy-drain.yml") + "\n"
        "- ansible.builtin.fail: {msg: simulated fault of a drain}\n"
    )
    canary, _ = pool.fleet.hosts
    before = canary.show("sglang.service", "MainPID")
    play = pool.play("site.yml", "--limit", canary.name, rollout_drain_tasks=str(broken))
    assert play.status != 0, play.output
    assert "simulated fault of a drain" in play.output
    assert canary.show("sglang.service", "MainPID") == before
    quiet(pool, "drain failed")


def test_one_host_by_its_name_and_then_the_rest(pool):
    canary, other = pool.fleet.hosts
    canary.run("rm -f /etc/simulated-gpu/faults.json")
    play = pool.play("site.yml", "--limit", other.name)
    assert play.status == 0, play.output
    assert "\n1 done." in play.output
    assert unit(canary) == "sglang.service"
    quiet(pool, "one host, SGLang and vLLM side by side")
    pid = other.show(unit(other), "MainPID")
    play = pool.play()
    assert play.status == 0, play.output
    assert "\n2 done." in play.output
    assert all(unit(host).startswith("vllm-dflash@") for host in pool.fleet.hosts)
    assert other.show(unit(other), "MainPID") == pid, "what was done is left alone"
    quiet(pool, "the rest")


def test_a_second_run_drains_nobody(pool):
    play = pool.play()
    assert play.status == 0, play.output
    assert {host.name: play.recap[host.name]["changed"] for host in pool.fleet.hosts} == {
        host.name: 0 for host in pool.fleet.hosts
    }
    assert "Drain it in HAProxy" not in play.output
    quiet(pool, "second run")


def test_status_shows_how_each_does_and_no_drift(pool, tmp_path):
    path = tmp_path / "status.json"
    for _ in range(2):
        play = pool.play("playbooks/status.yml", status_json=str(path))
        assert play.status == 0, play.output
        assert all(counts["changed"] == counts["rescued"] == 0 for counts in play.recap.values()), play.output
    print(play.output)
    hosts = json.loads(path.read_text())
    for host in pool.fleet.hosts:
        found = hosts[host.name]
        assert (found["running_unit"], found["drift"], found["unknown"]) == (unit(host), [], False)
        assert found["acceptance"] == pytest.approx(4.2, abs=0.1)
        assert found["tokens_per_s"] > 0, "it is under load"
        assert found["running"] is not None
        assert found["restarts"] == 0
        assert found["uptime_s"] > 5
        assert found["measured"]["short"]["length"] == pytest.approx(4.2, abs=0.1)
        line = next(
            line for line in play.output.splitlines() if f"{host.name} " in line and " vllm-dflash " in line
        )
        assert f" {found['release']} " in line
        assert f" {found['drafter_sha256'][:12]} " in line
    quiet(pool, "status")


def test_status_marks_drift_and_changes_nothing(pool, tmp_path):
    host = pool.fleet.hosts[0]
    host.run("echo '# by hand' >> /etc/systemd/system/vllm-dflash@.service")
    before = host.run("find /opt/vllm-dflash/releases /etc/systemd /var/lib/vllm-dflash | sort")
    path = tmp_path / "status.json"
    wish = {
        "max-num-seqs": 8,
        "max-num-batched-tokens": 8448,
        "tensor-parallel-size": 2,
        "max-model-len": 32768,
    }
    play = pool.play("playbooks/status.yml", vllm_service_args=wish, status_json=str(path))
    assert play.status == 0, play.output
    assert all(counts["changed"] == 0 for counts in play.recap.values()), play.output
    print(play.output)
    [sentence] = json.loads(path.read_text())[host.name]["drift"]
    assert sentence.startswith(f"release {unit(host)[12:28]} serves, the inventory wants ")
    assert sentence.endswith(" (vllm.yaml)")
    host.run("echo 'RestartSec=31' >> /etc/systemd/system/vllm-dflash@.service")
    play = pool.play("playbooks/status.yml", status_json=str(path))
    assert json.loads(path.read_text())[host.name]["drift"] == [
        "vllm-dflash@.service is not what this project installs"
    ]
    assert host.run("find /opt/vllm-dflash/releases /etc/systemd /var/lib/vllm-dflash | sort") == before
    unknown = pool.play(
        "playbooks/status.yml", drafter_source="/nowhere/model.safetensors", status_json=str(path)
    )
    assert unknown.status == 0, unknown.output
    assert json.loads(path.read_text())[host.name]["unknown"]
    assert "can't be worked out" in unknown.output
    quiet(pool, "drift")


def test_who_was_lost_out_of_the_pool_is_put_back(pool):
    host = pool.fleet.hosts[0]
    with socket.socket(socket.AF_UNIX) as admin:
        admin.connect(str(pool.folder / "admin.sock"))
        admin.sendall(f"set server llm/{host.name} state drain\n".encode())
        admin.recv(100)
    host.run("touch /var/lib/vllm-dflash/out_of_pool")
    play = pool.play()
    assert play.status == 0, play.output
    assert host.run("ls /var/lib/vllm-dflash/out_of_pool", check=False) == ""
    quiet(pool, "put back")


def test_back_to_sglang_host_by_host(pool):
    play = pool.play("playbooks/rollback.yml")
    assert play.status == 0, play.output
    assert "\n2 done." in play.output
    assert [unit(host) for host in pool.fleet.hosts] == ["sglang.service"] * 2
    quiet(pool, "rolled back")
