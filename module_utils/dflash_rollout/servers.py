"""A server by its description, whatever runs it: a systemd unit, or a container of docker or podman. The one place
that looks at `runtime`."""

from __future__ import annotations

import os

from . import containers, units
from .errors import RolloutError
from .secret_files import hidden

SYSTEMD = "systemd"
RUNTIMES = (SYSTEMD, *containers.ENGINES)


def runtime(server: dict) -> str:
    """ "systemd", "docker" or "podman"."""
    return server.get("runtime") or SYSTEMD


def is_container(server: dict | None) -> bool:
    """Whether nothing but its restart policy keeps the server from starting by itself."""
    return server is not None and runtime(server) != SYSTEMD


def show(server: dict) -> units.Unit:
    """Its state. Raises RolloutError when systemd or the engine doesn't answer."""
    if is_container(server):
        return containers.show(server["runtime"], server["unit"])
    return units.show(server["unit"])


def start(server: dict) -> None:
    """Start it, or queue that. Doesn't wait until it serves."""
    if is_container(server):
        containers.start(server["runtime"], server["unit"])
    else:
        units.start(server["unit"])


def stop(server: dict) -> None:
    """SIGTERM, without waiting."""
    if is_container(server):
        containers.stop(server["runtime"], server["unit"])
    else:
        units.stop(server["unit"])


def kill_group(server: dict) -> None:
    """SIGKILL to all of it."""
    if is_container(server):
        containers.kill(server["runtime"], server["unit"])
    else:
        units.kill_group(server["unit"])


def log_tail(server: dict, cursor: str | None = None, lines: int = 30) -> list[str]:
    """The last lines of its log; of a unit's those after `cursor` (units.journal_cursor).
    Without its API key."""
    if is_container(server):
        return hidden(server, containers.logs(server["runtime"], server["unit"], lines))
    return hidden(server, units.journal_tail(server["unit"], cursor, lines))


def check_container(server: dict) -> None:
    """Raise RolloutError when a switch could not keep a container down, or not bring it back."""
    if is_container(server):
        containers.check(server["runtime"], server["unit"])


def check_unit(server: dict, unit: units.Unit) -> None:
    """Raise RolloutError when a unit could not be started, or would start when it may not."""
    name = server["unit"]
    if unit.load_state != "loaded":
        raise RolloutError(
            f"{name} can't be used",
            found=f"LoadState={unit.load_state}",
            expected="LoadState=loaded",
            remedy="install or unmask the unit, and run systemctl daemon-reload",
        )
    check_guard(server, unit)
    gone = [path for path in needed_files(server, unit.program) if not os.path.exists(path)]
    if gone:
        raise RolloutError(
            f"{name} can't be started any more: files that it needs are gone",
            found=f"no {', no '.join(gone)}",
            remedy="stage the release again (playbooks/stage.yml)"
            if server.get("release")
            else "bring them back, or correct ExecStart= of the unit",
        )


def check_guard(server: dict, unit: units.Unit) -> None:
    """Raise RolloutError when a unit doesn't ask the program whether it may start."""
    if not unit.guarded:
        raise RolloutError(
            f"{server['unit']} would start without asking which server is chosen",
            found="no ExecCondition= of ours in it",
            expected="ExecCondition= with the program's may-start",
            remedy="let the roles install the unit or its drop-in, and run systemctl daemon-reload",
        )


def needed_files(server: dict, program: str) -> list[str]:
    """What must be there for a start: what ExecStart= runs, and of a release all that it names."""
    if not program:
        return []
    release = server.get("release")
    keys = [server["api_key_file"]] if server.get("api_key_file") else []
    before, found, _ = program.partition(f"/{release}/") if release else ("", "", "")
    inside = ("vllm.yaml", "environment", "drafter/config.json", "drafter/model.safetensors") if found else ()
    return [program, *(f"{before}/{release}/{name}" for name in inside), *keys]


def startable(server: dict) -> str | None:
    """Why a switch could not go to this server now, or None."""
    try:
        if is_container(server):
            check_container(server)
        else:
            check_unit(server, show(server))
    except RolloutError as problem:
        return str(problem)
    return None


def set_restart_policy(server: dict, policy: str) -> None:
    """Set a container's restart policy. A unit has none: its guard is asked instead."""
    if is_container(server):
        containers.set_policy(server["runtime"], server["unit"], policy)


def command(server: dict, verb: str) -> str:
    """What an operator types: `verb` is "start", "restart" or "logs"."""
    name = server["unit"]
    if is_container(server):
        return f"{server['runtime']} {verb} {name}"
    return f"journalctl -u {name}" if verb == "logs" else f"systemctl {verb} {name}"
