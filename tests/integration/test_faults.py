"""The named subset of the fault cells (`make faults` runs all of them): each has to end as it should."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.booted


def test_the_subset_of_the_fault_cells(bootable, tmp_path):
    command = [sys.executable, str(ROOT / "tests/faults/run.py"), "--ci", "--results", str(tmp_path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) >= 20
    assert {row["seen"] for row in rows} == {"CONFIRMED", "ROLLED_BACK", "STRANDED", "REFUSED"}
