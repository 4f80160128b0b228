"""The demo's watcher: it waits for a host that has just booted, and says so where nothing ever serves."""

import http.server
import sys
import threading
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo"))
import outage


class Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "a-model"}]}'
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def test_a_server_that_begins_to_listen_later_is_waited_for():
    # Bound, and not listening: a connection is refused, as on a host whose server still starts.
    server = http.server.HTTPServer(("127.0.0.1", 0), Models, bind_and_activate=False)
    server.server_bind()
    timer = threading.Timer(0.5, lambda: (server.server_activate(), server.serve_forever()))
    timer.daemon = True
    timer.start()
    try:
        assert outage.model_id(f"127.0.0.1:{server.server_address[1]}", patience_s=20) == "a-model"
    finally:
        server.shutdown()
        server.server_close()


def test_where_nothing_serves_the_watcher_says_so():
    silent = http.server.HTTPServer(("127.0.0.1", 0), Models, bind_and_activate=False)
    silent.server_bind()
    try:
        with pytest.raises(SystemExit, match="expected a model within 0 s"):
            outage.model_id(f"127.0.0.1:{silent.server_address[1]}", patience_s=0)
    finally:
        silent.server_close()
