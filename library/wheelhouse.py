#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: a folder with exactly the wheels of the locks, for hosts without a way out."""

from __future__ import annotations

DOCUMENTATION = r"""
module: wheelhouse
short_description: Download exactly the wheels of locks for one kind of host
description:
  - With O(python) it looks at that interpreter and says which wheels it takes. With O(kind) it has that said.
  - With O(path) it fills a folder with the wheels of O(locks) for O(platform), each with the sha256 of the lock, by the
    uv and the pip of this machine. What an interrupted run downloaded stays. A folder that has the wheels of all
    O(locks) is left alone.
options:
  python:
    description: Interpreter to look at.
    type: path
  kind:
    description: RV(key) of a host that can't be asked from here.
    type: str
  path:
    description: Folder to fill.
    type: path
  locks:
    description: Texts of hash-locked files.
    type: list
    elements: str
    default: []
  platform:
    description: What the module returned as RV(platform) for a host.
    type: dict
  uv:
    description: The uv of this machine.
    type: str
    default: uv
  index_url:
    description: Package index instead of PyPI, without credentials.
    type: str
    default: ""
  index_username:
    description: User name at the index.
    type: str
    default: ""
  index_password:
    description: Password or token at the index.
    type: str
    default: ""
attributes:
  check_mode:
    support: full
    description: Downloads nothing.
  diff_mode:
    support: none
    description: Wheels have no difference that a person could read.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Look which wheels the host takes
  wheelhouse:
    python: /usr/bin/python3
  register: __vllm_host

- name: Download them
  wheelhouse:
    path: "/srv/wheelhouse/{{ __vllm_host.key }}"
    locks: ["{{ lookup('ansible.builtin.file', 'uv.txt', rstrip=false) }}"]
    platform: "{{ __vllm_host.platform }}"
  delegate_to: localhost
"""

RETURN = r"""
platform:
  description: What decides which wheels fit.
  returned: success
  type: dict
  sample: {python: "3.11", machine: x86_64, glibc: 36}
key:
  description: The same in the words of wheels.
  returned: success
  type: str
  sample: cp311-manylinux_2_36_x86_64
"""

import sys
from dataclasses import asdict
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import wheelhouse
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.venv import Index


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path"},
            "kind": {"type": "str"},
            "path": {"type": "path"},
            "locks": {"type": "list", "elements": "str", "default": []},
            "platform": {"type": "dict"},
            "uv": {"type": "str", "default": "uv"},
            "index_url": {"type": "str", "default": ""},
            "index_username": {"type": "str", "default": ""},
            "index_password": {"type": "str", "default": "", "no_log": True},
        },
        mutually_exclusive=[("python", "kind", "path")],
        required_one_of=[("python", "kind", "path")],
        required_by={"path": ["platform"]},
        supports_check_mode=True,
    )
    params, locks = module.params, module.params["locks"]
    module.no_log_values.update(filter(None, [quote(params["index_password"], safe="")]))
    # Long, and nothing for a reader of the log.
    params["locks"] = [f"({len(lock)} characters)" for lock in locks]
    changed = False
    try:
        if params["path"]:
            given = params["platform"]
            platform = wheelhouse.Platform(given["python"], given["machine"], int(given["glibc"]))
            index = Index(params["index_url"], params["index_username"], params["index_password"])
            if module.check_mode:
                changed = wheelhouse.lacking(params["path"], locks) != []
            else:
                changed = wheelhouse.build(
                    params["path"],
                    locks,
                    platform,
                    uv=params["uv"],
                    python=sys.executable,
                    environment=index.variables(),
                )
        elif params["kind"]:
            platform = wheelhouse.platform_called(params["kind"])
        else:
            platform = wheelhouse.platform_of(params["python"])
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=changed, platform=asdict(platform), key=platform.key)


if __name__ == "__main__":
    main()
