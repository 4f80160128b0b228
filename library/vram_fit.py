#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: does the pair fit on the GPUs, and for how many requests?"""

from __future__ import annotations

DOCUMENTATION = r"""
module: vram_fit
short_description: Reckon whether target and drafter fit on the GPUs, and for how many requests
description:
  - Reads the headers of the target's weights and its config.json; no payload, no GPU.
  - Follows the cache arithmetic of vLLM 0.20.1. The part for CUDA graphs and workspace is an estimate, and
    the result says what an error of 1 GiB would cost.
  - Fails when not one request of O(max_model_len) tokens fits. Warns when O(max_num_seqs) promises more
    requests than fit.
options:
  target:
    description:
      - Folder of the target model, with config.json and its weights.
    type: path
    required: true
  drafter_weights:
    description:
      - The drafter's C(.safetensors) file, its shard index, or the folder that holds either.
    type: path
  drafter_tensors:
    description:
      - What M(safetensors_info) returned as RV(ignore:tensors), to use instead of O(drafter_weights).
    type: dict
  gpus:
    description:
      - The GPUs as M(gpu_info) returns them; only C(memory_total_mib) is used.
    type: list
    elements: dict
    required: true
  tensor_parallel_size:
    description:
      - Number of GPUs that share the models. The first GPUs of O(gpus) are used.
    type: int
    default: 1
  gpu_memory_utilization:
    description:
      - Share of a GPU's memory that vLLM may use.
    type: float
    default: 0.92
  num_speculative_tokens:
    description:
      - Tokens drafted at a time.
    type: int
    default: 15
  max_model_len:
    description:
      - Longest request in tokens.
    type: int
    required: true
  max_num_seqs:
    description:
      - Requests that vLLM may run at a time.
    type: int
    required: true
  max_num_batched_tokens:
    description:
      - Tokens in a batch.
    type: int
    default: 8448
  language_model_only:
    description:
      - Whether the vision part of the target is left out.
    type: bool
    default: false
  prefix_caching:
    description:
      - Whether prefix caching is switched on. Linear attention then keeps one state more a request.
    type: bool
    default: false
  graphs_set_aside:
    description:
      - Whether vLLM sets memory aside for its CUDA graphs. It doesn't with C(enforce-eager), or with
        E(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0).
    type: bool
    default: true
attributes:
  check_mode:
    support: full
    description: Reads only, so it does the same in check mode.
  diff_mode:
    support: none
    description: Nothing is changed.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Look at the GPUs
  gpu_info:
  register: __gpus

- name: Reckon what fits
  vram_fit:
    target: /root/models/Qwen3.6-27B
    drafter_weights: /root/models/Qwen3.6-27B-DFlash/model.safetensors
    gpus: "{{ __gpus.gpus }}"
    tensor_parallel_size: 2
    max_model_len: 32768
    max_num_seqs: 16
    language_model_only: true
"""

RETURN = r"""
table:
  description: Sizes in GiB on each GPU, and numbers of requests.
  returned: success
  type: dict
  sample:
    usable_gib: 44.15
    target_gib: 25.07
    not_loaded_gib: 0.86
    drafter_gib: 1.73
    workspace_gib: 2.48
    graphs_gib: 5.86
    cache_gib: 9.02
    request_state_gib: 1.32
    token_kib: 50.0
    requests_short: 6
    requests_max_model_len: 3
    max_model_len: 32768
    max_num_seqs: 16
lines:
  description: The table as text for people.
  returned: success
  type: list
  elements: str
warnings:
  description: What the settings promise and the memory won't hold.
  returned: success
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.drafter_config import read_target
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.safetensors import read_checkpoint, tensors_from_json
from ansible.module_utils.dflash_rollout.vram import fit


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "target": {"type": "path", "required": True},
            "drafter_weights": {"type": "path"},
            "drafter_tensors": {"type": "dict"},
            "gpus": {"type": "list", "elements": "dict", "required": True},
            "tensor_parallel_size": {"type": "int", "default": 1},
            "gpu_memory_utilization": {"type": "float", "default": 0.92},
            "num_speculative_tokens": {"type": "int", "default": 15},
            "max_model_len": {"type": "int", "required": True},
            "max_num_seqs": {"type": "int", "required": True},
            "max_num_batched_tokens": {"type": "int", "default": 8448},
            "language_model_only": {"type": "bool", "default": False},
            "prefix_caching": {"type": "bool", "default": False},
            "graphs_set_aside": {"type": "bool", "default": True},
        },
        mutually_exclusive=[("drafter_weights", "drafter_tensors")],
        required_one_of=[("drafter_weights", "drafter_tensors")],
        supports_check_mode=True,
    )
    given = module.params
    try:
        result = fit(
            read_target(given["target"]),
            read_checkpoint(given["target"]).tensors,
            read_checkpoint(given["drafter_weights"]).tensors
            if given["drafter_weights"]
            else tensors_from_json(given["drafter_tensors"]),
            memory_of(given["gpus"]),
            tensor_parallel_size=given["tensor_parallel_size"],
            gpu_memory_utilization=given["gpu_memory_utilization"],
            speculative_tokens=given["num_speculative_tokens"],
            max_model_len=given["max_model_len"],
            max_num_seqs=given["max_num_seqs"],
            max_num_batched_tokens=given["max_num_batched_tokens"],
            language_model_only=given["language_model_only"],
            prefix_caching=given["prefix_caching"],
            graphs_set_aside=given["graphs_set_aside"],
        )
    except RolloutError as error:
        module.fail_json(msg=str(error))
    for warning in result.warnings:
        module.warn(warning)
    module.exit_json(changed=False, table=result.table, lines=result.lines)


def memory_of(gpus: list[dict]) -> list[int]:
    """Total memory of each GPU in MiB."""
    sizes = [gpu.get("memory_total_mib") for gpu in gpus]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise RolloutError(
            "a GPU does not say how much memory it has",
            found=str(sizes),
            expected="memory_total_mib above 0 for each",
            remedy="look at nvidia-smi on this host",
        )
    return sizes


if __name__ == "__main__":
    main()
