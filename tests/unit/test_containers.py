"""The adapter for docker and podman: what `inspect` prints, and a simulated engine command behind the functions."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from dflash_rollout import containers, servers
from dflash_rollout.containers import EngineSilent
from dflash_rollout.errors import RolloutError
from dflash_rollout.units import Listener

FIXTURES = Path(__file__).parent / "fixtures" / "containers"
DOCKER_ID, OTHER_ID, PODMAN_ID = "3f4c" * 16, "9b1d" * 16, "c07e" * 16


def printed(name):
    return (FIXTURES / f"{name}.json").read_text()


def parsed(name):
    return containers.parse_inspect(printed(name))


@pytest.mark.parametrize(
    ("name", "state", "pid", "policy", "restarts"),
    [
        ("docker-host-network-running", ("active", "running"), 48211, "unless-stopped", 0),
        ("docker-published-running", ("active", "running"), 51002, "always", 0),
        ("docker-exited", ("failed", "exited"), 0, "on-failure:3", 0),
        ("docker-restarting", ("activating", "auto-restart"), 0, "always", 7),
        ("podman4-running", ("active", "running"), 60123, "no", 0),
        ("podman4-always", ("active", "running"), 60123, "always", 0),
        ("podman5-running", ("active", "running"), 60123, "on-failure:3", 0),
        ("podman5-exited", ("inactive", "exited"), 0, "no", 0),
    ],
)
def test_a_container_in_the_words_of_a_unit(name, state, pid, policy, restarts):
    unit = containers.as_unit(parsed(name), name[:6], None)
    assert (unit.active_state, unit.sub_state) == state
    assert (unit.main_pid, unit.enabled, unit.restarts) == (pid, policy, restarts)
    assert unit.running is (state[0] not in ("inactive", "failed"))
    assert unit.load_state == "loaded"
    assert not unit.guarded
    assert unit.invocation_id.split()[1].startswith("2026-12-01T0")


def test_the_stop_signal_is_the_images_own():
    assert parsed("docker-host-network-running").stop_signal == "SIGTERM"
    assert parsed("docker-published-running").stop_signal == "SIGINT"
    assert parsed("podman4-running").stop_signal == "SIGTERM", "a number in podman 4"
    assert parsed("podman5-running").stop_signal == "SIGTERM"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[{}]", "[1]", "null", json.dumps([{"State": {}, "HostConfig": {}, "Config": {}}])],
)
def test_what_is_no_container_is_refused(text):
    with pytest.raises(RolloutError, match="can't be read"):
        containers.parse_inspect(text)


@pytest.mark.parametrize(
    ("path", "engine", "group"),
    [
        (f"/system.slice/docker-{DOCKER_ID}.scope", "docker", f"/system.slice/docker-{DOCKER_ID}.scope"),
        (f"/docker/{DOCKER_ID}", "docker", f"/docker/{DOCKER_ID}"),
        (f"/llm.slice/docker-{DOCKER_ID}.scope/init.scope", "docker", f"/llm.slice/docker-{DOCKER_ID}.scope"),
        (
            f"/machine.slice/libpod-{DOCKER_ID}.scope/container",
            "podman",
            f"/machine.slice/libpod-{DOCKER_ID}.scope",
        ),
        (f"/libpod_parent/libpod-{DOCKER_ID}", "podman", f"/libpod_parent/libpod-{DOCKER_ID}"),
        (
            f"/system.slice/x.service/libpod-payload-{DOCKER_ID}",
            "podman",
            f"/system.slice/x.service/libpod-payload-{DOCKER_ID}",
        ),
    ],
)
def test_the_control_group_is_the_containers_own(path, engine, group):
    assert containers.container_of(path) == (engine, DOCKER_ID)
    assert containers.control_group(path, DOCKER_ID) == group


@pytest.mark.parametrize(
    "path", [None, "", "/", "/system.slice/docker.service", "/user.slice/session-3.scope"]
)
def test_no_container(path):
    assert containers.container_of(path) is None
    assert containers.control_group(path, DOCKER_ID) == ""


def test_a_published_port_is_held_by_the_engine_for_the_container():
    def listener(port, unit):
        return Listener("0.0.0.0", port, 7, "root", "docker-proxy", unit)  # noqa: S104

    box = containers.as_unit(parsed("docker-published-running"), "docker", None)
    assert box.published == (30000,)
    assert box.forwards(listener(30000, "docker.service"))
    assert not box.forwards(listener(30001, "docker.service"))
    assert not box.forwards(listener(30000, "nginx.service"))
    pod = containers.as_unit(parsed("podman5-running"), "podman", None)
    assert pod.forwards(listener(30000, f"libpod-conmon-{PODMAN_ID}.scope"))
    assert not pod.forwards(listener(30000, f"libpod-conmon-{OTHER_ID}.scope"))
    host = containers.as_unit(parsed("docker-host-network-running"), "docker", None)
    assert not host.forwards(listener(30000, "docker.service"))


# ---- through a simulated engine command --------------------------------------------------------------------

SIMULATED = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
    "container inspect "*) {inspect} ;;
    "update --restart=no "*) {update} ;;
    --version) echo "{version}" ;;
    "ps "*) echo {id} ;;
    "logs "*) echo "2026-12-01T06:00:02Z second"; echo "2026-12-01T06:00:01Z first" >&2 ;;
    *) {other} ;;
esac
"""


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """engine(name, …) puts a simulated docker or podman on PATH; engine.calls() is what it was asked."""

    def prepare(name, fixture, *, inspect=None, update=":", version="podman version 5.4.0", other=":"):
        text = SIMULATED.format(
            folder=tmp_path,
            inspect=inspect or f"cat {FIXTURES}/{fixture}.json",
            update=update,
            version=version,
            other=other,
            id=OTHER_ID,
        )
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    prepare.calls = lambda: (tmp_path / "calls").read_text().splitlines()
    return prepare


def test_a_missing_container_is_no_error(engine):
    for text in (
        "Error response from daemon: No such container: x",
        'Error: inspecting object: no such container "x"',
    ):
        engine("docker", "", inspect=f"echo '[]'; echo '{text}' >&2; exit 1")
        unit = containers.show("docker", "x")
        assert unit.load_state == "not-found"
        assert not unit.running
        with pytest.raises(RolloutError, match="does not exist"):
            containers.check("docker", "x")


def test_a_dead_daemon_is_silent(engine):
    text = "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?"
    engine("docker", "", inspect=f"echo '{text}' >&2; exit 1")
    with pytest.raises(EngineSilent, match="What to do: systemctl start docker"):
        containers.show("docker", "x")


def test_a_client_that_hangs_is_silent(engine, monkeypatch):
    engine("docker", "", inspect="exec sleep 5")
    monkeypatch.setattr(containers, "TIMEOUT_S", 0.2)
    with pytest.raises(EngineSilent, match=r"no answer within 0\.2 s to docker container inspect x"):
        containers.show("docker", "x")


def test_another_failure_is_said(engine):
    engine("docker", "", inspect="echo 'permission denied' >&2; exit 1")
    with pytest.raises(RolloutError, match="permission denied"):
        containers.show("docker", "x")


def test_no_engine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RolloutError, match="podman is missing"):
        containers.show("podman", "x")


@pytest.mark.parametrize(
    ("fixture", "words"),
    [
        ("docker-rm", "removed as soon as it stops.*without --rm"),
        ("docker-swarm", "the swarm service llm_sglang"),
    ],
)
def test_a_container_that_can_not_be_kept_down_or_brought_back_is_refused(engine, fixture, words):
    engine("docker", fixture)
    with pytest.raises(RolloutError, match=words):
        containers.check("docker", "sglang")


def test_a_container_of_a_systemd_unit_is_refused(engine, tmp_path):
    (found,) = json.loads(printed("podman5-running"))
    found["Config"]["Labels"] = {"PODMAN_SYSTEMD_UNIT": "sglang.service"}
    (tmp_path / "labelled.json").write_text(json.dumps([found]))
    engine("podman", "", inspect=f"cat {tmp_path}/labelled.json")
    with pytest.raises(RolloutError, match=r"the systemd unit sglang.service.*--cgroups=split"):
        containers.check("podman", "sglang")


@pytest.mark.parametrize(
    ("version", "fixture", "refused"),
    [
        ("podman version 4.9.3", "podman4-always", True),
        ("podman version 5.0.3", "podman4-always", True),
        ("", "podman4-always", True),
        ("podman version 5.1.0", "podman4-always", False),
        ("podman version 5.10.0-dev", "podman4-always", False),
        ("podman version 4.9.3", "podman4-running", False),
    ],
)
def test_a_podman_that_can_not_change_the_policy(engine, monkeypatch, version, fixture, refused):
    engine("podman", fixture, version=version)
    group = f"/machine.slice/libpod-{PODMAN_ID}.scope"
    monkeypatch.setattr(containers, "process_details", lambda pid: {"cgroup": group})
    if refused:
        with pytest.raises(RolloutError, match="--restart=no, or update podman"):
            containers.check("podman", "sglang")
    else:
        containers.check("podman", "sglang")


def test_a_container_in_somebody_elses_group_is_refused(engine, monkeypatch):
    engine("podman", "podman4-running")
    monkeypatch.setattr(containers, "process_details", lambda pid: {"cgroup": "/user.slice/session-3.scope"})
    with pytest.raises(RolloutError, match="no control group of its own"):
        containers.check("podman", "sglang")


def test_a_policy_that_is_so_already_is_not_set(engine):
    engine("podman", "podman5-exited")
    containers.set_policy("podman", "sglang", "no")
    assert engine.calls() == ["container inspect sglang"]


def test_a_policy_is_looked_at_after_it_was_set(engine, tmp_path):
    engine("docker", "docker-host-network-running")
    with pytest.raises(RolloutError, match=r"did not change.*unless-stopped"):
        containers.set_policy("docker", "sglang", "no")
    (found,) = json.loads(printed("docker-host-network-running"))
    current = tmp_path / "current.json"
    current.write_text(json.dumps([found]))
    found["HostConfig"]["RestartPolicy"]["Name"] = "no"
    (tmp_path / "after.json").write_text(json.dumps([found]))
    engine("docker", "", inspect=f"cat {current}", update=f"cp {tmp_path}/after.json {current}")
    containers.set_policy("docker", "sglang", "no")
    assert containers.show("docker", "sglang").enabled == "no"


def test_a_stop_is_a_signal_and_does_not_wait(engine):
    engine("docker", "docker-published-running")
    containers.stop("docker", "llm-sglang-1")
    assert engine.calls()[-1] == "kill --signal=SIGINT llm-sglang-1"
    containers.kill("docker", "llm-sglang-1")
    assert engine.calls()[-1] == "kill --signal=SIGKILL llm-sglang-1"


def test_a_container_that_waits_for_its_next_start_is_stopped_by_the_engine(engine):
    engine("docker", "docker-restarting")
    containers.stop("docker", "sglang")
    assert engine.calls()[-1] == "stop -t 5 sglang"


def test_a_signal_that_fails_counts_only_when_the_container_runs_on(engine):
    engine("docker", "docker-host-network-running", other="echo 'container is not well' >&2; exit 1")
    with pytest.raises(RolloutError, match="is not well"):
        containers.stop("docker", "sglang")


def test_the_log_is_in_the_order_of_time(engine):
    engine("docker", "docker-host-network-running")
    server = {"unit": "sglang", "runtime": "docker"}
    assert [line.split()[1] for line in servers.log_tail(server)] == ["first", "second"]


def test_a_server_is_asked_of_what_runs_it(engine):
    engine("podman", "podman5-exited")
    server = {"unit": "sglang", "runtime": "podman"}
    assert not servers.show(server).running
    servers.start(server)
    assert engine.calls()[-1] == "start sglang"
    assert servers.command(server, "logs") == "podman logs sglang"
    assert servers.command({"unit": "sglang.service"}, "logs") == "journalctl -u sglang.service"
    assert not servers.is_container({"unit": "sglang.service"})
