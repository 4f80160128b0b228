#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: is this host fit for vLLM with DFlash."""

from __future__ import annotations

DOCUMENTATION = r"""
module: host_preflight
short_description: Look whether a host is fit for vLLM with DFlash
description:
  - Looks at GPUs, driver, foreign processes on the GPUs, the port, disk, Python with its headers, compiler, systemd
    and the target's folder, and returns every reason why the host is not fit.
  - Reads only. Never fails because of what it finds, so that one run shows everything; wrong options fail.
options:
  gpus:
    description: Number of GPUs that the launch needs.
    type: int
    required: true
  min_driver:
    description: Oldest NVIDIA driver.
    type: str
    required: true
  min_compute_capability:
    description: Oldest GPU generation.
    type: str
    required: true
  root:
    description: Folder that receives venvs and weights.
    type: path
    required: true
  needs:
    description: What each path below O(root) takes in bytes; those that are there already count nothing.
    type: dict
    required: true
  python:
    description: Interpreter of the venv.
    type: path
    required: true
  target:
    description: Folder of the target model.
    type: path
    required: true
  port:
    description: Port of the old and the new server.
    type: int
    required: true
  listeners:
    description: Who holds the port, as M(serving_info) returns it.
    type: list
    elements: dict
    default: []
  known_units:
    description: Units that may hold the port and GPU memory.
    type: list
    elements: str
    required: true
  known_group:
    description: The control group of the server before. Processes in it may hold GPU memory as well.
    type: str
    default: ""
  target_sha256:
    description: File of the target's folder to the SHA-256 that it must have. A file is read once, then known by its stamp.
    type: dict
    default: {}
  stamps:
    description: Folder of these stamps.
    type: path
    default: /var/lib/vllm-dflash/stamps
  target_comes:
    description: The roll-out is going to bring the target, so that files which are missing are no reason.
    type: bool
    default: false
  needs_rsync:
    description: Files come by rsync.
    type: bool
    default: true
  trust_remote_code:
    description: Whether the launch runs Python code of the model folders. Then all of it has to be in O(target_sha256).
    type: bool
    default: false
  service_user:
    description: Who the server runs as. The target must not be its to change.
    type: str
    default: ""
  service_groups:
    description: More groups of that user in the unit.
    type: list
    elements: str
    default: []
  open_to_all:
    description: Whether the server listens on every address and asks for no API key, which is worth a warning.
    type: bool
    default: false
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
- name: Look at the host
  host_preflight:
    gpus: 2
    min_driver: "580"
    min_compute_capability: "8.0"
    root: /opt/vllm-dflash
    needs:
      /opt/vllm-dflash/venvs/0123456789abcdef: 17179869184
    python: /usr/bin/python3
    target: /root/models/Qwen3.6-27B
    port: 30000
    known_units: [sglang.service]
  register: __host
"""

RETURN = r"""
target_here:
  description: Whether the target's folder is complete.
  returned: success
  type: bool
findings:
  description: Every reason why the host is not fit, one sentence each.
  returned: always
  type: list
  elements: str
  sample: ["NVIDIA driver: found 535.1; expected 580 or later (the wheel is built for CUDA 13). What to do: update …"]
notes:
  description: What doesn't stand in the way and should be known; each is a warning too.
  returned: always
  type: list
  elements: str
gpus:
  description: The GPUs as M(gpu_info) returns them.
  returned: always
  type: list
  elements: dict
  sample: [{index: 0, name: NVIDIA RTX A6000, memory_total_mib: 49140}]
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.preflight import Wanted, judge, notes, numbers, observe


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "gpus": {"type": "int", "required": True},
            "min_driver": {"type": "str", "required": True},
            "min_compute_capability": {"type": "str", "required": True},
            "root": {"type": "path", "required": True},
            "needs": {"type": "dict", "required": True},
            "python": {"type": "path", "required": True},
            "target": {"type": "path", "required": True},
            "port": {"type": "int", "required": True},
            "listeners": {"type": "list", "elements": "dict", "default": []},
            "known_units": {"type": "list", "elements": "str", "required": True},
            "known_group": {"type": "str", "default": ""},
            "target_sha256": {"type": "dict", "default": {}},
            "stamps": {"type": "path", "default": "/var/lib/vllm-dflash/stamps"},
            "target_comes": {"type": "bool", "default": False},
            "needs_rsync": {"type": "bool", "default": True},
            "trust_remote_code": {"type": "bool", "default": False},
            "service_user": {"type": "str", "default": ""},
            "service_groups": {"type": "list", "elements": "str", "default": []},
            "open_to_all": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    arguments = dict(module.params)
    listeners = arguments.pop("listeners")
    for name in ("min_driver", "min_compute_capability"):
        try:
            numbers(arguments[name])
        except ValueError as error:
            module.fail_json(msg=f"{name}: {error}, as 580.65 would be.")
    try:
        needs = {path: int(size) for path, size in arguments["needs"].items()}
    except (TypeError, ValueError):
        module.fail_json(msg=f"needs: found {arguments['needs']}; expected a number of bytes for each path.")
    lists = {name: tuple(arguments[name]) for name in ("known_units", "service_groups")}
    wanted = Wanted(**{**arguments, **lists, "needs": needs})
    seen = observe(wanted, listeners, module.check_mode)
    said = notes(seen, wanted)
    for note in said:
        module.warn(note)
    module.exit_json(
        changed=False,
        findings=[str(finding) for finding in judge(seen, wanted)],
        notes=said,
        gpus=[asdict(gpu) for gpu in seen.gpus],
        target_here=not seen.target_missing,
    )


if __name__ == "__main__":
    main()
