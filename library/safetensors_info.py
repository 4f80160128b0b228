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
      - With O(url), where that file is going to be; a file that is here already is read instead of the URL.
    type: path
    required: true
  url:
    description: Read the header of the file at this URL, by requests for a part.
    type: str
    default: ""
  headers:
    description: Headers that go with the requests, such as a token.
    type: dict
    default: {}
  sha256:
    description: The file's digest, under which its header is kept in O(cache_dir).
    type: str
    default: ""
  cache_dir:
    description:
      - Folder for headers that are known, so that the file isn't read again.
      - A header is kept there once the file is verified, which its stamp says, beside it or in this folder (M(model_files)).
    type: path
    default: ""
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
file_bytes:
  description: Size of the file or all shards, headers included.
  returned: success
  type: int
  sample: 3460431112
files:
  description: The files that were read, the index first where there is one.
  returned: success
  type: list
  elements: str
  sample: [/root/models/Qwen3.6-27B-DFlash/model.safetensors]
"""

import os

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.model_file import stamped_digest
from ansible.module_utils.dflash_rollout.remote_header import read_remote_header
from ansible.module_utils.dflash_rollout.safetensors import known_header, read_checkpoint


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "url": {"type": "str", "default": "", "no_log": True},
            "headers": {"type": "dict", "default": {}, "no_log": True},
            "sha256": {"type": "str", "default": ""},
            "cache_dir": {"type": "path", "default": ""},
        },
        supports_check_mode=True,
    )
    params = module.params

    def read():
        if params["url"] and not os.path.exists(params["path"]):
            return read_remote_header(params["url"], params["headers"])
        return read_checkpoint(params["path"])

    try:
        # What is at a URL, or was never verified, may be another file than the one of this digest: its header isn't kept.
        path, cache, digest = params["path"], params["cache_dir"], params["sha256"].strip().lower()
        keep = not module.check_mode and os.path.isfile(path)
        keep = keep and digest in (stamped_digest(path), stamped_digest(path, cache))
        header = known_header(cache, digest, read, keep=keep)
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, **header)


if __name__ == "__main__":
    main()
