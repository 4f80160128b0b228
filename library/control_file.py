#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Documentation of the action plugin control_file (action_plugins/control_file.py), which does the work."""

from __future__ import annotations

DOCUMENTATION = r"""
module: control_file
short_description: Keep a text file on the control node
description:
  - Writes the file whole or not at all, with the folders that it needs, as the user who runs the play.
  - Runs inside of Ansible on the control node, whatever host the task is for. C(delegate_to) is there for the reader of the
    output, who sees by it that no host changed.
options:
  path:
    description: The file.
    type: path
    required: true
  content:
    description: Its text.
    type: str
    required: true
attributes:
  check_mode:
    support: full
    description: Writes nothing.
  diff_mode:
    support: full
    description: Shows what is going to be another text.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Keep the record of the last switch
  control_file:
    path: "{{ rollout_records }}/{{ inventory_hostname }}.json"
    content: "{{ sglang_found.switch | to_nice_json }}\n"
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The file.
  returned: success
  type: str
diff:
  description: The text before and after.
  returned: in diff mode, if it changes
  type: dict
"""
