#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: run one transfer on a host as a transient unit, and follow it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: transfer_job
short_description: Run one transfer on a host as a transient systemd unit, and follow it
description:
  - Starts a program that brings a file as C(vllm-dflash-transfer-NAME.service), in a sandbox, as a user that can write
    O(write_paths) and nothing else. systemd ends it after O(limit_s), whatever became of the control node.
  - The program reads C($CREDENTIALS_DIRECTORY/config.json) and writes C($RUNTIME_DIRECTORY/progress.json) by atomic
    renames, with RV(bytes_done), RV(bytes_total), RV(bytes_sent), RV(bytes_received), RV(peers), RV(seconds), C(error)
    and C(state), which is C(starting), C(checking), C(running), C(complete) or C(failed).
  - It can be asked again after a lost connection. A running job with the same options is left alone, with others it is
    replaced, and one that ended is started again.
options:
  state:
    description:
      - V(started) has the job run.
      - V(followed) watches it for O(follow_timeout), or until it is finished or has failed, which is no failure of the
        module; see RV(failure).
      - V(stopped) ends it and forgets it. What it brought so far stays.
    type: str
    choices: [started, followed, stopped]
    required: true
  name:
    description: Name of the transfer on this host.
    type: str
    required: true
  argv:
    description: The program, absolute, and its arguments, which everyone on the host can read.
    type: list
    elements: str
  config:
    description: What the program is told, as JSON in a file that only its user can read.
    type: dict
    default: {}
  secrets:
    description:
      - Added to O(config), for tokens. They are never in arguments, in the unit, in the journal, or in what this module
        returns.
    type: dict
    default: {}
  user:
    description: Who it runs as. Not root.
    type: str
  write_paths:
    description: The files that it brings. They are given to O(user), and made where they are missing.
    type: list
    elements: path
    default: []
  limit_s:
    description: For how many seconds it may run.
    type: int
  allow_addresses:
    description:
      - Addresses and networks that it may talk to and that may talk to it; all when this is empty.
      - systemd enforces it with the kernel's BPF filters on unified control groups. Where the kernel has none, systemd
        starts the unit all the same, and says so in its log.
    type: list
    elements: str
    default: []
  place:
    description:
      - With O(state=followed), files as M(model_files) returned them as RV(model_files#module:missing). As soon as the job
        is finished it is ended, so that it can't write to them any more, and they are verified and get their names as
        with O(model_files#module:state=placed). A host that is done doesn't wait for the others then.
      - A file that isn't what was wanted is a failure of the module.
    type: list
    elements: dict
    default: []
  superseded:
    description: As of M(model_files).
    type: list
    elements: str
    default: []
  discard:
    description: As of M(model_files).
    type: bool
    default: false
  follow_timeout:
    description: For how many seconds one call with O(state=followed) waits.
    type: float
    default: 5
attributes:
  check_mode:
    support: full
    description: Starts and stops nothing. A job that would be followed counts as finished.
  diff_mode:
    support: none
    description: There is nothing to compare.
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Start the download
  transfer_job:
    state: started
    name: drafter-0a1b2c3d
    argv: [/usr/bin/python3, -IB, /opt/vllm-dflash/transfer/url.py]
    config: {url: "https://models.example.org/model.safetensors", path: /opt/vllm-dflash/drafters/0a/model.safetensors.incoming}
    secrets: {token: "{{ transfer_token }}"}
    user: vllm-dflash-transfer
    write_paths: [/opt/vllm-dflash/drafters/0a/model.safetensors.incoming]
    limit_s: 3600

- name: Follow it
  transfer_job:
    state: followed
    name: drafter-0a1b2c3d
    place: "{{ __ready.missing }}"
  register: __job
  until: __job.finished or __job.failure != ''
  retries: 720
  delay: 0

- name: Leave nothing behind
  transfer_job:
    state: stopped
    name: drafter-0a1b2c3d
"""

RETURN = r"""
unit:
  description: The unit of the job.
  returned: success
  type: str
  sample: vllm-dflash-transfer-drafter-0a1b2c3d.service
finished:
  description: Whether the file is complete, and with O(place) has its name; else the job may go on and serve others.
  returned: followed
  type: bool
failure:
  description: Why the file won't come, and what to do; empty while it may.
  returned: followed
  type: str
percent:
  description: How much of the file is there, rounded down.
  returned: followed
  type: int
mb_per_s:
  description: How fast it came during this call, in 10^6 bytes per second; 0 when the call was too short to say.
  returned: followed
  type: float
bytes_done:
  description: Bytes of the file that are there and good.
  returned: followed
  type: int
bytes_total:
  description: Bytes of the file.
  returned: followed
  type: int
bytes_sent:
  description: Bytes of the file that this host sent to others.
  returned: followed
  type: int
bytes_received:
  description: Bytes of the file that this host received, with those that travelled twice.
  returned: followed
  type: int
peers:
  description: From how many hosts it receives, or to how many it sends.
  returned: followed
  type: int
seconds:
  description: Seconds from the start of the job, until the file was complete.
  returned: followed
  type: float
msg:
  description: One line for people.
  returned: success
  type: str
  sample: 61 % of 3.46 GB, 212 MB/s, 6 s left
changed:
  description: Whether a job was started or stopped, or files got their names.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import transfer_job, transfers
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main():
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["started", "followed", "stopped"], "required": True},
            "name": {"type": "str", "required": True},
            "argv": {"type": "list", "elements": "str"},
            "config": {"type": "dict", "default": {}},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "user": {"type": "str"},
            "write_paths": {"type": "list", "elements": "path", "default": []},
            "limit_s": {"type": "int"},
            "allow_addresses": {"type": "list", "elements": "str", "default": []},
            "place": {"type": "list", "elements": "dict", "default": []},
            "superseded": {"type": "list", "elements": "str", "default": []},
            "discard": {"type": "bool", "default": False},
            "follow_timeout": {"type": "float", "default": 5},
        },
        required_if=[("state", "started", ("argv", "user", "limit_s"))],
        supports_check_mode=True,
    )
    params = module.params
    name, check = params["name"], module.check_mode
    try:
        unit = transfer_job.unit_name(name)
        if params["state"] == "started":
            job = transfer_job.Job(
                name=name,
                config={**params["config"], **params["secrets"]},
                **{key: params[key] for key in ("argv", "user", "limit_s", "write_paths", "allow_addresses")},
            )
            changed = transfer_job.start(job, check=check)
            result = {"changed": changed, "msg": f"{unit} {'started' if changed else 'runs already'}"}
        elif params["state"] == "stopped":
            changed = transfer_job.stop(name, check=check)
            result = {"changed": changed, "msg": f"{unit} {'stopped' if changed else 'was not there'}"}
        elif check:
            result = {"changed": False, "finished": True, "failure": "", "msg": "nothing runs in check mode"}
        else:
            result = {"changed": False, **transfer_job.follow(name, timeout=params["follow_timeout"])}
            # The program's own words; `failed` and `error` mean something else to Ansible.
            for key in ("state", "error"):
                del result[key]
            if result["finished"] and params["place"]:
                files = [transfers.held_from_json(file) for file in params["place"]]
                with transfer_job.ended(name):
                    _, result["changed"] = transfers.place(
                        files, superseded=params["superseded"], discard=params["discard"]
                    )
    except (RolloutError, OSError) as error:
        # Who follows asks until one of these says that it is over.
        over = {"finished": False, "failure": str(error)} if params["state"] == "followed" else {}
        module.fail_json(msg=str(error), **over)
    module.exit_json(unit=unit, **result)


if __name__ == "__main__":
    main()
