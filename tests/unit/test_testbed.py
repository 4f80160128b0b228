"""What the test bed finds missing on the machine that it is to run on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "testbed"))

from bedlib import machine


def test_a_compiler_without_headers_lacks_a_package(monkeypatch):
    """Debian's gcc brings none without its recommended packages: seen on a fresh Debian 13."""
    monkeypatch.setattr(machine, "program", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(machine.os.path, "exists", lambda path: False)
    assert machine.missing_packages() == ["libc6-dev"]
    monkeypatch.setattr(machine.os.path, "exists", lambda path: path == "/usr/include/dirent.h")
    assert machine.missing_packages() == []


def test_what_is_missing_is_named_by_its_package(monkeypatch):
    monkeypatch.setattr(
        machine, "program", lambda name: None if name == "systemd-nspawn" else f"/usr/bin/{name}"
    )
    monkeypatch.setattr(machine.os.path, "exists", lambda path: True)
    assert machine.missing_packages() == ["systemd-container"]
