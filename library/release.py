#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: make a release folder named by the digest of what is in it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: release
short_description: Make a release folder that is complete or not there at all
description:
  - Makes a folder below O(root), named by the digest of O(files), O(links) and O(modes). It is written under
    a temporary name, made durable and renamed, so that it is complete or not there. Leftovers of crashed runs
    are removed.
  - A release that is there is never changed. When it isn't exactly what is asked for, the module fails and
    names the file.
options:
  root:
    description: Folder of the releases. Made with mode 0755 if it is missing.
    type: path
    required: true
  files:
    description:
      - Relative path to text. C(@release@) in a text stands for the absolute path of the release.
      - A mapping is written as what reads it wants it, C(*.yaml) for C(vllm serve --config), C(*.json) as JSON, any other
        name as an C(EnvironmentFile=) of systemd.
      - Mode 0644, owned by the user of the task. Folders are made as needed, with mode 0755.
    type: dict
    required: true
  links:
    description: Relative path to an absolute target, which has to exist.
    type: dict
    default: {}
  modes:
    description: Relative path of a file to its mode, where that isn't 0644, as an octal string.
    type: dict
    default: {}
  link:
    description: Path of a symbolic link that shall lead to this release. Empty means none.
    type: path
    default: ""
  compare_to:
    description: Path of the release that serves now, for the difference that is shown. Empty means none.
    type: path
    default: ""
  secrets:
    description:
      - Environment variables that root alone may read, as C(<digest>) below O(secrets_dir) with mode 0600, an
        C(EnvironmentFile=) of systemd. The release gets C(secrets.json) with a salted digest of each, so that another
        value is another release. The salt is this host's own.
      - Files of releases that are gone are removed.
    type: dict
    default: {}
  api_keys:
    description: Name to API key of servers that are not a release, as C(<name>) below O(secrets_dir). Empty ones are left out.
    type: dict
    default: {}
  secrets_dir:
    description: Folder of the secrets, made with mode 0700. Needed with one of the two before.
    type: path
attributes:
  check_mode:
    support: full
    description: Makes and removes nothing. Targets of links need not exist yet.
  diff_mode:
    support: full
    description: Shows each file and link against those of O(compare_to).
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Make the release
  release:
    root: /opt/vllm-dflash/releases
    files:
      vllm.yaml: "{{ __vllm_service_config }}"
      drafter/config.json: "{{ __vllm_service_drafter.config | to_nice_json }}\n"
    links:
      drafter/model.safetensors: "/opt/vllm-dflash/drafters/{{ __drafter_file.sha256 }}/model.safetensors"
      venv: "/opt/vllm-dflash/venvs/{{ __vllm_lock_digest }}"
    compare_to: "{{ '/opt/vllm-dflash/releases/' ~ serving.release if serving.release is defined else '' }}"
  register: __vllm_service_release
"""

RETURN = r"""
digest:
  description: Name of the release.
  returned: success
  type: str
  sample: 0a1b2c3d4e5f6071
path:
  description: Absolute path of the release.
  returned: success
  type: str
  sample: /opt/vllm-dflash/releases/0a1b2c3d4e5f6071
changed:
  description: Whether the release was made or the link changed, or would be.
  returned: always
  type: bool
diff:
  description: Files and links that differ from O(compare_to).
  returned: in diff mode
  type: list
  elements: dict
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout import release, secret_files
from ansible.module_utils.dflash_rollout.errors import RolloutError


def main():
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "files": {"type": "dict", "required": True},
            "links": {"type": "dict", "default": {}},
            "modes": {"type": "dict", "default": {}},
            "link": {"type": "path", "default": ""},
            "compare_to": {"type": "path", "default": ""},
            "secrets": {"type": "dict", "default": {}, "no_log": True},
            "api_keys": {"type": "dict", "default": {}, "no_log": True},
            "secrets_dir": {"type": "path", "no_log": False},
        },
        supports_check_mode=True,
    )
    params, check = module.params, module.check_mode
    files, folder, secrets = dict(params["files"]), params["secrets_dir"], params["secrets"]
    api_keys = {name: key for name, key in params["api_keys"].items() if key}
    if (secrets or api_keys) and not folder:
        module.fail_json(msg="secrets_dir is needed for secrets")
    try:
        if secrets:
            files["secrets.json"] = secret_files.fingerprints(folder, secrets, check)
        content = release.read_content(files, params["links"], params["modes"])
        # The secrets are there first: a release that is there can be started.
        kept = bool(secrets) and secret_files.put(folder, content.digest, secrets, check)
        for name, key in api_keys.items():
            kept |= secret_files.put(folder, name, {f"{name.upper()}_API_KEY": key}, check)
        made = release.make(params["root"], content, check)
        pointed = bool(params["link"]) and release.point(params["link"], made, check)
        if folder and not check:
            secret_files.drop_orphans(folder, params["root"])
        result = {**asdict(made), "changed": made.changed or kept or pointed}
        if module._diff:
            result["diff"] = release.difference(made, content, params["compare_to"])
    except RolloutError as error:
        module.fail_json(msg=str(error))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
