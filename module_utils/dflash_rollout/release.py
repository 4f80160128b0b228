"""A release: a folder named by the digest of everything in it, complete under that name or not there at all.

It is made under a temporary name and renamed, and never changed afterwards, so that the files of the running
server stay as they were when it started, and going back is starting the release before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import posixpath
import re
import shutil
import stat
from dataclasses import dataclass

from .errors import RolloutError
from .files import FOLDER_MODE, ensure_folder, fsync_directory
from .vllm_yaml import to_yaml

# Stands for the release's own path in the text of its files, which are part of its digest and can't know it.
PLACEHOLDER = "@release@"

FILE_MODE = 0o644
PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")


@dataclass(frozen=True)
class Content:
    """What a release is made of: relative path → text, absolute link target, or mode where it isn't 0644."""

    files: dict[str, str]
    links: dict[str, str]
    modes: dict[str, int]

    @property
    def digest(self) -> str:
        """The name of the release: 16 hexadecimal digits of the SHA-256 of its canonical JSON."""
        inputs: dict = {"files": self.files, "links": self.links}
        if self.modes:
            inputs["modes"] = self.modes
        text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def rendered(self, path: str) -> dict[str, str]:
        """The text of each file in the release at `path`."""
        return {name: text.replace(PLACEHOLDER, path) for name, text in self.files.items()}


@dataclass(frozen=True)
class Release:
    """A release on disk, or as it would be in check mode."""

    digest: str
    path: str
    changed: bool


def read_content(files: dict, links: dict, modes: dict | None = None) -> Content:
    """Check what a release shall be made of. `modes` are octal strings, as "0640".

    Raises RolloutError for a path that leaves the release or is there twice, a text that is none, a relative
    link target, or a mode that is none.
    """
    names = [*files, *links]
    for name in names:
        if not name or name == ".." or name.startswith(("/", "../")):
            raise RolloutError(f"{name!r} is no path inside a release", expected="a relative path")
        if posixpath.normpath(name) != name or name == ".":
            raise RolloutError(f"{name!r} is no plain path", expected=posixpath.normpath(name))
    folders = {parent for name in names for parent in _parents(name)}
    for name in names:
        if names.count(name) > 1 or name in folders:
            raise RolloutError(
                f"{name} is in the release twice", expected="one file, one link or one folder of a name"
            )
    files = {name: as_text(name, value) for name, value in files.items()}
    for name, target in links.items():
        if not isinstance(target, str) or not target.startswith("/"):
            raise RolloutError(f"Link {name} has no absolute target", found=repr(target))
    octal = {}
    for name, mode in (modes or {}).items():
        if name not in files:
            raise RolloutError(f"A mode is given for {name}", expected="one of " + ", ".join(files))
        if not isinstance(mode, str) or not re.fullmatch(r"0?[0-7]{3}", mode):
            raise RolloutError(
                f"The mode of {name} isn't one", found=repr(mode), expected='octal in quotes, as "0640"'
            )
        if int(mode, 8) != FILE_MODE:
            octal[name] = int(mode, 8)
    return Content(files, dict(links), octal)


def as_text(name: str, value: object) -> str:
    """The text of a file: a string as it is, a mapping as what reads it wants it.

    `*.yaml` is for `vllm serve --config`, `*.json` is JSON, anything else an EnvironmentFile= of systemd.
    Raises RolloutError for a value that has no such form.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, dict):
        raise RolloutError(f"The content of {name} is neither text nor a mapping", found=type(value).__name__)
    if name.endswith(".json"):
        return json.dumps(value, indent=1) + "\n"
    # Sorted: an inventory in another order is no other release.
    value = _sorted(value)
    if name.endswith(".yaml"):
        return to_yaml(value)
    return "".join(f"{_environment(key, item)}\n" for key, item in value.items())


def _sorted(value: object) -> object:
    """The same with the keys of every mapping in order."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    return value


def _environment(name: object, value: object) -> str:
    """One line of an EnvironmentFile=, systemd.exec(5)."""
    text = str(value)
    if (
        not isinstance(name, str)
        or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
        or not text.isprintable()
    ):
        raise RolloutError(
            f"{name!r} can't go into an environment file",
            found=repr(text),
            expected="a name of letters, digits and underscores, and a value on one line",
        )
    if re.fullmatch(r"[A-Za-z0-9_./:,@%+=-]*", text):
        return f"{name}={text}"
    escaped = re.sub(r'(["\\$`])', r"\\\1", text)
    return f'{name}="{escaped}"'


def _parents(name: str) -> list[str]:
    """The folders of a relative path, innermost first, without the top."""
    parents = []
    while name := posixpath.dirname(name):
        parents.append(name)
    return parents


def make(root: str, content: Content, check: bool = False) -> Release:
    """Make the release of `content` below `root`, or verify the one that is there.

    Makes `root` and removes leftovers of crashed runs. Raises RolloutError when a link's target does not exist (not in check
    mode, where nothing may exist yet), when the release is there and isn't what was asked for, and when it
    can't be read or written.
    """
    digest = content.digest
    path = os.path.join(os.path.abspath(root), digest)
    try:
        if check:
            changed = not _is_there(path, content)
        else:
            _check_targets(content.links)
            ensure_folder(root)
            changed = _make_locked(root, path, content)
    except OSError as error:
        raise RolloutError(
            f"The release {path} can't be made",
            found=f"{error.strerror or error}: {error.filename}" if error.filename else str(error),
            expected=f"a folder at {root}, or none yet, with room for some kilobytes",
            remedy="put it right and run again; what serves was not touched",
        ) from error
    return Release(digest, path, changed)


def point(link: str, release: Release, check: bool = False) -> bool:
    """Have the symbolic link `link` lead to a release, by one rename. True when it didn't.

    Raises RolloutError when something else has that name, or when it can't be written.
    """
    if os.path.lexists(link) and not os.path.islink(link):
        raise RolloutError(
            f"{link} is no link",
            found="a folder" if os.path.isdir(link) else "a file",
            expected=f"a link to {release.path}, or nothing",
            remedy="see who made it, and move it away",
        )
    if os.path.islink(link) and os.readlink(link) == release.path:
        return False
    if not check:
        partial = f"{link}.{release.digest}.partial"
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(partial)  # of a run that was killed between the two
            os.symlink(release.path, partial)
            os.replace(partial, link)
            fsync_directory(os.path.dirname(os.path.abspath(link)))
        except OSError as error:
            raise RolloutError(
                f"The link {link} can't be made",
                found=error.strerror or str(error),
                remedy="put it right and run again",
            ) from error
    return True


def _check_targets(links: dict[str, str]) -> None:
    for name, target in links.items():
        if not os.path.exists(target):
            raise RolloutError(
                f"Link {name} of the release would lead nowhere",
                found=f"no {target}",
                expected="the drafter and the venv in place before the release",
            )


def _make_locked(root: str, path: str, content: Content) -> bool:
    """Make the release unless it is there. True when it was made."""
    lock = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # A second play on this host waits, instead of taking the partial of the first for a leftover.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in filter(PARTIAL.fullmatch, os.listdir(root)):
            shutil.rmtree(os.path.join(root, name))
        if _is_there(path, content):
            return False
        _build(os.path.join(root, f".{content.digest}.partial"), path, content)
        return True
    finally:
        os.close(lock)


def _build(partial: str, path: str, content: Content) -> None:
    """Write everything under the name `partial`, make it durable, and rename it to `path`."""
    try:
        folders = {parent for name in [*content.files, *content.links] for parent in _parents(name)}
        # Sorted, a folder comes before what is in it; modes are set apart from mkdir, which obeys the umask.
        for folder in [partial, *(os.path.join(partial, folder) for folder in sorted(folders))]:
            os.mkdir(folder)
            os.chmod(folder, FOLDER_MODE)
        for name, text in content.rendered(path).items():
            with open(os.path.join(partial, name), "x", encoding="utf-8", newline="") as stream:
                stream.write(text)
                stream.flush()
                os.fchmod(stream.fileno(), content.modes.get(name, FILE_MODE))
                os.fsync(stream.fileno())
        for name, target in content.links.items():
            os.symlink(target, os.path.join(partial, name))
        for folder in sorted(folders, reverse=True):
            fsync_directory(os.path.join(partial, folder))
        fsync_directory(partial)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(
            partial, ignore_errors=True
        )  # the cause is the error to report; the next run tries again
        raise
    fsync_directory(os.path.dirname(path))


def _entries(path: str) -> dict[str, os.stat_result]:
    """Everything below `path`: relative path → its own status, links not followed."""
    found = {}
    for folder, folders, files in os.walk(path, onerror=_raise):
        for name in [*folders, *files]:
            full = os.path.join(folder, name)
            found[os.path.relpath(full, path)] = os.lstat(full)
    return found


def _raise(error: OSError) -> None:
    raise error


def _read(path: str) -> str:
    # A file with other bytes than UTF-8 is none that we wrote: it shall differ, not crash the reader.
    with open(path, encoding="utf-8", errors="backslashreplace", newline="") as stream:
        return stream.read()


def _is_there(path: str, content: Content) -> bool:
    """Whether there is a release at `path`. Raises RolloutError, naming the file, when it isn't `content`."""
    if not os.path.lexists(path):
        return False
    faults = []
    found = _entries(path) if stat.S_ISDIR(os.lstat(path).st_mode) else {}
    folders = {parent for name in [*content.files, *content.links] for parent in _parents(name)}
    for name in sorted({*found, *content.files, *content.links, *folders}):
        fault = _fault(path, name, found.get(name), name in folders, content)
        if fault:
            faults.append(f"{name} {fault}")
    if faults:
        raise RolloutError(
            f"The release {path} isn't what it was when it was made",
            found="; ".join(faults),
            expected="a release never changes once it is complete",
            remedy="find out who changed it; if nothing serves from it, remove the folder and run again",
        )
    return True


def _fault(path: str, name: str, status: os.stat_result | None, folder: bool, content: Content) -> str:
    """What is wrong with one entry of a release, or nothing."""
    full = os.path.join(path, name)
    if status is None:
        return "is missing"
    if name in content.links:
        if not stat.S_ISLNK(status.st_mode):
            return "is no link"
        target = os.readlink(full)
        return "" if target == content.links[name] else f"leads to {target}"
    if name not in content.files and not folder:
        return "was added"
    if folder != stat.S_ISDIR(status.st_mode) or not (folder or stat.S_ISREG(status.st_mode)):
        return "is of another kind"
    mode = FOLDER_MODE if folder else content.modes.get(name, FILE_MODE)
    if stat.S_IMODE(status.st_mode) != mode:
        return f"has mode {stat.S_IMODE(status.st_mode):04o} instead of {mode:04o}"
    if status.st_uid != os.geteuid():
        return f"belongs to uid {status.st_uid}"
    if not folder and _read(full) != content.files[name].replace(PLACEHOLDER, path):
        return "has another content"
    return ""


def difference(release: Release, content: Content, compare_to: str = "") -> list[dict[str, str]]:
    """What differs between the release that serves now (`compare_to`, empty for none) and this one.

    One entry for each file or link that differs, as Ansible's diff mode prints it.
    """
    before = {}
    if compare_to:
        for name, status in _entries(compare_to).items():
            full = os.path.join(compare_to, name)
            if stat.S_ISLNK(status.st_mode):
                before[name] = f"link to {os.readlink(full)}\n"
            elif stat.S_ISREG(status.st_mode):
                before[name] = _read(full)
    after = content.rendered(release.path)
    after.update({name: f"link to {target}\n" for name, target in content.links.items()})
    return [
        {
            "before": before.get(name, ""),
            "after": after.get(name, ""),
            "before_header": os.path.join(compare_to, name) if name in before else f"{name} (absent)",
            "after_header": os.path.join(release.path, name) if name in after else f"{name} (absent)",
        }
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
