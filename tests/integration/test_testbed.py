"""The test bed itself: hosts boot, are reachable, reboot, lose power, and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
BED = "bedtest"

pytestmark = [pytest.mark.booted, pytest.mark.usefixtures("bootable")]


def bed(*arguments: str, ok: bool = True) -> str:
    """Run bed.py; its stdout."""
    done = subprocess.run(
        [sys.executable, str(REPO / "tests/testbed/bed.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert (done.returncode == 0) == ok, f"bed.py {' '.join(arguments)}: {done.returncode}\n{done.stderr}"
    return done.stdout if ok else done.stderr


def on(host: str, command: str) -> str:
    """Run a shell command on a host as ops."""
    return bed("ssh", BED, host, command)


def status(name: str = BED) -> dict:
    return json.loads(bed("status"))[name]


def wait_for(condition, seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def traces(name: str, subnet: str) -> list[str]:
    """Everything on this machine that belongs to the bed `name`."""
    prefix = subnet.rpartition(".")[0] + "."
    commands = (["ip", "address"], ["ip", "route", "show", "table", "all"], ["nft", "list", "ruleset"])
    found = []
    for command in commands:
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found += [line for line in output.splitlines() if prefix in line]
    for mounts in Path("/proc").glob("[0-9]*/mounts"):
        try:
            found += [f"{mounts}: {x}" for x in mounts.read_text().splitlines() if f"/beds/{name}/" in x]
        except OSError:
            continue  # a process that ended meanwhile
    for command_line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command_line.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"/beds/{name}/" in words:
            found.append(words)
    found += [str(p) for p in Path("/sys/fs/cgroup").glob(f"**/vllm-dflash-testbed/{name}")]
    found += [str(p) for p in Path("/run/vllm-dflash-testbed").glob(name)]
    return found


@pytest.fixture(scope="module")
def hosts(bootable):
    """Two plain hosts, gone afterwards."""
    bed("down", BED)
    bed("up", BED, "--hosts", "2", "--no-sglang")
    yield [f"{BED}-gpu1", f"{BED}-gpu2"]
    bed("down", BED)


def test_hosts_are_booted_machines_of_their_own(hosts):
    seen = [
        on(host, "hostname; cat /etc/machine-id; sudo cat /etc/ssh/ssh_host_ed25519_key.pub")
        for host in hosts
    ]
    assert [text.split()[0] for text in seen] == hosts
    assert len({text.split()[1] for text in seen}) == 2, "two hosts share a machine-id"
    assert len({text.split()[3] for text in seen}) == 2, "two hosts share a host key"
    for host in hosts:
        assert on(host, "systemctl is-system-running --wait").strip() == "running"
        assert on(host, "sudo readlink /proc/1/exe").strip().endswith("/systemd")


def test_ops_is_unprivileged_and_can_sudo(hosts):
    assert on(hosts[0], "id -un; sudo -n id -un").split() == ["ops", "root"]
    assert (
        on(hosts[0], "cat /etc/shadow >/dev/null 2>&1 && echo readable || echo refused").strip() == "refused"
    )


def test_a_host_key_that_changed_is_refused(hosts, tmp_path):
    config = Path(status()["ssh_config"]).read_text()
    known = tmp_path / "known_hosts"
    lines = (Path(status()["ssh_config"]).parent / "known_hosts").read_text().splitlines()
    # gpu1 with the key of gpu2
    known.write_text(lines[0].rsplit(" ", 1)[0] + " " + lines[1].rsplit(" ", 1)[1] + "\n")
    changed = tmp_path / "ssh_config"
    changed.write_text(config.replace(str(Path(status()["ssh_config"]).parent / "known_hosts"), str(known)))
    command = ["ssh", "-F", str(changed), hosts[0], "true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 255
    assert "Host key verification failed" in done.stderr


def test_up_again_changes_nothing(hosts):
    before = status()
    bed("up", BED, "--hosts", "2", "--no-sglang")
    assert status() == before
    assert "first: bed.py down" in bed("up", BED, "--hosts", "3", "--no-sglang", ok=False)
    assert status() == before


def test_ansible_reaches_the_hosts(hosts):
    command = [str(Path(sys.executable).with_name("ansible")), "-i", status()["inventory"], "gpu_hosts"]
    done = subprocess.run(
        [*command, "-m", "ansible.builtin.command", "-a", "id -un", "--one-line"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(stdout) root") == 2, done.stdout


def test_reboot_from_inside_comes_back_with_its_journal(hosts):
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = on(hosts[0], boot_id)
    on(hosts[0], "sudo logger -t keep-me before-the-reboot; sudo touch /var/lib/kept /run/not-kept")
    on(hosts[0], "sudo systemd-run --on-active=0.2 systemctl reboot 2>/dev/null")

    def rebooted() -> bool:
        command = ["ssh", "-F", status()["ssh_config"], "-o", "ConnectTimeout=2", hosts[0], boot_id]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode == 0 and done.stdout != before

    wait_for(rebooted, 60, "reboot")
    assert on(hosts[0], "ls /var/lib/kept; ls /run/not-kept 2>/dev/null || true").split() == ["/var/lib/kept"]
    assert "before-the-reboot" in on(hosts[0], "sudo journalctl -b -1 -t keep-me")
    assert on(hosts[0], "systemctl is-system-running --wait").strip() == "running"


def test_power_cut_is_silent_and_power_on_boots_the_same_disk(hosts):
    host, other = hosts
    on(host, "echo kept | sudo tee /var/lib/cut >/dev/null")
    pid = status()["hosts"][host]["pid"]
    others = status()["hosts"][other]
    connection = subprocess.Popen(
        ["ssh", "-F", status()["ssh_config"], host, "sleep 300"], stdout=subprocess.PIPE
    )
    time.sleep(1)
    try:
        bed("power-cut", BED, host)
        assert status()["hosts"][host]["running"] is False
        assert not Path(f"/proc/{pid}").exists(), "the guest's PID 1 lives on"
        assert status()["hosts"][other] == others, "the other host noticed"
        time.sleep(1)
        assert connection.poll() is None, "the peer was told that the host went off"
    finally:
        connection.kill()
        connection.wait()
    bed("power-on", BED, host)
    assert on(host, "cat /var/lib/cut").strip() == "kept"
    assert "power off" not in on(host, "sudo journalctl -b -1 --no-pager -n 5").lower()
    assert status()["hosts"][host]["pid"] != pid


def test_down_leaves_nothing_and_other_beds_alone(hosts):
    second = f"{BED}2"
    try:
        bed("up", second, "--hosts", "1", "--no-sglang", "--no-outside")
        bystander = status()
        there = status(second)
        assert traces(second, there["subnet"]), "the search for traces finds nothing even while the bed is up"
        assert "default" not in bed("ssh", second, "gpu1", "ip route"), "--no-outside has a way out"
        assert there["subnet"] != bystander["subnet"]
    finally:
        bed("down", second)
    assert traces(second, there["subnet"]) == []
    assert second not in json.loads(bed("status"))
    assert not Path(there["hosts"][f"{second}-gpu1"]["upper"]).exists()
    assert status() == bystander
    bed("down", second)  # once more: nothing to do is fine


def test_cables_have_their_rates(bootable):
    """That of `up`, then another for the host, then another for the control node: each slower one is what counts."""
    name = f"{BED}3"
    size, burst = 500_000, 16 << 10
    try:
        bed("up", name, "--hosts", "1", "--no-sglang", "--no-outside", "--rate", "8mbit")
        words = "control", name, "ssh", "-F", status(name)["ssh_config"], f"{name}-gpu1"
        for whose, rate, bits_per_second in (
            ("", "", 8e6),
            ("gpu1", "4mbit", 4e6),
            ("gpu1", "80mbit", 8e6),
            ("control", "2mbit", 2e6),
        ):
            if whose:
                bed("rate", name, whose, rate)
            begin = time.monotonic()
            assert len(bed(*words, f"head -c {size} /dev/zero | tr '\\0' x")) == size
            # Compressed it would be nothing.
            assert time.monotonic() - begin >= (size - 2 * burst) * 8 / bits_per_second
    finally:
        bed("down", name)
