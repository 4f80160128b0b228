"""What the server's unit lets it do, and where its secrets are: a booted host, both servers with an API key.

The key of the simulated SGLang is in its argv and its log, as the real one's is: that is its own affair. It must not get
into anything of ours. The key and the token of vLLM are to be in one file and in one process.
"""

from __future__ import annotations

import json
import shlex
import time
import urllib.error
import urllib.request

import pytest

from .conftest import ROOT, WORKER, Fleet, _boot, bed

pytestmark = [pytest.mark.booted, pytest.mark.real_vllm]

OLD_KEY, KEY, TOKEN, NEXT_KEY = (
    "marker-old-7f3a9c",
    "marker-key-$c0de",
    "marker-hub-5b21e8",
    "marker-next-93d0",
)
SECRETS = {"sglang_api_key": OLD_KEY, "vllm_service_api_key": KEY, "vllm_service_hub_token": TOKEN}
UNIT = "systemctl list-units --no-legend --plain 'vllm-dflash@*' | cut -d ' ' -f 1"
TARGET = "/root/models/Qwen3.6-27B"
#: Where a server may write: its caches, a /tmp of its own, shared memory.
WRITABLE = ["/var/cache/vllm-dflash", "/var/cache/vllm-dflash/vllm", "/tmp", "/dev/shm"]  # noqa: S108
#: What makes the unit a server, and not its sandbox.
NO_SANDBOX = (
    "Exec",
    "Environment",
    "Type",
    "Restart",
    "Timeout",
    "KillMode",
    "OOMPolicy",
    "RemoveIPC",
    "LogRate",
)


@pytest.fixture(scope="module")
def fleet(bootable, small_drafter):
    """One fresh host whose SGLang asks for a key; the tests of this file are the steps of one story, in order."""
    name = f"unit{WORKER}"
    bed("down", name)
    (host,) = _boot(name, 1, "--layer", "--small")
    command = host.run("systemctl cat sglang.service | sed -n '/^ExecStart=/,/[^\\\\]$/p'")
    host.run("mkdir -p /etc/systemd/system/sglang.service.d")
    host.put(
        f"[Service]\nExecStart=\n{command} --api-key {OLD_KEY}\n",
        "/etc/systemd/system/sglang.service.d/key.conf",
    )
    host.run("systemctl daemon-reload && systemctl restart sglang")
    wait_for(host, OLD_KEY)
    yield Fleet([host], small_drafter)
    bed("down", name)


# What this test sends must not come by a command on the host: sudo writes each of those into the journal.
def status(host, key: str | None = None) -> str:
    """The HTTP status of /v1/models, asked from this machine."""
    request = urllib.request.Request(f"http://{host.address}:30000/v1/models")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=30) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError:
        return "no answer"


def wait_for(host, key: str) -> None:
    """Until the server answers to this key."""
    deadline = time.monotonic() + 180
    while status(host, key) != "200":
        assert time.monotonic() < deadline
        time.sleep(0.5)


def sandboxed(host, script: str) -> str:
    """What a shell script prints in the sandbox of the installed unit, as the service user."""
    lines = host.run("cat /etc/systemd/system/vllm-dflash@.service").partition("[Service]\n")[2].splitlines()
    wanted = [line for line in lines if line and line[0] != "#" and not line.startswith(NO_SANDBOX)]
    assert "ProtectSystem=strict" in wanted
    options = " ".join(shlex.quote(f"--property={line}") for line in wanted)
    return host.run(
        f"systemd-run --quiet --pipe --wait --collect {options} sh -c {shlex.quote(script)} 2>&1", check=False
    )


def files_with(host, marker: str) -> set[str]:
    """Every file of the host that holds it, but those of the kernel and of the venvs."""
    folders = "/etc /opt/vllm-dflash/[!uv]* /var /run /tmp /root /home /dev/shm"
    done = host._ssh(
        f"grep -rlsaF -D skip -f /dev/stdin {folders}", input=marker, capture_output=True, text=True
    )
    return set(done.stdout.splitlines())


def test_without_the_key_of_the_server_before_nothing_is_touched(fleet):
    play = fleet.play("playbooks/preflight.yml")
    assert play.status != 0
    said = " ".join(play.output.split())
    assert "API key is needed" in said, play.output
    assert "listen on every address, port 30000" in said, play.output


def test_both_servers_are_proved_with_their_keys(fleet):
    (host,) = fleet.hosts
    play = fleet.play("site.yml", "-vvv", "--diff", **SECRETS)
    assert play.status == 0, play.output[-6000:]
    # The command line of this very test, which ansible doesn't print, is how they came in.
    for marker in SECRETS.values():
        assert marker not in play.output
    assert [status(host, key) for key in (None, OLD_KEY, TOKEN, KEY)] == ["401", "401", "401", "200"]
    assert "listen on every address, port 30000" not in " ".join(play.output.split())


def test_the_secrets_are_in_one_file_and_one_process(fleet):
    (host,) = fleet.hosts
    release = host.run(UNIT).partition("@")[2].removesuffix(".service")
    own = f"/opt/vllm-dflash/secrets/{release}"
    said = [
        "systemctl show '*'",
        "systemctl cat '*'",
        "journalctl --no-pager -o export",
        "ps axww -o args",
        # Environments are for root and the server's own user.
        "runuser -u nobody -- sh -c 'ps axeww -o args; cat /proc/*/environ 2>/dev/null'",
    ]
    said = [host.run(command, check=False) for command in said]
    assert all("vllm-dflash" in text for text in said)
    said += [json.dumps(host.module(name)) for name in ("ansible.builtin.setup",)]
    said.append(json.dumps(host.module("serving_info", port=30000, prove=True)))
    for marker in (KEY, TOKEN):
        where = [line[:300] for text in said for line in text.splitlines() if marker in line]
        assert not where
        # As it is written there, and as it is.
        assert files_with(host, marker.replace("$", "\\$")) == {own}
        assert files_with(host, marker) <= {own}
    # SGLang's: its own unit and its own log, and the one file of ours.
    others = ("/etc/systemd/system/sglang", "/var/log/journal", "/run/log/journal")
    ours = {path for path in files_with(host, OLD_KEY) if not path.startswith(others)}
    assert ours == {"/opt/vllm-dflash/secrets/sglang"}
    modes = host.run("stat -c '%a %U' /opt/vllm-dflash/secrets /opt/vllm-dflash/secrets/*")
    assert modes.splitlines() == ["700 root", *["600 root"] * 3]
    kept = [path for path in (host.inventory.parent / "records").rglob("*") if path.is_file()]
    assert kept
    assert not [path for path in kept for marker in SECRETS.values() if marker in path.read_text()]


def test_the_same_again_changes_nothing(fleet):
    play = fleet.play("playbooks/stage.yml", **SECRETS)
    assert play.status == 0, play.output
    assert play.recap[fleet.hosts[0].name]["changed"] == 0


def test_a_release_does_not_start_without_its_secrets(fleet):
    (host,) = fleet.hosts
    unit = host.run(UNIT)
    host.run("mv /opt/vllm-dflash/secrets /opt/vllm-dflash/away")
    try:
        refused = host.run(f"systemctl restart {unit} 2>&1", check=False)
        assert "ssert" in refused, refused
        assert host.module("serving_info", port=30000)["advice"]
    finally:
        host.run("mv /opt/vllm-dflash/away /opt/vllm-dflash/secrets")
    host.run(f"systemctl reset-failed {unit}; systemctl start {unit}")
    wait_for(host, KEY)


def test_the_unit_is_as_closed_as_the_documents_say(fleet):
    (host,) = fleet.hosts
    verdict = host.run(f"systemd-analyze security --no-pager {host.run(UNIT)} | tail -1")
    figure = float(verdict.partition("service:")[2].split()[0])
    assert figure <= 2.0, verdict
    assert f"**{figure}**" in (ROOT / "docs/decisions/service.md").read_text()
    assert host.run(f"systemd-analyze verify --man=no {host.run(UNIT)} 2>&1") == ""


def test_only_the_caches_can_be_written(fleet):
    (host,) = fleet.hosts
    places = [
        "/", "/etc", "/usr", "/opt", "/opt/vllm-dflash", "/opt/vllm-dflash/releases", "/var", "/var/lib", "/var/lib/vllm-dflash",
        "/var/cache", "/var/log", "/run", "/root", "/home", TARGET, "/boot", "/sys", "/proc/sys/kernel", "/sys/fs/cgroup",
    ]  # fmt: skip
    every = " ".join([*WRITABLE, *places])
    said = sandboxed(host, f"id -un; for at in {every}; do touch $at/x 2>/dev/null && echo $at; done")
    assert said.split() == ["vllm-dflash", *WRITABLE]
    host.run("rm /dev/shm/x")
    assert not host.run("ls /tmp/x", check=False)


def test_what_else_it_can_not_do(fleet):
    (host,) = fleet.hosts
    refusals = {
        "ls /root": "models",  # its target, and nothing else
        f"head -c 2 {TARGET}/config.json": "{",
        "cat /opt/vllm-dflash/secrets/* 2>&1 | grep -c denied": "1",
        "ls -d /proc/1 2>&1 | grep -c 'No such'": "1",
        "unshare --user true 2>&1 | grep -ci 'not permitted'": "1",
        "dmesg 2>&1 | grep -ci 'not permitted'": "1",
        "ulimit -c": "0",
        "umask": "0077",
        "grep -c '^CapBnd:.0000000000000000' /proc/self/status": "1",
        "chmod u+s /var/cache/vllm-dflash/x 2>&1 | grep -ci 'not permitted'": "1",
    }
    said = sandboxed(
        host, "touch /var/cache/vllm-dflash/x; " + "; ".join(f"{{ {one}; }}" for one in refusals)
    )
    assert said.split() == list(refusals.values())


def test_another_key_is_another_release_and_the_way_back_has_the_key_before(fleet):
    (host,) = fleet.hosts
    before = host.run(UNIT)
    play = fleet.play("site.yml", **{**SECRETS, "vllm_service_api_key": NEXT_KEY})
    assert play.status == 0, play.output
    assert host.run(UNIT) != before
    assert [status(host, key) for key in (None, KEY, NEXT_KEY)] == ["401", "401", "200"]
    play = fleet.play("playbooks/rollback.yml")
    assert play.status == 0, play.output
    assert host.run(UNIT) == before
    assert [status(host, key) for key in (NEXT_KEY, KEY)] == ["401", "200"]
