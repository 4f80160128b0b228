#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: refuse misspelt, wrong or missing variables before any host is touched."""

from __future__ import annotations

DOCUMENTATION = r"""
module: inventory_check
short_description: Check the variables of all hosts against the roles' argument specs
description:
  - Runs on the control node, before any host is touched.
  - Refuses an empty group, an unknown variable with the prefix of one of the roles (with the nearest known
    name), a name that is nearly one of ours, a role's private name, a value of the wrong type or not among
    the choices, and a required variable that is missing. Dictionaries with options are checked inside.
  - All faults of all hosts are in one message; the same fault of several hosts is said once.
  - Scalars are taken as Ansible casts them. A list has to be a list and a dictionary a dictionary, because a
    role gets the value as it was written. A string option takes no float or boolean, because C(0.20) has
    already become C(0.2).
options:
  group:
    description: Name of the group, for the message when it is empty.
    type: str
    required: true
  hosts:
    description: For each host its variables with their values. Only variables of the roles are looked at.
    type: dict
    required: true
  names:
    description: For each host of the group the names of all its variables.
    type: dict
    required: true
  specs:
    description:
      - Paths, or patterns with C(*), of the roles' C(meta/argument_specs.yml). The name of each role with an
        underscore is a prefix of ours.
      - Variables that an entry point other than C(main) requires are not required of the inventory.
    type: list
    elements: path
    required: true
requirements:
  - PyYAML
attributes:
  check_mode:
    support: full
    description: Reads only, so it does the same in check mode.
  diff_mode:
    support: none
    description: Nothing is changed.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Check the inventory
  hosts: localhost
  gather_facts: false
  vars:
    ours: (rollout|gpu_host|drafter|vllm|sglang|switchover)_
  tasks:
    - name: Refuse misspelt, wrong and missing variables
      inventory_check:
        group: gpu_hosts
        # Only variables of ours are looked up: others may be secret, or templates that need facts.
        hosts: >-
          {%- set found = {} -%}
          {%- for host in groups.gpu_hosts -%}
          {%- set own = {} -%}
          {%- for name in hostvars[host] if name is match(ours) -%}
          {%- set _ = own.update({name: hostvars[host][name]}) -%}
          {%- endfor -%}
          {%- set _ = found.update({host: own}) -%}
          {%- endfor -%}
          {{ found }}
        names: "{{ dict(groups.gpu_hosts | zip(groups.gpu_hosts | map('extract', hostvars) | map('list'))) }}"
        specs: ["{{ playbook_dir }}/../roles/*/meta/argument_specs.yml"]
"""

RETURN = r"""
hosts_checked:
  description: How many hosts were checked.
  returned: success
  type: int
  sample: 8
variables_known:
  description: How many variables the roles know.
  returned: success
  type: int
  sample: 41
"""

import glob
import os
import traceback

from ansible.module_utils.basic import AnsibleModule, missing_required_lib
from ansible.module_utils.dflash_rollout import inventory
from ansible.module_utils.dflash_rollout.errors import RolloutError

try:
    import yaml
except ImportError:
    yaml = None
    YAML_ERROR = traceback.format_exc()


def read_specs(patterns):
    """Role name → its argument specs, from roles/<role>/meta/argument_specs.yml."""
    specs = {}
    for path in [path for pattern in patterns for path in sorted(glob.glob(pattern)) or [pattern]]:
        role = os.path.basename(os.path.dirname(os.path.dirname(os.path.abspath(path))))
        try:
            with open(path, encoding="utf-8") as stream:
                specs[role] = yaml.safe_load(stream)["argument_specs"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
            raise RolloutError(
                f"{path} can't be read as a role's argument specs",
                found=f"{type(error).__name__}: {error}",
                expected="YAML with the key argument_specs",
            ) from error
    if not specs:
        raise RolloutError("No argument specs were given", expected="roles/*/meta/argument_specs.yml")
    return specs


def main():
    module = AnsibleModule(
        argument_spec={
            "group": {"type": "str", "required": True},
            "hosts": {"type": "dict", "required": True},
            "names": {"type": "dict", "required": True},
            "specs": {"type": "list", "elements": "path", "required": True},
        },
        supports_check_mode=True,
    )
    if yaml is None:
        module.fail_json(msg=missing_required_lib("PyYAML"), exception=YAML_ERROR)
    names = module.params["names"]
    try:
        specs = read_specs(module.params["specs"])
        faults = inventory.check(module.params["group"], module.params["hosts"], names, specs)
    except RolloutError as error:
        module.fail_json(msg=str(error))
    if faults:
        module.fail_json(msg=inventory.report(faults, len(names)))
    module.exit_json(
        changed=False, hosts_checked=len(names), variables_known=len(inventory.known_options(specs))
    )


if __name__ == "__main__":
    main()
