"""A swarm of this roll-out's own: each host takes pieces of a file from the others, the control node sends each about once.

    swarm.py plan    on the control node: who swarms what with whom, and the torrents; JSON in, JSON out
    swarm.py fetch   on a host, as a transfer job: brings the files, then serves the others until it is stopped
    swarm.py serve   on the control node: serves the files in the background, as long as ansible-playbook lives
    swarm.py stop    on the control node: ends that

No tracker, no DHT, no local discovery, no port mapping: who takes part stands in the configuration, and nobody else is
let in. The torrents are of version 2 only: each piece has a SHA-256, so that nobody can pass on anything wrong.
Why and how fast: docs/decisions/transfer-swarm.md.
"""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
import tempfile
import time

TICK_S = 0.25
# A host that was slow to start is asked again after this.
RECONNECT_S = 2.0
# So much of what arrived may be lost with this process; libtorrent by itself keeps up to 100 MB in memory.
FLUSH_S = 2.0
# Nobody to talk to and no byte for so long: something else must bring the file.
PATIENCE_S = 45
MIN_PIECE, MAX_PIECE, PIECES = 256 * 1024, 32 * 1024 * 1024, 2048

SETTINGS = {
    # Nobody but who was named: nothing that announces or discovers.
    "enable_dht": False,
    "enable_lsd": False,
    "enable_upnp": False,
    "enable_natpmp": False,
    "enable_incoming_utp": False,
    "enable_outgoing_utp": False,
    # One port, the one that was opened for it, or none.
    "max_retry_port_bind": 0,
    "listen_system_port_fallback": False,
    # Obfuscation, not encryption: it costs a core and hides nothing.
    "in_enc_policy": 2,
    "out_enc_policy": 2,
    # All are friends: everyone is served at once, and a transfer lasts seconds, not hours.
    "unchoke_slots_limit": -1,
    "connections_limit": 500,
    "listen_queue_size": 64,
    "connection_speed": 100,
    "torrent_connect_boost": 100,
    "peer_connect_timeout": 5,
    "min_reconnect_time": 1,
    "max_failcount": 1000,
    "peer_turnover": 0,
    "initial_picker_threshold": 0,
    "auto_sequential": False,
    "smooth_connects": False,
    "rate_limit_ip_overhead": False,
    "ignore_resume_timestamps": True,
    # Blocks of a piece come from whoever has them, however fast: asking one peer for a whole piece makes hosts ask the control
    # node for what another host is about to have (bench: 1.4 instead of 2.1 times S/B, 8 hosts at 25 Mbit/s).
    "whole_pieces_threshold": 0,
    # Enough in flight for a fast link.
    "max_out_request_queue": 1500,
    "max_allowed_in_request_queue": 3000,
    "send_buffer_watermark": 4 * 1024 * 1024,
    "send_buffer_low_watermark": 1024 * 1024,
    "send_buffer_watermark_factor": 150,
    "aio_threads": 4,
    "hashing_threads": 2,
    "checking_mem_usage": 512,
    "active_checking": -1,
    "alert_queue_size": 10000,
    "user_agent": "vllm-dflash-rollout",
}


class SwarmError(Exception):
    """A cause with its remedy, for the person who runs the play."""


# --- pure


def piece_size(size: int) -> int:
    """Bytes of a piece: about PIECES of them, so that many can travel at once and a torrent stays below 100 KB."""
    piece = MIN_PIECE
    while piece < MAX_PIECE and piece * PIECES < size:
        piece *= 2
    return piece


def make_plan(order: dict, resolve, torrent) -> dict:
    """Who swarms what with whom.

    `order`: {"port", "limit_s", "hosts": {name: {"address", "client" (SSH_CONNECTION), "missing": [file]}}}, a file is
    {"path", "sha256", "source"}. `resolve(name)` gives its IP addresses, `torrent(source, sha256)` a torrent in base64;
    both raise SwarmError. Returns {"hosts": {name: configuration of `fetch`}, "left": {name: why it can't take part},
    "seeder": configuration of `serve`}.
    """
    left, addresses = {}, {}
    for name, host in order["hosts"].items():
        try:
            addresses[name] = resolve(host["address"])
        except SwarmError as error:
            left[name] = str(error)
    for name, found in addresses.items():
        twins = [other for other in addresses if other != name and set(addresses[other]) & set(found)]
        if twins:
            left[name] = f"{name} and {', '.join(twins)} have one address: set transfer_swarm_address on each"
    hosts = {name: host for name, host in order["hosts"].items() if name not in left}
    files = {file["sha256"]: file["source"] for host in hosts.values() for file in host["missing"]}
    torrents = {sha256: torrent(source, sha256) for sha256, source in files.items()}
    # Where the control node's connections seem to come from: as ssh sees it, since nobody else has been asked.
    clients = {
        host["client"].split()[0].partition("%")[0] for host in hosts.values() if host["client"].split()
    }
    everyone = sorted({address for name in hosts for address in addresses[name]} | clients)

    def wanting(sha256: str) -> list[str]:
        return sorted(
            name for name in hosts if any(file["sha256"] == sha256 for file in hosts[name]["missing"])
        )

    def peers(sha256: str, but: str = "") -> list[str]:
        return [addresses[name][0] for name in wanting(sha256) if name != but]

    plan: dict = {"hosts": {}, "left": left}
    for name, host in hosts.items():
        plan["hosts"][name] = {
            "listen": addresses[name],
            "port": order["port"],
            "allow": everyone,
            "patience_s": PATIENCE_S,
            "files": [
                {
                    "path": file["path"],
                    "torrent": torrents[file["sha256"]],
                    "peers": peers(file["sha256"], name),
                    "rank": wanting(file["sha256"]).index(name),
                }
                for file in host["missing"]
            ],
        }
    plan["seeder"] = {
        "listen": [],
        "port": order["port"],
        "allow": everyone,
        "limit_s": order["limit_s"],
        "files": [
            {"path": source, "torrent": torrents[sha256], "peers": peers(sha256)}
            for sha256, source in files.items()
        ],
    }
    return plan


def share(pieces: int, rank: int, hosts: int) -> list[int]:
    """The priority of each piece: first those that this host is to have first, every `hosts`th of them.

    So each piece leaves the control node about once. With the rarest first alone, two hosts often ask for the same one.
    """
    return [7 if piece % hosts == rank else 1 for piece in range(pieces)]


def sum_up(statuses: list[dict], started: float, now: float) -> dict:
    """Progress of the job (see PROGRESS of module_utils' transfer_job.py) from that of its torrents."""
    total = sum(status["total"] for status in statuses)
    done = sum(status["done"] for status in statuses)
    if any(status["checking"] for status in statuses):
        state = "checking"
    else:
        state = "complete" if all(status["complete"] for status in statuses) else "running"
    return {
        "state": state,
        "bytes_done": done,
        "bytes_total": total,
        "bytes_sent": sum(status["sent"] for status in statuses),
        "bytes_received": sum(status["received"] for status in statuses),
        "peers": max((status["peers"] for status in statuses), default=0),
        "seconds": round(now - started, 2),
    }


def playbook_of(pid: int, look) -> tuple[int, int] | None:
    """(pid, start time) of the ansible-playbook that `pid` descends from: the topmost, as its workers look the same.

    `look(pid)` is (parent, start time, arguments), or None for a process that is gone.
    """
    found = None
    while pid > 1 and (seen := look(pid)):
        parent, start, arguments = seen
        if any(os.path.basename(word) == "ansible-playbook" for word in arguments[:3]):
            found = (pid, start)
        elif found:
            break
        pid = parent
    return found


# --- the machine


def resolve(name: str) -> list[str]:
    """The addresses of a host, that which is tried first in front. Raises SwarmError."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SwarmError(f"{name} has no address here ({error}): set transfer_swarm_address") from error
    return list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))


def look(pid: int) -> tuple[int, int, list[str]] | None:
    """(parent, start time in ticks, arguments) of a living process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as stream:
            arguments = stream.read().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]), arguments)


def write_atomically(path: str, content: bytes) -> None:
    """The old content or the new, never a part of it; for this user's eyes."""
    descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def cached_torrent(cache: str, source: str, sha256: str) -> bytes:
    """The torrent of a file, made once: reading 3.3 GB and hashing it takes seconds."""
    path = os.path.join(cache, "torrents", f"{sha256}.torrent")
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as stream:
        return stream.read()
    os.makedirs(os.path.dirname(path), exist_ok=True)
    content = make_torrent(source)
    write_atomically(path, content)
    return content


def make_torrent(source: str) -> bytes:
    """A torrent of version 2 with one file, named `file` whatever its own name: a host puts it where it belongs."""
    import libtorrent as lt

    folder, name = os.path.split(os.path.abspath(source))
    size = os.path.getsize(source)
    made = lt.create_torrent([lt.create_file_entry(name, size)], piece_size(size), lt.create_torrent.v2_only)
    made.set_priv(True)
    try:
        lt.set_piece_hashes(made, folder)
    except (OSError, RuntimeError) as error:
        raise SwarmError(f"{source} can't be read: {error}") from error
    return lt.bencode(made.generate())


class Swarm:
    """A libtorrent session with the files of one configuration."""

    def __init__(self, config: dict, *, seed: bool):
        import libtorrent as lt

        self._lt = lt
        self._config = config
        self._seed = seed
        self._torrents: list[dict] = []
        self._started = time.monotonic()
        self._asked = self._written = float("-inf")
        self._moved = (self._started, -1)
        listen = [address for address in config["listen"] if _is_mine(address)]
        if config["listen"] and not listen:
            # Behind a translation of addresses the others know this host by one that it doesn't have.
            listen = ["0.0.0.0", "::"]  # noqa: S104 - the filter below and the unit let only the named hosts in
        parameters = lt.session_params()
        parameters.settings = {
            **SETTINGS,
            # The others let in who comes from an address that they know.
            "outgoing_interfaces": ",".join(listen if listen == config["listen"] else []),
            "listen_interfaces": ",".join(_endpoint(address, config["port"]) for address in listen),
            "alert_mask": lt.alert.category_t.error_notification
            | lt.alert.category_t.status_notification
            | lt.alert.category_t.storage_notification,
        }
        parameters.ip_filter = self._filter(config["allow"])
        # Not lt.session's defaults: they bring plugins that exchange peers.
        self._session = lt.session(parameters)
        for file in config["files"]:
            self._add(file)

    def _filter(self, allowed: list[str]):
        rules = self._lt.ip_filter()
        blocked = 1
        rules.add_rule("0.0.0.0", "255.255.255.255", blocked)  # noqa: S104 - a range, nothing is bound to it
        rules.add_rule("::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", blocked)
        for address in allowed:
            rules.add_rule(address, address, 0)
        return rules

    def _add(self, file: dict) -> None:
        lt = self._lt
        params = lt.add_torrent_params()
        params.ti = lt.torrent_info(lt.bdecode(base64.b64decode(file["torrent"])))
        folder, name = os.path.split(os.path.abspath(file["path"]))
        params.save_path = folder
        params.renamed_files = {0: name}
        params.storage_mode = lt.storage_mode_t.storage_mode_sparse
        flags = lt.torrent_flags
        params.flags = flags.apply_ip_filter | flags.disable_dht | flags.disable_lsd | flags.disable_pex
        if self._seed:
            params.flags |= flags.seed_mode
        else:
            params.piece_priorities = share(params.ti.num_pieces(), file["rank"], len(file["peers"]) + 1)
        handle = self._session.add_torrent(params)
        self._torrents.append({"handle": handle, "file": file, "flushed": self._seed, "flushing": self._seed})

    def step(self) -> dict:
        """Look, connect to who isn't connected, and return the progress. Raises SwarmError when nothing will come."""
        for alert in self._session.pop_alerts():
            self._take(alert)
        now = time.monotonic()
        if now - self._asked >= RECONNECT_S:
            self._asked = now
            for torrent in self._torrents:
                self._connect(torrent)
        if now - self._written >= FLUSH_S:
            self._written = now
            for torrent in self._torrents:
                if not torrent["flushing"]:
                    torrent["handle"].flush_cache()
        statuses = [self._status(torrent) for torrent in self._torrents]
        progress = sum_up(statuses, self._started, now)
        self._lose_patience(progress, now)
        return progress

    def _take(self, alert) -> None:
        lt = self._lt
        if isinstance(alert, lt.listen_failed_alert):
            raise SwarmError(
                f"Port {self._config['port']} can't be opened ({alert.message()}): set transfer_swarm_port to a free one"
            )
        if isinstance(alert, lt.torrent_error_alert | lt.file_error_alert):
            raise SwarmError(
                f"{alert.message()}: look at the disk (df), then run again: it goes on with what arrived"
            )
        if isinstance(alert, lt.cache_flushed_alert):
            for torrent in self._torrents:
                torrent["flushed"] |= torrent["flushing"] and torrent["handle"] == alert.handle

    def _connect(self, torrent: dict) -> None:
        handle = torrent["handle"]
        status = handle.status()
        if "checking" in str(status.state) or (status.is_seeding and not self._seed):
            return
        connected = {peer.ip[0] for peer in handle.get_peer_info()}
        for address in torrent["file"]["peers"]:
            if address not in connected:
                handle.connect_peer((address, self._config["port"]))

    def _status(self, torrent: dict) -> dict:
        status = torrent["handle"].status()
        whole = status.is_seeding and "checking" not in str(status.state)
        if whole and not torrent["flushing"]:
            # Complete is what the kernel has, not what waits in this process to be written. An alert may be of an earlier
            # flush, or of libtorrent's own: who reads the file ends this process before, and `close` writes the rest.
            torrent["flushing"] = True
            torrent["handle"].flush_cache()
        return {
            "total": status.total_wanted,
            "done": status.total_wanted_done,
            "checking": "checking" in str(status.state),
            "complete": whole and torrent["flushed"],
            "sent": status.total_payload_upload,
            "received": status.total_payload_download,
            "peers": status.num_peers,
        }

    def _lose_patience(self, progress: dict, now: float) -> None:
        patience = self._config.get("patience_s")
        moved = progress["bytes_done"] + progress["bytes_received"]
        if not patience or progress["state"] != "running" or moved != self._moved[1]:
            self._moved = (now, moved)
        elif now - self._moved[0] > patience:
            raise SwarmError(
                f"Nothing arrived for {patience} s from {progress['peers']} hosts: let the hosts and the control node reach "
                f"TCP port {self._config['port']} of each other, or set transfer_swarm_address to where they do"
            )

    def close(self) -> None:
        """Disconnect, and write out what arrived: the next one goes on with it."""
        self._session.pause()
        for torrent in self._torrents:
            torrent["flushing"], torrent["flushed"] = True, False
            torrent["handle"].flush_cache()
        deadline = time.monotonic() + 5
        while not all(torrent["flushed"] for torrent in self._torrents) and time.monotonic() < deadline:
            self._session.wait_for_alert(200)
            with contextlib.suppress(SwarmError):
                for alert in self._session.pop_alerts():
                    self._take(alert)


def _is_mine(address: str) -> bool:
    family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def run(config: dict, progress_path: str, *, seed: bool, goes_on) -> int:
    """Swarm while `goes_on()`; the progress goes to `progress_path`. Returns the exit status."""
    ending = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.append(True))
    progress = {"state": "starting"}
    swarm = None
    try:
        swarm = Swarm(config, seed=seed)
        seconds = None
        while goes_on() and not ending:
            progress = swarm.step()
            if progress["state"] == "complete":
                # The time that it took, not that for which it has been serving since.
                seconds = progress["seconds"] = seconds or progress["seconds"]
            write_atomically(progress_path, json.dumps(progress).encode())
            time.sleep(TICK_S)
    except (SwarmError, OSError, RuntimeError) as error:
        progress = {**progress, "state": "failed", "error": str(error)}
        write_atomically(progress_path, json.dumps(progress).encode())
        return 1
    finally:
        if swarm:
            swarm.close()
    return 0


# --- the verbs


def plan() -> int:
    """See make_plan; `order` is on standard input, with "cache", the folder for torrents."""
    order = json.load(sys.stdin)

    def torrent(source: str, sha256: str) -> str:
        return base64.b64encode(cached_torrent(order["cache"], source, sha256)).decode()

    json.dump(make_plan(order, resolve, torrent), sys.stdout)
    return 0


def fetch() -> int:
    """What the unit of a transfer job runs; systemd ends it at its limit."""
    with open(os.path.join(os.environ["CREDENTIALS_DIRECTORY"], "config.json"), encoding="utf-8") as stream:
        config = json.load(stream)
    progress = os.path.join(os.environ["RUNTIME_DIRECTORY"], "progress.json")
    return run(config, progress, seed=False, goes_on=lambda: True)


def _seeder_path(folder: str) -> tuple[tuple[int, int], str]:
    playbook = playbook_of(os.getppid(), look)
    if playbook is None:
        raise SwarmError("No ansible-playbook above this process: there would be nobody to end it for")
    return playbook, os.path.join(folder, f"seeder-{playbook[0]}-{playbook[1]}.json")


def serve(folder: str) -> int:
    """Serve in the background; the configuration is on standard input. Its life is that of this ansible-playbook."""
    config = json.load(sys.stdin)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    playbook, path = _seeder_path(folder)
    _end(path)
    if os.fork():
        return 0
    os.setsid()
    # Nothing of the caller's is kept open: Ansible waits for its ends of these.
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    write_atomically(f"{path}.pid", json.dumps([os.getpid(), look(os.getpid())[1]]).encode())
    limit = time.monotonic() + config["limit_s"]

    def goes_on() -> bool:
        seen = look(playbook[0])
        return seen is not None and seen[1] == playbook[1] and time.monotonic() < limit

    try:
        return run(config, path, seed=True, goes_on=goes_on)
    finally:
        if not goes_on():
            # Nobody will ask any more.
            _forget(path)


def stop(folder: str) -> int:
    """End what `serve` began for this ansible-playbook, and print its last progress."""
    print(json.dumps(_end(_seeder_path(folder)[1])))
    return 0


def _end(path: str) -> dict:
    try:
        with open(f"{path}.pid", encoding="ascii") as stream:
            pid, start = json.load(stream)
    except FileNotFoundError:
        return {}
    deadline = time.monotonic() + 10
    while (seen := look(pid)) and seen[1] == start:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM if time.monotonic() < deadline else signal.SIGKILL)
        time.sleep(0.1)
    progress = {}
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as stream:
        progress = json.load(stream)
    _forget(path)
    return progress


def _forget(path: str) -> None:
    for name in (path, f"{path}.pid"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def main(words: list[str]) -> int:
    verbs = {("plan", 0): plan, ("fetch", 0): fetch, ("serve", 1): serve, ("stop", 1): stop}
    verb = verbs.get((words[0], len(words) - 1)) if words else None
    if verb is None:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        return verb(*words[1:])
    except SwarmError as error:
        print(error, file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        print(f"{error} for {sys.executable}: install requirements.txt there", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
