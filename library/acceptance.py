#!/usr/bin/python
"""Ansible module: measures how well the serving release drafts, and judges it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: acceptance
short_description: Measure and judge the acceptance length of the release that serves
description:
  - Asks the server fixed prompts, greedily and one after the other, and reads its counters before and after.
    Once with short prompts, once with prompts beyond the drafter's window.
  - Keeps figures and verdict in C(acceptance/<release>.json) below O(state_dir). Where they are there for the
    same switch, mode and conditions, nothing is asked; the verdict is made anew with the reference given.
  - Rolls nothing back itself, RV(roll_back) says when that is to be done.
author: the roll-out's authors (@vllm-dflash-rollout)
options:
  server:
    description: The server of a release, as M(switchover) takes it. It has to be the one that the last switch confirmed.
    type: dict
    required: true
  mode:
    description: With V(enforce), RV(roll_back) is set by a bad verdict.
    type: str
    choices: [observe, enforce]
    default: observe
  drafting:
    description: What acceptance depends on; a reference is good for the same values only.
    type: dict
    required: true
    suboptions:
      drafter_sha256:
        description: The drafter's weights.
        type: str
        required: true
      target:
        description: The target.
        type: str
        required: true
      vllm_version:
        description: The version that serves.
        type: str
        required: true
      num_speculative_tokens:
        description: How many tokens are drafted at once.
        type: int
        required: true
      sliding_window:
        description: The window of the drafter's sliding layers, in tokens; left out where it has none.
        type: int
      trained:
        description: Whether the drafter was trained. Of one that was not, nothing is measured.
        type: bool
        default: true
  reference:
    description: Acceptance lengths to compare with, set by hand. They go before O(references).
    type: dict
    suboptions:
      short:
        description: Of the short prompts.
        type: float
      long:
        description: Of the prompts beyond the window.
        type: float
  references:
    description: What canaries committed, by key; the values as in RV(commit).
    type: dict
    default: {}
  ratio:
    description: The part of the reference that each set has to reach.
    type: float
    default: 0.9
  tokens:
    description: How many tokens each answer may have.
    type: int
    default: 128
  timeout_s:
    description: For everything that is asked.
    type: float
    default: 600.0
  state_dir:
    description: Where the switch keeps its state.
    type: path
    default: /var/lib/vllm-dflash
attributes:
  check_mode:
    support: full
    description: Asks the server nothing; says what would be measured.
  diff_mode:
    support: none
    description: The figures are in the result.
"""

EXAMPLES = r"""
- name: Measure how well the release drafts
  acceptance:
    server:
      name: vllm-dflash
      unit: vllm-dflash@0123456789abcdef.service
      release: 0123456789abcdef
      port: 30000
      chat: true
    mode: enforce
    drafting:
      drafter_sha256: 2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae
      target: /root/models/Qwen3.6-27B
      vllm_version: 0.20.1
      num_speculative_tokens: 15
      sliding_window: 2048
    reference: {short: 4.2, long: 3.9}
  register: measured
"""

RETURN = r"""
verdict:
  description: C(passed), C(below) the reference, C(not drafting), C(not judged) or C(off).
  type: str
  returned: success
  sample: passed
msg:
  description: The verdict with what was measured and expected, for each set of prompts.
  type: str
  returned: success
record:
  description: The figures and the verdict as they are kept on the host; null where nothing would be known.
  type: dict
  returned: success
  sample:
    release: 0123456789abcdef
    verdict: passed
    sets:
      short: {length: 4.2, per_position: [0.9, 0.8], tokens: 768, tokens_per_s: 71.3, own_share: 1.0}
commit:
  description: What a canary commits as the reference, by key; empty when there is a reference already, or when
    the server did not pass.
  type: dict
  returned: success
roll_back:
  description: Whether the server before is to be brought back.
  type: bool
  returned: success
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.acceptance import (
    BELOW,
    DRAFTING_SPEC,
    NOT_DRAFTING,
    NOT_JUDGED,
    REFERENCE_SPEC,
    gate,
)
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "server": {"type": "dict", "required": True},
            "mode": {"type": "str", "choices": ["observe", "enforce"], "default": "observe"},
            "drafting": {"type": "dict", "required": True, "options": DRAFTING_SPEC},
            "reference": {"type": "dict", "options": REFERENCE_SPEC},
            "references": {"type": "dict", "default": {}},
            "ratio": {"type": "float", "default": 0.9},
            "tokens": {"type": "int", "default": 128},
            "timeout_s": {"type": "float", "default": 600.0},
            "state_dir": {"type": "path", "default": "/var/lib/vllm-dflash"},
        },
        supports_check_mode=True,
    )
    try:
        result = gate(check_mode=module.check_mode, **module.params)
    except (RolloutError, OSError) as error:
        module.fail_json(msg=str(error))
    if result["verdict"] in (BELOW, NOT_DRAFTING, NOT_JUDGED) and result["record"]:
        module.warn(f"Acceptance of {result['msg']}")
    module.exit_json(**result)


if __name__ == "__main__":
    main()
