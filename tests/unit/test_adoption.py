"""A unit file made from a process: what systemd reads back is what was started, and no secret is in it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest
from dflash_rollout import adoption
from dflash_rollout.adoption import Program, instructions, quote, top_of, unit_file
from hypothesis import given
from hypothesis import strategies as st


def read_back(line):
    """The words of a line of a unit file, by systemd's rules: quotes, C escapes, %% and $$."""
    words, word, quoted, position = [], None, False, 0
    while position < len(line):
        character = line[position]
        position += 1
        if character == "\\":
            code = line[position]
            position += 1
            if code == "x":
                character, position = chr(int(line[position : position + 2], 16)), position + 2
            else:
                character = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", '"': '"'}[code]
            word = (word or "") + character
        elif character == '"':
            quoted, word = not quoted, word or ""
        elif character == " " and not quoted:
            words, word = ([*words, word] if word is not None else words), None
        else:
            assert character not in "\n\r"
            word = (word or "") + character
    assert not quoted
    return words if word is None else [*words, word]


def expand(word):
    assert "$" not in word.replace("$$", "")
    assert "%" not in word.replace("%%", "")
    return word.replace("$$", "$").replace("%%", "%")


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=20)))
def test_words_come_back(words):
    line = " ".join(quote(word) for word in words)
    assert "\n" not in line
    assert [expand(word) for word in read_back(line)] == words


def program(*arguments, **different):
    values = {
        "pid": 4711,
        "user": "alice",
        "arguments": arguments or ("/opt/venv/bin/python", "-m", "sglang.launch_server", "--port", "30000"),
        "directory": "/home/alice/llm",
        "executable": "/usr/bin/python3.11",
        "environment": {},
    }
    return Program(**{**values, **different})


def test_the_interpreter_of_a_venv_is_kept():
    assert "ExecStart=/opt/venv/bin/python -m sglang.launch_server" in unit_file(program())[0]
    assert "ExecStart=/home/alice/llm/venv/bin/python x" in unit_file(program("venv/bin/python", "x"))[0]
    assert "ExecStart=/home/alice/x.sh" in unit_file(program("../x.sh"))[0]


def test_a_bare_name_is_looked_up_where_the_process_would(tmp_path):
    (tmp_path / "sglang").write_text("#!/bin/sh\n")
    (tmp_path / "sglang").chmod(0o755)
    environment = {"PATH": f"/nowhere:{tmp_path}"}
    assert (
        f"ExecStart={tmp_path}/sglang serve"
        in unit_file(program("sglang", "serve", environment=environment))[0]
    )
    assert (
        "ExecStart=/usr/bin/python3.11 serve"
        in unit_file(program("absent", "serve", environment=environment))[0]
    )


def test_secrets_are_names_only():
    environment = {
        "HF_TOKEN": "hf_private1",
        "OPENAI_API_KEY": "private2",
        "HF_ENDPOINT": "http://bob:private3@hub",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "HF_HOME": "/data/hf cache",
        "DB_PASSWORD": "private4",
        "SSH_AUTH_SOCK": "/run/x",
    }
    arguments = ("/bin/x", "--api-key", "private5", "--admin-api-key=private6", "--port", "30000")
    made = program(*arguments, environment=environment)
    text, secrets = unit_file(made)
    assert "private" not in text + "\n".join(instructions(made))
    assert secrets == ["ADMIN_API_KEY", "API_KEY", "HF_ENDPOINT", "HF_TOKEN", "OPENAI_API_KEY"]
    assert "ExecStart=/bin/x --api-key ${API_KEY} --admin-api-key=${ADMIN_API_KEY} --port 30000" in text
    assert "EnvironmentFile=/etc/sglang.env" in text
    assert 'Environment="HF_HOME=/data/hf cache"' in text
    assert "Environment=TOKENIZERS_PARALLELISM=false" in text
    assert 'Environment="CUDA_VISIBLE_DEVICES=0,1"' in text or "Environment=CUDA_VISIBLE_DEVICES=0,1" in text
    assert "DB_PASSWORD" not in text
    assert "SSH_AUTH_SOCK" not in text
    assert any("install -m 0600" in line for line in instructions(made))


def test_without_secrets_there_is_no_file_of_them():
    lines = instructions(program())
    assert not any("EnvironmentFile" in line or "install" in line for line in lines)
    assert [line[2] for line in lines if line.startswith("# ") and line[2].isdigit()] == ["1", "2", "3"]


def test_a_process_that_changed_its_title_is_said():
    assert any("changed its title" in line for line in instructions(program("sglang: serving on 30000")))


NASTY = (
    "a b",
    'c"d',
    "e'f",
    "g\\h",
    "50%",
    "$HOME",
    "${X}",
    "",
    ";",
    "new\nline",
    '--json={"a": [1, 2]}',
    "é",
)


def test_systemd_takes_it(tmp_path):
    """The real systemd-analyze, where there is one; it needs no booted systemd."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("no systemd-analyze here")
    environment = {"PATH": "/usr/bin:/bin", "HF_HOME": '/data/50% "of" it', "HF_TOKEN": "x"}
    made = program("/bin/echo", *NASTY, user="root", directory="/tmp", environment=environment)  # noqa: S108
    path = tmp_path / "sglang.service"
    path.write_text(unit_file(made)[0])
    done = subprocess.run(
        [analyze, "verify", "--man=no", "--recursive-errors=no", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert str(path) not in done.stderr, done.stderr
    assert "sglang.service" not in done.stderr, done.stderr
    assert done.returncode == 0, done.stderr


TREE = {40: 30, 30: 20, 20: 10, 10: 1, 50: 1, 60: 2, 2: 1}
NAMES = {
    40: "python3.11",
    30: "python3.11",
    20: "bash",
    10: "tmux",
    50: "python3.11",
    60: "python3",
    2: "systemd",
}


@pytest.mark.parametrize(
    ("pid", "top"),
    [(40, 30), (30, 30), (50, 50), (60, 60)],
    ids=["worker", "launcher in tmux", "left by nohup", "of a user's manager"],
)
def test_the_launcher_is_adopted_not_a_worker(pid, top):
    assert top_of(pid, TREE.get, NAMES.get) == top


def test_a_real_process_below_a_shell():
    """The worker of a launcher that a shell started: the launcher is what is adopted."""
    script = (
        "import subprocess, sys, time\n"
        "print(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
        "time.sleep(60)"
    )
    environment = {"PATH": os.environ["PATH"], "HF_HOME": "/data/hf", "HF_TOKEN": "private"}
    shell = subprocess.Popen(
        ["/bin/sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )
    worker = int(shell.stdout.readline())
    try:
        found = adoption.look(worker, "alice")
        assert adoption.parent_of(found.pid) == shell.pid
        assert found.arguments == (sys.executable, "-c", script)
        assert found.directory == "/"
        assert found.environment["HF_HOME"] == "/data/hf"
        text, secrets = unit_file(found)
        (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
        words = [expand(word) for word in read_back(line.removeprefix("ExecStart="))]
        assert words == list(found.arguments)
        assert secrets == ["HF_TOKEN"]
    finally:
        os.kill(worker, 9)
        os.kill(found.pid, 9)
        shell.wait()
        shell.stdout.close()
    # A killed process is there until the kernel is done with it.
    deadline = time.monotonic() + 20
    while adoption.look(worker, "alice") is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert adoption.look(worker, "alice") is None
