"""Unit files: which are written, and what systemctl is asked to do."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dflash_rollout import files, unit_files
from dflash_rollout.errors import RolloutError
from dflash_rollout.unit_files import Change, State

UNIT = "[Service]\nExecStart=/bin/true\n"


def put(folder: Path, name: str, text: str, mode: int = 0o644) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_only_what_differs_is_written(tmp_path):
    put(tmp_path, "same.service", UNIT)
    put(tmp_path, "other.service", "old\n")
    put(tmp_path, "writable.service", UNIT, 0o666)
    wanted = dict.fromkeys(["same.service", "other.service", "writable.service", "a.service.d/50.conf"], UNIT)
    changes = unit_files.differing(wanted, str(tmp_path))
    assert changes == [
        Change("other.service", "old\n", UNIT),
        Change("writable.service", UNIT, UNIT),
        Change("a.service.d/50.conf", None, UNIT),
    ]
    unit_files.write(changes, str(tmp_path))
    assert unit_files.differing(wanted, str(tmp_path)) == []
    assert (tmp_path / "a.service.d/50.conf").read_text() == UNIT
    assert (tmp_path / "writable.service").stat().st_mode & 0o777 == 0o644


def test_a_masked_unit_is_refused(tmp_path):
    (tmp_path / "a.service").symlink_to("/dev/null")
    with pytest.raises(RolloutError, match=r"systemctl unmask a\.service"):
        unit_files.differing({"a.service": UNIT}, str(tmp_path))


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("a.service", "a.service"),
        ("a.timer", "a.timer"),
        ("a@.service", "a@*.service"),
        ("a.service.d/50-b.conf", "a.service"),
        ("a@.service.d/50-b.conf", "a@*.service"),
        ("a@i.service.d/50-b.conf", "a@i.service"),
    ],
)
def test_which_units_a_file_is_of(name, unit):
    assert unit_files.unit_of(name) == unit


def test_states_as_systemctl_prints_them():
    text = (
        "Id=a.service\nActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no\n\n"
        "Id=gone.timer\nActiveState=inactive\nUnitFileState=\nNeedDaemonReload=no\n\n"
        "Id=b@x.service\nActiveState=failed\nUnitFileState=static\nNeedDaemonReload=yes\n"
    )
    assert unit_files.parse_states(text) == {
        "a.service": State(enabled=True, active=True),
        "gone.timer": State(),
        "b@x.service": State(outdated=True),
    }
    assert unit_files.parse_states("") == {}


RUNS = State(enabled=True, active=True)


@pytest.mark.parametrize(
    ("changed", "states", "asked", "calls"),
    [
        # Nothing to do.
        (
            [],
            {"a.service": State(enabled=True), "t.timer": RUNS},
            {"enabled": ["a.service"], "started": ["t.timer"]},
            [],
        ),
        ([], {"t.timer": State()}, {"disabled": ["t.timer"]}, []),
        ([], {}, {"disabled": ["t.timer"]}, []),
        # A fresh host.
        (
            ["a.service", "t.timer"],
            {},
            {"enabled": ["a.service"], "started": ["t.timer"]},
            [["daemon-reload"], ["enable", "a.service", "t.timer"], ["restart", "t.timer"]],
        ),
        # Another interval: the timer starts anew; another text of a unit that only starts at boot starts nothing.
        (
            ["a.service", "t.timer"],
            {"a.service": State(enabled=True), "t.timer": RUNS},
            {"enabled": ["a.service"], "started": ["t.timer"]},
            [["daemon-reload"], ["restart", "t.timer"]],
        ),
        # Cut off between writing and reading.
        (
            [],
            {"a.service": State(enabled=True, outdated=True)},
            {"enabled": ["a.service"]},
            [["daemon-reload"]],
        ),
        # Stopped by hand, or given up.
        ([], {"t.timer": State(enabled=True)}, {"started": ["t.timer"]}, [["restart", "t.timer"]]),
        ([], {"t.timer": RUNS}, {"disabled": ["t.timer"]}, [["disable", "--now", "t.timer"]]),
        ([], {"t.timer": State(active=True)}, {"disabled": ["t.timer"]}, [["disable", "--now", "t.timer"]]),
    ],
)
def test_what_systemctl_is_asked_for(changed, states, asked, calls):
    assert unit_files.commands(changed, states, **asked) == calls


def simulated_tool(tmp_path: Path, monkeypatch, name: str, script: str) -> None:
    path = tmp_path / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(("version", "option"), [(249, False), (252, True)])
def test_systemd_reads_a_template_as_an_instance(tmp_path, monkeypatch, version, option):
    simulated_tool(tmp_path, monkeypatch, "systemctl", f"echo 'systemd {version} (simulated)'")
    simulated_tool(
        tmp_path,
        monkeypatch,
        "systemd-analyze",
        f'echo "$@" > {tmp_path}/asked; cat "$(eval echo \\$$#)" > {tmp_path}/read',
    )
    unit_files.verify(Change("a@.service", None, UNIT), "a@i.service")
    asked = (tmp_path / "asked").read_text()
    assert asked.split()[-1].endswith("/a@i.service")
    assert ("--recursive-errors=no" in asked) == option
    assert (tmp_path / "read").read_text() == UNIT


def test_what_systemd_refuses_is_said(tmp_path, monkeypatch):
    simulated_tool(tmp_path, monkeypatch, "systemctl", "echo 'systemd 252 (simulated)'")
    simulated_tool(
        tmp_path,
        monkeypatch,
        "systemd-analyze",
        'for path; do :; done; echo "$path:2: Unknown key" >&2; exit 1',
    )
    with pytest.raises(RolloutError) as refused:
        unit_files.verify(Change("a.service", None, UNIT))
    assert "doesn't accept a.service, which was not written" in str(refused.value)
    assert "Found: a.service:2: Unknown key" in str(refused.value)


def test_folders(tmp_path):
    path = tmp_path / "a" / "b"
    assert files.ensure_folder(str(path), check=True)
    assert not path.parent.exists()
    old = os.umask(0o077)
    try:
        assert files.ensure_folder(str(path))
    finally:
        os.umask(old)
    assert [one.stat().st_mode & 0o777 for one in (path, path.parent)] == [0o755, 0o755]
    assert not files.ensure_folder(str(path))
    path.chmod(0o700)
    assert files.ensure_folder(str(path), check=True)
    assert path.stat().st_mode & 0o777 == 0o700
    assert files.ensure_folder(str(path))
    assert path.stat().st_mode & 0o777 == 0o755
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.ensure_folder(str(tmp_path / "file"))
