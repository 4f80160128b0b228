# Licensed under the Apache License 2.0, see LICENSE.
"""Action model_source: what the control node has of a model. Documented in library/model_source.py."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator

from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

# Runs in Ansible's own process: a module on localhost would cost a Python start for every host of the fleet.
sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils"))

from dflash_rollout import model_file
from dflash_rollout.errors import RolloutError
from dflash_rollout.safetensors import known_header, read_checkpoint

ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "sha256": {"type": "str", "default": ""},
    "digests": {"type": "dict", "default": {}},
    "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
    "cache": {"type": "path", "required": True},
    "header": {"type": "bool", "default": False},
}


@contextlib.contextmanager
def _one_at_a_time(folder: str) -> Iterator[None]:
    """One host's task reads the file, the others find its stamp."""
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, ".lock"), "a", encoding="ascii") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def names_in(folder: str) -> list[str]:
    """The files of a model folder by their names relative to it, hidden ones and their folders left out, sorted."""
    names = []
    for directory, folders, files in os.walk(folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [
            os.path.relpath(os.path.join(directory, name), folder)
            for name in files
            if not name.startswith(".")
        ]
    return sorted(names)


class ActionModule(ActionBase):
    """See library/model_source.py."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        """Hash what no stamp knows; the same in check mode, since the stamp is the control node's own."""
        result = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        path, cache = options["path"], options["cache"]
        try:
            names = names_in(path) if os.path.isdir(path) else [""]
            self._refuse_missing(path, names, options["digests"])
            files = []
            with _one_at_a_time(cache):
                for name in names:
                    files.append(self._know(os.path.join(path, name) if name else path, name, options))
                if options["header"]:
                    # A folder has no digest of its own, and its first file may be the license of ten models.
                    digest = files[0]["sha256"] if names == [""] else ""
                    result["header"] = known_header(cache, digest, lambda: read_checkpoint(path))
        except RolloutError as error:
            return {**result, "failed": True, "msg": str(error)}
        except OSError as error:
            return {**result, "failed": True, "msg": f"{path} can't be looked at: {error}"}
        return {
            **result,
            "changed": False,
            "files": files,
            "sha256": files[0]["sha256"] if len(names) == 1 else "",
            "size": sum(file["size"] for file in files),
            "read_bytes": sum(file.pop("read_bytes") for file in files),
        }

    def _refuse_missing(self, path: str, names: list[str], digests: dict[str, str]) -> None:
        if not os.path.exists(path) or not names:
            raise RolloutError(
                f"{path} is not on the control node" if names else f"{path} is empty",
                expected="the model file or folder that is to be brought to the hosts",
                remedy="download it first, or correct the path in the inventory",
            )
        for file in (os.path.join(path, name) if name else path for name in names):
            if not os.path.exists(file):
                raise RolloutError(
                    f"{file} is a link to nothing",
                    found=f"a link to {os.readlink(file)}",
                    expected="a whole model",
                    remedy="download the model again",
                )
        lacking = sorted(set(digests) - set(names))
        if lacking:
            raise RolloutError(
                f"{path} lacks files whose SHA-256 is pinned",
                found=", ".join(lacking),
                remedy="download the model again",
            )

    def _know(self, path: str, name: str, options: dict) -> dict[str, object]:
        expected = options["digests"].get(name, "") if name else options["sha256"]
        size = os.path.getsize(path)
        if size > 1 << 30:
            Display().vv(f"the digest of {path}: from its stamp, or by reading {size / 1e9:.2f} GB once")
        known = model_file.inspect(
            path, sha256=expected, verify=options["verify"], stamp_dir=options["cache"]
        )
        return {
            "name": name,
            "source": path,
            "sha256": known.sha256,
            "size": known.size,
            "read_bytes": known.read_bytes,
        }
