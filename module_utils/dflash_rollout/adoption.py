"""A unit file for a server that runs in a terminal, a user's manager or under nothing at all: made from its process,
for a person to read and install. Quoting and choosing are pure; `look` reads /proc."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

from .gpus import is_secret_option
from .units import parent_of

# Programs that only hold a server: what is adopted is the child below them.
_HOLDERS = (
    "ash bash dash fish ksh sh tcsh zsh tmux screen dtach sshd sshd-session login su sudo systemd init cron crond atd "
    "script containerd-shim-runc-v2 conmon dumb-init tini"
)
HOLDERS = frozenset(_HOLDERS.split())
# What a server of models reads from its environment. Anything else stays out, and with it what may be private.
_RELEVANT = re.compile(
    r"PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV|CONDA_PREFIX|OMP_NUM_THREADS|TOKENIZERS_PARALLELISM"
    r"|XDG_CACHE_HOME|(?:CUDA|NVIDIA|NCCL|HF|HUGGING_FACE|TRANSFORMERS|SGLANG|SGL|TORCH|TORCHINDUCTOR|PYTORCH|TRITON"
    r"|FLASHINFER|GLOO|OPENAI|MODELSCOPE)_\w+"
)
_SECRET = re.compile(r"(?:^|_)(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(?:_|$)", re.IGNORECASE)
_PLAIN = re.compile(r"[\w@+=:,./-]+", re.ASCII)


@dataclass(frozen=True)
class Program:
    """A process as it was started."""

    pid: int
    user: str
    arguments: tuple[str, ...]
    directory: str
    executable: str
    environment: dict[str, str] = field(default_factory=dict)


def quote(word: str, dollar: bool = True) -> str:
    """One word of a unit file as systemd reads it back: specifiers (%) doubled, quotes and backslashes escaped.

    `dollar`: variables are expanded there (ExecStart=), so $ is doubled too.
    """
    word = word.replace("%", "%%")
    if dollar:
        word = word.replace("$", "$$")
    if _PLAIN.fullmatch(word):
        return word
    named = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    text = ""
    for character in word:
        if character in named:
            text += named[character]
        elif ord(character) < 32 or ord(character) == 127 or 0xDC80 <= ord(character) <= 0xDCFF:
            # Bytes that are no UTF-8 came as surrogates.
            text += f"\\x{ord(character) & 0xFF:02x}"
        else:
            text += character
    return f'"{text}"'


def top_of(pid: int, parent_of: Callable[[int], int | None], name_of: Callable[[int], str | None]) -> int:
    """The process to adopt: the highest above `pid` that is not a shell, a terminal, a login or a manager."""
    while True:
        parent = parent_of(pid)
        if not parent or parent == 1 or (name_of(parent) or "") in HOLDERS:
            return pid
        pid = parent


def _hidden(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """(words for ExecStart=, names for the file of secrets): values of secret options come from that file."""
    words: list[str] = []
    names: list[str] = []
    hide = None
    for argument in arguments:
        option = is_secret_option(argument)
        if hide and not argument.startswith("-"):
            words.append("${" + hide + "}")
            names.append(hide)
            hide = None
            continue
        hide = None
        if option is None:
            words.append(quote(argument))
            continue
        name = re.sub(r"\W", "_", option.lstrip("-")).upper()
        if "=" in argument:
            words.append(f"{quote(option)}=${{{name}}}")
            names.append(name)
        else:
            words.append(quote(option))
            hide = name
    return words, names


def _executable(program: Program) -> str:
    """The absolute path of what was started: of a venv its own python, which /proc/PID/exe does not tell."""
    name = program.arguments[0]
    if "/" in name:
        return os.path.normpath(os.path.join(program.directory, name))
    return shutil.which(name, path=program.environment.get("PATH", os.defpath)) or program.executable


def unit_file(
    program: Program, name: str = "sglang.service", stop_timeout_s: int = 180
) -> tuple[str, list[str]]:
    """(the text of a system unit that starts this process as it was started, the names of its secrets).

    Values of variables and options that look like secrets are left out: only their names are in it.
    """
    words, secrets = _hidden(program.arguments)
    words[0] = quote(_executable(program))
    lines = []
    for key, value in sorted(program.environment.items()):
        private = _SECRET.search(key) or re.search(r"://[^/@]*@", value)
        if private and _RELEVANT.fullmatch(key):
            secrets.append(key)
        elif _RELEVANT.fullmatch(key):
            lines.append(f"Environment={quote(f'{key}={value}', dollar=False)}")
    if secrets:
        lines.append(f"EnvironmentFile=/etc/{name.removesuffix('.service')}.env")
    text = "\n".join(
        [
            "[Unit]",
            "Description=The language model server before vLLM",
            "Wants=network-online.target",
            "After=network-online.target",
            "",
            "[Service]",
            "Type=exec",
            f"User={program.user}",
            f"WorkingDirectory={program.directory.replace('%', '%%')}",
            *lines,
            f"ExecStart={' '.join(words)}",
            "Restart=on-failure",
            "RestartSec=10",
            "# SIGTERM to the main process, which ends its workers when requests are done; then to the rest.",
            "KillMode=mixed",
            f"TimeoutStopSec={stop_timeout_s}",
            "LimitNOFILE=65536",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )
    return text, sorted(set(secrets))


def instructions(program: Program, name: str = "sglang.service") -> list[str]:
    """Lines to print: the unit file, and the commands that adopt the process."""
    text, secrets = unit_file(program, name)
    environment = f"/etc/{name.removesuffix('.service')}.env"
    lines = [f"# 1. Read this, mend what is wrong with it, and write it to /etc/systemd/system/{name}:"]
    lines += text.splitlines()
    if len(program.arguments) == 1 and " " in program.arguments[0]:
        lines += ["# The process changed its title: ExecStart= above is not how it was started, mend it."]
    if secrets:
        lines += [
            f"# 2. Its secrets, as NAME=value a line: {', '.join(secrets)}",
            f"install -m 0600 -o root /dev/null {environment} && ${{EDITOR:-vi}} {environment}",
        ]
    lines += [
        f"# {'3' if secrets else '2'}. When an outage is all right: end pid {program.pid} the way it was started"
        " (so that nothing starts it again), then",
        f"systemctl daemon-reload && systemctl enable --now {name}",
        f"# {'4' if secrets else '3'}. Run preflight again.",
    ]
    return lines


def _read(pid: int, name: str) -> list[str]:
    with open(f"/proc/{pid}/{name}", "rb") as stream:
        return stream.read().decode("utf-8", "surrogateescape").rstrip("\0").split("\0")


def name_of(pid: int) -> str | None:
    """The name of the program that a process runs, None when that can't be seen."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).removesuffix(" (deleted)")
    except OSError:  # gone, or a kernel thread
        return None


def look(pid: int, user: str) -> Program | None:
    """The process to adopt for a server's `pid`, read as root; None when it ended meanwhile."""
    top = top_of(pid, parent_of, name_of)
    try:
        environment = dict(item.split("=", 1) for item in _read(top, "environ") if "=" in item)
        return Program(
            pid=top,
            user=user,
            arguments=tuple(_read(top, "cmdline")),
            directory=os.readlink(f"/proc/{top}/cwd"),
            executable=os.readlink(f"/proc/{top}/exe"),
            environment=environment,
        )
    except (FileNotFoundError, ProcessLookupError):
        return None
