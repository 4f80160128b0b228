"""The swarm of roles/transfer: who is told what, and real swarms of processes on loopback addresses."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "roles/transfer/files"
sys.path.insert(0, str(FILES))
import swarm  # noqa: E402

PIECE = swarm.MIN_PIECE
SIZE = 24 * PIECE + 1000


def missing(name: str = "a") -> dict:
    return {"path": f"/srv/{name}.incoming", "sha256": name, "source": f"/src/{name}"}


def plan(hosts: dict) -> dict:
    return swarm.make_plan(
        {"port": 51413, "limit_s": 60, "hosts": hosts},
        lambda name: [name] if name[0].isdigit() else nowhere(name),
        lambda source, sha256: f"torrent of {source}",
    )


def nowhere(name: str):
    raise swarm.SwarmError(f"{name} has no address here")


def host(address: str, *files: str, client: str = "10.0.0.9 4711 10.0.0.1 22") -> dict:
    return {"address": address, "client": client, "missing": [missing(name) for name in files]}


def test_each_is_told_of_those_who_want_the_same_file():
    made = plan(
        {"x": host("10.0.0.1", "a", "b"), "y": host("10.0.0.2", "a"), "z": host("10.0.0.3", "b", client="")}
    )
    assert made["left"] == {}
    assert made["hosts"]["x"]["allow"] == ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.9"]
    assert [(file["path"], file["peers"], file["rank"]) for file in made["hosts"]["x"]["files"]] == [
        ("/srv/a.incoming", ["10.0.0.2"], 0), ("/srv/b.incoming", ["10.0.0.3"], 0),
    ]  # fmt: skip
    assert made["hosts"]["z"]["files"][0]["rank"] == 1
    assert made["seeder"]["listen"] == []
    assert [(file["path"], file["peers"]) for file in made["seeder"]["files"]] == [
        ("/src/a", ["10.0.0.1", "10.0.0.2"]), ("/src/b", ["10.0.0.1", "10.0.0.3"]),
    ]  # fmt: skip


def test_a_host_without_an_address_is_left_and_the_others_go_on():
    made = plan({"x": host("10.0.0.1", "a"), "y": host("gone", "a")})
    assert made["left"] == {"y": "gone has no address here"}
    assert made["hosts"].keys() == {"x"}


def test_hosts_behind_one_address_are_left():
    made = plan({"x": host("10.0.0.1", "a"), "y": host("10.0.0.1", "a"), "z": host("10.0.0.3", "a")})
    assert made["left"].keys() == {"x", "y"}
    assert "set transfer_swarm_address" in made["left"]["x"]


def test_every_piece_is_somebodys_first():
    shares = [swarm.share(10, rank, 4) for rank in range(4)]
    assert all(sorted(column) == [1, 1, 1, 7] for column in zip(*shares, strict=True))


@pytest.mark.parametrize("size", [1, 2**28, 3_458_278_136, 54 * 10**9, 10**12])
def test_torrents_stay_small(size):
    piece = swarm.piece_size(size)
    assert piece & (piece - 1) == 0
    assert size / piece <= 2048 or piece == swarm.MAX_PIECE


def test_progress_of_several_files():
    one = {"total": 10, "done": 10, "checking": False, "complete": True, "sent": 1, "received": 2, "peers": 3}
    other = {**one, "done": 4, "complete": False}
    assert swarm.sum_up([one, other], 1.0, 3.5) == {
        "state": "running", "bytes_done": 14, "bytes_total": 20, "bytes_sent": 2, "bytes_received": 4, "peers": 3,
        "seconds": 2.5,
    }  # fmt: skip
    assert swarm.sum_up([one, {**other, "checking": True}], 0, 1)["state"] == "checking"
    assert swarm.sum_up([one, one], 0, 1)["state"] == "complete"


def test_the_playbook_above_is_found_through_its_workers():
    processes = {
        9: (8, 90, ["/usr/bin/python3", "module.py"]),
        8: (7, 80, ["/venv/bin/python3", "/venv/bin/ansible-playbook", "site.yml"]),
        7: (6, 70, ["/venv/bin/python3", "/venv/bin/ansible-playbook", "site.yml"]),
        6: (1, 60, ["bash", "-c", "ansible-playbook site.yml"]),
    }
    assert swarm.playbook_of(9, processes.get) == (7, 70)
    assert swarm.playbook_of(6, processes.get) is None


# --- real swarms


@pytest.fixture
def bed(tmp_path):
    """A file, its torrent, and processes that are all ended."""
    pytest.importorskip("libtorrent")
    made = Bed(tmp_path)
    yield made
    made.end()


class Bed:
    """Up to three hosts at 127.0.0.11, .12, .13 and the control node, each a process."""

    port = 20000 + os.getpid() % 20000

    def __init__(self, folder: Path):
        self.folder = folder
        self.source = folder / "source"
        self.content = os.urandom(SIZE)
        self.source.write_bytes(self.content)
        self.sha256 = hashlib.sha256(self.content).hexdigest()
        self.processes: list[subprocess.Popen] = []

    def plan(self, count: int) -> dict:
        hosts = {}
        for number in range(1, count + 1):
            file = {"path": str(self.incoming(number)), "sha256": self.sha256, "source": str(self.source)}
            hosts[f"h{number}"] = {
                "address": f"127.0.0.1{number}",
                "client": "127.0.0.1 1 2 3",
                "missing": [file],
            }
            self.incoming(number).touch()

        def torrent(source: str, sha256: str) -> str:
            return base64.b64encode(swarm.cached_torrent(str(self.folder), source, sha256)).decode()

        return swarm.make_plan({"port": self.port, "limit_s": 60, "hosts": hosts}, swarm.resolve, torrent)

    def incoming(self, number: int) -> Path:
        return self.folder / f"h{number}.incoming"

    def fetch(self, name: str, config: dict) -> None:
        folder = self.folder / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        env = {**os.environ, "CREDENTIALS_DIRECTORY": str(folder), "RUNTIME_DIRECTORY": str(folder)}
        self.processes.append(subprocess.Popen([sys.executable, FILES / "swarm.py", "fetch"], env=env))

    def seed(self, config: dict) -> None:
        (self.folder / "seeder").mkdir()
        code = "import json, sys, swarm; swarm.run(json.load(sys.stdin), sys.argv[1], seed=True, goes_on=lambda: True)"
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder / "seeder/progress.json")],
            env={**os.environ, "PYTHONPATH": str(FILES)}, stdin=subprocess.PIPE, text=True,
        )  # fmt: skip
        process.stdin.write(json.dumps(config))
        process.stdin.close()
        self.processes.append(process)

    def progress(self, name: str) -> dict:
        path = self.folder / name / "progress.json"
        return json.loads(path.read_text()) if path.exists() else {"state": "starting", "bytes_sent": 0}

    def wait(self, name: str, state: str = "complete", seconds: float = 60) -> dict:
        deadline = time.monotonic() + seconds
        while self.progress(name)["state"] != state:
            assert time.monotonic() < deadline, f"{name}: {self.progress(name)}"
            time.sleep(0.1)
        return self.progress(name)

    def run(self, count: int) -> dict:
        made = self.plan(count)
        for name, config in made["hosts"].items():
            self.fetch(name, config)
        self.seed(made["seeder"])
        return {name: self.wait(name) for name in made["hosts"]}

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(30)


def test_three_hosts_get_the_file(bed):
    bed.run(3)
    for number in (1, 2, 3):
        assert bed.incoming(number).read_bytes() == bed.content
    # Complete says how long it took, also while it serves the others.
    before = bed.progress("h1")["seconds"]
    time.sleep(1)
    assert bed.progress("h1")["seconds"] == before


def test_a_host_passes_on_what_it_has(bed):
    # Without a control node: all comes from the host that has it.
    bed.incoming(1).write_bytes(bed.content)
    for name, config in bed.plan(2)["hosts"].items():
        bed.fetch(name, config)
    assert bed.wait("h2")["bytes_received"] == SIZE
    assert bed.incoming(2).read_bytes() == bed.content
    deadline = time.monotonic() + 20
    while bed.progress("h1")["bytes_sent"] < SIZE and time.monotonic() < deadline:
        time.sleep(0.1)
    assert bed.progress("h1")["bytes_sent"] == SIZE


def test_only_the_rest_of_a_partial_file_is_sent_and_a_flipped_byte_costs_a_piece(bed):
    partial = bytearray(bed.content[: 20 * PIECE])
    partial[5 * PIECE + 17] ^= 1
    bed.incoming(1).write_bytes(partial)
    seen = bed.run(1)
    assert bed.incoming(1).read_bytes() == bed.content
    assert seen["h1"]["bytes_received"] == SIZE - 19 * PIECE


def test_what_arrived_is_in_the_file_before_all_is_there(bed):
    """Or a process that is killed has lost it all. Nobody has the rest here."""
    some = bed.content[: 20 * PIECE]
    bed.incoming(1).write_bytes(some)
    for name, config in bed.plan(2)["hosts"].items():
        bed.fetch(name, config)
    deadline = time.monotonic() + 30
    while bed.incoming(2).read_bytes()[: len(some)] != some:
        assert time.monotonic() < deadline, bed.progress("h2")
        time.sleep(0.1)
    assert bed.progress("h2")["state"] == "running"


def test_a_complete_file_is_not_sent_again(bed):
    bed.incoming(1).write_bytes(bed.content)
    assert bed.run(1)["h1"]["bytes_received"] == 0


def test_who_is_not_in_the_list_gets_nothing(bed):
    made = bed.plan(3)
    stranger = made["hosts"].pop("h3")
    for config in (*made["hosts"].values(), made["seeder"]):
        config["allow"] = [address for address in config["allow"] if address != "127.0.0.13"]
    for file in made["seeder"]["files"]:
        file["peers"].remove("127.0.0.13")
    # It knows the torrent and the others, and still gets nothing.
    bed.fetch("h3", {**stranger, "patience_s": 6})
    for name, config in made["hosts"].items():
        bed.fetch(name, config)
    bed.seed(made["seeder"])
    for name in made["hosts"]:
        bed.wait(name)
    failed = bed.wait("h3", "failed")
    assert (failed["bytes_done"], failed["bytes_received"]) == (0, 0)
    assert "Nothing arrived for 6 s" in failed["error"]


def test_a_port_that_is_taken_is_said(bed):
    config = bed.plan(1)["hosts"]["h1"]
    with swarm.socket.create_server(("127.0.0.11", bed.port)):
        bed.fetch("h1", config)
        assert f"Port {bed.port} can't be opened" in bed.wait("h1", "failed")["error"]
