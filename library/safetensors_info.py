#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: what a safetensors checkpoint holds, from its header alone."""

from __future__ import annotations

DOCUMENTATION = r"""
module: safetensors_info
short_description: Read the header of a safetensors checkpoint
description:
  - Returns names, dtypes and shapes of all tensors. Reads the header only, whatever the size of the payload.
  - Checks that the file is exactly as long as its header promises.
  - Fails with a diagnosis and a remedy for damaged files, and for what is no safetensors file at all, such as
    a Git-LFS pointer, an error page or a GGUF file.
options:
  path:
    description:
      - A C(.safetensors) file, a shard index (C(.safetensors.index.json)), or a folder that holds either.
    type: path
    required: true
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
- name: Look at the drafter
  safetensors_info:
    path: /root/models/Qwen3.6-27B-DFlash/model.safetensors
  register: __drafter_header
"""

RETURN = r"""
tensors:
  description: Each tensor by name.
  returned: success
  type: dict
  sample:
    fc.weight:
      dtype: BF16
      shape: [5120, 25600]
metadata:
  description: The C(__metadata__) of the file; empty where there is none.
  returned: success
  type: dict
  sample:
    format: pt
payload_bytes:
  description: Size of all tensors in bytes.
  returned: success
  type: int
  sample: 3460426240
files:
  description: The files that were read, the index first where there is one.
  returned: success
  type: list
  elements: str
  sample: [/root/models/Qwen3.6-27B-DFlash/model.safetensors]
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.safetensors import read_checkpoint


def main() -> None:
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}}, supports_check_mode=True
    )
    try:
        header = read_checkpoint(module.params["path"])
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **header.as_json())


if __name__ == "__main__":
    main()
