#!/usr/bin/env python3
"""What clients see: the same prompts against several servers, one server at a time; standard library only.

Acceptance comes from vLLM's own counters, read before and after: acceptance length = 1 + accepted / drafts.
Its error is that of a mean over the drafts, taken as independent; neighbours in a text are not quite.
"""

from __future__ import annotations

import json
import math
import re
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total\{[^}]*\} ([0-9.e+]+)$", re.M
)
POSITION = re.compile(
    r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{[^}]*position="(\d+)"[^}]*\} ([0-9.e+]+)$', re.M
)


def ask(base: str, path: str, body: dict | None = None, timeout: float = 120) -> bytes:
    """One request; raises for any status but 200."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base + path, data, {"Content-Type": "application/json"})  # noqa: S310
    try:
        with _OPENER.open(request, timeout=timeout) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        with error:
            raise OSError(f"{base}{path} answered {error.code}: {error.read(500)!r}") from error


def counters(base: str) -> dict[str, float]:
    """vLLM's counters of speculation; positions as pos0, pos1, …; empty without speculation."""
    text = ask(base, "/metrics").decode()
    found = {name: float(value) for name, value in COUNTER.findall(text)}
    return found | {f"pos{place}": float(value) for place, value in POSITION.findall(text)}


def acceptance(before: dict[str, float], after: dict[str, float]) -> dict[str, object]:
    """Acceptance length of what ran between, with its standard error and the rate of each position."""
    drafts = after.get("drafts", 0) - before.get("drafts", 0)
    if not drafts:
        return {}
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    places = sorted((name for name in after if name.startswith("pos")), key=lambda name: int(name[3:]))
    # P(accepted >= k), so the moments of the accepted number of tokens.
    reached = [(after[name] - before.get(name, 0)) / drafts for name in places]
    mean = accepted / drafts
    square = sum((2 * place + 1) * rate for place, rate in enumerate(reached))
    error = math.sqrt(max(0.0, square - mean * mean) / drafts)
    return {
        "acceptance_length": round(1 + mean, 3),
        "standard_error": round(error, 4),
        "drafts": int(drafts),
        "accepted_of_position": [round(rate, 3) for rate in reached],
    }


def load(base: str, model: str, prompts: list, tokens: int, at_a_time: int) -> dict[str, object]:
    """Run all prompts (texts or token ids), greedy; tokens a second over all, and acceptance."""

    def one(prompt: object) -> tuple[int, str]:
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = json.loads(ask(base, "/v1/completions", body, timeout=300))
        return answer["usage"]["completion_tokens"], answer["choices"][0]["text"]

    before, begin = counters(base), time.monotonic()
    with ThreadPoolExecutor(at_a_time) as pool:
        answers = list(pool.map(one, prompts))
    seconds = time.monotonic() - begin
    made = sum(count for count, _ in answers)
    return {
        "prompts": len(prompts),
        "at_a_time": at_a_time,
        "tokens": made,
        "seconds": round(seconds, 2),
        "tokens_per_second": round(made / seconds, 1),
        **acceptance(before, counters(base)),
        "texts": [text for _, text in answers],
    }


def source_prompts(count: int, length: int) -> list[str]:
    """ASCII pieces of Python's own standard library, the same for one version of it: what the tiny pair knows."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = "".join(
        path.read_text(errors="replace")
        for path in sorted(folder.glob("*.py"))
        if path.stat().st_size > 20000
    )
    text = text.encode("ascii", "ignore").decode()
    step = max(1, (len(text) - length) // count)
    return [text[place : place + length] for place in range(0, step * count, step)]


class Probe(threading.Thread):
    """One small completion every `every` seconds, as a client from outside; writes one line for each."""

    def __init__(self, path: Path, base: str, model: str, every: float = 0.2):
        super().__init__(daemon=True)
        self.path, self.base, self.model, self.every = path, base, model, every
        self.ended = threading.Event()

    def run(self) -> None:
        with self.path.open("w") as log:
            log.write("unix_time,good,seconds\n")
            while not self.ended.wait(self.every):
                begin = time.time()
                try:
                    body = {"model": self.model, "prompt": "import ", "max_tokens": 1, "temperature": 0}
                    good = bool(json.loads(ask(self.base, "/v1/completions", body, 10))["choices"])
                except (OSError, ValueError, KeyError):
                    good = False
                log.write(f"{begin:.3f},{int(good)},{time.time() - begin:.3f}\n")
                log.flush()

    def stop(self) -> None:
        """End it and wait for its last line."""
        self.ended.set()
        self.join(15)


def outages(path: Path) -> list[dict[str, float]]:
    """From a probe's log: last good begin to the end of the first good one after, each time it was bad."""
    found, last_good, bad_since = [], None, None
    for line in path.read_text().splitlines()[1:]:
        begin, good, seconds = line.split(",")
        if good == "1":
            if bad_since is not None and last_good is not None:
                back = float(begin) + float(seconds)
                found.append({"from": last_good, "to": round(back, 3), "seconds": round(back - last_good, 2)})
            last_good, bad_since = float(begin), None
        elif bad_since is None:
            bad_since = float(begin)
    return found


def gpu_memory(path: Path, begin: float, end: float) -> dict[str, float | int]:
    """MiB used on the first GPU between two times (unix), from `nvidia-smi --query-gpu=timestamp,memory.used`."""
    seen = []
    for line in path.read_text().splitlines():
        stamp, _, used = line.partition(", ")
        try:
            at = time.mktime(time.strptime(stamp.split(".")[0], "%Y/%m/%d %H:%M:%S"))
            at += int(stamp.split(".")[1]) / 1000
            seen.append((at, int(used)))
        except (ValueError, IndexError):
            continue  # the line that is just being written
    mine = [used for at, used in seen if begin <= at <= end]
    if not mine:
        return {}
    return {
        "first": mine[0],
        "lowest": min(mine),
        "highest": max(mine),
        "last": mine[-1],
        "readings": len(mine),
    }
