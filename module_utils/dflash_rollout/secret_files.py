"""API keys and tokens: files that only root reads. Everything else names the file, or holds a salted digest.

A release's secrets are an EnvironmentFile= of its unit, `<folder>/<digest of the release>`, mode 0600 in a folder of
mode 0700. systemd reads it as root before it gives up its rights; the server gets it as environment variables,
so it is in no argv, no unit file and no property of the unit. What the release itself holds is an HMAC of each secret with a
salt of this host, so that another key is another release and nobody can try keys against it.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import secrets as random_source
import shlex
import stat

from .errors import RolloutError
from .files import read_text, write_atomically

SALT = "salt"
#: The environment variables that are an API key of a server, vLLM's own and that of the file for the server before.
KEY_NAMES = ("VLLM_API_KEY", "SGLANG_API_KEY")
MODE = 0o600
FOLDER_MODE = 0o700
_RELEASE = re.compile(r"[0-9a-f]{16}")
# Fit for an environment file and for an HTTP header.
_PLAIN = re.compile(r"[!-~]+")


def line(name: str, value: object) -> str:
    """One line of a systemd EnvironmentFile=. Raises RolloutError, without the value, when it can't be one."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not _PLAIN.fullmatch(str(value)):
        raise RolloutError(
            f"The value of {name} can't be used",
            found="white space, or characters beyond ASCII, or nothing",
            expected="printable ASCII without spaces, in quotes in the inventory",
        )
    escaped = re.sub(r'(["\\$`])', r"\\\1", str(value))
    return f'{name}="{escaped}"\n'


def read_environment(path: str) -> dict[str, str]:
    """The variables of a systemd EnvironmentFile of the plain kind: one KEY=value a line, quoted or not.

    Raises RolloutError for a missing file and for a line of any other kind.
    """
    text = read_text(path)
    if text is None:
        raise RolloutError(f"There is no environment file {path}")
    variables = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line[0] in "#;":
            continue
        key, equals, value = line.partition("=")
        try:
            words = shlex.split(value) if value[:1] in ("'", '"') else [value]
        except ValueError:
            words = []
        if not equals or not key.isidentifier() or len(words) != 1 or line.endswith("\\"):
            raise RolloutError(f"Line {number} of {path} is no KEY=value", remedy="one variable a line")
        # systemd escapes two more than the shell's words know.
        variables[key] = re.sub(r"\\([$`])", r"\1", words[0]) if value[:1] == '"' else words[0]
    return variables


def api_key(server: dict) -> str | None:
    """The API key of a server by its description, or None where it has none.

    A description that is written anywhere has `api_key_file`; `api_key` is for one that stays in memory.
    Raises RolloutError when the file can't be read or holds no key.
    """
    if server.get("api_key"):
        return server["api_key"]
    path = server.get("api_key_file")
    if not path:
        return None
    try:
        variables = read_environment(path)
    except OSError as error:
        raise RolloutError(
            f"The API key of {server['name']} can't be read",
            found=f"{error.strerror}: {path}",
            remedy="ask as root",
        ) from error
    for name in KEY_NAMES:
        if variables.get(name):
            return variables[name]
    raise RolloutError(f"{path} holds no API key", expected=" or ".join(KEY_NAMES))


def hidden(server: dict, lines: list[str]) -> list[str]:
    """Lines of a server's log without its API key: SGLang prints all of its arguments when it starts."""
    try:
        key = api_key(server)
    except RolloutError:
        key = None  # without the key there is nothing to look for; the proof says what is wrong with the file
    return [text.replace(key, "***") for text in lines] if key else lines


def fingerprints(folder: str, values: dict[str, object], check: bool = False) -> dict[str, str]:
    """Name → HMAC-SHA-256 of its value with this host's salt, which is made where it is missing (not in check mode)."""
    salt = _salt(folder, check)
    found = {}
    for name in sorted(values):
        line(name, values[name])
        found[name] = hmac.new(salt, f"{name}={values[name]}".encode(), hashlib.sha256).hexdigest()
    return found


def _salt(folder: str, check: bool) -> bytes:
    path = os.path.join(folder, SALT)
    text = read_text(path)
    if text is None:
        text = random_source.token_hex(32)
        if not check:
            _make_folder(folder)
            write_atomically(path, text, MODE)
    return text.encode()


def _make_folder(folder: str) -> None:
    os.makedirs(folder, mode=FOLDER_MODE, exist_ok=True)
    os.chmod(folder, FOLDER_MODE)


def put(folder: str, name: str, values: dict[str, object], check: bool = False) -> bool:
    """Have `<folder>/<name>` hold these variables for root alone. True when that is, or would be, a change."""
    path = os.path.join(folder, name)
    content = "".join(line(key, values[key]) for key in sorted(values))
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        same = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == MODE
        if same and status.st_uid == os.geteuid() and read_text(path) == content:
            return False
    if not check:
        _make_folder(folder)
        write_atomically(path, content, MODE)
    return True


def drop_orphans(folder: str, releases: str) -> None:
    """Remove the secrets of releases that are gone."""
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            if _RELEASE.fullmatch(name) and not os.path.isdir(os.path.join(releases, name)):
                os.unlink(os.path.join(folder, name))
