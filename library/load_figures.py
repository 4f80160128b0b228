#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: how fast a server answers several clients at once."""

from __future__ import annotations

DOCUMENTATION = r"""
module: load_figures
short_description: How fast a server answers several clients at once
description:
  - Asks the server fixed prompts, greedily, from as many clients at once as it is told, each load after a round of
    its own that doesn't count, since kernels are compiled for a size of batch when it is seen for the first time.
  - Fails where a request fails, and where other clients were generating meanwhile.
options:
  server:
    description: The server, as M(switchover) takes it. It has to count what it generates.
    type: dict
    required: true
  concurrencies:
    description: Numbers of clients at once; each is a measurement of its own, the smallest first.
    type: list
    elements: int
    required: true
  tokens:
    description: How many tokens each answer may have.
    type: int
    default: 128
  timeout_s:
    description: For everything that is asked.
    type: float
    default: 900.0
attributes:
  check_mode:
    support: full
    description: Asks nothing, returns nothing.
  diff_mode:
    support: none
    description: Changes nothing.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Measure it
  load_figures:
    server: "{{ vllm_service_server }}"
    concurrencies: [1, 4, 16]
"""

RETURN = r"""
loads:
  description: The figures of each number of clients. C(length) is the acceptance length, null without a drafter.
  type: list
  elements: dict
  returned: success
  sample:
    - concurrency: 4
      requests: 8
      tokens: 1024
      seconds: 4.1
      tokens_per_s: 249.8
      p50_s: 1.9
      p99_s: 2.2
      length: 4.19
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.calibration import measure
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.store import SERVER_SPEC, complete


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "server": {"type": "dict", "required": True},
            "concurrencies": {"type": "list", "elements": "int", "required": True},
            "tokens": {"type": "int", "default": 128},
            "timeout_s": {"type": "float", "default": 900.0},
        },
        supports_check_mode=True,
    )
    given = module.params
    if module.check_mode:
        module.exit_json(changed=False, loads=[])
    try:
        server = complete(SERVER_SPEC, given["server"])
        loads = measure(server, given["concurrencies"], given["tokens"], given["timeout_s"])
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, loads=loads)


if __name__ == "__main__":
    main()
