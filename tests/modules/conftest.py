"""Modules run as processes of their own, fed as Ansible feeds them: JSON on stdin, JSON on stdout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# Ansible packs module_utils/ of the project into each module; here its search path is made longer instead.
RUNNER = """
import runpy, sys
import ansible.module_utils
ansible.module_utils.__path__.append(sys.argv.pop(1))
module = sys.argv.pop(1)
runpy.run_path(module, run_name="__main__")
"""


def _run_module(
    name: str, args: dict, check: bool = False, diff: bool = False, env: dict[str, str] | None = None
) -> dict:
    """Run library/<name>.py with `args` and return what it prints; `failed` is in it when it failed.

    `env` is added to the environment. Anything but one JSON document on stdout, and any failure that the
    module didn't report itself, is an AssertionError with the traceback.
    """
    arguments = {**args, "_ansible_check_mode": check, "_ansible_diff": diff}
    process = subprocess.run(
        [sys.executable, "-c", RUNNER, REPOSITORY / "module_utils", REPOSITORY / "library" / f"{name}.py"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **(env or {})},
        check=False,
    )
    try:
        result = json.loads(process.stdout)
    except json.JSONDecodeError:
        raise AssertionError(f"{name} printed no JSON:\n{process.stdout}\n{process.stderr}") from None
    assert process.stderr == "", process.stderr
    assert (process.returncode != 0) == result.get("failed", False), result
    return result


@pytest.fixture(scope="session")
def run_module() -> Callable[..., dict]:
    """`run_module(name, args, check=False, diff=False, env=None) -> dict`, see _run_module."""
    return _run_module
