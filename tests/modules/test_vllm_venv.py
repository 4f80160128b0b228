"""The modules around installing and clearing up: check mode, and secrets that are shown nowhere."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

SECRET = "s3cr:t/m4rker"  # noqa: S105
SIMULATED_UV = """#!/bin/sh
# simulated uv: shows all that it was given, as a careless program would
echo "$@"; env | grep -i -e index -e proxy; exit 2
"""


@pytest.fixture
def arguments(tmp_path) -> dict:
    root = tmp_path / "root"
    uv = root / "uv" / hashlib.sha256(b"uv lock").hexdigest()[:16] / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(SIMULATED_UV)
    uv.chmod(0o755)
    return {
        "root": str(root),
        "lock": "vllm lock",
        "version": "0.20.1",
        "uv_lock": "uv lock",
        "python": "/usr/bin/python3",
        "index_url": "https://packages.example.com/simple",
        "index_username": "deploy",
        "index_password": SECRET,
        "environment": {"https_proxy": "http://proxy-user:pr0xy-m4rker@proxy.example.com:3128"},
    }


def test_no_secret_is_shown(run_module, arguments):
    result = run_module("vllm_venv", arguments)
    assert result["failed"]
    assert "Could not make the venv" in result["msg"]
    shown = json.dumps(result)
    for marker in (SECRET, "s3cr%3At%2Fm4rker", "m4rker"):
        assert marker not in shown
    assert "vllm lock" not in shown


def test_check_mode_installs_nothing(run_module, arguments):
    result = run_module("vllm_venv", arguments, check=True)
    assert (result["changed"], result["found"]) == (True, None)
    assert os.listdir(arguments["root"]) == ["uv"]


def test_a_login_in_the_url_is_refused(run_module, arguments):
    arguments |= {"index_url": "https://deploy:pw@packages.example.com/simple", "index_password": ""}
    result = run_module("vllm_venv", arguments, check=True)
    assert result["failed"]
    assert "vllm_index_password" in result["msg"]


def test_wheelhouse_looks_at_an_interpreter(run_module):
    result = run_module("wheelhouse", {"python": "/nonexistent/python"})
    assert "can't be asked" in result["msg"]
    platform = {"python": "3.11", "machine": "x86_64", "glibc": 36}
    arguments = {"path": "/nonexistent/wheels", "platform": platform, "locks": ["x" * 1000]}
    result = run_module("wheelhouse", arguments, check=True)
    assert (result["changed"], result["key"]) == (True, "cp311-manylinux_2_36_x86_64")
    assert "xxx" not in json.dumps(result)


def test_old_releases_shows_what_would_go(run_module, tmp_path):
    """A folder of systemctl that knows no unit stands before the real one."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "systemctl").write_text("#!/bin/sh\nexit 0\n")
    (programs / "systemctl").chmod(0o755)
    root = tmp_path / "root"
    (root / "venvs").mkdir(parents=True)
    for number in (1, 2):
        folder = root / "releases" / f"{number:016x}"
        folder.mkdir(parents=True)
        os.utime(folder, (1000 * number, 1000 * number))
    arguments = {"root": str(root), "state_dir": str(tmp_path / "state"), "keep": 1}
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    shown = run_module("old_releases", arguments, check=True, diff=True, env=environment)
    assert shown["removed"] == [str(root / "releases" / f"{1:016x}")]
    assert f"releases/{2:016x} (one of the newest 1)" in shown["diff"]["after"]
    assert len(os.listdir(root / "releases")) == 2
    assert run_module("old_releases", arguments, env=environment)["removed"] == shown["removed"]
    assert os.listdir(root / "releases") == [f"{2:016x}"]
    assert run_module("old_releases", arguments, env=environment)["changed"] is False
