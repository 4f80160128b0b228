#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: unit files in their place, read by systemd, enabled and started as asked."""

from __future__ import annotations

DOCUMENTATION = r"""
module: systemd_units
short_description: Put unit files in their place, and have systemd act on them
description:
  - Writes the files that differ below C(/etc/systemd/system), each whole or not at all, and has systemd read its units again
    when one did, or when a unit of theirs waits for that since an earlier run was cut off.
  - One call for what else are some ten tasks for each host.
options:
  files:
    description:
      - Name to text. A name may be that of a drop-in, as C(sglang.service.d/50-vllm-dflash.conf).
      - Owned by the user of the task, mode 0644.
    type: dict
    default: {}
  verify:
    description:
      - Files that C(systemd-analyze verify) has to accept before they are written, with the name under which it reads them.
        For a template that is an instance.
      - Not asked in check mode, where what the unit starts need not exist yet.
    type: dict
    default: {}
  folders:
    description: Folders that the units need, made with mode 0755.
    type: list
    elements: path
    default: []
  enabled:
    description: Units that start at boot.
    type: list
    elements: str
    default: []
  started:
    description: Units that start at boot and now. Started anew when their own file changed.
    type: list
    elements: str
    default: []
  disabled:
    description: Units that are stopped and don't start at boot. They need not exist.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    support: full
    description: Writes and starts nothing.
  diff_mode:
    support: full
    description: Shows each file that is written.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Install the template unit
  systemd_units:
    files:
      vllm-dflash@.service: "{{ lookup('ansible.builtin.template', 'vllm-dflash@.service.j2') }}"
    verify:
      vllm-dflash@.service: vllm-dflash@0a1b2c3d4e5f6071.service
"""

RETURN = r"""
written:
  description: Names of the files that were written, or would be.
  returned: success
  type: list
  elements: str
commands:
  description: The calls of systemctl, or what they would be.
  returned: success
  type: list
  elements: list
  sample: [[daemon-reload], [enable, llm-serving.service]]
diff:
  description: Each file that differs.
  returned: in diff mode
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import files, unit_files, units
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main():
    names = {"type": "list", "elements": "str", "default": []}
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "dict", "default": {}},
            "verify": {"type": "dict", "default": {}},
            "folders": {"type": "list", "elements": "path", "default": []},
            "enabled": names,
            "started": names,
            "disabled": names,
        },
        supports_check_mode=True,
    )
    params, check = module.params, module.check_mode
    lists = {name: params[name] for name in ("enabled", "started", "disabled")}
    try:
        changes = unit_files.differing(params["files"])
        for change in changes if not check else []:
            if change.name in params["verify"]:
                unit_files.verify(change, params["verify"][change.name])
        made = [path for path in params["folders"] if files.ensure_folder(path, check)]
        asked = [
            *map(unit_files.unit_of, params["files"]),
            *(unit for some in lists.values() for unit in some),
        ]
        states = unit_files.states_of(asked)
        commands = unit_files.commands([change.name for change in changes], states, **lists)
        if not check:
            unit_files.write(changes)
            for command in commands:
                units.systemctl(*command)
    except RolloutError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"{error.filename} can't be written: {error.strerror}. What to do: put it right and run again."
        )
    result = {
        "changed": bool(changes or made or commands),
        "written": [change.name for change in changes],
        "commands": commands,
    }
    if module._diff:
        result["diff"] = [
            files.difference(f"{unit_files.FOLDER}/{change.name}", change.before, change.after)
            for change in changes
        ]
    module.exit_json(**result)


if __name__ == "__main__":
    main()
