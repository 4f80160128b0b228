# Licensed under the Apache License 2.0, see LICENSE.
"""Filter index_variables: the environment in which pip and uv find a package index and log in there."""

from __future__ import annotations

import os
import sys

from ansible.errors import AnsibleFilterError

# As in action_plugins: the same code as the modules', in Ansible's own process.
_ROOT = os.path.abspath(__file__)
for _ in range(4):
    _ROOT = os.path.dirname(_ROOT)
sys.path.append(os.path.join(_ROOT, "module_utils"))

from dflash_rollout.errors import RolloutError
from dflash_rollout.venv import Index


def index_variables(url: str, username: str = "", password: str = "") -> dict[str, str]:
    """As role vllm gives them to its own uv and pip."""
    try:
        return Index(url, username, password).variables()
    except RolloutError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict:
        """name → function"""
        return {"index_variables": index_variables}
