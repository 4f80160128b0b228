"""The pool hooks for nginx against a real nginx, with two servers of this machine behind it and clients in front."""

from __future__ import annotations

import http.client
import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

sys.path.append(str(Path(__file__).parents[1]))

import debian

EXAMPLES = Path(__file__).parents[2] / "examples" / "pool"
CONFIG = """\
daemon off;
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    {temporary}
    upstream llm {{ include {folder}/pool/*.server; }}
    server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://llm; proxy_next_upstream off; }} }}
}}
"""
SLOW_S = 2.5


class Backend(http.server.BaseHTTPRequestHandler):
    """Answers with its name; /slow takes its time."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/slow":
            time.sleep(SLOW_S)
        name = f"{self.server.server_address[1]}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(name)))
        self.end_headers()
        self.wfile.write(name)


def ask(port: int, path: str = "/") -> int:
    """The port of the server that answered. Raises for anything but 200."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    assert answer.status == 200, text
    return int(text)


@pytest.fixture
def pool(tmp_path):
    """(folder, port of nginx, ports of the two servers behind it)."""
    program, environment = debian.program("nginx")
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Backend) for _ in range(3)]
    ports = [server.server_address[1] for server in servers]
    servers.pop().server_close()  # its port is nginx's
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "pool").mkdir()
    for number, port in enumerate(ports[:2], 1):
        (tmp_path / f"pool/h{number}.server").write_text(f"server 127.0.0.1:{port};\n")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {tmp_path}/{kind};" for kind in kinds)
    config = tmp_path / "nginx.conf"
    config.write_text(CONFIG.format(folder=tmp_path, port=ports[2], temporary=temporary))
    # Where the tasks look for it, and with the test's configuration instead of /etc/nginx.
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/nginx"
    wrapper.write_text(f'#!/bin/sh\nexec {program} -e {tmp_path}/error.log -c {config} "$@"\n')
    wrapper.chmod(0o755)
    with subprocess.Popen([wrapper], env=environment) as nginx:
        try:
            until = time.monotonic() + 20
            while not (tmp_path / "nginx.pid").exists() or not (tmp_path / "nginx.pid").read_text():
                assert time.monotonic() < until, "nginx doesn't start"
                time.sleep(0.1)
            time.sleep(0.3)
            yield tmp_path, ports[2], ports[:2]
        finally:
            nginx.terminate()
    for server in servers:
        server.shutdown()
        server.server_close()


def play(folder: Path, name: str, address: str) -> subprocess.CompletedProcess:
    """The tasks of one example, for host h1."""
    host = {
        "ansible_connection": "local",
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
        "pool_nginx": "localhost",
        "pool_address": address,
        "pool_folder": str(folder / "pool"),
        "pool_pid": str(folder / "nginx.pid"),
        "pool_timeout": 30,
        "rollout_port": 30000,
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": {"h1": host}}}))
    tasks = [{"ansible.builtin.include_tasks": str(EXAMPLES / name)}]
    (folder / "play.yml").write_text(yaml.safe_dump([{"hosts": "h1", "gather_facts": False, "tasks": tasks}]))
    return subprocess.run(
        ["ansible-playbook", "-i", folder / "hosts.yml", folder / "play.yml"],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_drained_and_put_back_without_a_failed_request(pool):
    folder, port, (first, second) = pool
    assert {ask(port) for _ in range(8)} == {first, second}
    stop, failures, slow = threading.Event(), [], []

    def client():
        while not stop.is_set():
            try:
                ask(port)
            except (OSError, http.client.HTTPException, AssertionError) as error:
                failures.append(repr(error))
            stop.wait(0.02)

    clients = [threading.Thread(target=client) for _ in range(3)]
    # Two, one for each of the servers: one of them is answered by who is being drained.
    waiting = [threading.Thread(target=lambda: slow.append(ask(port, "/slow"))) for _ in range(2)]
    for thread in [*clients, *waiting]:
        thread.start()
    drained = play(folder, "nginx-drain.yml", f"127.0.0.1:{first}")
    assert drained.returncode == 0, drained.stdout + drained.stderr
    assert len(slow) == 2, "the drain waits for the last answer"
    assert {ask(port) for _ in range(8)} == {second}
    back = play(folder, "nginx-rejoin.yml", f"127.0.0.1:{first}")
    assert back.returncode == 0, back.stdout + back.stderr
    time.sleep(0.5)
    assert {ask(port) for _ in range(8)} == {first, second}
    stop.set()
    for thread in clients:
        thread.join()
    assert failures == []
