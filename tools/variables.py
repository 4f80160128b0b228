#!/usr/bin/env python3
"""Writes docs/variables.md from the roles' argument specs; with --check, says whether it is up to date."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
ROLES = (
    "rollout",
    "gpu_host",
    "vllm",
    "drafter",
    "transfer",
    "vllm_service",
    "sglang",
    "switchover",
    "calibrate",
)
HEAD = """# Variables

Generated from the roles' `meta/argument_specs.yml` by `make docs`. Set them in `inventory/group_vars/`.
"""


def prose(description: str | list[str] | None) -> str:
    """Ansible's markup (`C(x)`, `O(x)`, `V(x)`) as Markdown, on one line, safe in a table."""
    text = " ".join(description) if isinstance(description, list) else description or ""
    return re.sub(r"\b[COVM]\(([^)]*)\)", r"`\1`", " ".join(text.split())).replace("|", "\\|")


def rows(options: dict, prefix: str = ""):
    """One table row an option, those inside dicts after their dict."""
    for name, option in options.items():
        default = "required" if option.get("required") else f"`{json.dumps(option.get('default'))}`"
        kind = option.get("type", "str") + (f" of {option['elements']}" if "elements" in option else "")
        choices = (
            f" One of {', '.join(f'`{choice}`' for choice in option['choices'])}."
            if "choices" in option
            else ""
        )
        what = f"{prose(option.get('description'))}{choices}"
        yield f"| `{prefix}{name}` | {kind} | {'' if prefix else default} | {what} |"
        yield from rows(option.get("options", {}), f"{prefix}{name}.")


def render() -> str:
    """The whole document."""
    parts = [HEAD]
    for role in ROLES:
        spec = yaml.safe_load((ROOT / "roles" / role / "meta" / "argument_specs.yml").read_text())[
            "argument_specs"
        ]["main"]
        parts.append(
            f"\n## {role}\n\n{prose(spec['short_description'])}. {prose(spec.get('description'))}".rstrip()
            + "\n"
        )
        parts.append("\n| variable | type | default | what |\n|---|---|---|---|\n")
        parts.extend(f"{row}\n" for row in rows(spec["options"]))
    return "".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    target = ROOT / "docs" / "variables.md"
    if not arguments.check:
        target.write_text(render())
        return 0
    if target.read_text() == render():
        return 0
    print(
        "docs/variables.md is not what the argument specs say. Run `make docs` and commit it.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
