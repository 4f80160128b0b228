#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Documentation of the action plugin model_source (action_plugins/model_source.py), which does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_source
short_description: Know a model file or folder on the control node
description:
  - Returns name, SHA-256 and size of each file, and the header of a checkpoint if asked.
  - Runs inside of Ansible on the control node. A file that was read before is known by its stamp in O(cache); while one
    host's task reads it, the others wait and find that stamp.
options:
  path:
    description: A file, or a folder, whose files are taken except hidden ones.
    type: path
    required: true
  sha256:
    description: The digest that a single file must have. Empty means any.
    type: str
    default: ""
  digests:
    description: Digests that files of a folder must have, by name relative to it. Others may have any.
    type: dict
    default: {}
  verify:
    description: V(stamp) trusts a matching stamp, V(full) reads the files in any case.
    type: str
    choices: [stamp, full]
    default: stamp
  cache:
    description: Folder for stamps and headers. Made if it is missing.
    type: path
    required: true
  header:
    description: Return the header of the safetensors checkpoint too.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Does the same in check mode; it writes to O(cache) alone.
  diff_mode:
    support: none
    description: Nothing of the roll-out is changed.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Know the drafter
  model_source:
    path: /root/models/Qwen3.6-27B-DFlash/model.safetensors
    cache: "{{ lookup('env', 'HOME') }}/.cache/vllm-dflash-rollout/stamps"
    header: true
  register: __drafter
"""

RETURN = r"""
files:
  description: The files, by name relative to O(path), empty for a single one.
  returned: success
  type: list
  elements: dict
  sample: [{name: "", source: /root/models/d/model.safetensors, sha256: 9f86d081…, size: 3458278136}]
sha256:
  description: The digest of a single file.
  returned: success
  type: str
size:
  description: Bytes of all files.
  returned: success
  type: int
header:
  description: As M(safetensors_info) returns it.
  returned: with O(header)
  type: dict
read_bytes:
  description: Bytes of the files that were read to know this.
  returned: success
  type: int
  sample: 0
"""
