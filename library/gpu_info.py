#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: the GPUs of a host and who holds memory on them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_info
short_description: List the GPUs of a host and the processes on them
description:
  - Asks C(nvidia-smi) for the GPUs and for the processes that hold GPU memory, and C(/proc) for the user, the
    command line and the systemd unit of each process.
  - Values of options such as C(--api-key) in a command line are replaced by C(***).
  - Fails when C(nvidia-smi) is missing, fails, lists no GPU or does not answer within 30 s.
options: {}
attributes:
  check_mode:
    support: full
    description: Reads only, so it does the same in check mode.
  diff_mode:
    support: none
    description: Nothing is changed.
notes:
  - Without root, the details of other users' processes may be unknown (null).
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Look at the GPUs
  gpu_info:
  register: __gpus

- name: Show who holds GPU memory
  ansible.builtin.debug:
    msg: "{{ item.pid }} ({{ item.user }}, {{ item.unit }}): {{ item.command }}"
  loop: "{{ __gpus.processes }}"
"""

RETURN = r"""
gpus:
  description: The GPUs in the order of C(nvidia-smi).
  returned: success
  type: list
  elements: dict
  contains:
    index:
      description: Number of the GPU.
      type: int
    uuid:
      description: Its UUID.
      type: str
    name:
      description: Product name.
      type: str
    memory_total_mib:
      description: Memory in MiB; null where the GPU does not say.
      type: int
    memory_used_mib:
      description: Used memory in MiB; null where the GPU does not say.
      type: int
    driver_version:
      description: Version of the driver.
      type: str
    compute_capability:
      description: Compute capability.
      type: str
  sample:
    - index: 0
      uuid: GPU-8f6bb9a2-6a4b-4a0e-a7b9-0c1f4f3f2b11
      name: NVIDIA RTX A6000
      memory_total_mib: 49140
      memory_used_mib: 44012
      driver_version: 580.95.05
      compute_capability: "8.6"
processes:
  description: One entry for each process and GPU.
  returned: success
  type: list
  elements: dict
  contains:
    pid:
      description: Process id.
      type: int
    gpu_uuid:
      description: UUID of the GPU.
      type: str
    gpu_index:
      description: Number of the GPU; null for a part of a GPU (MIG).
      type: int
    name:
      description: Process name by C(nvidia-smi), null where withheld.
      type: str
    used_mib:
      description: Memory held on that GPU in MiB, null where withheld.
      type: int
    user:
      description: Owner, as a number where it has no name.
      type: str
    command:
      description: Command line.
      type: str
    cgroup:
      description: Path in the control group hierarchy.
      type: str
    unit:
      description: The systemd unit, null for a process outside of any.
      type: str
  sample:
    - pid: 4711
      gpu_uuid: GPU-8f6bb9a2-6a4b-4a0e-a7b9-0c1f4f3f2b11
      gpu_index: 0
      name: python3
      used_mib: 44011
      user: root
      command: python3 -m sglang.launch_server --port 30000
      cgroup: /system.slice/sglang.service
      unit: sglang.service
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.gpus import query_gpus, query_processes


def main():
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    try:
        gpus = query_gpus()
        processes = query_processes(gpus)
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=False,
        gpus=[asdict(gpu) for gpu in gpus],
        processes=[asdict(process) for process in processes],
    )


if __name__ == "__main__":
    main()
