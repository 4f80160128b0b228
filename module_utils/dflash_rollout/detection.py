"""Which server is it that serves now? From who listens on the port, else from who holds the GPUs, to a unit or a
container that a switch can stop and start again, or a refusal that says what it is instead."""

from __future__ import annotations

from dataclasses import dataclass

from . import adoption, containers, units
from .containers import container_of
from .errors import RolloutError
from .gpus import process_details, query_processes, unit_of

# Services that run what others give them. To stop and start one of these is not to stop and start what it carries.
CARRIERS = frozenset(
    {"sshd", "sshd-session", "cron", "crond", "atd", "tmux", "screen", "dockerd", "containerd"}
)
# Their processes hold published ports for containers.
ENGINE_UNITS = ("docker.service", "snap.docker.dockerd.service")


@dataclass(frozen=True)
class Owner:
    """To whom a process belongs: `runtime` None is nothing that a switch can handle, and `name` says what."""

    runtime: str | None
    name: str


@dataclass
class Found:
    """What serves: `server` with its runtime and unit, or None; `refusal` why a switch can't take it over.

    `adopt`: a text to print, a unit file for what runs under none.
    """

    server: dict | None = None
    refusal: str | None = None
    adopt: str | None = None


def owner_of(cgroup: str | None) -> Owner:
    """The owner of a process by its cgroup path; of a container the name is its id."""
    parts = [part.removeprefix("_") for part in (cgroup or "").strip("/").split("/")]
    unit, container = unit_of(cgroup), container_of(cgroup)
    if parts[0] == "user.slice":
        inner = [part for part in parts if part.endswith(".service") and not part.startswith("user@")]
        if container:
            return Owner(None, f"a container of a user's own {container[0]} ({parts[-1]})")
        if unit and unit.startswith("user@"):
            return Owner(None, f"the user unit {inner[-1]}" if inner else f"something in {unit}")
        return Owner(None, f"the login session {unit}" if unit else "a login session")
    # A container in a unit's own control group is that unit's: Quadlet, --cgroups=split.
    if unit and unit.endswith(".service"):
        return Owner("systemd", unit)
    if "kubepods" in (cgroup or ""):
        return Owner(None, "a pod of Kubernetes")
    if container:
        return Owner(*container)
    if unit == "init.scope":
        return Owner(None, "no unit at all (it lies in init.scope)")
    return Owner(None, f"the scope {unit}, which nothing can start again" if unit else "no unit at all")


def _described(pid: int, owner: Owner) -> str:
    details = process_details(pid)
    user, command = details["user"] or "an unknown user", details["command"] or "unknown command"
    return f"pid {pid} of {user}: {command}, in {owner.name} ({details['cgroup']})"


def _owners(pid: int, port: int | None) -> list[Owner]:
    """The owner of a process; behind an engine's forwarder those whose port it is."""
    owner = owner_of(process_details(pid)["cgroup"])
    if owner.runtime == "systemd" and owner.name in ENGINE_UNITS and port is not None:
        return [Owner("docker", found) for found in containers.publishing("docker", port)] or [owner]
    return [owner]


def _carried(unit: str, pids: list[int]) -> Owner | None:
    """Not the unit itself but something in its control group: what cron or an ssh login without logind started."""
    main = units.show(unit).main_pid
    if not main:
        return None
    name = adoption.name_of(main)
    if name in CARRIERS:
        return Owner(None, f"{unit}, which only carries it (its main process is {name})")
    for pid in pids:
        above: int | None = pid
        while above:
            if above == main:
                return None
            above = units.parent_of(above)
    return Owner(None, f"{unit}, though not started by its main process {main} ({name or 'unknown'})")


def _owners_of(pids: list[int], port: int | None) -> dict[Owner, list[int]]:
    """Who owns these processes, each owner with those that are its."""
    found: dict[Owner, list[int]] = {}
    for pid in pids:
        for owner in _owners(pid, port):
            found.setdefault(owner, []).append(pid)
    carried = {owner: _carried(owner.name, own) for owner, own in found.items() if owner.runtime == "systemd"}
    return {carried.get(owner) or owner: own for owner, own in found.items()}


def _server(owner: Owner) -> dict:
    if owner.runtime == "systemd":
        return {"runtime": "systemd", "unit": owner.name}
    container = containers.inspect(owner.runtime or "", owner.name)
    if container is None:
        raise RolloutError(
            f"{owner.runtime} of root knows no container {owner.name}",
            remedy="a container of another engine, or a rootless one: adopt the server as a unit, or start it with "
            "docker or podman as root",
        )
    return {"runtime": owner.runtime, "unit": container.name}


def _holders() -> tuple[list[int], str | None]:
    """(pids that hold GPU memory, why they can't be known)."""
    try:
        return sorted({process.pid for process in query_processes()}), None
    except RolloutError as error:
        return [], str(error)


def _several(text: str) -> Found:
    return Found(
        refusal=f"It isn't clear what serves: {text}. What to do: end what doesn't belong there, or name the server to "
        "replace (sglang_unit, and sglang_runtime for a container)."
    )


def detect(port: int) -> Found:
    """Look who serves on `port`. Raises EngineSilent when the engine of a container doesn't answer.

    A listener without GPU memory, while others hold some, is not taken for the server. Without an answer of
    nvidia-smi the port alone decides (preflight says what is wrong with the driver).
    """
    listening = units.listeners(port)
    if any(listener.pid is None for listener in listening):
        return Found(
            refusal=f"Port {port} is held by a process that can't be seen from here. Is this run as root?"
        )
    at_port = sorted({listener.pid for listener in listening if listener.pid})
    on_gpu, unknown = _holders()
    if not at_port and not on_gpu:
        return Found(refusal=unknown)
    owners = _owners_of(at_port or on_gpu, port if at_port else None)
    distinct = list(owners)
    described = "; ".join(_described(pid, owner) for owner, own in owners.items() for pid in own)
    if not at_port:
        # It may be loading, or somebody's training that nobody may stop.
        return _several(f"nobody listens on port {port}, and the GPUs are held by {described}")
    where = f"listens on port {port}"
    if len(distinct) > 1:
        return _several(f"more than one server {where}: {described}")
    computing = _owners_of(on_gpu, None)
    if on_gpu and distinct[0] not in computing:
        held = "; ".join(_described(pid, owner) for owner, own in computing.items() for pid in own)
        return _several(f"port {port} is held by {described}, without GPU memory, and the GPUs by {held}")
    if distinct[0].runtime is not None:
        try:
            return Found(_server(distinct[0]))
        except containers.EngineSilent:
            raise
        except RolloutError as error:
            return Found(refusal=f"{error} It {where}: {described}.")
    program = adoption.look(at_port[0], process_details(at_port[0])["user"] or "root")
    return Found(
        refusal=f"What {where} is nothing that a switch can stop and start again: {described}. "
        "Expected: a systemd system unit, or a container of docker or podman (as root). What to do: adopt it as a "
        "unit (a ready file is printed beside this), then run this again.",
        adopt="\n".join(adoption.instructions(program)) if program else None,
    )
