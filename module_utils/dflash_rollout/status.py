"""One line of the table `status` for a host: what serves, how it does, and where it differs from the inventory. Reads only.

What decides is pure; `look` at the end is what reads.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable

from . import release as releases
from . import secret_files, units
from .acceptance import ACCEPTED, DRAFTS, GENERATED
from .errors import RolloutError
from .files import read_text
from .metrics_text import Sample, parse
from .proof import Deadline, NoProof, ask

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
ASK_TIMEOUT_S = 10.0

# As an argument spec.
WANTED_SPEC = {
    "files": {"type": "dict", "required": True},
    "links": {"type": "dict", "required": True},
    "secrets": {"type": "dict", "default": {}, "no_log": True},
    "secrets_dir": {"type": "path", "required": True, "no_log": False},
    "unit": {"type": "str", "required": True},
    "unit_path": {"type": "path", "default": "/etc/systemd/system/vllm-dflash@.service"},
}


# ---- pure --------------------------------------------------------------------------------------------------


def totals(samples: Iterable[Sample]) -> dict[str, float]:
    """Metric → its value summed over models and engines, of those that this looks at and the server has."""
    found: dict[str, float] = {}
    for sample in samples:
        if sample.name in (RUNNING, WAITING, GENERATED, DRAFTS, ACCEPTED):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def load_of(first: dict[str, float], second: dict[str, float], seconds: float) -> dict:
    """How the server does, from two readings of `totals`, `seconds` apart.

    `acceptance` is 1 + accepted / drafts since the start of the process; `tokens_per_s` is that of the time between
    the readings. None for what the server doesn't count, or hasn't yet.
    """
    drafts = second.get(DRAFTS)
    grown = second[GENERATED] - first[GENERATED] if GENERATED in first and GENERATED in second else None
    return {
        "acceptance": round(1 + second.get(ACCEPTED, 0.0) / drafts, 2) if drafts else None,
        "tokens_per_s": round(grown / seconds, 1)
        if grown is not None and grown >= 0 and seconds > 0
        else None,
        "running": int(second[RUNNING]) if RUNNING in second else None,
        "waiting": int(second[WAITING]) if WAITING in second else None,
    }


def span(seconds: float | None) -> str:
    """A time as an operator reads it: 42 s, 12 min, 5.3 h, 12 d."""
    if seconds is None:
        return "-"
    for unit, size, upto in (("s", 1, 120), ("min", 60, 7200)):
        if seconds < upto:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.0f} d"


def drift(
    *,
    unit: str | None,
    release: str | None,
    has: dict,
    wanted: dict,
    differing: list[str],
    unit_differs: bool,
) -> list[str]:
    """What differs between host and inventory, a sentence each; empty where they agree.

    `release`: the digest that serves, None for a server of others. `has`: release.json of it. `wanted`: `release`,
    `vllm` and `drafter_sha256` by the inventory. `differing`: files of the two releases that differ.
    """
    found = []
    if release is None:
        found.append(f"{unit or 'nothing'} serves, the inventory wants release {wanted['release']}")
    elif release != wanted["release"]:
        files = f" ({', '.join(differing)})" if differing else ""
        found.append(f"release {release} serves, the inventory wants {wanted['release']}{files}")
        for key, word, shorten in (("drafter_sha256", "drafter", 12), ("vllm", "vLLM", 20)):
            if has.get(key) != wanted[key]:
                found.append(
                    f"{word} {str(has.get(key))[:shorten]} serves, the inventory wants {wanted[key][:shorten]}"
                )
    if release is not None and unit_differs:
        found.append("vllm-dflash@.service is not what this project installs")
    return found


def row(host: str, status: dict, found: dict) -> dict[str, str]:
    """The cells of a host in the table: column → text. `status`: what `look` returned, `found`: what `inspect_serving` did."""

    def number(value: float | None, form: str = "{:g}") -> str:
        return "-" if value is None else form.format(value)

    sets = (found.get("acceptance") or {}).get("sets") or {}
    gate = [number((sets.get(name) or {}).get("length"), "{:.2f}") for name in ("short", "long")]
    serves = status["running_unit"]
    queue = [number(status["running"]), number(status["waiting"])]
    return {
        "host": host,
        "server": (serves or "nothing").split("@")[0].removesuffix(".service"),
        "release": status["release"] or "-",
        "drafter": (status["drafter_sha256"] or "-")[:12],
        "proved": "yes" if (found.get("proof") or {}).get("proved") else "NO",
        "uptime": span(status["uptime_s"]),
        "restarts": number(status["restarts"]),
        "acceptance": number(status["acceptance"], "{:.2f}"),
        "short_long": " / ".join(gate) if gate != ["-", "-"] else "-",
        "tokens_per_s": number(status["tokens_per_s"], "{:.1f}"),
        "queue": "+".join(queue) if queue != ["-", "-"] else "-",
        "drift": "?" if status["unknown"] else "YES" if status["drift"] else "no",
    }


# ---- looking -----------------------------------------------------------------------------------------------


def _read_release(path: str) -> dict:
    text = read_text(os.path.join(path, "release.json"))
    try:
        return json.loads(text) if text else {}
    except ValueError as error:
        raise RolloutError(f"{path}/release.json can't be read", found=str(error)) from error


def _instructions(text: str | None) -> list[str]:
    """The lines of a unit file without its comments and empty lines."""
    return [line for line in (text or "").splitlines() if line.strip() and not line.startswith("#")]


def compare(serving: dict | None, unit: str | None, wanted: dict, root: str) -> list[str]:
    """`drift` of this host. `wanted`: `files`, `links`, `secrets`, `secrets_dir`, `unit`, `unit_path`, as the roles
    would install them. Raises RolloutError for a release that can't be read or described."""
    files = dict(wanted["files"])
    if wanted["secrets"]:
        files["secrets.json"] = secret_files.fingerprints(
            wanted["secrets_dir"], wanted["secrets"], check=True
        )
    content = releases.read_content(files, wanted["links"])
    release = (serving or {}).get("release")
    path = os.path.join(root, "releases", release) if release else ""
    differing: list[str] = []
    if release and release != content.digest and os.path.isdir(path):
        # As if at the same place: a release's own path in its texts is no difference.
        entries = releases.difference(releases.Release(content.digest, path, False), content, path)
        headers = [(entry["before_header"], entry["after_header"]) for entry in entries]
        differing = [
            os.path.relpath(before if before.startswith(path) else after, path) for before, after in headers
        ]
    described = files["release.json"]
    return drift(
        unit=unit,
        release=release,
        has=_read_release(path) if release else {},
        wanted={
            "release": content.digest,
            "vllm": described["vllm"],
            "drafter_sha256": described["drafter_sha256"],
        },
        differing=differing,
        unit_differs=_instructions(read_text(wanted["unit_path"])) != _instructions(wanted["unit"]),
    )


def _metrics(server: dict) -> dict[str, float]:
    return totals(parse(ask(server, "/metrics", Deadline(ASK_TIMEOUT_S)).decode(errors="replace")))


def look(
    *, host: str, found: dict, server: dict | None, wanted: dict | None, root: str, window_s: float
) -> dict:
    """What the module `server_status` returns (see its RETURN).

    `found`: what `inspect_serving` returned. `server`: the description of what serves, or None.
    `wanted`: see `compare`; None where the inventory's wish can't be worked out.
    """
    unit = found["unit"] if found["unit"] and found["unit"]["running"] else None
    ours = found["serving"] if unit and (found["serving"] or {}).get("unit") == unit["unit"] else None
    release = (ours or {}).get("release")
    has = _read_release(os.path.join(root, "releases", release)) if release else {}
    load, silent = load_of({}, {}, 0.0), ""
    if unit and server and server.get("metrics"):
        try:
            begin, first = time.monotonic(), _metrics(server)
            time.sleep(window_s)
            second = _metrics(server)
            load = load_of(first, second, time.monotonic() - begin)
        except (NoProof, RolloutError) as reason:
            silent = f"/metrics: {reason}"
    status = {
        "running_unit": unit and unit["unit"],
        "release": release,
        "vllm": has.get("vllm"),
        "drafter_sha256": has.get("drafter_sha256"),
        "uptime_s": units.age_s(unit["main_pid"]) if unit and unit["main_pid"] else None,
        "restarts": unit and unit["restarts"],
        **load,
        "silent": silent,
        "drift": compare(ours, unit and unit["unit"], wanted, root) if wanted else [],
        "unknown": wanted is None,
    }
    return {**status, "row": row(host, status, found)}
