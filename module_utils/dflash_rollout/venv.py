"""Puts the locked vLLM on a host: a venv that is complete and probed under its name, or not there at all.

It is made under a temporary name by uv and renamed. What an interrupted install left is removed by the next; uv's
cache stays, so that nothing that arrived travels twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pkgutil
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit, urlunsplit

from . import gpus

# Imported so that Ansible packs it; what runs is its source, on the standard input of the venv's Python.
from . import venv_probe as _packed  # noqa: F401
from .errors import RolloutError
from .files import fsync_directory, locked, write_atomically
from .preflight import numbers

PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
COPY_GB = 7.5  # what is copied where hardlinks can't be made
LOW_BYTES = 2 * 10**9  # less than this left after a failure: the disk was full, whatever was said
PROBE_TIMEOUT_S = 300
NOBODY = 65534
# Oldest NVIDIA driver for each major version of CUDA (minor versions are compatible).
CUDA_DRIVERS = {12: (525, 60), 13: (580,)}


@dataclass(frozen=True)
class Index:
    """Where wheels come from. An empty `url` is PyPI, or what the environment says."""

    url: str = ""
    username: str = ""
    password: str = ""

    def variables(self) -> dict[str, str]:
        """For uv and pip: by environment, which other users can't read, never by command line.

        Raises RolloutError for credentials inside the URL, which would be shown, and for ones without a URL.
        """
        if not self.url:
            if self.username or self.password:
                raise RolloutError("vllm_index_username or vllm_index_password is set without vllm_index_url")
            return {}
        parts = urlsplit(self.url)
        if "@" in parts.netloc:
            raise RolloutError(
                "vllm_index_url has credentials in it, and it is shown in logs",
                remedy="move them to vllm_index_username and vllm_index_password, which are not",
            )
        if parts.scheme not in ("https", "http", "file"):
            raise RolloutError("vllm_index_url is no URL", found=self.url, expected="https://…/simple")
        if self.username or self.password:
            login = f"{quote(self.username, safe='')}:{quote(self.password, safe='')}"
            parts = parts._replace(netloc=f"{login}@{parts.netloc}")
        url = urlunsplit(parts)
        return {"UV_DEFAULT_INDEX": url, "PIP_INDEX_URL": url}


@dataclass(frozen=True)
class Wanted:
    """What shall be there. Paths are absolute; `find_links` is a folder of wheels, then no network is asked."""

    root: str
    digest: str
    lock: str
    version: str
    uv_digest: str
    uv_lock: str
    python: str
    find_links: str = ""
    index: Index = field(default_factory=Index)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def venv(self) -> str:
        """The venv under its own name."""
        return os.path.join(self.root, "venvs", self.digest)

    @property
    def uv(self) -> str:
        """The folder of uv, under its own name."""
        return os.path.join(self.root, "uv", self.uv_digest)

    @property
    def cache(self) -> str:
        """uv's cache."""
        return os.path.join(self.root, "uv-cache")


def exists(venv: str) -> bool:
    """Whether the venv is there: under its own name it is complete."""
    return os.path.exists(os.path.join(venv, "bin", "vllm"))


def ensure(wanted: Wanted) -> dict:
    """Install what is not there. Returns `changed`, `warnings`, and after an install what the probe saw (`found`).

    A second call at the same time waits for the first. Raises RolloutError with the remedy; the venvs that were
    there before are never touched.
    """
    for name in ("", "uv", "venvs"):
        os.makedirs(os.path.join(wanted.root, name), mode=0o755, exist_ok=True)
        os.chmod(os.path.join(wanted.root, name), 0o755)  # noqa: S103 (the service user passes through)
    # uv's lock file in there is for everyone to write, so that everyone could keep an install waiting.
    os.makedirs(wanted.cache, mode=0o700, exist_ok=True)
    os.chmod(wanted.cache, 0o700)
    with locked(os.path.join(wanted.root, "venvs")):
        if exists(wanted.venv):
            return {"changed": False, "warnings": [], "found": None}
        remove_partials(wanted)
        warnings = _one_filesystem(wanted)
        environment = _environment(wanted)
        _install_uv(wanted, environment)
        found = _install_vllm(wanted, environment)
    if wanted.find_links:
        shutil.rmtree(wanted.find_links)
    return {"changed": True, "warnings": warnings, "found": found}


def remove_partials(wanted: Wanted) -> list[str]:
    """Remove what interrupted installs left, of this lock and of others. Call with the lock held."""
    removed = []
    for folder in (os.path.dirname(wanted.venv), os.path.dirname(wanted.uv)):
        for name in filter(PARTIAL.fullmatch, os.listdir(folder)):
            shutil.rmtree(os.path.join(folder, name))
            removed.append(os.path.join(folder, name))
    return removed


def _one_filesystem(wanted: Wanted) -> list[str]:
    if os.stat(wanted.cache).st_dev == os.stat(os.path.dirname(wanted.venv)).st_dev:
        return []
    return [
        f"{wanted.cache} and {os.path.dirname(wanted.venv)} are on different filesystems: every venv is a copy of "
        f"{COPY_GB:g} GB instead of hardlinks, and takes half a minute more."
    ]


def _environment(wanted: Wanted) -> dict[str, str]:
    """Nothing of root's own configuration may change what is installed, and nothing is left in root's home."""
    return {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "HOME": wanted.root,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_CACHE_DIR": "1",
        "PIP_NO_INPUT": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "UV_NO_CONFIG": "1",
        "UV_NO_PROGRESS": "1",
        "UV_CACHE_DIR": wanted.cache,
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_LINK_MODE": "hardlink",
        **wanted.environment,
        **({} if wanted.find_links else wanted.index.variables()),
    }


def _sources(wanted: Wanted) -> list[str]:
    return ["--no-index", f"--find-links={wanted.find_links}"] if wanted.find_links else []


def _install_uv(wanted: Wanted, environment: dict[str, str]) -> None:
    if os.path.exists(os.path.join(wanted.uv, "bin", "uv")):
        return
    # A folder without the program is what an older version of this role left.
    shutil.rmtree(wanted.uv, ignore_errors=True)
    partial = _partial(wanted.uv)
    lock = f"{wanted.uv}.txt"
    write_atomically(lock, wanted.uv_lock)
    _run([wanted.python, "-m", "venv", partial], environment, wanted, "make uv's venv")
    pip = [os.path.join(partial, "bin", "python"), "-m", "pip", "install", "--require-hashes", "--no-deps"]
    _run([*pip, *_sources(wanted), f"--requirement={lock}"], environment, wanted, "install uv")
    _finish(partial, wanted.uv)


def _install_vllm(wanted: Wanted, environment: dict[str, str]) -> dict:
    partial = _partial(wanted.venv)
    lock = f"{wanted.venv}.txt"
    write_atomically(lock, wanted.lock)
    uv = os.path.join(wanted.uv, "bin", "uv")
    # uv calls a venv's folder name its prompt, and scripts carry the path they were made under.
    _run(
        [uv, "venv", "--relocatable", f"--python={wanted.python}", partial],
        environment,
        wanted,
        "make the venv",
    )
    python = os.path.join(partial, "bin", "python")
    install = [uv, "pip", "install", "--require-hashes", "--compile-bytecode", f"--python={python}"]
    _run([*install, *_sources(wanted), f"--requirements={lock}"], environment, wanted, "install vLLM")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(partial, ".lock"))  # uv's, for everyone to write
    found = probe(python, wanted.version)
    _finish(partial, wanted.venv)
    return found


def _partial(path: str) -> str:
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.partial")


def _finish(partial: str, path: str) -> None:
    """On disk first, then under its name: a power cut must not leave empty files in a complete venv."""
    subprocess.run(["sync", "--file-system", partial], check=True)
    os.rename(partial, path)
    fsync_directory(os.path.dirname(path))


def _run(argv: list[str], environment: dict[str, str], wanted: Wanted, what: str) -> None:
    try:
        done = subprocess.run(
            argv,
            env=environment,
            cwd="/",
            umask=0o022,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise RolloutError(
            f"Can't {what}", found=str(error), remedy="set vllm_python to a Python 3.10 to 3.13"
        ) from error
    if done.returncode:
        raise failure(what, done.returncode, done.stdout, shutil.disk_usage(wanted.root).free, wanted)


_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")
_CAUSES = (
    (r"[Hh]ash(es)? mismatch|HASHES|do not match the hashes|hashes are required|in --require-hashes mode",
     "every file as the lock has its sha256",
     "the index or the wheelhouse has another file under that name: look at it before anything else"),
    (r"\b40[13]\b|[Uu]nauthorized|[Ff]orbidden",
     "an index that lets this host in",
     "see vllm_index_url, vllm_index_username and vllm_index_password"),
    (r"dns error|failed to lookup|[Cc]onnect|error sending request|timed out|[Tt]imeout|Temporary failure in name|"
     r"client error|Network is unreachable|Max retries",
     "an index that this host can reach",
     "set vllm_index_url to one, a proxy in vllm_install_environment, or bring the wheels: docs/air-gapped.md"),
    (r"[Nn]o (solution|matching distribution)|was not found in the (package registry|provided package locations)|not found in",
     "every file of the lock where it is looked for",
     "complete the index; a wheelhouse is made anew by playbooks/wheelhouse.yml"),
)  # fmt: skip


def failure(what: str, returncode: int, output: str, free: int, wanted: Wanted) -> RolloutError:
    """What uv or pip said, with what can be done about it. `free` is in bytes, after the failure."""
    output = _CREDENTIALS.sub("", output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    found = " / ".join(lines[-6:])[-700:] or f"exit status {returncode}"
    again = "run again, what arrived is in uv's cache"
    if returncode < 0:
        return RolloutError(f"Could not {what}", found=f"killed by signal {-returncode}", remedy=again)
    if re.search(r"No space left|os error 28", output) or free < LOW_BYTES:
        return RolloutError(
            f"Could not {what}: the filesystem of {wanted.root} is full",
            found=f"{free / 10**9:.1f} GB free; {found}",
            expected="16 GB free for uv's cache and a venv",
            remedy=f"free space, or set rollout_root to another filesystem; {again}",
        )
    for pattern, expected, remedy in _CAUSES:
        if re.search(pattern, output):
            return RolloutError(f"Could not {what}", found=found, expected=expected, remedy=remedy)
    return RolloutError(f"Could not {what}", found=found, remedy=f"see its message; {again}")


def probe(python: str, version: str) -> dict:
    """What the installed vLLM is, asked as a user without rights. Raises RolloutError with every fault."""
    source = pkgutil.get_data(__package__, "venv_probe.py")
    if source is None:
        raise RolloutError("The source of the probe can't be read", found=f"package {__package__}")
    rights = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    try:
        done = subprocess.run(
            [python, "-I", "-B", "-", version],
            input=source,
            capture_output=True,
            cwd="/",
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/nonexistent"},
            timeout=PROBE_TIMEOUT_S,
            check=False,
            **rights,
        )
    except PermissionError as error:
        raise RolloutError(
            "The venv's Python can't be run by a user without rights, which the service is",
            found=str(error),
            remedy="vllm_python must not lie below a closed folder such as /root: use the distribution's python3",
        ) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RolloutError("The installed vLLM can't be probed", found=str(error)) from error
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        last = (
            done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        )[-1]
        raise RolloutError("The probe of the installed vLLM broke off", found=last) from error
    faults = [*answer.pop("faults"), *driver_fault(answer.get("cuda"), _drivers())]
    if faults:
        raise RolloutError(
            "The installed vLLM is not fit to serve",
            found="; ".join(fault[0] for fault in faults),
            expected="; ".join(fault[1] for fault in faults),
            remedy="; ".join(fault[2] for fault in faults),
        )
    return answer


def _drivers() -> list[str]:
    """Driver versions of the cards. None where nvidia-smi doesn't answer: preflight has said so before."""
    try:
        return [gpu.driver_version for gpu in gpus.query_gpus()]
    except RolloutError:
        return []


def driver_fault(cuda: str | None, drivers: list[str]) -> list[list[str]]:
    """The driver that is too old for the CUDA of the wheel, as found, expected and remedy; or nothing."""
    least = CUDA_DRIVERS.get(int(cuda.split(".")[0])) if cuda else None
    if least is None:
        return []
    for driver in drivers:
        try:
            fits = numbers(driver) >= least
        except ValueError:
            continue  # preflight refuses what is no version
        if not fits:
            wanted = ".".join(map(str, least))
            return [
                [
                    f"NVIDIA driver {driver}",
                    f"{wanted} or later for CUDA {cuda}",
                    "update the driver and reboot",
                ]
            ]
    return []


def digest_of(lock: str) -> str:
    """The name of a lock: 16 hexadecimal digits of the SHA-256 of its text."""
    return hashlib.sha256(lock.encode()).hexdigest()[:16]
