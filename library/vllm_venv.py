#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: the locked vLLM in a venv that is complete and probed, or not there at all."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_venv
short_description: Install the locked vLLM into a venv of its own
description:
  - Makes C(ROOT/venvs/DIGEST) by uv from a hash-locked file, under a temporary name until it is complete and probed. uv
    itself comes from a hash-locked file into C(ROOT/uv/DIGEST). What interrupted installs left is removed.
  - The probe runs as a user without rights. It reads the version from the metadata and the classes from the source,
    compiles a C file with Python.h, loads vLLM's compiled extension, and compares the wheel's CUDA with the driver.
  - Two calls at the same time wait for one another.
options:
  root:
    description: Folder of the installation.
    type: path
    required: true
  lock:
    description: Text of the lock of vLLM.
    type: str
    required: true
  version:
    description: The version that the lock is for.
    type: str
    required: true
  uv_lock:
    description: Text of the lock of uv.
    type: str
    required: true
  python:
    description: Interpreter of the venvs.
    type: path
    required: true
  find_links:
    description: Folder of wheels on the host. Then no network is asked, and the folder is removed after the install.
    type: path
    default: ""
  index_url:
    description: Package index instead of PyPI, without credentials.
    type: str
    default: ""
  index_username:
    description: User name at the index. It travels in the environment, never in a command line.
    type: str
    default: ""
  index_password:
    description: Password or token at the index.
    type: str
    default: ""
  environment:
    description: More environment of uv and pip, for example proxies. Logins inside URLs are not shown.
    type: dict
    default: {}
attributes:
  check_mode:
    support: full
    description: Installs and removes nothing.
  diff_mode:
    support: none
    description: A venv has no difference that a person could read.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Install the locked vLLM
  vllm_venv:
    root: /opt/vllm-dflash
    lock: "{{ lookup('ansible.builtin.file', 'locks/vllm-0.20.1.txt', rstrip=false) }}"
    version: 0.20.1
    uv_lock: "{{ lookup('ansible.builtin.file', 'uv.txt', rstrip=false) }}"
    python: /usr/bin/python3
"""

RETURN = r"""
venv:
  description: Path of the venv.
  returned: success
  type: str
  sample: /opt/vllm-dflash/venvs/e274c266d04872b2
found:
  description: What the probe saw; null when nothing was installed.
  returned: success
  type: dict
  sample: {vllm: 0.20.1, torch: 2.11.0, cuda: "13.0", tree_attention: true, python: "3.11"}
"""

import re
from urllib.parse import quote

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import venv
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "lock": {"type": "str", "required": True},
            "version": {"type": "str", "required": True},
            "uv_lock": {"type": "str", "required": True},
            "python": {"type": "path", "required": True},
            "find_links": {"type": "path", "default": ""},
            "index_url": {"type": "str", "default": ""},
            "index_username": {"type": "str", "default": ""},
            "index_password": {"type": "str", "default": "", "no_log": True},
            "environment": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    params = module.params
    environment = {key: str(value) for key, value in params["environment"].items()}
    # As uv and pip may show them, and as they stand in the environment of a proxy.
    module.no_log_values.update(filter(None, [quote(params["index_password"], safe="")]))
    module.no_log_values.update(
        login for value in environment.values() for login in re.findall(r"://[^/\s@:]*:([^/\s@]+)@", value)
    )
    wanted = venv.Wanted(
        root=params["root"],
        digest=venv.digest_of(params["lock"]),
        lock=params["lock"],
        version=params["version"],
        uv_digest=venv.digest_of(params["uv_lock"]),
        uv_lock=params["uv_lock"],
        python=params["python"],
        find_links=params["find_links"],
        index=venv.Index(params["index_url"], params["index_username"], params["index_password"]),
        environment=environment,
    )
    # The texts of the locks say nothing to a reader of the log, and are long.
    module.params.update(lock=f"({wanted.digest})", uv_lock=f"({wanted.uv_digest})")
    try:
        wanted.index.variables()
        if module.check_mode:
            module.exit_json(changed=not venv.exists(wanted.venv), venv=wanted.venv, found=None)
        done = venv.ensure(wanted)
    except RolloutError as error:
        module.fail_json(msg=str(error))
    for warning in done["warnings"]:
        module.warn(warning)
    module.exit_json(changed=done["changed"], venv=wanted.venv, found=done["found"])


if __name__ == "__main__":
    main()
