#!/usr/bin/python
"""Ansible module: hands an order to the switch program on the host and follows it to its end."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: switchover
short_description: Switch a GPU host from one LLM server to another, or back
description:
  - Writes the order C(switch/pending.json), starts C(llm-switchover.service) and follows the record of the
    program that does the work on the host by itself. A lost control node or connection changes nothing.
  - The program stops the old server, waits until GPU memory is free and stable, starts the new one, proves it
    by completions and commits; on any failure it brings the old server back and proves that.
  - Does nothing when C(serving.json) names O(new), its unit is active and a completion works.
  - When a switch to the same unit is running already, it is followed. Another switch that runs is a failure.
author: the roll-out's authors (@vllm-dflash-rollout)
options:
  old:
    description: The server that serves now, or none. The unit of O(new) counts as none and is restarted.
    type: dict
    suboptions: &server
      name:
        description: For people.
        type: str
        required: true
      unit:
        description: The systemd unit, with its suffix; or the name of the container.
        type: str
        required: true
      port:
        description: Where it answers.
        type: int
        required: true
      host:
        description: The address at which it is asked.
        type: str
        default: 127.0.0.1
      model_id:
        description: The id that C(/v1/models) must name. Without one, the first it names.
        type: str
      metrics:
        description: Whether C(/metrics) must be reachable for the server to be proved.
        type: bool
        default: false
      chat:
        description: Whether a chat must be answered for the server to be proved.
        type: bool
        default: false
      tools:
        description: Whether a chat that offers a tool must be answered well for the server to be proved.
        type: bool
        default: false
      ready_timeout_s:
        description: From started to ready, at most.
        type: int
        default: 1200
      stop_timeout_s:
        description: The drain time. From SIGTERM until the whole control group is killed.
        type: int
        default: 180
      release:
        description: The digest of the release, for a server of ours.
        type: str
      runtime:
        description: What runs it. A container must exist, and not be removed when it stops.
        type: str
        choices: [systemd, docker, podman]
        default: systemd
      restart_policy:
        description: The policy that a container gets when it serves again, as C(docker update --restart) takes
          it. Not given, the one it has when the switch begins.
        type: str
      api_key_file:
        description: A file that root alone can read with the API key as C(VLLM_API_KEY=) or C(SGLANG_API_KEY=), where
          the server asks for one. The key itself is in no order and no record.
        type: path
  new:
    description: The server to serve.
    type: dict
    required: true
    suboptions: *server
  way_back:
    description: The server that a confirmed switch keeps as the way back, in the place of O(old), where O(new) is on trial
      and something else served before all trials. With the unit of O(new) there is none.
    type: dict
    suboptions: *server
  settings:
    description: How the switch is done.
    type: dict
    default: {}
    suboptions:
      accept_unproven_old:
        description: Go on although the old server runs and can't be proved by completions.
        type: bool
        default: false
      gpus:
        description: Indices of the GPUs that the servers use; all of them when not given.
        type: list
        elements: int
      gpu_free_mib:
        description: A GPU is free when less than this is used on it, in MiB.
        type: int
        default: 500
      gpu_free_stable_s:
        description: For how many seconds it must have been free.
        type: float
        default: 2.0
      gpu_free_timeout_s:
        description: How long to wait for that.
        type: float
        default: 120.0
      leftover_grace_s:
        description: Seconds from SIGTERM to SIGKILL for a process that a stopped server left behind and that
          still holds a GPU or the port.
        type: float
        default: 10.0
      proof_completions:
        description: How many completions prove a server; the last one is streamed.
        type: int
        default: 3
      proof_timeout_s:
        description: For the whole proof.
        type: float
        default: 120.0
  state_dir:
    description: Where the state is kept.
    type: path
    default: /var/lib/vllm-dflash
  id:
    description:
      - The id of the order; made up when not given.
      - Called again with the id of an order that is known on the host, the module hands over nothing and
        follows that order, or returns its outcome again. So a task can be repeated after a lost connection
        and nothing is guessed.
    type: str
  follow_timeout:
    description:
      - For how many seconds to follow. When they are over and the switch is not, the module returns
        RV(finished=false), which is no failure of the switch.
    type: int
    default: 3600
attributes:
  check_mode:
    support: full
    description: Says what would be done, and whether the program would refuse it as things are now.
  diff_mode:
    support: full
    description: Shows what would serve instead of what.
"""

EXAMPLES = r"""
- name: Switch from SGLang to the release
  switchover:
    old: {name: sglang, unit: sglang.service, port: 30000, model_id: Qwen3.6-27B}
    new:
      name: vllm-dflash
      unit: vllm-dflash@0123456789abcdef.service
      port: 30000
      model_id: Qwen3.6-27B
      metrics: true
      release: 0123456789abcdef
    id: "{{ switchover_order_id }}"
    follow_timeout: 60
  register: switch
  until: switch is failed or switch.finished
  retries: 60
  delay: 1
"""

RETURN = r"""
outcome:
  description: CONFIRMED, or the state so far when RV(finished=false), or UNCHANGED when there was nothing to
    do, or WOULD_SWITCH in check mode. ROLLED_BACK, REFUSED and STRANDED come with a failure.
  type: str
  returned: always
  sample: CONFIRMED
finished:
  description: Whether the switch has ended.
  type: bool
  returned: always
id:
  description: The id of the order.
  type: str
  returned: when an order was handed over or followed
states:
  description: Each state with the seconds spent in it.
  type: list
  elements: dict
  returned: when an order was handed over or followed
  sample: [{state: PREPARED, at: "2026-12-02T10:00:00+00:00", seconds: 2.1}]
outage_s:
  description: Seconds from the stop of the old server to the first proved completion after it.
  type: float
  returned: when an order was handed over or followed
last_log_line:
  description: The last line of the new unit's log.
  type: str
  returned: when RV(finished=false)
record:
  description: The whole record, as it is kept on the host.
  type: dict
  returned: when an order was handed over or followed
would:
  description: What would be done, in a sentence.
  type: str
  returned: in check mode
would_refuse:
  description: Why the program would refuse it as things are now, or null. What a role would install first
    (the new unit, a drop-in) counts as missing.
  type: str
  returned: in check mode
old_class:
  description: What the program takes the old server for, none, stopped, proved (by completions) or unproven. Null where it
    would refuse.
  type: str
  returned: in check mode
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.orders import order_switch
from ansible.module_utils.dflash_rollout.store import SERVER_SPEC, SETTINGS_SPEC


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "old": {"type": "dict", "options": SERVER_SPEC},
            "new": {"type": "dict", "required": True, "options": SERVER_SPEC},
            "way_back": {"type": "dict", "options": SERVER_SPEC},
            "settings": {"type": "dict", "default": {}, "apply_defaults": True, "options": SETTINGS_SPEC},
            "state_dir": {"type": "path", "default": "/var/lib/vllm-dflash"},
            "id": {"type": "str"},
            "follow_timeout": {"type": "int", "default": 3600},
        },
        supports_check_mode=True,
    )
    try:
        failed, result = order_switch(check_mode=module.check_mode, **module.params)
    except RolloutError as error:
        module.fail_json(msg=str(error), changed=False, finished=True, outcome="REFUSED")
    if failed:
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
