#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: how the server of a host does, and where it differs from the inventory. Read only."""

from __future__ import annotations

DOCUMENTATION = r"""
module: server_status
short_description: How the server of a GPU host does, and where it differs from the inventory
description:
  - Reads the age of the server's process, its counters twice within a short time, and the release that it runs.
  - Compares that with the release and the unit that the inventory asks for, without making them.
  - Read only; runs in check mode as well.
options:
  host:
    description: What the host is called in the table.
    type: str
    required: true
  found:
    description: What M(serving_info) returned.
    type: dict
    required: true
  server:
    description: The server that serves, as M(switchover) takes it. Left out where there is none.
    type: dict
  wanted:
    description: What the inventory asks for. Left out where that can't be worked out; then nothing is compared.
    type: dict
    suboptions:
      files:
        description: As M(release) takes them.
        type: dict
        required: true
      links:
        description: As M(release) takes them.
        type: dict
        required: true
      secrets:
        description: As M(release) takes them.
        type: dict
        default: {}
      secrets_dir:
        description: As M(release) takes it.
        type: path
        required: true
      unit:
        description: The text of the template unit. Comments don't count.
        type: str
        required: true
      unit_path:
        description: Where that is installed.
        type: path
        default: /etc/systemd/system/vllm-dflash@.service
  root:
    description: Folder of the releases, one above.
    type: path
    default: /opt/vllm-dflash
  window_s:
    description: Seconds between the two readings of the counters, for the rate of tokens.
    type: float
    default: 1.0
attributes:
  check_mode:
    support: full
    description: Changes nothing anyway.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Look how the server does
  server_status:
    host: "{{ inventory_hostname }}"
    found: "{{ sglang_found }}"
    server: "{{ sglang_serving }}"
"""

RETURN = r"""
running_unit:
  description: The unit or container that runs, or null.
  type: str
  returned: success
release:
  description: The digest of the release that serves, null for a server of others.
  type: str
  returned: success
vllm:
  description: Its version of vLLM.
  type: str
  returned: success
drafter_sha256:
  description: Its drafter's weights.
  type: str
  returned: success
uptime_s:
  description: Seconds since the server's main process started.
  type: float
  returned: success
restarts:
  description: How often systemd or the engine restarted it by itself.
  type: int
  returned: success
acceptance:
  description: Acceptance length over everything since the server started, by its own counters.
  type: float
  returned: success
  sample: 4.12
tokens_per_s:
  description: Tokens that it generated per second between the two readings, for all clients.
  type: float
  returned: success
running:
  description: Requests that are being answered.
  type: int
  returned: success
waiting:
  description: Requests that wait for a place.
  type: int
  returned: success
silent:
  description: Why the counters can't be read; empty when they can, or when none were promised.
  type: str
  returned: success
drift:
  description: What differs between host and inventory, a sentence each.
  type: list
  elements: str
  returned: success
unknown:
  description: Whether O(wanted) was left out.
  type: bool
  returned: success
row:
  description: The same as texts, cell by cell, for the table.
  type: dict
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.status import WANTED_SPEC, look


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "required": True},
            "found": {"type": "dict", "required": True},
            "server": {"type": "dict"},
            "wanted": {"type": "dict", "options": WANTED_SPEC},
            "root": {"type": "path", "default": "/opt/vllm-dflash"},
            "window_s": {"type": "float", "default": 1.0},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **look(**module.params))
    except RolloutError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
