"""Two or more ranks add up a tensor over NCCL: `python -I -B - RANKS < nccl_probe.py`, inside the vLLM venv.

Sent on stdin by `launch_check.py`, so it can import nothing of this package; torch it imports. One process a GPU, spawned
by command line, because what runs from stdin can't be imported again. Its answer is one JSON object between `BEGIN`
and `END`, as that of launch_probe.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time

BEGIN = "<<<launch-probe "
END = " launch-probe>>>"

# 64 MiB of float32, so that it is not the small-message path alone; every element has to be right.
RANK = """
import sys, time
import torch
import torch.distributed as ranks
rank, count, port = map(int, sys.argv[1:])
torch.cuda.set_device(rank)
ranks.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
for size in (1, 1024, 16 * 1024 * 1024):
    tensor = torch.full((size,), float(rank + 1), device="cuda")
    begin = time.monotonic()
    ranks.all_reduce(tensor)
    torch.cuda.synchronize()
    seconds = time.monotonic() - begin
    wrong = int((tensor != count * (count + 1) / 2).sum())
    if wrong:
        sys.exit(f"rank {rank}: {wrong} of {size} sums are wrong")
print(f"last all-reduce: {seconds * 1000:.1f} ms", flush=True)
ranks.destroy_process_group()
"""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main(count: int) -> dict:
    """Run the ranks; {"ok": True, "ranks", "probe_seconds", "said"}, or {"ok": False, "error", "phase"}."""
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile(mode="w+")) for _ in range(count)]
        failed, texts = _run(count, logs)
    if failed is not None:
        return {
            "ok": False,
            "phase": "nccl",
            "error": f"rank {failed}: {texts[failed][-3000:] or 'no output'}",
        }
    return {"ok": True, "ranks": count, "probe_seconds": round(time.monotonic() - begin, 1), "said": texts[0]}


def _run(count: int, logs: list) -> tuple[int | None, list[str]]:
    """The number of the first rank that failed, or None, and what each of them printed."""
    port = _free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", RANK, str(rank), str(count), str(port)],
            stdin=subprocess.DEVNULL,
            stdout=logs[rank],
            stderr=subprocess.STDOUT,
            # Interfaces of containers and VPNs are none between two GPUs of one host.
            env={"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", **os.environ},
        )
        for rank in range(count)
    ]
    # A rank that died leaves the others waiting: their time is this whole check's, which whoever runs it ends.
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.2)
    failed = next((number for number, rank in enumerate(ranks) if rank.poll()), None)
    texts = []
    for rank, log in zip(ranks, logs, strict=True):
        if rank.poll() is None:
            rank.kill()
        rank.wait()
        log.seek(0)
        texts.append(log.read().strip())
    return failed, texts


if __name__ == "__main__":
    print(BEGIN + json.dumps(main(int(sys.argv[1]))) + END, flush=True)
