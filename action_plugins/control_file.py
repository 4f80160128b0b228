# Licensed under the Apache License 2.0, see LICENSE.
"""Action control_file: a text file on the control node. Documented in library/control_file.py."""

from __future__ import annotations

import os
import sys

from ansible.plugins.action import ActionBase

# Runs in Ansible's own process: three modules on localhost (folder, stat, copy) would start Python for every host of the fleet.
sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils"))

from dflash_rollout.files import difference, read_text, write_atomically

ARGUMENT_SPEC = {
    "path": {"type": "path", "required": True},
    "content": {"type": "str", "required": True},
}


class ActionModule(ActionBase):
    """See library/control_file.py."""

    TRANSFERS_FILES = False
    _requires_connection = False

    def run(self, tmp=None, task_vars=None):
        """Write the file whole, unless it has this text."""
        result = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        path, content = options["path"], options["content"]
        try:
            before = read_text(path)
            changed = before != content
            if changed and not self._task.check_mode:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                write_atomically(path, content)
        except (OSError, UnicodeDecodeError) as error:
            return {
                **result,
                "failed": True,
                "msg": f"{path} can't be written on the control node. Found: {error}. "
                "What to do: make room or give yourself the right to write there, or set another path.",
            }
        if changed and self._task.diff:
            result["diff"] = difference(path, before, content)
        return {**result, "changed": changed, "path": path}
