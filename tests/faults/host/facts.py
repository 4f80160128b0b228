#!/usr/bin/python3 -IS
"""What is true on the host at this moment, as JSON, for the checker: files, units, answers. It judges nothing.

facts.py NEW_UNIT OLD_UNIT SINCE_CURSOR
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request

STATE, RUN = "/var/lib/vllm-dflash", "/run/vllm-dflash"
PROGRAM = ["/usr/bin/python3", "-IB", "/opt/vllm-dflash/program"]
PORT = 30000


def document(path: str) -> object:
    try:
        with open(path, encoding="utf-8") as stream:
            return json.load(stream)
    except FileNotFoundError:
        return None
    except ValueError as error:
        return f"broken: {error}"


def run(*command: str) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout


def completion(model: str) -> dict:
    """One completion, asked as any client would."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    body = json.dumps({"model": model, "prompt": "The capital of France is", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with opener.open(request, timeout=5) as answer:
            return {"text": json.load(answer)["choices"][0]["text"]}
    except Exception as error:
        return {"text": "", "error": f"{type(error).__name__}: {error}"}


def unit(name: str) -> dict:
    names = "LoadState,ActiveState,SubState,MainPID,NRestarts,Result,ExecMainStatus"
    _, text = run("systemctl", "show", "-p", names, "--", name)
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def main() -> None:
    new, old, cursor = sys.argv[1:4]
    record = document(f"{RUN}/record.json") or document(f"{STATE}/switch/record.json")
    if not new and isinstance(record, dict):
        new = record["new"]["unit"]
    signals = []
    with contextlib.suppress(FileNotFoundError), open("/var/log/faults-signals.jsonl") as stream:
        signals = [json.loads(line) for line in stream]
    status, text = run(*PROGRAM, "status") if os.path.exists(PROGRAM[2]) else (None, "")
    since = [f"--after-cursor={cursor}"] if cursor else ["-b"]
    _, journal = run("journalctl", "-q", "--no-pager", "-o", "short-monotonic", *since, "-n", "400")
    print(
        json.dumps(
            {
                "t": time.clock_gettime(time.CLOCK_BOOTTIME),
                "wall": time.time(),
                "new": new,
                "old": old,
                "record": record,
                "serving": document(f"{STATE}/serving.json"),
                "gate": document(f"{RUN}/gate.json"),
                "pending": document(f"{STATE}/switch/pending.json"),
                "units": {name: unit(name) for name in (new, old, "llm-switchover.service") if name},
                "may_start": {name: run(*PROGRAM, "may-start", name)[0] == 0 for name in (new, old) if name},
                "completion": completion("Qwen3.6-27B"),
                "status": {"exit": status, **(json.loads(text) if text else {})},
                "signals": signals,
                "journal": journal.splitlines(),
            }
        )
    )


if __name__ == "__main__":
    main()
