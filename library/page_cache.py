#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: reads model weights into the page cache, as far as they fit."""

from __future__ import annotations

DOCUMENTATION = r"""
module: page_cache
short_description: Read model weights into the page cache, as far as they fit
description:
  - Reads what is not resident of the given weights, in the order in which vLLM loads them, so that the next load reads memory.
  - Works for O(limit_s) and returns RV(finished=false) when there is more to do; called again, it goes on from there.
    Nothing runs between two calls.
  - Reads with idle I/O priority and the lowest CPU priority.
  - Never fails for what prevents it; that is RV(reason), and RV(finished=true).
options:
  paths:
    description: Files of weights, or folders, whose C(*.safetensors) are taken; those of the index, where there is one.
    type: list
    elements: path
    required: true
  reserve_mib:
    description: How much of the available memory is not filled, in MiB.
    type: int
    default: 8192
  limit_s:
    description: For how many seconds to read.
    type: float
    default: 10.0
attributes:
  check_mode:
    support: full
    description: Reads nothing, returns what is resident.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Read the weights into memory
  page_cache:
    paths: [/root/models/Qwen3.6-27B, /opt/vllm-dflash/drafters/0123abcd/model.safetensors]
  register: warmed
  until: warmed.finished or warmed.attempts >= 90
  retries: 90
  delay: 0
"""

RETURN = r"""
finished:
  description: Whether there is nothing left to do, or nothing that can be done.
  type: bool
  returned: always
msg:
  description: How much of the weights is resident, how fast the rest is read, or why it is left.
  type: str
  returned: always
  sample: 12.4 GB of 57.3 GB of weights are in the page cache, 1103 MB/s
total_bytes:
  description: Bytes of the weights on the disk.
  type: int
  returned: always
resident_bytes:
  description: How many of them are in the page cache now.
  type: int
  returned: always
read_bytes:
  description: How many of them this call read.
  type: int
  returned: always
reason:
  description: Why the rest is not read. Empty when it is.
  type: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.page_cache import warm


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "paths": {"type": "list", "elements": "path", "required": True},
            "reserve_mib": {"type": "int", "default": 8192},
            "limit_s": {"type": "float", "default": 10.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    module.exit_json(
        changed=False,
        **warm(
            given["paths"],
            reserve=given["reserve_mib"] << 20,
            limit_s=given["limit_s"],
            dry=module.check_mode,
        ),
    )


if __name__ == "__main__":
    main()
