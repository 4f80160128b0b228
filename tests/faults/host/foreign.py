#!/usr/bin/python3 -IS
"""A foreign process of the fault tests: simulated, it holds GPU memory, and writes down every signal that it gets
and from whom. It ignores them, as a training that is worth its days would. What ends it is SIGKILL, which the observer sees.

foreign.py GPU MIB [--listen PORT]
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

LOG = "/var/log/faults-signals.jsonl"


def main() -> None:
    catchable = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    signal.pthread_sigmask(signal.SIG_BLOCK, catchable)
    gpu, mib = sys.argv[1], sys.argv[2]
    if sys.argv[3:4] == ["--listen"]:
        listener = socket.create_server(("0.0.0.0", int(sys.argv[4])))  # noqa: S104
        listener.listen()
    if mib != "0":
        with open(f"/run/simulated-gpu/holds/{os.getpid()}", "w", encoding="ascii") as stream:
            stream.write(f"{gpu} {mib}\n")
    while True:
        info = signal.sigwaitinfo(catchable)
        sender = subprocess.run(
            ["ps", "-o", "args=", "-p", str(info.si_pid)], capture_output=True, text=True, check=False
        ).stdout.strip()
        with open(LOG, "a", encoding="utf-8") as stream:
            stream.write(
                json.dumps(
                    {"to": os.getpid(), "signal": info.si_signo, "from": info.si_pid, "sender": sender}
                )
                + "\n"
            )


if __name__ == "__main__":
    main()
