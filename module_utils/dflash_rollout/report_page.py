"""Records of switches → what the page of a roll-out shows and where it draws it. Pure: no clock, no file.

Places are percentages of a drawing's width, so that its text keeps its size on a phone and on paper.
"""

from __future__ import annotations

import datetime
import html
import json
import math
import re

from .switch_state import (
    CONFIRMED,
    END_STATES,
    GPU_FREE,
    NEW_GONE,
    NEW_STARTED,
    OLD_STOPPED,
    PREPARED,
    PROVED,
    REFUSED,
    ROLLED_BACK,
    ROLLING_BACK,
    STRANDED,
    seconds_in_states,
)

# What goes on while a switch is in a state: it is written down before anything is done that it allows.
MEANING = {
    PREPARED: "the old server is being stopped",
    OLD_STOPPED: "waiting until the GPUs are free and stable",
    GPU_FREE: "the new server is being started",
    NEW_STARTED: "the new server loads, until it is proved",
    PROVED: "the new server is made the one that boots",
    CONFIRMED: "the new server serves, proved",
    ROLLING_BACK: "the new server is being stopped",
    NEW_GONE: "the old server loads, until it is proved",
    ROLLED_BACK: "the old server serves again, proved",
    STRANDED: "no server could be proved",
    REFUSED: "nothing was touched",
}
# Which colour a state has.
_KIND = {PREPARED: "begin", NEW_STARTED: "load", ROLLING_BACK: "back", NEW_GONE: "back"}
_END_KIND = {CONFIRMED: "good", ROLLED_BACK: "warn", REFUSED: "warn", STRANDED: "bad"}
# Of the width of a drawing, in percent: less can't be seen.
THINNEST = 0.4
# Narrower ones have no room for their number.
NUMBERED = 3.5
# Seconds between two marks of the axis; the first that gives at most `MARKS` of them.
STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
MARKS = 6
# Of the chart of positions, in pixels.
PLOT_TOP, PLOT_HEIGHT = 10, 120


def page(records: dict[str, dict | None], run: dict | None = None) -> dict | None:
    """The whole page: host → its record as it is kept on the control node, or None where there is none.

    A record is a switch's own (switch_state.new_record) with `acceptance` (acceptance.gate), `drafter`
    (serving.drafter_of) and `advice`; all three may be missing. `run` is a roll-out that did not end well: `at`,
    `line` (how it ended for all), `reasons` (texts that concern all) and `hosts`: host → `end` and `reasons`, each
    with `task`, `phase` and `text`. Returns None without any record and without a run.
    """
    known = {host: record for host, record in records.items() if record}
    if not known and not run:
        return None
    scale = max(1.0, *(_duration(record) for record in known.values())) if known else 1.0
    hosts = [_host(host, record, scale) for host, record in known.items()]
    counts = {}
    for host in hosts:
        counts[host["state"]] = counts.get(host["state"], 0) + 1
    moments = [_moment(record["states"][-1]["at"]) for record in known.values() if record["states"]]
    # The same records are the same page, under the same name; what did not end well has a page of its own.
    last = _moment(run["at"]) if run else max(moments)
    return {
        "name": f"roll-out-{last:%Y%m%dT%H%M%SZ}",
        "until": _date(last.isoformat()),
        "counts": [
            {"state": state, "hosts": counts[state], "kind": _END_KIND[state]}
            for state in END_STATES
            if state in counts
        ]
        + [
            {"state": state, "hosts": number, "kind": "warn"}
            for state, number in counts.items()
            if state not in END_STATES
        ],
        "hosts": hosts,
        "without": [host for host, record in records.items() if not record],
        "marks": marks(scale),
        "run": run and _run(run),
    }


def _run(run: dict) -> dict:
    return {
        "line": run["line"],
        "reasons": [_reason({"text": text}) for text in run["reasons"]],
        "hosts": [
            {"name": host, "end": found["end"], "reasons": [_reason(reason) for reason in found["reasons"]]}
            for host, found in run["hosts"].items()
        ],
    }


def _reason(reason: dict) -> dict:
    return {
        "where": f"{reason['phase']}: {reason['task']}" if reason.get("task") else None,
        "lines": [
            row for line in reason["text"].splitlines() if line.strip() for row in _parts(line.strip())
        ],
    }


def _parts(line: str) -> list[dict]:
    """What a RolloutError says, part by part: `label` (found, expected, what to do, or None) and `text`."""
    pieces = re.split(r" (Found|Expected|What to do): ", line)
    labels = [None, *pieces[1::2]]
    return [{"label": label, "text": text} for label, text in zip(labels, pieces[::2], strict=True)]


def escaped(value: object) -> object:
    """The same with every text in it made safe for HTML: what is done here, no line of a template can forget."""
    if isinstance(value, dict):
        return {key: escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [escaped(one) for one in value]
    return html.escape(value) if isinstance(value, str) else value


def _host(name: str, record: dict, scale: float) -> dict:
    old, new = record.get("old"), record["new"]
    ended = record["state"] in END_STATES
    return {
        "name": name,
        "state": record["state"],
        "kind": _END_KIND.get(record["state"], "warn"),
        "meaning": MEANING[record["state"]] if ended else "the switch had not ended when this was recorded",
        "old": old and old["unit"],
        "new": new["unit"],
        "model_id": new.get("model_id"),
        "id": record["id"],
        "by": record.get("requested_by"),
        "at": _date(record["states"][0]["at"] if record["states"] else record.get("requested_at")),
        "outage": seconds_text(record.get("outage_s")),
        "timeline": timeline(record, scale),
        "cause": record.get("cause"),
        "remedy": record.get("remedy"),
        "advice": record.get("advice") or None,
        "logs": [
            {"unit": server["unit"], "lines": lines}
            for server, lines in ((new, record.get("log_tail")), (old, record.get("old_log_tail")))
            if server and lines
        ],
        "killed": record.get("killed") or [],
        "acceptance": acceptance(record.get("acceptance")),
        "drafter": drafter(record.get("drafter")),
    }


def seconds_text(seconds: float | None) -> str | None:
    """`4.19 s`, `68.3 s`, `20 min 7 s`; None stays None."""
    if seconds is None:
        return None
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s"


def _moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).astimezone(datetime.timezone.utc)


def _date(text: str | None) -> str | None:
    return f"{_moment(text):%Y-%m-%d %H:%M:%S} UTC" if text else None


def _steps(record: dict) -> list[dict]:
    """Each state with its seconds; where the host was restarted in it, those of the wall clock (`exact` false)."""
    rows = seconds_in_states(record)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        row["exact"] = row["seconds"] is not None
        if following is None:
            row["seconds"] = None
        elif not row["exact"]:
            row["seconds"] = max(0.0, (_moment(following["at"]) - _moment(row["at"])).total_seconds())
    return rows


def _duration(record: dict) -> float:
    return sum(row["seconds"] or 0.0 for row in _steps(record))


def timeline(record: dict, scale: float) -> dict:
    """One switch on an axis of `scale` seconds: `segments` (with `left` and `width` in percent), `outage`, `end`.

    A segment's `number` is its row in the table beside the drawing, from 1.
    """
    segments, at = [], 0.0
    for number, row in enumerate(_steps(record), 1):
        seconds = row["seconds"]
        width = max(THINNEST, 100 * (seconds or 0.0) / scale)
        left = min(100 * at / scale, 100 - THINNEST)
        segments.append(
            {
                "number": number,
                "state": row["state"],
                "meaning": MEANING[row["state"]],
                "at": f"{_moment(row['at']):%H:%M:%S}",
                "seconds": seconds_text(seconds),
                "exact": row["exact"],
                "kind": _KIND.get(row["state"], _END_KIND.get(row["state"], "down")),
                "left": round(left, 3),
                "width": round(min(width, 100 - left), 3),
                "drawn": seconds is not None,
                "numbered": seconds is not None and width >= NUMBERED,
            }
        )
        at += seconds or 0.0
    begin, lasted, outage = record.get("outage_begin_s"), record.get("outage_s"), None
    if begin is not None and lasted is not None and record["states"]:
        left = min(max(0.0, 100 * (begin - record["states"][0]["boot_s"]) / scale), 100 - THINNEST)
        width = min(max(THINNEST, 100 * lasted / scale), 100 - left)
        outage = {"left": round(left, 3), "width": round(width, 3), "text": seconds_text(lasted)}
    return {
        "segments": segments,
        "outage": outage,
        "end": round(min(100.0, 100 * at / scale), 3),
        "total": seconds_text(at),
    }


def marks(scale: float) -> list[dict]:
    """The axis of `scale` seconds: `left` in percent and `text`, at most seven of them, the first at 0."""
    step = next((step for step in STEPS if scale / step <= MARKS), None)
    if step is None:
        step = 3600 * math.ceil(scale / MARKS / 3600)
    return [
        {
            "left": round(100 * second / scale, 3),
            "text": f"{second} s" if step < 60 or second == 0 else f"{second // 60} min",
        }
        for second in range(0, math.floor(scale) + 1, step)
    ]


def acceptance(record: dict | None) -> dict | None:
    """The kept measurement of a release: verdict, a row for each set of prompts, and the bars of their positions."""
    if not record:
        return None
    sets = []
    for name in ("short", "long"):
        found = record["sets"].get(name)
        if found is None:
            continue
        sets.append(
            {
                "name": name,
                "length": None if found.get("length") is None else f"{found['length']:.2f}",
                "reference": f"{record['reference'][name]:.2f}"
                if (record.get("reference") or {}).get(name)
                else None,
                "tokens": found.get("tokens"),
                "speed": None if found.get("tokens_per_s") is None else f"{found['tokens_per_s']:.1f}",
                "note": found.get("left_out") or found.get("problem"),
                "rates": found.get("per_position") or [],
            }
        )
    return {
        "verdict": record["verdict"],
        "kind": {"passed": "good", "off": "none"}.get(record["verdict"], "warn"),
        "text": record["text"],
        "mode": record["mode"],
        "from": record.get("reference_from"),
        "at": _date(record.get("measured_at")),
        "sets": sets,
        "chart": positions({found["name"]: found["rates"] for found in sets if found["rates"]}),
    }


def positions(series: dict[str, list[float]]) -> dict | None:
    """Bars for the part of drafts accepted at each position: `left`, `width` in percent, `top`, `height` in pixels.

    `series`: name → rates from 0 to 1, from the first position. None where there is nothing to draw.
    """
    count = max(map(len, series.values()), default=0)
    if count == 0:
        return None
    slot = 100 / count
    thick = slot * 0.76 / len(series)
    bars = []
    for place, (name, rates) in enumerate(series.items()):
        for number, rate in enumerate(rates):
            high = round(PLOT_HEIGHT * min(max(rate, 0.0), 1.0), 1)
            bars.append(
                {
                    "set": name,
                    "position": number + 1,
                    "rate": f"{rate:.1%}",
                    "left": round(number * slot + slot * 0.12 + place * thick, 3),
                    "width": round(thick, 3),
                    "top": round(PLOT_TOP + PLOT_HEIGHT - high, 1),
                    "height": high,
                }
            )
    return {
        "bars": bars,
        "labels": [
            {"left": round((number + 0.5) * slot, 3), "text": number + 1}
            # Two digits need some room on a phone.
            for number in range(0, count, 1 if count <= 16 else math.ceil(count / 16))
        ],
        "lines": [
            {"top": round(PLOT_TOP + PLOT_HEIGHT * (1 - part), 1), "text": f"{part:.0%}"}
            for part in (1, 0.5, 0)
        ],
        "bottom": PLOT_TOP + PLOT_HEIGHT,
        "rows": [
            {
                "position": number + 1,
                "rates": [
                    f"{rates[number]:.1%}" if number < len(rates) else None for rates in series.values()
                ],
            }
            for number in range(count)
        ],
        "sets": list(series),
    }


def drafter(found: dict | None) -> dict | None:
    """The drafter of a release: its file, and each value of its config with where that comes from."""
    if not found:
        return None
    config, rows = found.get("config") or {}, []
    for key, source in (found.get("provenance") or {}).items():
        value = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        rows.append({"key": key, "value": json.dumps(value), "source": source})
    return {"sha256": found.get("drafter_sha256"), "vllm": found.get("vllm"), "rows": rows}
