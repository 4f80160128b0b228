"""What systemctl and /proc say, read from text, and from real processes of this test."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from dflash_rollout import units
from dflash_rollout.errors import RolloutError

SHOW = """\
MainPID=812
NRestarts=3
LoadState=loaded
ActiveState=active
SubState=running
ControlGroup=/system.slice/sglang.service
InvocationID=6f2c
Result=success
UnitFileState=enabled
Job=41
ExecStart={ path=/opt/sg lang/bin/python ; argv[]=/opt/sg lang/bin/python -m sglang.launch_server ; ignore_errors=no }
ExecCondition={ path=/bin/sh ; argv[]=/bin/sh -c program may-start sglang.service ; ignore_errors=no }
"""


def test_a_unit_is_read():
    unit = units.parse_unit("sglang.service", SHOW)
    assert unit == units.Unit(
        "sglang.service", "loaded", "active", "running", 812, 3, "/system.slice/sglang.service", "6f2c",
        "success", "enabled", 41, True, program="/opt/sg lang/bin/python",
    )  # fmt: skip
    assert unit.running


@pytest.mark.parametrize("line", ["RootDirectory=/srv/root", "RootImage=/srv/root.img", "ExecStart="])
def test_a_program_of_another_root_is_not_looked_for(line):
    assert units.parse_unit("x.service", f"{SHOW}{line}\n").program == ""


def test_a_command_with_empty_lines_is_still_one_unit():
    text = SHOW.replace("may-start", "a\n\nb may-start").replace("sglang.launch_server", "a\n\nb")
    assert units.parse_unit("x.service", text).program == "/opt/sg lang/bin/python"


def test_a_unit_that_is_not_there():
    unit = units.parse_unit("x.service", "LoadState=not-found\nActiveState=inactive\nMainPID=0\nJob=\n")
    assert (unit.load_state, unit.main_pid, unit.job, unit.guarded) == ("not-found", 0, 0, False)
    assert not unit.running


@pytest.mark.parametrize(
    ("active", "job", "running"),
    [
        ("inactive", 0, False),
        ("failed", 0, False),
        ("inactive", 5, True),
        ("activating", 0, True),
        ("deactivating", 0, True),
        ("reloading", 0, True),
    ],
)
def test_running(active, job, running):
    assert units.parse_unit("x.service", f"ActiveState={active}\nJob={job}\n").running is running


def simulate(tmp_path, monkeypatch, name, body):
    program = tmp_path / name
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_a_systemctl_that_fails_is_said(tmp_path, monkeypatch):
    simulate(tmp_path, monkeypatch, "systemctl", 'echo "Failed to connect to bus" >&2; exit 1')
    with pytest.raises(RolloutError, match="Failed to connect to bus"):
        units.show("x.service")


def test_a_systemctl_that_hangs_is_said(tmp_path, monkeypatch):
    simulate(tmp_path, monkeypatch, "systemctl", "exec sleep 5")
    monkeypatch.setattr(units, "TIMEOUT_S", 0.2)
    with pytest.raises(RolloutError, match="doesn't answer"):
        units.systemctl("show", timeout=0.2)


def test_no_systemctl(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RolloutError, match="systemctl is missing"):
        units.show("x.service")


def test_the_journal_is_read_from_its_cursor(tmp_path, monkeypatch):
    simulate(
        tmp_path,
        monkeypatch,
        "journalctl",
        # As systemd 252 counts: --lines= alone gives the last ones, after a cursor the first ones.
        """case "$*" in
        *--show-cursor*) echo "-- cursor: s=1;i=2" ;;
        *--after-cursor=s=1*--lines=*) seq 1 5 ;;
        *--unit=x.service*--after-cursor=s=1*) seq 1 40 ;;
        *--unit=x.service*--boot*--lines=30*) seq 11 40 ;;
        esac""",
    )
    assert units.journal_cursor() == "s=1;i=2"
    assert units.journal_tail("x.service", "s=1;i=2", 5) == ["36", "37", "38", "39", "40"]
    assert units.journal_tail("x.service") == [str(number) for number in range(11, 41)]


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:7530 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 111 1 0
   1: 0100007F:7530 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 112 1 0
   2: 00000000:7531 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 113 1 0
"""
TCP6 = """\
  sl  local_address                         remote_address                        st
   0: 00000000000000000000000000000000:7530 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 114
   1: 000080FE00000000FF005450B6AD1DFE:7530 00000000000000000000000000000000:0000 0A 0:0 00:0 0 0 0 115
"""


def test_listeners_are_read():
    assert units.parse_listeners(TCP, 30000) == [("127.0.0.1", 30000, "111")]
    assert units.parse_listeners(TCP6, 30000) == [
        ("::", 30000, "114"),
        ("fe80::5054:ff:fe1d:adb6", 30000, "115"),
    ]
    assert units.parse_listeners(TCP, 22) == []
    assert [port for _, port, _ in units.parse_listeners(TCP)] == [30000, 30001]


def test_who_listens_on_a_real_socket():
    us = units.Process(os.getpid(), 0)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert units.listeners(port) == [], "bound is not listening"
        server.listen()
        (found,) = units.listeners(port)
        assert f"127.0.0.1:{port}" in units.listens_at([us])
    assert (found.address, found.port, found.pid) == ("127.0.0.1", port, os.getpid())
    assert sys.executable.rpartition("/")[2] in found.command
    assert units.listeners(port) == []
    assert f"127.0.0.1:{port}" not in units.listens_at([us])


@pytest.fixture
def family():
    """A child with a child of its own in another session; both sleep."""
    script = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen(['sleep', '60'], start_new_session=True).pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    yield parent, child
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def wait_gone(process):
    until = time.monotonic() + 5
    while units.is_alive(process):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_descendants_are_members_and_stay_so_when_their_parent_dies(family):
    parent, child = family
    ticks = units._stat(parent.pid)[1]
    found = units.members([], [units.Process(parent.pid, ticks)])
    assert {process.pid for process in found} == {parent.pid, child}
    assert {process.command.split()[0] for process in found} == {sys.executable, "sleep"}
    parent.kill()
    parent.wait()
    assert {process.pid for process in units.members([], found)} == {child}


def test_another_process_under_the_same_pid_is_no_member_and_gets_no_signal(family):
    parent, _ = family
    ticks = units._stat(parent.pid)[1]
    earlier = units.Process(parent.pid, ticks - 1)
    assert units.members([], [earlier]) == []
    assert not units.is_alive(earlier)
    assert not units.send_signal(earlier, signal.SIGKILL)
    assert parent.poll() is None


def test_a_signal_arrives(family):
    parent, _ = family
    process = units.Process(parent.pid, units._stat(parent.pid)[1])
    assert units.send_signal(process, signal.SIGTERM)
    wait_gone(process)  # a zombie is dead
    assert parent.wait() == -signal.SIGTERM
    assert not units.send_signal(process, signal.SIGTERM)


def test_members_of_a_control_group(family, monkeypatch):
    parent, child = family
    groups = {parent.pid: "/system.slice/x.service/inner", os.getpid(): "/system.slice/x.service2"}
    monkeypatch.setattr(
        units,
        "process_details",
        lambda pid: {"user": "u", "command": "c", "unit": None, "cgroup": groups.get(pid, "/init.scope")},
    )
    found = units.members(["/system.slice/x.service"])
    assert {process.pid for process in found} == {parent.pid, child}
    assert units.members([""]) == [], "the group of a unit that doesn't run is nobody's"
