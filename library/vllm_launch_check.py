#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: have vLLM itself accept a launch, before the server that runs now is touched."""

from __future__ import annotations

DOCUMENTATION = r"""
module: vllm_launch_check
short_description: Have vLLM itself accept a launch, without a GPU
description:
  - Runs with a venv's Python what C(vllm serve --config) does up to the point where a GPU is needed, on the
    very files that the server will use. Parses and validates the flags, builds the engine config (where a
    token budget below zero shows), takes the auxiliary layers and the mask token as vLLM takes them, and has
    vLLM's own DFlash class load the tensors of the drafter's file, of which only the header is read.
  - Every parameter of the drafter must be filled and every value of the file used.
  - With tensor parallelism the drafter is built whole, as the one rank of a group.
  - Needs no GPU memory, no network and no port, so it runs while another server serves. It takes about 1 GiB
    of memory and 10 to 60 seconds.
  - Written for vLLM 0.20.1 and 0.26.0 and a launch whose speculative method is C(dflash).
options:
  python:
    description: Python of the venv that vLLM is installed in.
    type: path
    required: true
  config:
    description: The YAML file that C(vllm serve --config) will read.
    type: path
    required: true
  user:
    description: Who runs the check. The default is the user of the task, or of O(unit_properties).
    type: str
    default: ""
  environment:
    description:
      - Environment variables of the check.
      - Not for secrets. With O(unit_properties) every user of the host can read them while the check runs.
    type: dict
    default: {}
  environment_file:
    description: The C(EnvironmentFile) of the server.
    type: path
  unit_properties:
    description:
      - The sandbox of the server, as systemd's C(Key=value). The check is then a transient unit with these.
      - Without it the check is a plain child of this module.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds after which the check is ended.
    type: int
    default: 300
  nccl_ranks:
    description:
      - Also have this many GPUs of the host add up a tensor over NCCL, each in a process of its own, in the same
        sandbox. It takes some hundred MiB on each GPU. 0 leaves it out.
    type: int
    default: 0
  nccl_timeout:
    description: Seconds after which that is ended. Ranks that wait for each other for ever are what it looks for.
    type: int
    default: 120
attributes:
  check_mode:
    support: full
    description:
      - Runs in check mode too. Where there is no release, venv or config yet, RV(checked) is false.
  diff_mode:
    support: none
    description: Changes nothing.
notes:
  - vLLM and Triton fill their own caches in the home of the user, as the server will.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Check the launch with vLLM itself, while the server before goes on serving
  vllm_launch_check:
    python: "{{ release }}/venv/bin/python"
    config: "{{ release }}/vllm.yaml"
    environment_file: "{{ release }}/environment"
    unit_properties:
      - User=vllm-dflash
      - ProtectSystem=strict
      - CacheDirectory=vllm-dflash
"""

RETURN = r"""
checked:
  description: Whether vLLM was asked and accepted the launch.
  returned: success
  type: bool
reason:
  description: Why the launch could not be checked, in check mode.
  returned: when RV(checked) is false
  type: str
  sample: not checked (no release yet)
vllm_version:
  description: Version of the installed vLLM.
  returned: when checked
  type: str
  sample: 0.20.1
scheduled_tokens:
  description: Tokens that vLLM will schedule a step, after the draft tokens of all requests are taken off.
  returned: when checked
  type: int
  sample: 8224
max_model_len:
  description: Longest sequence in tokens.
  returned: when checked
  type: int
  sample: 32768
max_num_seqs:
  description: Requests that run at the same time, at most.
  returned: when checked
  type: int
  sample: 16
kv_cache_dtype:
  description: Type of the KV cache as configured; C(auto) is the model's own.
  returned: when checked
  type: str
  sample: auto
tensor_parallel_size:
  description: GPUs that the target is split over.
  returned: when checked
  type: int
  sample: 2
num_speculative_tokens:
  description: Tokens drafted a step.
  returned: when checked
  type: int
  sample: 15
aux_layers:
  description: The target layers that feed the drafter, as vLLM numbers them (taps + 1).
  returned: when checked
  type: list
  elements: int
  sample: [2, 17, 32, 47, 62]
mask_token_id:
  description: The token that stands for what is to be drafted.
  returned: when checked
  type: int
  sample: 248070
drafter_class:
  description: vLLM's class of the drafter.
  returned: when checked
  type: str
  sample: DFlashQwen3ForCausalLM
sliding_windows:
  description: The window of each layer of the drafter as vLLM builds it, in tokens; null for full attention.
  returned: when checked
  type: list
  elements: int
  sample: [2048, 2048, 2048, 2048, null]
tensors_loaded:
  description: Tensors that vLLM's loader took from the drafter's file.
  returned: when checked
  type: int
  sample: 58
tensors_expected:
  description: Tensors in the drafter's file.
  returned: when checked
  type: int
  sample: 58
attention_backend:
  description: vLLM's attention backend of the drafter.
  returned: when checked
  type: str
  sample: FLASH_ATTN
cuda_initialized:
  description: Whether torch touched a GPU during the check.
  returned: when checked
  type: bool
  sample: false
max_rss_mib:
  description: Largest memory of one process of the check, in MiB.
  returned: when checked
  type: int
  sample: 1014
probe_seconds:
  description: Seconds of the check itself, without the start of Python.
  returned: when checked
  type: float
seconds:
  description: Seconds that it all took.
  returned: when checked
  type: float
nccl:
  description: What O(nccl_ranks) GPUs did together, in seconds and in the words of the first rank.
  returned: when checked with O(nccl_ranks)
  type: dict
  sample: {ranks: 2, seconds: 21.4, said: "last all-reduce: 8.1 ms"}
phase:
  description:
    - Where it failed.
    - One of start, import, parse, engine config, aux layers, mask token, weights, timeout, nccl.
  returned: failure
  type: str
  sample: engine config
log_tail:
  description: The last lines that vLLM printed.
  returned: failure
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import launch_check
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main():
    module = AnsibleModule(
        argument_spec={
            "python": {"type": "path", "required": True},
            "config": {"type": "path", "required": True},
            "user": {"type": "str", "default": ""},
            "environment": {"type": "dict", "default": {}},
            "environment_file": {"type": "path"},
            "unit_properties": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 300},
            "nccl_ranks": {"type": "int", "default": 0},
            "nccl_timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    params = module.params
    missing = launch_check.missing(params["python"], params["config"])
    if missing and module.check_mode:
        module.exit_json(changed=False, checked=False, reason=f"not checked ({missing})")
    how = {
        "user": params["user"],
        "environment": {key: str(value) for key, value in params["environment"].items()},
        "environment_file": params["environment_file"] or "",
        "unit_properties": params["unit_properties"],
    }
    try:
        answer = launch_check.run(params["config"], params["python"], timeout=params["timeout"], **how)
        if params["nccl_ranks"] > 1:
            answer["nccl"] = launch_check.all_reduce(
                params["python"], params["nccl_ranks"], timeout=params["nccl_timeout"], **how
            )
    except launch_check.LaunchCheckFailed as error:
        module.fail_json(msg=str(error), phase=error.phase, log_tail=error.log_tail)
    except RolloutError as error:
        module.fail_json(msg=str(error), phase="start", log_tail=[])
    module.exit_json(changed=False, checked=True, **answer)


if __name__ == "__main__":
    main()
