#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Documentation of the action plugin push_files (action_plugins/push_files.py), which does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: push_files
short_description: Send files from the control node to a host by rsync, resumable and verified
description:
  - Makes room for each file as C(PATH.incoming), has rsync bring what is missing of it, verifies it and gives it its name.
  - What arrived is kept when the connection breaks or the playbook ends; another run goes on from it.
  - rsync runs over an ssh connection of its own, as the inventory connects, without compression, with AES-GCM first where
    both processors have instructions for AES. On the host it runs as the user who logs in, not as root.
  - Says every few seconds how far it is.
options:
  files:
    description: What M(model_files) returned as RV(ignore:missing), with a C(source) each.
    type: list
    elements: dict
    required: true
  superseded:
    description: Globs of partials that are removed once all files are placed.
    type: list
    elements: str
    default: []
  limit_s:
    description: Seconds that one file may take. rsync on the host ends then too, if the control node is still there or not.
    type: int
    default: 7200
attributes:
  check_mode:
    support: full
    description: Looks at the space, and says what would be sent.
  diff_mode:
    support: none
    description: A model file has no readable difference.
notes:
  - For connections ssh and local.
  - Set C(throttle) on the task, so that one uplink isn't shared by too many.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Send the drafter
  push_files:
    files: "{{ __held.missing }}"
  throttle: 4
"""

RETURN = r"""
files:
  description: The files, as M(model_files) returns them.
  returned: success
  type: list
  elements: dict
sent_bytes:
  description: Bytes that rsync sent for the files, which is less than their size where a part was there.
  returned: when not in check mode
  type: int
  sample: 3460426240
msg:
  description: One line for people.
  returned: always
  type: str
changed:
  description: Whether files were sent.
  returned: always
  type: bool
"""
