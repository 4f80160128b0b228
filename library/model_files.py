#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: which model files a host holds, room for those that it lacks, and their names once verified."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_files
short_description: Know, receive and place model files of a host
description:
  - With O(state=verified), says for each file whether the host holds it. A file that was read before is known by a stamp
    beside it, which has its device, inode, size, mtime and ctime, and no byte of it is read.
  - With O(state=receiving), makes for each file that isn't verified a file C(PATH.incoming) to arrive in, of O(owner),
    after a look at the space. What an earlier transfer left is kept. A damaged file is copied, to be mended in the copy.
  - With O(state=placed), reads what arrived in full, and renames it to its path if it has its digest, with mode 0644,
    owned by the user of the task, durable and stamped.
  - Fails, with nothing changed, where a path holds another file than the one wanted.
options:
  files:
    description: The files. What another call returned as RV(missing) can be given again.
    type: list
    elements: dict
    required: true
    suboptions:
      path: {description: Where the host is to hold it., type: path, required: true}
      sha256: {description: The digest that it must have., type: str, required: true}
      size: {description: Its size in bytes., type: int}
      source: {description: Where the control node has it., type: str, default: ""}
      state: {description: As returned by another call., type: str, choices: [verified, missing, damaged], default: missing}
      incoming: {description: As returned by another call., type: str, default: ""}
      here: {description: As returned by another call., type: int, default: 0}
      ranges: {description: As returned by another call., type: raw}
      read_bytes: {description: As returned by another call., type: int, default: 0}
      stamp_dir: {description: As returned by another call., type: str, default: ""}
  state:
    description: See above.
    type: str
    choices: [verified, receiving, placed]
    default: verified
  verify:
    description:
      - V(stamp) trusts a matching stamp.
      - V(full) reads the file in any case. It finds what no stamp can, for example bit rot.
    type: str
    choices: [stamp, full]
    default: stamp
  stamp_dir:
    description: Folder for stamps, where the files' own folder may be read-only. Made if it is missing.
    type: path
    default: ""
  owner:
    description:
      - Numeric user who receives, for O(state=receiving).
      - Without it a file stays whose it is, since a job of an earlier run may still be writing to it.
    type: int
  superseded:
    description: Globs of partials that are removed once all files are placed.
    type: list
    elements: str
    default: []
  discard:
    description: Remove what arrived if it has a wrong digest, instead of keeping it for another attempt to mend.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Reads, verifies and looks at the space, but makes, renames and stamps nothing.
  diff_mode:
    support: none
    description: A model file has no readable difference.
notes:
  - A stamp is not reported as a change.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Look for the drafter
  model_files:
    files:
      - path: "/opt/vllm-dflash/drafters/{{ drafter_digest }}/model.safetensors"
        sha256: "{{ drafter_digest }}"
  register: __held

- name: Put what arrived in place
  model_files:
    state: placed
    files: "{{ __held.missing }}"
"""

RETURN = r"""
files:
  description: All files, as C(missing) has them.
  returned: success
  type: list
  elements: dict
missing:
  description: The files that the host does not hold yet.
  returned: success
  type: list
  elements: dict
  contains:
    state: {description: V(missing) or V(damaged)., type: str}
    incoming: {description: Where it arrives., type: str}
    here: {description: Bytes that an earlier transfer left., type: int}
    ranges:
      description: The damaged byte ranges as pairs of first and end; null where all of it is to be brought.
      type: list
      elements: list
read_bytes:
  description: How many bytes of the files were read.
  returned: success
  type: int
  sample: 0
rsync:
  description: Where rsync is on this host; empty where it isn't.
  returned: receiving
  type: str
aes:
  description: Whether the processor of this host has instructions for AES.
  returned: receiving
  type: bool
msg:
  description: One line for people.
  returned: success
  type: str
  sample: 1 file to bring (model.safetensors), 3.46 GB
changed:
  description: Whether a file was made or put in place.
  returned: always
  type: bool
"""

import shutil

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import transfers
from ansible.module_utils.dflash_rollout.errors import RolloutError

FILE = {
    "path": {"type": "path", "required": True},
    "sha256": {"type": "str", "required": True},
    "size": {"type": "int"},
    "source": {"type": "str", "default": ""},
    "state": {"type": "str", "choices": ["verified", "missing", "damaged"], "default": "missing"},
    "incoming": {"type": "str", "default": ""},
    "here": {"type": "int", "default": 0},
    "ranges": {"type": "raw"},
    "read_bytes": {"type": "int", "default": 0},
    "stamp_dir": {"type": "str", "default": ""},
}


def main():
    module = AnsibleModule(
        argument_spec={
            "files": {"type": "list", "elements": "dict", "required": True, "options": FILE},
            "state": {"type": "str", "choices": ["verified", "receiving", "placed"], "default": "verified"},
            "verify": {"type": "str", "choices": ["stamp", "full"], "default": "stamp"},
            "stamp_dir": {"type": "path", "default": ""},
            "owner": {"type": "int"},
            "superseded": {"type": "list", "elements": "str", "default": []},
            "discard": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    params, check = module.params, module.check_mode
    result = {"changed": False}
    try:
        if params["state"] == "verified":
            wanted = [
                transfers.Wanted(**{key: file[key] for key in ("path", "sha256", "size", "source")})
                for file in params["files"]
            ]
            held = transfers.look(wanted, verify=params["verify"], stamp_dir=params["stamp_dir"], check=check)
        else:
            held = [transfers.held_from_json(file) for file in params["files"]]
            if params["state"] == "receiving":
                owner = None if params["owner"] is None else (params["owner"], params["owner"])
                held = transfers.receive(held, owner=owner, check=check)
                result = {
                    "changed": bool(held),
                    "rsync": shutil.which("rsync") or "",
                    "aes": transfers.has_aes(),
                }
            else:
                held, changed = transfers.place(
                    held, superseded=params["superseded"], discard=params["discard"], check=check
                )
                result = {"changed": changed}
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        files=[file.as_json() for file in held],
        missing=[file.as_json() for file in held if file.state != "verified"],
        read_bytes=sum(file.read_bytes for file in held),
        msg=transfers.summary(held),
        **result,
    )


if __name__ == "__main__":
    main()
