"""Booted hosts for tests. A test that can't boot them skips with the reason; in CI that is a failure."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BED = [sys.executable, str(ROOT / "tests" / "testbed" / "bed.py")]
RUN = Path("/run/vllm-dflash-testbed")


#: Files run side by side; those that share a bed's name get one of their own by it.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def bed(*arguments: str, timeout: float = 1800) -> str:
    """Run one verb of the test bed; its progress goes to the terminal."""
    return subprocess.run(
        [*BED, *arguments], check=True, stdout=subprocess.PIPE, text=True, timeout=timeout
    ).stdout


@dataclass
class Play:
    """What `ansible-playbook` did: exit status, everything it printed, and its recap by host."""

    status: int
    output: str
    recap: dict[str, dict[str, int]]

    @property
    def pages(self) -> list[Path]:
        """Each page of HTML that it says it made. What Ansible writes to stderr stands behind the last line of stdout."""
        return [Path(path) for path in re.findall(r"for a browser or a ticket: (\S+\.html)", self.output)]


@dataclass
class Host:
    """One booted host of a bed."""

    bed: str
    name: str
    inventory: Path

    def _ssh(self, command: str, **options) -> subprocess.CompletedProcess:
        login = ["ssh", "-F", str(RUN / self.bed / "ssh_config"), self.name]
        return subprocess.run([*login, f"sudo sh -c {shlex.quote(command)}"], **{"check": False, **options})

    def run(self, command: str, *, check: bool = True, timeout: float = 300) -> str:
        """What a shell command prints, run as root over ssh."""
        done = self._ssh(command, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            raise AssertionError(
                f"{self.name}: {command!r} ended with {done.returncode}: {done.stderr}{done.stdout}"
            )
        return done.stdout.strip()

    def put(self, content: str | bytes, remote: str) -> None:
        """Write a file on the host, as root."""
        data = content if isinstance(content, bytes) else content.encode()
        self._ssh(f"cat > {shlex.quote(remote)}", input=data, check=True, timeout=300)

    def module(self, name: str, /, *, check_mode: bool = False, **arguments) -> dict:
        """Run one module over ssh as root and return what it returned, failed or not."""
        argv = ["ansible", self.name, "-i", str(self.inventory), "-m", name, "-a", json.dumps(arguments)]
        done = subprocess.run(
            argv + (["--check"] if check_mode else []),
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
                "ANSIBLE_CALLBACK_RESULT_FORMAT": "json",
            },
            capture_output=True,
            text=True,
            timeout=1200,
            check=False,
        )
        # A failure has a paragraph for people before it, with braces of its own.
        _, found, result = done.stdout.partition(f"{self.name} | ")
        assert found, done.stdout + done.stderr
        # The callback leaves `failed` out.
        return {"failed": done.returncode != 0, **json.loads(result[result.index("{") :])}

    def show(self, unit: str, name: str) -> str:
        """One property of a unit, as systemd shows it."""
        return self.run(f"systemctl show --value -p {name} {unit}")

    def get(self, url: str, *, body: dict | None = None, timeout: float = 30) -> dict:
        """Ask a server on the host, from this machine, and return the JSON of its answer."""
        argv = [
            "curl",
            "--silent",
            "--fail-with-body",
            "--noproxy",
            "*",
            "--max-time",
            str(timeout),
            f"http://{self.address}{url}",
        ]
        if body is not None:
            argv += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
        return json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)

    @property
    def address(self) -> str:
        """Its address on the bed's bridge."""
        inventory = json.loads(self.inventory.read_text())
        return inventory["all"]["children"]["gpu_hosts"]["children"]["qwen3_6_27b_dflash"]["hosts"][
            self.name
        ]["ansible_host"]

    def wait(self, condition: str, seconds: float = 60) -> None:
        """Wait until a shell command succeeds on the host."""
        deadline = time.monotonic() + seconds
        while self._ssh(condition, capture_output=True).returncode:
            assert time.monotonic() < deadline, f"{self.name}: {condition!r} did not come true in {seconds} s"
            time.sleep(0.3)


@dataclass
class Fleet:
    """The hosts of one bed, and the play against them."""

    hosts: list[Host]
    drafter: Path

    @property
    def inventory(self) -> Path:
        """The bed's own inventory."""
        return self.hosts[0].inventory

    def play(self, playbook: str = "site.yml", *options: str, **variables) -> Play:
        """`ansible-playbook` as a user types it, with the bed's inventory alone: a user's own may hold real hosts."""
        extra = {"drafter_source": str(self.drafter), **variables}
        done = subprocess.run(
            [
                "ansible-playbook",
                "-i",
                str(self.inventory),
                playbook,
                "-e",
                json.dumps(extra),
                *options,
            ],
            cwd=ROOT,
            env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        output = done.stdout + done.stderr
        recap = {}
        for line in output.partition("PLAY RECAP")[2].splitlines()[1:]:
            host, colon, counts = line.partition(" : ")
            if colon:
                recap[host.strip()] = {
                    key: int(value) for key, value in (word.split("=") for word in counts.split())
                }
        return Play(done.returncode, output, recap)


@pytest.fixture(scope="session")
def bootable() -> None:
    """Images are there, or the test skips (in CI: fails) with the reason."""
    probe = subprocess.run([*BED, "can-boot"], capture_output=True, text=True, check=False)
    if probe.returncode:
        reason = f"this machine can't boot hosts: {probe.stdout.strip()}"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    bed("prepare")


def _drafter(folder: Path, size: str) -> Path:
    path = folder / "model.safetensors"
    subprocess.run([sys.executable, str(ROOT / "tests/testbed/make_drafter.py"), str(path), size], check=True)
    return path


@pytest.fixture(scope="session")
def sparse_drafter(tmp_path_factory) -> Path:
    """The published shapes; the payload is a hole, so that nothing of it takes disk."""
    return _drafter(tmp_path_factory.mktemp("sparse"), "--sparse")


@pytest.fixture(scope="session")
def small_drafter(tmp_path_factory) -> Path:
    """The same names and layers, narrow: it travels at once. Goes with hosts booted with --small."""
    return _drafter(tmp_path_factory.mktemp("small"), "--small")


def _boot(name: str, count: int, *options: str) -> list[Host]:
    inventory = Path(bed("up", name, "--hosts", str(count), *options).strip().splitlines()[-1])
    return [Host(name, f"{name}-gpu{number}", inventory) for number in range(1, count + 1)]


@contextlib.contextmanager
def fresh_hosts(name: str, count: int, *options: str) -> Iterator[list[Host]]:
    """A bed of its own with hosts on which SGLang answers; gone afterwards, whatever happens."""
    bed("down", name)
    try:
        hosts = _boot(name, count, *options)
        for host in hosts:
            host.wait("curl -sf http://127.0.0.1:30000/v1/models")
        yield hosts
    finally:
        bed("down", name)


@pytest.fixture
def fleet(bootable, small_drafter, request):
    """Fresh hosts with the release layer and SGLang serving; as many as an indirect parameter says, else one."""
    name = f"it{WORKER}"
    bed("down", name)
    hosts = _boot(name, getattr(request, "param", 1), "--layer", "--small")
    for host in hosts:
        host.wait("curl -sf http://127.0.0.1:30000/v1/models")
    yield Fleet(hosts, small_drafter)
    bed("down", name)


@pytest.fixture(scope="module")
def layer_host(bootable):
    """One host with the release layer, shared by the tests of a file; SGLang does not run."""
    name = f"lh{WORKER}"
    bed("down", name)
    yield _boot(name, 1, "--layer", "--no-sglang")[0]
    bed("down", name)


@pytest.fixture(scope="session")
def full_drafter(bootable) -> Path:
    """3.46 GB of random weights in the published shapes, kept in the test bed's cache: the demo uses the same file."""
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vllm-dflash-testbed" / "drafter"
    )
    path = cache / "model.safetensors"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _drafter(cache, "--full-size")
    return path
