"""Every transport brings the drafter to booted hosts, goes on where it was cut off, and mends what was damaged."""

from __future__ import annotations

import hashlib
import http.server
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from .conftest import ROOT, WORKER, Fleet, _boot, bed

pytestmark = pytest.mark.booted

PLAY = "tests/integration/plays/bring.yml"
SIZE_MB = 48
TOKEN = "Bearer marker-of-a-token"  # noqa: S105, a marker to be looked for
QUERY = "marker-of-a-signature"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def place(path: Path) -> str:
    return f"/opt/vllm-dflash/drafters/{sha256(path)}/model.safetensors"


@pytest.fixture(scope="module")
def hosts(bootable):
    name = f"ds{WORKER}"
    bed("down", name)
    yield _boot(name, 2, "--no-sglang")
    bed("down", name)


@pytest.fixture
def fleet(hosts, tmp_path, request):
    """Two hosts and a drafter of its own for each test, that no test before has brought."""
    path = tmp_path / "model.safetensors"
    seed = sum(map(ord, request.node.name))
    maker = [sys.executable, str(ROOT / "tests/testbed/make_drafter.py"), str(path)]
    subprocess.run(
        [*maker, "--size", str(SIZE_MB), "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL
    )
    return Fleet(hosts, path)


def held(fleet: Fleet) -> None:
    """Both hosts hold the drafter, root's, and nothing that was on its way is left."""
    for host in fleet.hosts:
        assert host.run(f"sha256sum {place(fleet.drafter)}").split()[0] == sha256(fleet.drafter)
        assert host.run(f"stat -c '%U %a' {place(fleet.drafter)}") == "root 644"
        assert host.run("find /opt/vllm-dflash/drafters -name '*.incoming'") == ""
        assert host.run("systemctl list-units --all --no-legend 'vllm-dflash-transfer*'") == ""


def brought(fleet: Fleet, **variables) -> str:
    play = fleet.play(PLAY, drafter_shipped_config="", **variables)
    assert play.status == 0, play.output
    return play.output


def nothing_to_do(fleet: Fleet, **variables) -> None:
    play = fleet.play(PLAY, drafter_shipped_config="", **variables)
    assert play.status == 0, play.output
    assert all(counts["changed"] == 0 for counts in play.recap.values()), play.output


def damage(host, path: str) -> None:
    """One byte flipped in the middle, with the time put back."""
    host.run(
        f"python3 -c \"import os; p='{path}'; s=os.stat(p); f=open(p,'r+b'); f.seek(s.st_size//2); b=f.read(1); "
        'f.seek(-1,1); f.write(bytes([b[0]^1])); f.close(); os.utime(p, ns=(s.st_atime_ns, s.st_mtime_ns))"'
    )


def sent_bytes(output: str, host: str) -> int:
    """What push_files returned for a host, from -v."""
    found = re.search(rf"\[{host}\] => *\n(?: {{4}}.*\n)*? {{4}}sent_bytes: (\d+)", output)
    assert found, output
    return int(found[1])


def seeders(playbook: int) -> list[Path]:
    """What an ansible-playbook's seeder keeps on the control node while it lives."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return list(cache.glob(f"vllm-dflash-rollout/seeders/seeder-{playbook}-*.pid"))


def test_rsync(fleet):
    planned = fleet.play(PLAY, "--check", drafter_shipped_config="")
    assert planned.status == 0, planned.output
    assert all(counts["changed"] == 1 for counts in planned.recap.values())
    brought(fleet)
    held(fleet)
    nothing_to_do(fleet)


def test_rsync_goes_on_with_what_arrived_and_mends_a_flipped_byte(fleet):
    whole, partial = fleet.hosts
    size = fleet.drafter.stat().st_size
    partial.run(f"mkdir -p $(dirname {place(fleet.drafter)})")
    partial.put(fleet.drafter.read_bytes()[: size * 6 // 10], f"{place(fleet.drafter)}.incoming")
    done = fleet.play(PLAY, "-v", drafter_shipped_config="")
    assert done.status == 0, done.output
    assert sent_bytes(done.output, whole.name) >= size
    assert sent_bytes(done.output, partial.name) <= 0.45 * size
    held(fleet)

    inode = whole.run(f"stat -c %i {place(fleet.drafter)}")
    damage(whole, place(fleet.drafter))
    mended = fleet.play(PLAY, "-v", drafter_shipped_config="", drafter_verify="full")
    assert mended.status == 0, mended.output
    assert mended.recap[whole.name]["changed"] == 1
    assert mended.recap[partial.name]["changed"] == 0
    assert sent_bytes(mended.output, whole.name) <= 0.01 * size
    held(fleet)
    # What serves keeps the file that it has open: another one took its name.
    assert whole.run(f"stat -c %i {place(fleet.drafter)}") != inode


class Ranges(http.server.BaseHTTPRequestHandler):
    """A file server that knows parts and wants the token; it breaks its third connection off."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        served = self.server
        if self.headers.get("Authorization") != TOKEN or QUERY not in self.path:
            self.send_error(401)
            return
        first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"]).groups())
        size = served.file.stat().st_size
        last = min(last, size - 1)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        data = served.file.read_bytes()[first : last + 1]
        served.asked.append((self.client_address[0], len(data)))
        if len(data) > 10**7 and not served.broken:
            served.broken = True
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
            return
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(fleet):
    """The drafter by HTTP, on the bed's own bridge."""
    gateway = fleet.hosts[0].address.rpartition(".")[0] + ".1"
    with http.server.ThreadingHTTPServer((gateway, 0), Ranges) as served:
        served.file, served.asked, served.broken = fleet.drafter, [], False
        thread = threading.Thread(target=served.serve_forever, daemon=True)
        thread.start()
        served.url = f"http://{gateway}:{served.server_port}/model.safetensors?signature={QUERY}"
        yield served
        served.shutdown()
        thread.join()


def test_url_with_a_token_and_no_file_on_the_control_node(fleet, server):
    variables = {
        "drafter_source": "",
        "drafter_sha256": sha256(fleet.drafter),
        "drafter_transport": "url",
        "drafter_url": server.url,
    }
    refused = fleet.play(PLAY, drafter_shipped_config="", **variables)
    assert refused.status != 0
    assert "HTTP 401" in refused.output
    assert "give the token" in refused.output

    variables["drafter_url_headers"] = {"Authorization": TOKEN}
    # From a file, as secrets are given: -e on the command line is nobody's secret.
    play = fleet.play(PLAY, "-vvv", drafter_shipped_config="", **variables)
    assert play.status == 0, play.output
    shown = re.sub(r".*ansible-playbook.*", "", play.output)
    assert TOKEN not in shown
    assert QUERY not in shown
    assert server.broken
    held(fleet)
    nothing_to_do(fleet, **variables)

    damage(fleet.hosts[0], place(fleet.drafter))
    server.asked.clear()
    brought(fleet, **variables)
    held(fleet)
    assert sum(count for _, count in server.asked) <= 4 << 20


def test_present_verifies_and_brings_nothing(fleet):
    path = "/srv/share/model.safetensors"
    variables = {
        "drafter_source": "",
        "drafter_sha256": sha256(fleet.drafter),
        "drafter_transport": "present",
        "drafter_path": path,
    }
    for host in fleet.hosts:
        host.run("mkdir -p /srv/share")
        host.put(fleet.drafter.read_bytes(), path)
    brought(fleet, **variables)
    for host in fleet.hosts:
        assert host.run("ls /srv/share") == "model.safetensors"
    nothing_to_do(fleet, **variables)
    fleet.hosts[1].run(f"printf x | dd of={path} bs=1 seek=40000000 conv=notrunc status=none")
    refused = fleet.play(PLAY, drafter_shipped_config="", **variables)
    assert refused.status != 0
    assert 'Transport "present" brings nothing' in " ".join(refused.output.split())
    assert refused.recap[fleet.hosts[0].name]["failed"] == 0
    assert refused.recap[fleet.hosts[1].name]["failed"] == 1


def test_swarm(fleet):
    output = brought(fleet, drafter_transport="swarm")
    assert "The swarm did not bring everything" not in output, output
    held(fleet)
    nothing_to_do(fleet, drafter_transport="swarm")


def test_a_sharded_target_file_by_file_and_never_over_another_one(fleet, tmp_path):
    source = tmp_path / "target"
    (source / "tokenizer").mkdir(parents=True)
    for name in (
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "tokenizer/vocab.json",
        ".hidden",
    ):
        (source / name).write_bytes(os.urandom(200_000))
    folder = f"/srv/targets/{tmp_path.name}"
    variables = {
        "vllm_service_target": folder,
        "vllm_service_target_transport": "rsync",
        "vllm_service_target_source": str(source),
    }
    brought(fleet, **variables)
    for host in fleet.hosts:
        names = host.run(f"cd {folder} && find . -type f | sort").split()
        assert names == [
            "./config.json",
            "./model-1.safetensors",
            "./model-2.safetensors",
            "./tokenizer/vocab.json",
        ]
        assert host.run(f"sha256sum {folder}/model-2.safetensors").split()[0] == sha256(
            source / "model-2.safetensors"
        )
    nothing_to_do(fleet, **variables)

    (source / "model-1.safetensors").write_bytes(os.urandom(200_000))
    refused = fleet.play(PLAY, drafter_shipped_config="", **variables)
    # This one was ours: another revision of it is damage to what was asked for before, so it is refused as well.
    assert refused.status != 0
    assert "has the wrong SHA-256" in " ".join(refused.output.split())


@pytest.mark.parametrize("transport", ["rsync", "swarm"])
def test_after_a_control_node_died_the_next_run_goes_on(fleet, transport):
    """kill -9 of the whole playbook in the middle of a slow transfer: rsync ends, and the next run goes on with what arrived."""
    bed("rate", fleet.hosts[0].bed, "gpu1", "40mbit")
    try:
        process = subprocess.Popen(
            [
                *("ansible-playbook", "-i", str(fleet.inventory), PLAY, "--limit", fleet.hosts[0].name),
                *("-e", f"drafter_source={fleet.drafter}", "-e", "drafter_shipped_config="),
                *("-e", f"drafter_transport={transport}"),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        incoming = f"{place(fleet.drafter)}.incoming"
        fleet.hosts[0].wait(f"test $(stat -c %b {incoming} 2>/dev/null || echo 0) -gt 20000", 90)
        if transport == "rsync":
            fleet.hosts[0].run("pgrep -x timeout")  # what ends it where nobody is left to
        assert transport == "rsync" or seeders(process.pid)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        # The seeder takes a moment to see it, and without the limit that is enough for the whole file.
        deadline = time.monotonic() + 30
        while seeders(process.pid):
            assert time.monotonic() < deadline, "The seeder outlived its ansible-playbook"
            time.sleep(0.2)
    finally:
        bed("rate", fleet.hosts[0].bed, "gpu1", "")
    if transport == "rsync":
        fleet.hosts[0].wait("! pgrep -x rsync", 90)
        time.sleep(1)
    # The swarm's job waits 45 s for somebody to come back: it is there still, and has its file open.
    only = ("--limit", fleet.hosts[0].name)
    done = fleet.play(PLAY, "-v", *only, drafter_shipped_config="", drafter_transport=transport)
    assert done.status == 0, done.output
    if transport == "rsync":
        assert sent_bytes(done.output, fleet.hosts[0].name) < 0.9 * fleet.drafter.stat().st_size
    else:
        assert "vllm-dflash-transfer-swarm.service runs already" in done.output
        assert "The swarm did not bring everything" not in done.output, done.output
    brought(fleet, drafter_transport=transport)
    held(fleet)
