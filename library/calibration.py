#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: what a calibration is to try next, and what comes of what was measured."""

from __future__ import annotations

DOCUMENTATION = r"""
module: calibration
short_description: What a calibration tries next, and what comes of it
description:
  - With O(stage), the candidates of that stage which are not among O(results). Without it, what of them is to be kept.
  - Computes only, on whatever machine it runs.
options:
  stage:
    description: What is looked for. V(config) of the drafter, V(drafting) or not and how much, V(requests) at once.
    type: str
    choices: [config, drafting, requests]
  results:
    description: Candidates that were measured, with RV(loads) of M(load_figures) as C(loads).
    type: list
    elements: dict
    default: []
  base:
    description: What the inventory has now.
    type: dict
    required: true
    suboptions:
      args:
        description: C(vllm_service_args).
        type: dict
        default: {}
      speculative:
        description: C(vllm_service_speculative_config).
        type: dict
        default: {}
      profile:
        description: C(drafter_profile).
        type: dict
        default: {}
  rendered:
    description: What M(dflash_config) returned for the inventory as it is.
    type: dict
    required: true
  token_counts:
    description: Numbers of drafted tokens to try.
    type: list
    elements: int
    default: []
  max_num_seqs:
    description: Values of C(max-num-seqs) to try.
    type: list
    elements: int
    default: []
  profiles:
    description: Other configs of the drafter to try, as parts of C(drafter_profile).
    type: list
    elements: dict
    default: []
  margin:
    description: By how much the best has to beat serving without a drafter.
    type: float
    default: 0.05
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
- name: Know what to try
  calibration:
    stage: drafting
    base:
      speculative: {num_speculative_tokens: 15}
    rendered: "{{ drafter_rendered }}"
    token_counts: [3, 7, 15]
  delegate_to: localhost
"""

RETURN = r"""
candidates:
  description: What is to be measured in this stage.
  type: list
  elements: dict
  returned: with O(stage)
  sample:
    - {name: 7 tokens, speculation: true, args: {}, speculative: {num_speculative_tokens: 7}, profile: {}}
best:
  description: The fastest of O(results) that drafts.
  type: dict
  returned: without O(stage)
gain:
  description: How many times as fast it is as without a drafter, the geometric mean over the loads.
  type: float
  returned: without O(stage)
kept:
  description: Whether that is more than O(margin).
  type: bool
  returned: without O(stage)
variables:
  description: The inventory's variables that it changes, each of them whole.
  type: dict
  returned: without O(stage)
table:
  description: Every candidate at every load, in lines for people.
  type: list
  elements: str
  returned: without O(stage)
text:
  description: The verdict in a few sentences.
  type: str
  returned: without O(stage)
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import calibration


def main() -> None:
    part = {"type": "dict", "default": {}}
    module = AnsibleModule(
        argument_spec={
            "stage": {"type": "str", "choices": list(calibration.STAGES)},
            "results": {"type": "list", "elements": "dict", "default": []},
            "base": {
                "type": "dict",
                "required": True,
                "options": {"args": part, "speculative": part, "profile": part},
            },
            "rendered": {"type": "dict", "required": True},
            "token_counts": {"type": "list", "elements": "int", "default": []},
            "max_num_seqs": {"type": "list", "elements": "int", "default": []},
            "profiles": {"type": "list", "elements": "dict", "default": []},
            "margin": {"type": "float", "default": 0.05},
        },
        supports_check_mode=True,
    )
    given, rendered = module.params, module.params["rendered"]
    if given["stage"] is None:
        chosen = calibration.choose(given["results"], given["margin"])
        chosen["variables"] = calibration.variables(chosen["best"], given["base"])
        module.exit_json(changed=False, **chosen)
    base = given["base"]
    drafted = base["speculative"].get("num_speculative_tokens") or rendered["config"]["block_size"] - 1
    candidates = calibration.plan(
        given["stage"],
        drafted=int(drafted),
        token_counts=given["token_counts"],
        max_num_seqs=given["max_num_seqs"],
        seqs_now=base["args"].get("max-num-seqs"),
        configs=calibration.uncertain_configs(rendered["provenance"], rendered["config"], given["profiles"]),
        results=given["results"],
    )
    module.exit_json(changed=False, candidates=candidates)


if __name__ == "__main__":
    main()
