"""`inspect` and `render`, for people without a playbook at hand; the same code as the modules.

    python3 -m dflash_rollout.drafter_cli inspect FILE [--target FOLDER]
    python3 -m dflash_rollout.drafter_cli render FILE --target FOLDER [--profile FILE.json] [--dest FILE]

render prints the config to stdout, and its provenance and warnings to stderr.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from typing import Any

from .drafter_config import (
    DERIVABLE,
    DERIVED_BY_DEFAULT,
    ELSEWHERE,
    Rendered,
    known_drafters,
    read_target,
    render,
    target_of,
)
from .drafter_facts import first_free_token, read_config, shipped_facts
from .drafter_layout import Geometry, read_geometry
from .errors import RolloutError
from .files import read_text, write_atomically
from .known_drafters import KNOWN
from .safetensors import Header, read_checkpoint

VERBS = ("inspect", "render")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of VERBS (the first of `arguments`); returns the exit status, 1 for a refusal."""
    parsed = _parser().parse_args(arguments)
    try:
        return parsed.run(parsed)
    except RolloutError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dflash_rollout", description="Look at a DFlash drafter.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    look = verbs.add_parser("inspect", help="geometry, family and size of a drafter; what is unknown")
    look.add_argument("weights", help=".safetensors file, shard index, or folder")
    look.add_argument("--target", default="", help="the target's folder or config.json")
    look.set_defaults(run=run_inspect)

    make = verbs.add_parser("render", help="a drafter's config.json with a source for every value")
    make.add_argument("weights", help=".safetensors file, shard index, or folder")
    make.add_argument("--target", required=True, help="the target's folder or config.json")
    make.add_argument("--profile", default="", help="JSON file with what the operator knows")
    make.add_argument("--drafter", default="", help="name of a published drafter, e.g. " + KNOWN[0].name)
    make.add_argument(
        "--shipped-config", help="config.json that came with the weights; the one beside them if not given"
    )
    make.add_argument(
        "--allow-derived",
        action="append",
        default=[],
        choices=sorted(set(DERIVABLE) - set(DERIVED_BY_DEFAULT)),
        help="derive this key where nothing knows it (may be wrong)",
    )
    make.add_argument("--vllm-version", default="0.20.1", help="the version that will serve")
    make.add_argument("--dest", default="", help="write the config here; without it, print it")
    make.set_defaults(run=run_render)
    return parser


def run_inspect(arguments: argparse.Namespace) -> int:
    """Print what the header says, and what it can't say."""
    header = read_checkpoint(arguments.weights)
    geometry = read_geometry(header.tensors, arguments.weights)
    lines = describe(header, geometry)
    if arguments.target:
        target = target_of(read_target(arguments.target), arguments.target)
        width = target.size("hidden_size")
        fits = geometry.fc_columns % width == 0
        lines.append(
            f"  taps                {geometry.fc_columns // width} (fc columns / target's {width})"
            if fits
            else f"  taps                none: not a drafter for a target of width {width}"
        )
        known = known_drafters(geometry, target)
        names = " or ".join(entry.name for entry in known)
        lines.append(f"  published drafters  {names or 'none of this geometry for this target'}")
    unknown = textwrap.wrap(", ".join(ELSEWHERE), 70)
    lines += [f"  {'' if index else 'not in the file':<20}{text}" for index, text in enumerate(unknown)]
    print("\n".join(lines))
    return 0


def run_render(arguments: argparse.Namespace) -> int:
    """Print or write the config; the provenance table and warnings go to stderr."""
    header = read_checkpoint(arguments.weights)
    profile = read_config(arguments.profile, "the profile") if arguments.profile else {}
    if arguments.drafter:
        profile = {**profile, "drafter": arguments.drafter}
    rendered = render(
        header.tensors,
        read_target(arguments.target),
        profile,
        arguments.vllm_version,
        shipped=shipped_facts(arguments.shipped_config, arguments.weights, arguments.dest or None),
        allow_derived=(*DERIVED_BY_DEFAULT, *arguments.allow_derived),
        first_free_token=partial(first_free_token, arguments.target),
        where=arguments.weights,
        target_name=arguments.target,
    )
    print(provenance_table(rendered), file=sys.stderr)
    if not arguments.dest:
        print(rendered.text, end="")
    elif read_text(arguments.dest) == rendered.text:
        print(f"{arguments.dest} is already so", file=sys.stderr)
    else:
        try:
            write_atomically(arguments.dest, rendered.text)
        except OSError as error:
            raise RolloutError(f"{arguments.dest} can't be written: {error.strerror}") from error
        print(f"wrote {arguments.dest}", file=sys.stderr)
    return 0


def describe(header: Header, geometry: Geometry) -> list[str]:
    """What the header says, in lines for a terminal."""
    shards = f" in {len(header.files) - 1} shards" if len(header.files) > 1 else ""
    return [
        f"{header.files[0]}: a plain DFlash drafter",
        f"  tensors             {len(header.tensors)} of {geometry.dtype}, "
        f"{header.payload_bytes:,} bytes{shards}",
        f"  hidden size         {geometry.hidden_size}",
        f"  intermediate size   {geometry.intermediate_size}",
        f"  layers              {geometry.num_hidden_layers}",
        f"  attention           {geometry.num_attention_heads} heads, {geometry.num_key_value_heads} "
        f"key/value heads of {geometry.head_dim}" + (", with biases" if geometry.attention_bias else ""),
        f"  fc columns          {geometry.fc_columns}",
    ]


def provenance_table(rendered: Rendered) -> str:
    """Key, value and source of every line of the config, then the warnings."""
    rows = []
    for key, source in rendered.provenance.items():
        holder, name = rendered.config, key
        if key.startswith("dflash_config."):
            holder, name = rendered.config["dflash_config"], key.partition(".")[2]
        rows.append((key, _short(holder[name]), source))
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{key:<{widths[0]}}  {value:<{widths[1]}}  {source}" for key, value, source in rows]
    lines += [f"warning: {warning}" for warning in rendered.warnings]
    lines += [f"environment: {name}={value}" for name, value in rendered.environment.items()]
    return "\n".join(lines)


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 1 and all(isinstance(item, str) for item in value):
        runs: list[list[Any]] = []
        for item in value:
            if runs and runs[-1][1] == item:
                runs[-1][0] += 1
            else:
                runs.append([1, item])
        return " + ".join(f"{count} {item}" for count, item in runs)
    text = str(value)
    return text if len(text) <= 48 else text[:45] + "..."


if __name__ == "__main__":
    sys.exit(main())
