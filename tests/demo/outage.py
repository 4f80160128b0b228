#!/usr/bin/env python3
"""The outage of each host as its clients see it: completions from outside, five a second.

    outage.py watch LOG INVENTORY      until SIGTERM: one JSON line per request, to LOG
    outage.py report LOG INVENTORY     a table: outage, of it the old server's stop and the new one's load, the rest

Outage: from the last good completion to the first good one after it. The old server's stop is systemd's own
time from SIGTERM to gone; the new one's load is from its exec (systemd) to the first 200 of /v1/models that was
seen. What remains is the switch's own. Local test hosts share this machine's monotonic clock, so the two can be
compared; with hosts elsewhere they can't.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request

PERIOD_S = 0.2
TIMEOUT_S = 2.0
#: A simulated SGLang serves some seconds after its host has booted, more on a busy machine.
PATIENCE_S = 60.0
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def hosts_of(inventory: str) -> dict[str, dict]:
    """Host → its variables."""
    shown = subprocess.run(
        ["ansible-inventory", "-i", inventory, "--list"], check=True, capture_output=True, text=True
    )
    return json.loads(shown.stdout)["_meta"]["hostvars"]


def ask(address: str, path: str, body: dict | None = None) -> bool:
    """Whether the server answered 200 with JSON in time."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} if data else {}
    try:
        request = urllib.request.Request(f"http://{address}{path}", data, headers)
        with OPENER.open(request, timeout=TIMEOUT_S) as response:
            return bool(json.load(response))
    except (OSError, ValueError):
        return False


def model_id(address: str, patience_s: float = PATIENCE_S) -> str:
    """The id of the model that is served there. A host that has just booted may not serve yet.

    Raises SystemExit when there is none within `patience_s` seconds.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with OPENER.open(f"http://{address}/v1/models", timeout=TIMEOUT_S) as response:
                return json.load(response)["data"][0]["id"]
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"http://{address}/v1/models: {error}; expected a model within {patience_s:.0f} s. "
                    "Nothing serves there that could have an outage."
                ) from error
            time.sleep(PERIOD_S)


def watch(log: str, inventory: str) -> None:
    """Ask every host until SIGTERM."""
    addresses = {
        name: f"{values['ansible_host']}:{values.get('rollout_port', 30000)}"
        for name, values in hosts_of(inventory).items()
    }
    model = {name: model_id(address) for name, address in addresses.items()}
    running = True
    writing = threading.Lock()

    def end(*_: object) -> None:
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, end)
    with open(log, "w", encoding="utf-8") as stream, concurrent.futures.ThreadPoolExecutor(32) as pool:

        def request(name: str, what: str) -> None:
            begin = time.monotonic()
            if what == "models":
                good = ask(addresses[name], "/v1/models")
            else:
                good = ask(
                    addresses[name],
                    "/v1/completions",
                    {"model": model[name], "prompt": "Hello", "max_tokens": 1, "temperature": 0},
                )
            row = {"host": name, "what": what, "begin": begin, "end": time.monotonic(), "good": good}
            with writing:
                stream.write(json.dumps(row) + "\n")

        due = time.monotonic()
        while running:
            for name in addresses:
                for what in ("models", "completion"):
                    pool.submit(request, name, what)
            due += PERIOD_S
            time.sleep(max(0.0, due - time.monotonic()))


def gap(rows: list[dict]) -> tuple[float, float] | None:
    """(end of the last good completion before the longest time without one, end of the first good one after it)."""
    good = sorted(row["end"] for row in rows if row["what"] == "completion" and row["good"])
    bad = [row["begin"] for row in rows if row["what"] == "completion" and not row["good"]]
    found = [
        (before, after)
        for before, after in itertools.pairwise(good)
        if any(before <= begin <= after for begin in bad)
    ]
    return max(found, key=lambda pair: pair[1] - pair[0], default=None)


def clock(inventory: str, host: str, unit: str, name: str) -> float:
    """A monotonic timestamp of a unit in seconds, as systemd keeps it."""
    argv = ["ansible", host, "-i", inventory, "-m", "ansible.builtin.command", "-a"]
    argv.append(f"systemctl show --value -p {name}TimestampMonotonic {unit}")
    shown = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return int(shown.split()[-1]) / 1e6


def report(log: str, inventory: str) -> int:
    """Print the table; returns 1 when a host had no outage or none that ended."""
    with open(log, encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    print(
        f"{'HOST':<14}{'OUTAGE':>9}{'OLD STOPS':>11}{'NEW LOADS':>11}{'THE SWITCH':>12}   (seconds, 5 probes a second)"
    )
    complete = True
    for host in sorted(hosts_of(inventory)):
        own = [row for row in rows if row["host"] == host]
        found = gap(own)
        if found is None:
            print(f"{host:<14} no outage was seen")
            complete = False
            continue
        last, first = found
        stops = clock(inventory, host, "sglang.service", "InactiveEnter") - clock(
            inventory, host, "sglang.service", "ActiveExit"
        )
        started = clock(inventory, host, "vllm-dflash@*.service", "ExecMainStart")
        ready = min(
            row["end"] for row in own if row["what"] == "models" and row["good"] and row["begin"] > started
        )
        loads = ready - started
        print(
            f"{host:<14}{first - last:>9.1f}{stops:>11.1f}{loads:>11.1f}{first - last - stops - loads:>12.1f}"
        )
    return 0 if complete else 1


if __name__ == "__main__":
    verb, *rest = sys.argv[1:]
    sys.exit(watch(*rest) if verb == "watch" else report(*rest))
