"""Containers of docker and podman as servers: thin functions around the two commands, and readers of what they
print. They decide nothing.

A container has no ExecCondition=: nothing asks us before it starts. What keeps it down during a switch and after
one is its restart policy `no`, so the functions that read and set the policy are here beside those that stop it.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass

from .errors import RolloutError
from .gpus import process_details
from .units import Unit

ENGINES = ("docker", "podman")
# Both answer at once when they are well. Docker's client waits for ever for a daemon that hangs.
TIMEOUT_S = 30.0
# A start mounts the image and asks the GPU's hook: seconds, after a boot many.
START_TIMEOUT_S = 120.0
# `podman update` has --restart since this version.
PODMAN_SETS_POLICY = (5, 1)
# Who else starts a container again, by the label that it puts on it.
_MANAGERS = {
    "PODMAN_SYSTEMD_UNIT": "the systemd unit",
    "com.docker.swarm.service.name": "the swarm service",
    "io.kubernetes.pod.name": "the Kubernetes pod",
}
_ID = re.compile(r"(?:(docker|libpod|libpod-conmon|libpod-payload)-)?([0-9a-f]{64})(?:\.scope)?")


class EngineSilent(RolloutError):
    """The engine gives no answer: its daemon is dead, hangs, or has not booted yet. Asking again may help."""


@dataclass(frozen=True)
class Container:
    """What `inspect` prints of a container, as far as a switch needs it.

    `policy` as `update --restart=` takes it; `manager`: who else starts it, in words, or None; `published`: ports
    of the host.
    """

    id: str
    name: str
    status: str
    pid: int
    exit_code: int
    started_at: str
    restarts: int
    policy: str
    removed_on_exit: bool
    stop_signal: str
    published: tuple[int, ...]
    manager: str | None


def parse_inspect(text: str) -> Container:
    """Read what `docker container inspect` or `podman container inspect` prints for one container.

    Raises RolloutError for anything else.
    """
    try:
        (found,) = json.loads(text)
        state, host, config = found["State"], found["HostConfig"], found["Config"]
        rule = host.get("RestartPolicy") or {}
        policy = rule.get("Name") or "no"
        if policy == "on-failure" and rule.get("MaximumRetryCount"):
            policy = f"on-failure:{rule['MaximumRetryCount']}"
        labels = config.get("Labels") or {}
        managers = [f"{what} {labels[label]}" for label, what in _MANAGERS.items() if labels.get(label)]
        bindings = [binding for port in (host.get("PortBindings") or {}).values() for binding in port or []]
        # podman 4 prints the number of the signal, everybody else its name.
        stop = config.get("StopSignal") or "SIGTERM"
        return Container(
            id=found["Id"],
            name=found["Name"].removeprefix("/"),
            status=state["Status"],
            pid=state["Pid"],
            exit_code=state["ExitCode"],
            started_at=state["StartedAt"],
            restarts=found.get("RestartCount", 0),
            policy="no" if policy == "never" else policy,
            removed_on_exit=bool(host.get("AutoRemove")),
            stop_signal=signal.Signals(stop).name if isinstance(stop, int) else stop,
            published=tuple(sorted({int(item["HostPort"]) for item in bindings if item.get("HostPort")})),
            manager=managers[0] if managers else None,
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RolloutError(
            "What the container engine prints of a container can't be read",
            found=f"{type(error).__name__}: {error} in {' '.join(text.split())[:200]}",
            expected="a list with one container",
            remedy="is this the real docker or podman command?",
        ) from error


def container_of(cgroup: str | None) -> tuple[str, str] | None:
    """(engine, id) of the container that a cgroup path belongs to, or None.

    docker-<id>.scope and libpod-<id>.scope under whatever slice (systemd's driver), /docker/<id> (cgroupfs).
    podman's conmon, which holds the published ports, lies in libpod-conmon-<id>.scope.
    """
    for part in (cgroup or "").split("/"):
        match = _ID.fullmatch(part)
        if match:
            return "podman" if (match[1] or "").startswith("libpod") else "docker", match[2]
    return None


def control_group(cgroup: str | None, container_id: str) -> str:
    """The part of a process's cgroup path that is the container's own; "" when no part is.

    Without the groups below it: crun puts the processes into `…/libpod-<id>.scope/container`.
    """
    path = ""
    for part in (cgroup or "").strip("/").split("/"):
        path += f"/{part}"
        if container_id in part:
            return path
    return ""


# systemd's words for an engine's; anything else has ended.
_STATES = {
    "running": ("active", "running"),
    "paused": ("active", "paused"),
    "restarting": ("activating", "auto-restart"),
    "stopping": ("deactivating", "stopping"),
    "removing": ("deactivating", "removing"),
}


def as_unit(container: Container, engine: str, cgroup: str | None) -> Unit:
    """A container in the words that the switch reads. `cgroup`: the path of its main process, None when down."""
    ended = ("inactive" if container.exit_code == 0 else "failed", container.status)
    active, sub = _STATES.get(container.status, ended)
    return Unit(
        unit=container.name,
        load_state="loaded",
        active_state=active,
        sub_state=sub,
        main_pid=container.pid,
        restarts=container.restarts,
        control_group=control_group(cgroup, container.id),
        invocation_id=f"{container.id[:12]} {container.started_at}",
        result="success" if container.exit_code == 0 else f"exit-code {container.exit_code}",
        enabled=container.policy,
        job=0,
        guarded=False,
        published=container.published,
        forwarders=("docker.service", "snap.docker.dockerd.service")
        if engine == "docker"
        else (f"libpod-conmon-{container.id}.scope",),
    )


def _run(engine: str, *arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    command, timeout = [engine, *arguments], timeout or TIMEOUT_S
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise RolloutError(
            f"{engine} is missing",
            found=f"no {engine} on PATH",
            remedy=f"install its command, or don't name {engine} as the runtime of the server",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise EngineSilent(
            f"{engine} doesn't answer",
            found=f"no answer within {timeout:g} s to {' '.join(command)}",
            remedy=f"look whether {engine} is well (systemctl status {engine}), restart its daemon",
        ) from error
    if done.returncode and re.search(
        r"cannot connect|is the docker daemon running", done.stderr, re.IGNORECASE
    ):
        raise EngineSilent(
            f"{engine} doesn't answer",
            found=" ".join(done.stderr.split()),
            remedy=f"systemctl start {engine}, and see its log if that fails",
        )
    return done


def _do(engine: str, *arguments: str, timeout: float | None = None) -> str:
    done = _run(engine, *arguments, timeout=timeout)
    if done.returncode:
        raise RolloutError(
            f"{engine} {' '.join(arguments)} failed with exit status {done.returncode}",
            found=" ".join((done.stderr or done.stdout).split()) or "no output",
        )
    return done.stdout


def inspect(engine: str, name: str) -> Container | None:
    """A container by its name or id; None when there is none. Raises EngineSilent, or RolloutError."""
    done = _run(engine, "container", "inspect", name)
    if done.returncode and "no such container" in done.stderr.lower():
        return None
    if done.returncode:
        raise RolloutError(
            f"{engine} can't inspect the container {name}", found=" ".join(done.stderr.split()) or "no output"
        )
    return parse_inspect(done.stdout)


def show(engine: str, name: str) -> Unit:
    """The state of a container. One that does not exist has load_state "not-found"; that is no error."""
    container = inspect(engine, name)
    if container is None:
        return Unit(name, "not-found", "inactive", "dead", 0, 0, "", "", "success", "", 0, False)
    cgroup = process_details(container.pid)["cgroup"] if container.pid else None
    return as_unit(container, engine, cgroup)


def publishing(engine: str, port: int) -> list[str]:
    """Ids of the running containers that publish a port of the host."""
    return _do(engine, "ps", "--quiet", "--no-trunc", "--filter", f"publish={port}").split()


def check(engine: str, name: str) -> None:
    """Raise RolloutError when a switch could not stop this container for good, or not start it again."""
    container = inspect(engine, name)
    who = f"The container {name} of {engine}"
    if container is None:
        raise RolloutError(f"{who} does not exist", remedy=f"see {engine} ps --all")
    if container.removed_on_exit:
        raise RolloutError(
            f"{who} is removed as soon as it stops: there would be no way back to it",
            found="AutoRemove (it was started with --rm)",
            remedy="start it once without --rm, with the same arguments",
        )
    if container.manager:
        raise RolloutError(
            f"{who} belongs to somebody who starts it again",
            found=container.manager,
            expected="a container that nothing but its restart policy starts",
            remedy="for a systemd unit: run the server in the unit's own control group (--cgroups=split, as Quadlet "
            "does), then the unit is what the switch stops. Otherwise take the container out of its manager's hands",
        )
    if container.policy != "no" and engine == "podman":
        words = _do(engine, "--version").split()
        version = re.match(r"(\d+)\.(\d+)", words[-1] if words else "")
        if version is None or (int(version[1]), int(version[2])) < PODMAN_SETS_POLICY:
            raise RolloutError(
                f"{who} has a restart policy that this podman can't change",
                found=f"policy {container.policy}, {' '.join(words) or 'no version'}",
                expected=f"policy no, or podman {'.'.join(map(str, PODMAN_SETS_POLICY))} or later",
                remedy="create the container anew with --restart=no, or update podman",
            )
    if container.pid and not control_group(process_details(container.pid)["cgroup"], container.id):
        raise RolloutError(
            f"{who} has no control group of its own: its processes can't be told from others",
            found=f"pid {container.pid} in {process_details(container.pid)['cgroup']}",
            remedy="create it anew without --cgroups=disabled",
        )


def set_policy(engine: str, name: str, policy: str) -> None:
    """Set the restart policy, unless it is that already. Raises RolloutError when it isn't so afterwards."""
    container = inspect(engine, name)
    if container is not None and container.policy == policy:
        return
    _do(engine, "update", f"--restart={policy}", name)
    container = inspect(engine, name)
    if container is None or container.policy != policy:
        raise RolloutError(
            f"{engine} did not change the restart policy of {name}",
            found=container.policy if container else "no such container",
            expected=policy,
        )


def start(engine: str, name: str) -> None:
    """Start a container that exists. Does nothing when it runs."""
    _do(engine, "start", name, timeout=START_TIMEOUT_S)


def stop(engine: str, name: str) -> None:
    """Send the stop signal, SIGTERM unless the image names another. Doesn't wait, and SIGKILL is not sent.

    `engine stop` would wait and kill by a clock of its own, which dies with its client.
    """
    container = inspect(engine, name)
    if container is None:
        return
    if container.status in ("restarting", "paused"):
        # Nothing runs that could drain; `kill` refuses both.
        _do(engine, "stop", "-t", "5", name)
    elif container.pid:
        done = _run(engine, "kill", f"--signal={container.stop_signal}", name)
        if done.returncode and show(engine, name).running:
            raise RolloutError(f"{engine} can't signal {name}", found=" ".join(done.stderr.split()))


def kill(engine: str, name: str) -> None:
    """SIGKILL to the container: the kernel ends all of its processes with the first one."""
    _run(engine, "kill", "--signal=SIGKILL", name)


def logs(engine: str, name: str, lines: int = 30) -> list[str]:
    """The last lines of its log, standard output and error together, with the time before each."""
    done = _run(engine, "logs", "--timestamps", f"--tail={lines}", name)
    found = [line.rstrip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return sorted(found)[-lines:]
