#!/usr/bin/python
"""Ansible module: what serves on this host now. Read only."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: serving_info
short_description: What serves on a GPU host now
description:
  - Reads what the switch decided last, the state of a unit, who listens on a port and what answers there.
  - Read only; runs in check mode as well.
author: the roll-out's authors (@vllm-dflash-rollout)
options:
  unit:
    description:
      - The unit that is expected to serve, with its suffix, or the name of the container. Where C(serving.json) is
        there, the server that it names is described instead.
      - Left out before the first switch, it is found from who listens on O(port), and when nobody does from who holds
        the GPUs.
    type: str
  runtime:
    description: What runs O(unit).
    type: str
    choices: [systemd, docker, podman]
    default: systemd
  port:
    description: The port to look at. Left out, the port of the server that C(serving.json) names.
    type: int
  host:
    description: The address at which the server is asked.
    type: str
    default: 127.0.0.1
  state_dir:
    description: Where the switch keeps its state.
    type: path
    default: /var/lib/vllm-dflash
  prove:
    description: Also prove the server by completions.
    type: bool
    default: false
  releases:
    description: Folder of the releases, for RV(drafter).
    type: path
  proof_timeout_s:
    description: For the whole proof.
    type: float
    default: 120.0
  api_key:
    description: The API key of a server that no switch knows yet. The descriptions of others name a file.
    type: str
attributes:
  check_mode:
    support: full
    description: Changes nothing anyway.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Ask what serves now
  serving_info:
    unit: sglang.service
    port: 30000
    prove: true
  register: serving
"""

RETURN = r"""
serving:
  description: The server that C(serving.json) names, or null where no switch was confirmed yet.
  type: dict
  returned: always
systemd:
  description: The version of systemd, or null where it doesn't say.
  type: int
  returned: always
  sample: 252
previous:
  description: The server before it, or null.
  type: dict
  returned: always
unit:
  description: The state of the unit; of a container in the same words, with its restart policy as C(enabled).
  type: dict
  returned: always; null when no unit is known
  sample:
    unit: sglang.service
    load_state: loaded
    active_state: active
    sub_state: running
    main_pid: 812
    restarts: 0
    control_group: /system.slice/sglang.service
    invocation_id: 6f2c0e3a9d7b4c58a1e0b2d4f6081a3c
    result: success
    enabled: enabled
    job: 0
    guarded: true
    published: []
    forwarders: []
    running: true
    runtime: systemd
refusal:
  description: Why a switch can't take over what serves, or null.
  type: str
  returned: always
adopt:
  description: A text to print for what is neither unit nor container, a unit file made from the process and the commands
    that adopt it; else null. Values that look secret are not in it.
  type: str
  returned: always
listeners:
  description: Who listens on the port. C(own) tells whether it is the unit, or the engine for the container.
  type: list
  elements: dict
  returned: always
  sample:
    - address: 0.0.0.0
      port: 30000
      pid: 812
      user: root
      command: python3 -m sglang.launch_server
      unit: sglang.service
      own: true
listens_in_unit:
  description: Whether somebody listens on the port and all who do belong to the unit.
  type: bool
  returned: always
model_ids:
  description: What C(/v1/models) names; null when it doesn't answer.
  type: list
  elements: str
  returned: always
no_answer:
  description: Why C(/v1/models) doesn't answer.
  type: str
  returned: when it doesn't
proof:
  description: The proof by completions.
  type: dict
  returned: when O(prove)
  sample:
    proved: true
    problem: null
    model_id: Qwen3.6-27B
    seconds: 1.2
    first_good_s: 0.5
    chat: reasoning
    tools: tool calls
    completions: [{seconds: 0.4, characters: 41, stream: false}]
switch:
  description: The record of the running or the last switch, or null.
  type: dict
  returned: always
switch_running:
  description: Whether an order is there that has not ended.
  type: bool
  returned: always
way_back:
  description: The server before, and why it could not be brought back now (as far as that is known without starting
    it); null where there is none.
  type: dict
  returned: always
  sample: {unit: sglang.service, problem: null}
acceptance:
  description: What was measured of how well the serving release drafts, as M(acceptance) keeps it; or null.
  type: dict
  returned: always
  sample:
    verdict: passed
    sets: {short: {length: 4.2}, long: {length: 4.0}}
drafter:
  description: What a release says of its drafter, the one that the last switch was to, or else that serves, or else that the
    switch left; null without O(releases) or without a release.
  type: dict
  returned: always
  sample:
    release: 0123456789abcdef
    vllm: 0.20.1
    drafter_sha256: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
    provenance: {hidden_size: fc.weight}
    config: {hidden_size: 5120}
out_of_pool:
  description: Whether a roll-out took this host out of its pool and has not put it back.
  type: bool
  returned: always
advice:
  description: What the operator should do, in a sentence; empty when nothing.
  type: str
  returned: always
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.serving import inspect_serving


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str"},
            "runtime": {"type": "str", "choices": ["systemd", "docker", "podman"], "default": "systemd"},
            "port": {"type": "int"},
            "host": {"type": "str", "default": "127.0.0.1"},
            "state_dir": {"type": "path", "default": "/var/lib/vllm-dflash"},
            "prove": {"type": "bool", "default": False},
            "api_key": {"type": "str", "no_log": True},
            "releases": {"type": "path"},
            "proof_timeout_s": {"type": "float", "default": 120.0},
        },
        supports_check_mode=True,
    )
    try:
        module.exit_json(changed=False, **inspect_serving(**module.params))
    except RolloutError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
