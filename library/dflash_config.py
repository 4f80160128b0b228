#!/usr/bin/python
# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible module: the config.json of a DFlash drafter, with a source for every key."""

from __future__ import annotations

DOCUMENTATION = r"""
module: dflash_config
short_description: Render the config.json of a DFlash drafter
description:
  - Takes the geometry from the tensor shapes and sizes of the target from its config.json. What neither
    says comes, best first, from O(profile), O(shipped_config), the published drafters built in here, or a
    derivation that O(allow_derived) permits.
  - Nothing is guessed. What no source knows is refused, all of it in one message.
  - Refuses drafters of other families and of other targets, and a O(launch) that can't work.
  - Writes RV(config) to O(dest) atomically where O(dest) is given, and changes nothing when it is equal.
options:
  weights:
    description:
      - The drafter's C(.safetensors) file, its shard index, or the folder that holds either.
    type: path
  expect_sha256:
    description:
      - SHA-256 of O(weights), which are then read once and stamped. Revisions of one name differ in shape.
    type: str
  tensors:
    description:
      - What M(safetensors_info) returned as RV(ignore:tensors), to use instead of O(weights).
      - Lets a fresh host be checked with the header read on the control node.
    type: dict
  target_config:
    description:
      - The target's C(config.json) or the folder that holds it.
    type: path
  target:
    description:
      - The target's C(config.json) as a dictionary, to use instead of O(target_config).
    type: dict
  dest:
    description:
      - Where to write the config. Without it the config is only returned.
    type: path
  profile:
    description:
      - What the operator knows of this drafter and its tensors don't say.
      - Keys are C(mask_token_id), C(block_size), C(target_layer_ids) (counted from 0), C(layer_types),
        C(sliding_window) (tokens), C(rope_theta), C(rms_norm_eps) and C(hidden_act).
      - A key that the tensors or the target fix may be given as well and must then agree.
      - C(rope_parameters) holds RoPE settings besides theta, such as YaRN's.
      - C(drafter) names a published drafter built in here, such as C(z-lab/Qwen3.6-27B-DFlash).
    type: dict
    default: {}
  shipped_config:
    description:
      - The C(config.json) that came with the weights.
      - By default the one beside O(weights), unless it is O(dest). V("") ignores it.
    type: str
  shipped:
    description:
      - The content of that file, where it lies on another machine. O(shipped_config) is its name then.
    type: str
  allow_derived:
    description:
      - Keys that may be derived when no source knows them. Each derivation is a warning.
      - V(mask_token_id) is the first id after the last token of the tokenizer beside O(target_config), and
        V(layer_types) is full attention throughout. Both have been wrong for published drafters.
    type: list
    elements: str
    choices: [target_layer_ids, rope_theta, rms_norm_eps, hidden_act, mask_token_id, layer_types]
    default: [target_layer_ids, rope_theta, rms_norm_eps, hidden_act]
  launch:
    description:
      - Flags of the launch as in vLLM's YAML config, C(speculative-config) nested. The pair is then checked
        for tensor parallelism, KV cache type, block size and token budget.
    type: dict
  vllm_version:
    description:
      - The version that will serve. It decides which warnings apply.
    type: str
    default: 0.20.1
extends_documentation_fragment:
  - ansible.builtin.files
attributes:
  check_mode:
    support: full
  diff_mode:
    support: full
author:
  - vllm-dflash-rollout
"""

EXAMPLES = r"""
- name: Render the drafter's config
  dflash_config:
    weights: /opt/vllm-dflash/drafters/0123abcd/model.safetensors
    target_config: /root/models/Qwen3.6-27B/config.json
    dest: /opt/vllm-dflash/releases/.next/drafter/config.json
    profile:
      mask_token_id: 248070
      block_size: 16
      target_layer_ids: [1, 16, 31, 46, 61]
      layer_types:
        - sliding_attention
        - sliding_attention
        - sliding_attention
        - sliding_attention
        - full_attention
      sliding_window: 2048
      rope_theta: 10000000.0
"""

RETURN = r"""
config:
  description: The drafter's config, keys in the order of the file.
  returned: success
  type: dict
provenance:
  description: The source of each key; nested keys are named with a dot.
  returned: success
  type: dict
  sample:
    hidden_size: "tensors: rows of fc.weight"
    dflash_config.mask_token_id: profile
warnings:
  description: What is derived rather than known, and what this vLLM version will not honour.
  returned: success
  type: list
  elements: str
environment:
  description: Environment variables that this vLLM version needs to run this drafter.
  returned: success
  type: dict
"""

import os
from functools import partial

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.dflash_rollout.drafter_config import (
    DERIVABLE,
    DERIVED_BY_DEFAULT,
    read_target,
    render,
)
from ansible.module_utils.dflash_rollout.drafter_facts import (
    Facts,
    facts_of,
    first_free_token,
    parse_config,
    shipped_facts,
)
from ansible.module_utils.dflash_rollout.errors import RolloutError
from ansible.module_utils.dflash_rollout.files import difference, read_text, write_atomically
from ansible.module_utils.dflash_rollout.model_file import inspect
from ansible.module_utils.dflash_rollout.pairing import check_pair
from ansible.module_utils.dflash_rollout.safetensors import Tensor, read_checkpoint, tensors_from_json


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "weights": {"type": "path"},
            "expect_sha256": {"type": "str"},
            "tensors": {"type": "dict"},
            "target_config": {"type": "path"},
            "target": {"type": "dict"},
            "dest": {"type": "path"},
            "profile": {"type": "dict", "default": {}},
            "shipped_config": {"type": "str"},
            "shipped": {"type": "str"},
            "allow_derived": {
                "type": "list",
                "elements": "str",
                "choices": list(DERIVABLE),
                "default": list(DERIVED_BY_DEFAULT),
            },
            "launch": {"type": "dict"},
            "vllm_version": {"type": "str", "default": "0.20.1"},
        },
        add_file_common_args=True,
        mutually_exclusive=[
            ("weights", "tensors"),
            ("target_config", "target"),
            ("expect_sha256", "tensors"),
        ],
        required_by={"shipped": "shipped_config"},
        required_one_of=[("weights", "tensors"), ("target_config", "target")],
        supports_check_mode=True,
    )
    given = module.params
    target_name = given["target_config"] or "the target's config.json"
    try:
        tensors = read_tensors(given, module.check_mode)
        target = read_target(given["target_config"]) if given["target_config"] else given["target"]
        rendered = render(
            tensors,
            target,
            given["profile"],
            given["vllm_version"],
            shipped=read_shipped(given),
            allow_derived=given["allow_derived"],
            first_free_token=partial(first_free_token, given["target_config"])
            if given["target_config"]
            else None,
            where=given["weights"] or "the drafter",
            target_name=target_name,
        )
        warnings = list(rendered.warnings)
        if given["launch"] is not None:
            block_size = rendered.config["block_size"]
            warnings += check_pair(target, rendered.geometry, block_size, given["launch"], target_name)
        result = {
            "config": rendered.config,
            "provenance": rendered.provenance,
            "environment": rendered.environment,
            "changed": False,
        }
        if given["dest"]:
            result.update(write(module, given["dest"], rendered.text))
    except RolloutError as error:
        module.fail_json(msg=str(error))
    for warning in warnings:
        module.warn(warning)
    module.exit_json(**result)


def read_tensors(given: dict, check: bool) -> dict[str, Tensor]:
    """The drafter's tensors, after its digest was compared where one is expected."""
    if not given["weights"]:
        return tensors_from_json(given["tensors"])
    header = read_checkpoint(given["weights"])
    if given["expect_sha256"]:
        if len(header.files) != 1:
            raise RolloutError(
                "expect_sha256 needs a single weights file",
                found=f"{given['weights']}, {len(header.files) - 1} shards",
                remedy="leave it out, or give one file",
            )
        inspect(header.files[0], sha256=given["expect_sha256"], check=check)
    return header.tensors


def read_shipped(given: dict) -> Facts | None:
    """The facts of shipped, of shipped_config, or of the config.json beside the weights."""
    path = given["shipped_config"]
    if given["shipped"] is None:
        return shipped_facts(path, given["weights"], given["dest"])
    return facts_of(parse_config(given["shipped"], f"the shipped config {path}"), f"shipped config {path}")


def write(module: AnsibleModule, dest: str, text: str) -> dict[str, object]:
    """Bring `dest` to `text` and to the wanted mode and owner; `changed` and `diff` for the result."""
    try:
        before = read_text(dest)
    except (OSError, UnicodeDecodeError) as error:
        raise RolloutError(f"{dest} can't be read: {error}", remedy="give a file path as dest") from error
    changed = before != text
    if changed and not module.check_mode:
        try:
            write_atomically(dest, text)
        except OSError as error:
            raise RolloutError(
                f"{dest} can't be written: {error.strerror}",
                remedy=f"create {os.path.dirname(dest) or '.'} first, and check its space and permissions",
            ) from error
    arguments = module.load_file_common_arguments(module.params, path=dest)
    changed = module.set_fs_attributes_if_different(arguments, changed)
    return {"changed": changed, "diff": difference(dest, before, text)}


if __name__ == "__main__":
    main()
