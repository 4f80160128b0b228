#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: remove releases, venvs and drafters that nothing needs any more."""

from __future__ import annotations

DOCUMENTATION = r"""
module: old_releases
short_description: Remove releases that are not needed any more, and what only they used
description:
  - Keeps the newest O(keep) releases, and besides them each that serves, that a way back leads to, that an order or the
    last switch names or whose unit is loaded. Venvs, drafters, programs and uv stay as long as a kept release or this run
    needs them. Whatever changed within the last hour stays.
  - Does nothing while a switch runs.
options:
  root:
    description: Folder of the installation.
    type: path
    required: true
  state_dir:
    description: Where the state of the switch is.
    type: path
    default: /var/lib/vllm-dflash
  keep:
    description: How many of the newest releases stay.
    type: int
    default: 3
  staged:
    description: Paths below O(root) that this run needs.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    support: full
    description: Removes nothing, returns what would go.
  diff_mode:
    support: full
    description: Shows what goes, and why each of the others stays.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Remove what no release needs any more
  old_releases:
    root: /opt/vllm-dflash
    keep: 3
    staged: ["{{ vllm_venv }}"]
"""

RETURN = r"""
removed:
  description: Folders that were removed, or would be.
  returned: success
  type: list
  elements: str
  sample: [/opt/vllm-dflash/releases/0a1b2c3d4e5f6071]
freed:
  description: Bytes that became free.
  returned: success
  type: int
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import garbage
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "state_dir": {"type": "path", "default": "/var/lib/vllm-dflash"},
            "keep": {"type": "int", "default": 3},
            "staged": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    params = module.params
    try:
        done = garbage.collect(
            params["root"], params["state_dir"], params["keep"], params["staged"], check=module.check_mode
        )
    except RolloutError as error:
        module.fail_json(msg=str(error))
    result = {"changed": bool(done["removed"]), "removed": done["removed"], "freed": done["freed"]}
    if module._diff and done["removed"]:
        stays = "".join(f"{name} ({reason})\n" for name, reason in sorted(done["kept"].items()))
        goes = "".join(f"{path}\n" for path in done["removed"])
        result["diff"] = {"before": goes + stays, "after": stays}
    module.exit_json(**result)


if __name__ == "__main__":
    main()
