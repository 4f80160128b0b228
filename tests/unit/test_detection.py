"""Who serves: from the port or the GPUs to a unit, a container, or a refusal."""

from __future__ import annotations

import pytest
from dflash_rollout import containers, detection, units
from dflash_rollout.detection import Owner, detect, owner_of
from dflash_rollout.errors import RolloutError
from dflash_rollout.gpus import GpuProcess
from dflash_rollout.units import Listener

ID, OTHER = "3f4c" * 16, "9b1d" * 16


@pytest.mark.parametrize(
    ("cgroup", "runtime", "name"),
    [
        ("/system.slice/sglang.service", "systemd", "sglang.service"),
        ("/system.slice/system-llm.slice/llm@1.service/worker", "systemd", "llm@1.service"),
        (f"/system.slice/docker-{ID}.scope", "docker", ID),
        (f"/docker/{ID}", "docker", ID),
        (f"/machine.slice/libpod-{ID}.scope/container", "podman", ID),
        (f"/machine.slice/libpod-conmon-{ID}.scope", "podman", ID),
        (f"/system.slice/quadlet.service/libpod-payload-{ID}", "systemd", "quadlet.service"),
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/sglang.service",
            None,
            "user unit sglang.service",
        ),
        ("/user.slice/user-1000.slice/session-3.scope", None, "login session session-3.scope"),
        ("/user.slice/user-1000.slice/user@1000.service/tmux-spawn-1.scope", None, "user@1000.service"),
        (
            f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope/container",
            None,
            "user's own podman",
        ),
        ("/system.slice/run-r1.scope", None, "scope run-r1.scope"),
        ("/init.scope", None, "no unit at all"),
        ("/", None, "no unit at all"),
        (None, None, "no unit at all"),
        (f"/kubepods.slice/kubepods-pod1.slice/cri-containerd-{ID}.scope", None, "Kubernetes"),
    ],
)
def test_the_owner_of_a_control_group(cgroup, runtime, name):
    owner = owner_of(cgroup)
    assert owner.runtime == runtime
    assert name in owner.name
    assert runtime is None or owner == Owner(runtime, name)


@pytest.fixture
def host(monkeypatch):
    """host(listening={pid: cgroup}, gpus={pid: cgroup}, published=[ids]) prepares what is seen."""

    def prepare(listening=(), gpus=(), published=(), main_pid=0, main_name="python3.11"):
        groups = {**dict(listening), **dict(gpus)}
        monkeypatch.setattr(
            units,
            "listeners",
            lambda port: [Listener("127.0.0.1", port, pid, "u", "c", None) for pid in dict(listening)],
        )
        monkeypatch.setattr(
            detection,
            "query_processes",
            lambda: [GpuProcess(pid, "GPU-0", 0, "python3", 9, "u", "c") for pid in dict(gpus)],
        )
        monkeypatch.setattr(
            detection,
            "process_details",
            lambda pid: {"user": "alice", "command": f"command {pid}", "cgroup": groups[pid], "unit": None},
        )
        main = units.parse_unit("x.service", f"MainPID={main_pid}")
        monkeypatch.setattr(units, "show", lambda unit: main)
        parents = {12: 11, 11: 10, 10: 1}
        for place in (detection.units, detection.adoption):
            monkeypatch.setattr(place, "parent_of", parents.get)
        monkeypatch.setattr(detection.adoption, "name_of", lambda pid: main_name)
        monkeypatch.setattr(containers, "publishing", lambda engine, port: list(published))
        monkeypatch.setattr(
            containers,
            "inspect",
            lambda engine, name: (
                None
                if name == OTHER
                else containers.Container(
                    ID, "sglang", "running", 7, 0, "noon", 0, "always", False, "SIGTERM", (30000,), None
                )
            ),
        )
        monkeypatch.setattr(
            detection.adoption, "look", lambda pid, user: None if pid == 1 else started_as(pid, user)
        )

    return prepare


def started_as(pid, user):
    return detection.adoption.Program(
        pid, user, ("/opt/venv/bin/python", "-m", "x"), "/srv", "/usr/bin/python3.11"
    )


UNIT = {"runtime": "systemd", "unit": "sglang.service"}


def test_the_unit_that_listens_and_computes_whoever_else_holds_a_gpu(host):
    sglang = "/system.slice/sglang.service"
    host({10: sglang}, {11: sglang, 20: "/system.slice/training.service"})
    assert detect(30000).server == UNIT


def test_a_listener_that_computes_nothing_is_not_taken_for_the_server(host):
    host({10: "/system.slice/web.service"}, {20: "/system.slice/sglang.service"})
    found = detect(30000)
    assert found.server is None
    for word in ("port 30000 is held by pid 10", "web.service", "the GPUs by pid 20", "sglang.service"):
        assert word in found.refusal


def test_without_nvidia_smi_the_port_decides(host, monkeypatch):
    def fail():
        raise RolloutError("nvidia-smi is missing")

    host({10: "/system.slice/sglang.service"})
    monkeypatch.setattr(detection, "query_processes", fail)
    assert detect(30000).server == UNIT
    host()
    monkeypatch.setattr(detection, "query_processes", fail)
    assert "nvidia-smi is missing" in detect(30000).refusal


def test_several_processes_of_one_server(host):
    host({10: "/system.slice/sglang.service", 11: "/system.slice/sglang.service"})
    assert detect(30000).server == UNIT


def test_who_holds_a_gpu_without_listening_may_be_anybody(host):
    """Somebody's training must never become the server to stop."""
    host({}, {20: "/system.slice/training.service"})
    found = detect(30000)
    assert found.server is None
    for word in ("nobody listens on port 30000", "command 20", "training.service", "sglang_unit"):
        assert word in found.refusal


def test_nobody_at_all(host):
    host()
    found = detect(30000)
    assert (found.server, found.refusal, found.adopt) == (None, None, None)


@pytest.mark.parametrize("group", [f"/docker/{ID}", f"/system.slice/docker-{ID}.scope"])
def test_a_container(host, group):
    host({10: group})
    assert detect(30000).server == {"runtime": "docker", "unit": "sglang"}


def test_a_container_behind_dockers_proxy(host):
    host({10: "/system.slice/docker.service"}, published=[ID])
    assert detect(30000).server == {"runtime": "docker", "unit": "sglang"}


def test_a_container_that_root_does_not_know(host):
    host({10: f"/docker/{OTHER}"})
    found = detect(30000)
    assert found.server is None
    assert f"knows no container {OTHER}" in found.refusal
    assert "command 10" in found.refusal


def test_an_engine_that_gives_no_answer_is_no_refusal(host, monkeypatch):
    host({10: f"/docker/{ID}"})

    def inspect(engine, name):
        raise containers.EngineSilent("docker doesn't answer")

    monkeypatch.setattr(containers, "inspect", inspect)
    with pytest.raises(containers.EngineSilent):
        detect(30000)


@pytest.mark.parametrize("place", ["port", "gpu"])
def test_two_servers_are_named_both(host, place):
    both = {10: "/system.slice/sglang.service", 11: f"/docker/{ID}"}
    host(both if place == "port" else {}, both)
    found = detect(30000)
    assert found.server is None
    what = "more than one server" if place == "port" else "nobody listens"
    for word in (what, "command 10", "sglang.service", "command 11", "sglang_unit"):
        assert word in found.refusal


def test_a_login_session_is_refused_with_a_unit_file(host):
    host({10: "/user.slice/user-1000.slice/session-3.scope"})
    found = detect(30000)
    assert found.server is None
    for word in ("pid 10 of alice", "command 10", "session-3.scope", "adopt it as a unit"):
        assert word in found.refusal
    text = found.adopt
    assert "ExecStart=/opt/venv/bin/python -m x" in text
    assert "User=alice" in text
    assert "systemctl daemon-reload && systemctl enable --now sglang.service" in text


def test_a_process_that_ended_meanwhile(host):
    host({1: "/user.slice/user-1000.slice/session-3.scope"})
    assert detect(30000).adopt is None


def test_a_listener_that_can_not_be_seen(host, monkeypatch):
    host()
    monkeypatch.setattr(units, "listeners", lambda port: [Listener("::", port, None, None, None, None)])
    assert "root" in detect(30000).refusal


@pytest.mark.parametrize(
    ("pids", "main_pid", "main_name", "words"),
    [
        ([12], 10, "python3.11", None),
        ([12], 10, "bash", None),
        ([12, 13], 10, "python3.11", None),
        ([12], 10, "sshd", "ssh.service, which only carries it (its main process is sshd)"),
        ([12], 10, "cron", "only carries it"),
        ([12], 7, "agent", "not started by its main process 7 (agent)"),
    ],
    ids=["main", "a script", "one left its parent", "no logind", "cron", "left behind by nohup"],
)
def test_a_unit_that_only_carries_the_server_is_not_taken_for_it(host, pids, main_pid, main_name, words):
    """Without logind what an ssh login starts lies in ssh.service: stopping that is not stopping SGLang."""
    host(dict.fromkeys(pids, "/system.slice/ssh.service"), main_pid=main_pid, main_name=main_name)
    found = detect(30000)
    if words is None:
        assert found.server == {"runtime": "systemd", "unit": "ssh.service"}
    else:
        assert found.server is None
        assert words in found.refusal
        assert found.adopt
