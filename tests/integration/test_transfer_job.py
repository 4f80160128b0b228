"""The module transfer_job under a real systemd: a simulated transfer that writes its progress and its file."""

from __future__ import annotations

import hashlib

import pytest

from .conftest import WORKER, _boot, bed

pytestmark = pytest.mark.booted

NAME = "test"
UNIT = f"vllm-dflash-transfer-{NAME}.service"
PATH = "/srv/models/model.safetensors.incoming"

# A simulated transfer: 100 bytes, as fast as its configuration says. It tries what the sandbox must refuse.
PROGRAM = """
import json, os, sys, time
config = json.load(open(os.environ["CREDENTIALS_DIRECTORY"] + "/config.json"))
progress = os.environ["RUNTIME_DIRECTORY"] + "/progress.json"
def say(**fields):
    with open(progress + ".new", "w") as stream:
        json.dump({"bytes_total": 100, **fields}, stream)
    os.replace(progress + ".new", progress)
try:
    open(os.path.dirname(config["path"]) + "/other", "w")
    say(state="failed", error="the sandbox is open")
    sys.exit(1)
except OSError:
    pass
with open(config["path"], "r+b", buffering=0) as stream:
    for count in range(0, 101, 10):
        say(state="running", bytes_done=count)
        stream.write(b"0123456789"[:10 if count < 100 else 0])
        time.sleep(config["pause_s"])
say(state="complete", bytes_done=100, seconds=1.5)
time.sleep(config.get("serve_s", 0))
"""


@pytest.fixture(scope="module")
def host(bootable):
    name = f"swj{WORKER}"
    bed("down", name)
    host = _boot(name, 1, "--no-sglang")[0]
    host.run("useradd --system --no-create-home carrier && mkdir /srv/models")
    host.put(PROGRAM, "/srv/simulated_transfer.py")
    yield host
    bed("down", name)


@pytest.fixture
def job(host):
    """`job(**changes)` asks the module to start; whatever it left is stopped in the end."""

    def start(*, check_mode: bool = False, limit_s: int = 60, **config) -> dict:
        secrets = {"token": "a-secret-token"}
        return host.module(
            "transfer_job", state="started", name=NAME, user="carrier", limit_s=limit_s, write_paths=[PATH],
            argv=["/usr/bin/python3", "-IB", "/srv/simulated_transfer.py"],
            config={"path": PATH, "pause_s": 0.05, **config}, secrets=secrets,
            allow_addresses=["127.0.0.1", "::1"], check_mode=check_mode,
        )  # fmt: skip

    yield start
    host.module("transfer_job", state="stopped", name=NAME)
    assert host.run(f"ls -A /run/vllm-dflash-transfer | grep -v lock; rm -f {PATH}; true") == ""


def follow(host, seconds: float = 5) -> dict:
    return host.module("transfer_job", state="followed", name=NAME, follow_timeout=seconds)


def test_a_file_comes_in_a_sandbox_and_nothing_stays(host, job):
    assert job(check_mode=True)["changed"]
    assert host.run(f"ls -A {PATH} /run/vllm-dflash-transfer/{NAME} 2>&1; true").count("No such file") == 2
    assert job()["changed"]
    seen = follow(host, 20)
    assert (seen["failed"], seen["finished"], seen["failure"], seen["percent"]) == (False, True, "", 100), (
        seen
    )
    assert seen["msg"] == "100 B in 1.5 s"
    assert host.run(f"stat -c '%U %a %s' {PATH}") == "carrier 600 100"
    assert host.run(f"systemctl show --value -p LoadState {UNIT}") == "not-found"
    # A secret is where the program reads it, and nowhere else. The brackets: sudo logs these commands too.
    assert host.run("grep -r '[a]-secret-token' /run /etc/systemd; true") == ""
    assert host.run("journalctl --no-pager | grep '[a]-secret-token'; true") == ""


def test_asked_again_it_goes_on_and_with_another_order_it_is_replaced(host, job):
    job(limit_s=300, pause_s=20)
    first = host.show(UNIT, "MainPID")
    assert not job(limit_s=300, pause_s=20)["changed"]
    assert host.show(UNIT, "MainPID") == first
    seen = follow(host, 1)
    assert (seen["finished"], seen["failure"]) == (False, "")
    assert "% of 100 B, " in seen["msg"]
    assert job(limit_s=300, pause_s=21)["changed"]
    assert host.show(UNIT, "MainPID") not in (first, "0")


def test_one_that_serves_others_is_finished_and_runs_until_it_is_stopped(host, job):
    job(serve_s=60)
    assert follow(host, 20)["finished"]
    assert host.show(UNIT, "ActiveState") == "active"
    assert host.module("transfer_job", state="stopped", name=NAME)["changed"]
    assert host.show(UNIT, "ActiveState") == "inactive"
    assert not host.module("transfer_job", state="stopped", name=NAME)["changed"]
    assert "No transfer test is known" in follow(host)["failure"]


def test_what_it_brought_gets_its_name_once_nothing_can_write_to_it(host, job):
    final = PATH.removesuffix(".incoming")
    digest = hashlib.sha256(b"0123456789" * 10).hexdigest()
    file = {"path": final, "incoming": PATH, "sha256": digest, "size": 100, "state": "missing"}

    def placed(file: dict) -> dict:
        words = {"state": "followed", "name": NAME, "follow_timeout": 20, "place": [file]}
        return host.module("transfer_job", **words)

    job(serve_s=60)
    refused = placed({**file, "sha256": "0" * 64})
    assert (refused["failed"], refused["finished"]) == (True, False)
    assert "has the wrong SHA-256" in refused["failure"]
    assert host.show(UNIT, "ActiveState") == "inactive"
    assert host.run(f"ls {final} {PATH} 2>/dev/null; true") == PATH

    seen = placed(file)
    assert (seen["failed"], seen["finished"], seen["changed"]) == (False, True, True)
    assert host.run(f"stat -c '%U %a' {final}; ls {PATH} 2>/dev/null; true") == "root 644"
    # As after a lost connection.
    seen = placed(file)
    assert (seen["failed"], seen["finished"], seen["changed"]) == (False, True, False)


def test_how_it_ended_is_known_after_the_unit_is_gone(host, job):
    job(pause_s=1, limit_s=2)
    assert "not done within its limit of 2 s" in follow(host, 20)["failure"]
    job(pause_s="none")
    failure = follow(host, 20)["failure"]
    assert "broke off (exit-code, exited 1)" in failure
    assert "TypeError" in failure
    job(pause_s=1)
    host.run(f"systemctl kill --signal=SIGKILL {UNIT}")
    assert "broke off (signal, killed KILL)" in follow(host, 20)["failure"]
