#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: know the digest of a model file without reading it twice; put a verified one in place."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_file
short_description: Verify a model file, and put a transferred one in place
description:
  - Returns the SHA-256 of a file. When the file was read before and a stamp beside it has the same device,
    inode, size, mtime and ctime, no byte of the file is read.
  - With O(incoming), verifies that file and renames it to O(path), with mode 0644, owned by the user of the
    task, durable, and stamped.
  - Fails when the digest is not O(sha256), with nothing changed under O(path).
options:
  path:
    description: The model file; with O(incoming), where it is to be.
    type: path
    required: true
  incoming:
    description:
      - A transferred file on the same filesystem as O(path), always read in full.
      - When it is absent and O(path) exists, O(path) is looked at instead.
    type: path
  sha256:
    description: The digest that the file must have. Empty means any.
    type: str
    default: ""
  verify:
    description:
      - V(stamp) trusts a matching stamp.
      - V(full) reads the file in any case. It finds what no stamp can, for example bit rot.
    type: str
    choices: [stamp, full]
    default: stamp
  stamp_dir:
    description:
      - Folder for the stamp, where the file's own folder may be read-only. Made if it is missing.
      - Not with O(incoming), whose stamp lies beside O(path).
    type: path
attributes:
  check_mode:
    support: full
    description: Reads and verifies, but renames nothing and writes no stamp.
  diff_mode:
    support: none
    description: A model file has no readable difference.
notes:
  - A stamp is not reported as a change.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Know the digest of the drafter on the control node
  model_file:
    path: "{{ drafter_source }}"
    sha256: "{{ drafter_sha256 }}"
    stamp_dir: "{{ lookup('env', 'HOME') }}/.cache/vllm-dflash"
  delegate_to: localhost
  register: __drafter_file

- name: Put the transferred drafter in place
  model_file:
    incoming: /opt/vllm-dflash/drafters/.incoming/model.safetensors
    path: "/opt/vllm-dflash/drafters/{{ __drafter_file.sha256 }}/model.safetensors"
    sha256: "{{ __drafter_file.sha256 }}"
"""

RETURN = r"""
path:
  description: The path that was asked for.
  returned: success
  type: str
  sample: /opt/vllm-dflash/drafters/model.safetensors
exists:
  description: Whether there is a file at RV(path), or, in check mode, would be.
  returned: success
  type: bool
  sample: true
sha256:
  description: SHA-256 of the file; null when there is none.
  returned: success
  type: str
  sample: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
size:
  description: Size of the file in bytes; null when there is none.
  returned: success
  type: int
  sample: 3458278136
read_bytes:
  description: How many bytes of the file were read.
  returned: success
  type: int
  sample: 0
changed:
  description: Whether a file was put in place.
  returned: always
  type: bool
"""

import os
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import model_file
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main():
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "incoming": {"type": "path"},
            "sha256": {"type": "str", "default": ""},
            "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
            "stamp_dir": {"type": "path"},
        },
        mutually_exclusive=[("incoming", "stamp_dir")],
        supports_check_mode=True,
    )
    params = module.params
    path, incoming, sha256 = params["path"], params["incoming"], params["sha256"]
    try:
        if incoming and os.path.lexists(incoming):
            result = model_file.install(incoming, path, sha256=sha256, check=module.check_mode)
        else:
            result = model_file.inspect(
                path,
                sha256=sha256,
                verify=params["verify"],
                stamp_dir=params["stamp_dir"] or "",
                check=module.check_mode,
            )
            # In check mode no transfer came before this.
            if incoming and not result.exists and not module.check_mode:
                raise RolloutError(f"Neither {incoming} nor {path} exists", remedy="transfer the file first")
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**asdict(result))


if __name__ == "__main__":
    main()
