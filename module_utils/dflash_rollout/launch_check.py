"""Run the dry launch (`launch_probe.py`) with a venv's Python on the files of a release; read its answer."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import pwd
import re
import signal
import subprocess
import time

# Imported so that Ansible packs them; what runs is their source, on the standard input of the venv's Python.
from . import (
    nccl_probe,  # noqa: F401
    units,
)
from .errors import RolloutError
from .launch_probe import BEGIN, END
from .secret_files import read_environment
from .topology import WORKAROUNDS

LOG_TAIL_LINES = 40
PARAGRAPH_LENGTH = 700


class LaunchCheckFailed(RolloutError):
    """vLLM refuses the launch, or could not be asked: one paragraph, the phase, the end of vLLM's log."""

    def __init__(self, message: str, *, phase: str, log_tail: list[str], remedy: str = ""):
        self.phase = phase
        self.log_tail = log_tail
        super().__init__(message, remedy=remedy)


def missing(python: str, config: str) -> str:
    """Why there is nothing to check yet ("no release yet", "no venv yet", "no config yet"), or "" when there is."""
    if not os.path.isdir(os.path.dirname(config)):
        return "no release yet"
    if not os.path.exists(python):
        return "no venv yet"
    return "" if os.path.exists(config) else "no config yet"


def run(
    config: str,
    python: str,
    *,
    user: str = "",
    environment: dict[str, str] | None = None,
    environment_file: str = "",
    unit_properties: list[str] | None = None,
    timeout: int = 300,
) -> dict:
    """Have the vLLM of `python` accept `config` as `vllm serve --config` would, without a GPU.

    With `unit_properties` (systemd `Key=value`) it runs as a transient unit with these, so inside the sandbox
    of the server; else as a child of this process. `user` is who runs it, by default the unit's or this one.
    `environment` ends in the unit's properties, which everyone can read: secrets belong in the file.
    `timeout` is in seconds. Changes nothing but vLLM's own caches of that user.

    Returns the probe's answer (see launch_probe.main) and `seconds`, the whole run. Raises LaunchCheckFailed.
    """
    answer, log, seconds = _probe(
        "launch_probe.py",
        [config],
        python,
        user=user,
        environment=environment,
        environment_file=environment_file,
        unit_properties=unit_properties,
        timeout=timeout,
    )
    if not answer.pop("ok"):
        reason = _with_cause(error_paragraph(answer["error"]), log)
        raise LaunchCheckFailed(
            f"vLLM refuses this launch ({answer['phase']}): {reason}",
            phase=answer["phase"],
            log_tail=log[-LOG_TAIL_LINES:],
        )
    return answer | {"seconds": seconds}


def all_reduce(python: str, ranks: int, **how) -> dict:
    """Have `ranks` GPUs of this host add up a tensor over NCCL (nccl_probe.py), in the venv and in the server's sandbox.

    `how` is as for `run`. Returns {"ranks", "seconds", "said"}. Raises LaunchCheckFailed with phase "nccl".
    """
    try:
        answer, log, seconds = _probe("nccl_probe.py", [str(ranks)], python, **how)
    except LaunchCheckFailed as error:
        raise LaunchCheckFailed(
            f"{ranks} GPUs don't work together over NCCL: {error.message}",
            phase="nccl",
            log_tail=error.log_tail,
            remedy=WORKAROUNDS,
        ) from error
    if not answer["ok"]:
        raise LaunchCheckFailed(
            f"{ranks} GPUs don't work together over NCCL: {error_paragraph(answer['error'])}",
            phase="nccl",
            log_tail=log[-LOG_TAIL_LINES:],
            remedy=WORKAROUNDS,
        )
    return {"ranks": ranks, "seconds": seconds, "said": answer["said"]}


def _probe(
    probe: str,
    arguments: list[str],
    python: str,
    *,
    user: str = "",
    environment: dict[str, str] | None = None,
    environment_file: str = "",
    unit_properties: list[str] | None = None,
    timeout: int = 300,
) -> tuple[dict, list[str], float]:
    """Run one of the programs of this package that run inside the venv: its answer, its log, the seconds."""
    started = time.monotonic()
    source = pkgutil.get_data(__package__, probe)
    if source is None:
        raise RolloutError("The source of the launch check can't be read", found=f"package {__package__}")
    # -B: as root it would write bytecode into the venv.
    argv = [python, "-I", "-B", "-", *arguments]
    if unit_properties:
        returncode, output = _in_unit(
            argv, source, user, environment or {}, environment_file, unit_properties, timeout
        )
    else:
        returncode, output = _as_child(argv, source, user, environment or {}, environment_file, timeout)
    seconds = time.monotonic() - started
    answer, log = read_answer(output)
    tail = log[-LOG_TAIL_LINES:]
    if answer is None:
        if seconds >= timeout:
            raise LaunchCheckFailed(
                f"The launch check did not end within {timeout} s",
                phase="timeout",
                log_tail=tail,
                remedy="look at log_tail; where nothing is cached yet and the disk is slow, raise timeout",
            )
        raise LaunchCheckFailed(
            f"The launch check broke off ({_ending(returncode)}): {error_paragraph(chr(10).join(log))}",
            phase="start",
            log_tail=tail,
        )
    return answer, log, round(seconds, 1)


def _in_unit(
    argv: list[str],
    source: bytes,
    user: str,
    environment: dict[str, str],
    environment_file: str,
    properties: list[str],
    timeout: int,
) -> tuple[int, str]:
    """Run it as a transient unit, which systemd ends when its time is up, even if this process is gone."""
    wanted = [f"RuntimeMaxSec={timeout}", "TimeoutStopSec=10", *properties]
    if user:
        wanted.append(f"User={user}")
    if environment_file:
        wanted.append(f"EnvironmentFile={environment_file}")
    unit = f"vllm-launch-check-{os.getpid()}.service"
    command = ["systemd-run", f"--unit={unit}", "--service-type=exec"]
    command += ["--pipe", "--wait", "--collect", "--quiet"]
    command += [f"--property={value}" for value in wanted]
    command += [f"--setenv={key}={value}" for key, value in environment.items()]
    returncode, output = _communicate([*command, "--", *argv], source, timeout + 60)
    if BEGIN not in output:
        # Why a sandbox can't be set up, systemd says in the journal only.
        journal = [line.partition("]: ")[2] for line in units.journal_tail(unit)]
        output = "\n".join([output, *journal])
    return returncode, output


def _as_child(
    argv: list[str],
    source: bytes,
    user: str,
    environment: dict[str, str],
    environment_file: str,
    timeout: int,
) -> tuple[int, str]:
    """Run it as a child with the rights and a fresh environment of `user`."""
    try:
        account = pwd.getpwnam(user) if user else pwd.getpwuid(os.getuid())
    except KeyError as error:
        raise LaunchCheckFailed(
            f"There is no user {user or os.getuid()}", phase="start", log_tail=[]
        ) from error
    wanted = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": account.pw_dir,
        "LANG": "C.UTF-8",
        **environment,
    }
    if environment_file:
        wanted |= read_environment(environment_file)
    rights = {}
    if account.pw_uid != os.getuid():
        rights = {"user": account.pw_uid, "group": account.pw_gid}
        rights["extra_groups"] = os.getgrouplist(account.pw_name, account.pw_gid)
    return _communicate(argv, source, timeout, env=wanted, cwd="/", **rights)


def _communicate(argv: list[str], source: bytes, timeout: int, **options) -> tuple[int, str]:
    """Exit status and output of a process; at the end of its time it is killed with all its children."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            **options,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchCheckFailed(f"{argv[0]} can't be run: {error}", phase="start", log_tail=[]) from error
    with process:
        try:
            output, _ = process.communicate(source, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
    return process.returncode, output.decode(errors="replace")


def read_answer(output: str) -> tuple[dict | None, list[str]]:
    """The probe's answer in its output, or None where it gave none, and the lines of the log around it."""
    before, begin, rest = output.partition(BEGIN)
    text, end, after = rest.partition(END)
    log = [line for line in (before + after if end else output).splitlines() if line.strip()]
    return (json.loads(text) if begin and end else None), log


def error_paragraph(text: str) -> str:
    """The last error in `text` (a traceback, or what a program printed) as one readable paragraph.

    Drops the frames, pydantic's echo of its input and its links, and the name of an exception class where the
    message is a sentence of its own.
    """
    _, traceback, last = text.rpartition("Traceback (most recent call last):\n")
    if traceback:
        lines = last.splitlines()
        while lines and (lines[0].startswith("  ") or not lines[0].strip()):
            lines.pop(0)
        message = "\n".join(lines)
        name, colon, words = message.partition(": ")
        # "package.Error: words"; KeyError shows its words in quotes.
        if colon and re.fullmatch(r"[\w.]+", name):
            if name == "KeyError" and words[:1] in ("'", '"'):
                words = str(ast.literal_eval(words.strip()))
            kind = name.rpartition(".")[2]
            message = words if " " in words.strip() else f"{kind}: {words}"
    else:
        message = "\n".join([line for line in text.splitlines() if line.strip()][-3:])
    message = re.sub(r"\s*\[type=\w+, input_value=.*?, input_type=\w+\]", "", message, flags=re.DOTALL)
    message = re.sub(r"\s*For further information visit \S+", "", message)
    message = re.sub(r"^\d+ validation errors? for (\w+)\n", r"\1: ", message)
    message = re.sub(r"(^|: )([\w.]+)\n  (?=\S)", r"\1\2: ", message)
    message = message.replace("Value error, ", "")
    message = " ".join(message.split()) or "no message"
    return (
        message if len(message) <= PARAGRAPH_LENGTH else message[:PARAGRAPH_LENGTH].rsplit(" ", 1)[0] + " …"
    )


def _with_cause(paragraph: str, log: list[str]) -> str:
    """Add the error from the log, where vLLM's exception says no more than that it is there."""
    if "check the logs" not in paragraph:
        return paragraph
    errors = [line for line in log if re.search(r"\b\w*(Error|Exception): ", line)]
    if not errors:
        return paragraph
    # "ERROR 12-02 04:24:30 [registry.py:912] FileNotFoundError: …"
    cause = re.sub(r"^[A-Z]+ [\d: -]+ \[[^\]]*\] ", "", errors[-1])
    return f"{paragraph} The log says: {cause}"


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exit status {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"
