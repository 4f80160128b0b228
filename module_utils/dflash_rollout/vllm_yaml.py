"""Flags of `vllm serve` → the YAML that `--config FILE.yaml` reads back as they were meant.

vLLM 0.20.1 turns the file into an argument list (vllm/utils/argparse_utils.py:load_config_file): `true`
becomes the bare flag, `false` is dropped, a mapping becomes JSON, everything else is `--flag str(value)`.
What would come back as something else is refused here.
"""

from __future__ import annotations

import math
import re

from .errors import RolloutError

FLAG = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# The flags of 0.20.1 that have no `--no-` form: they are off unless given.
ONLY_ON = {
    "aggregate-engine-logging",
    "disable-log-stats",
    "grpc",
    "headless",
}
# YAML 1.1 reads these as booleans or null.
YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def to_yaml(flags: dict) -> str:
    """The text of a config file for `vllm serve --config`, flags in the order given.

    Keys are flags without `--`, spelt with `-` or `_`. None means not given. False becomes `no-<flag>: true`,
    or nothing where vLLM has no such form. Raises RolloutError for a key that is no flag or is given twice,
    a value that vLLM would read as something else, and a `speculative_token_tree`, which DFlash ignores.
    """
    lines = []
    seen: dict[str, str] = {}
    for key, value in flags.items():
        if not isinstance(key, str) or not FLAG.fullmatch(key) or key in YAML_WORDS | {"config"}:
            raise RolloutError(
                "A key of vLLM's config is no flag",
                found=repr(key),
                expected="a flag without --, as max-model-len",
            )
        name = key.replace("_", "-")
        switch = name.removeprefix("no-")
        if switch in seen:
            raise RolloutError(
                f"vLLM's flag --{switch} is given twice",
                found=f"{seen[switch]} and {key}",
                remedy="keep one of them",
            )
        seen[switch] = key
        if value is None:
            continue
        if isinstance(value, bool):
            lines += _switch(name, value)
        elif name == "speculative-config":
            lines += _speculative_config(value)
        elif isinstance(value, dict):
            lines += _mapping(name, value)
        elif isinstance(value, list):
            lines.append(f"{name}: {_list(name, value)}")
        else:
            lines.append(f"{name}: {_argument(name, value)}")
    return "".join(line + "\n" for line in lines)


def _switch(name: str, value: bool) -> list[str]:
    if value:
        return [f"{name}: true"]
    if name in ONLY_ON:
        return []
    if name.startswith("no-"):
        raise RolloutError(
            f"vLLM's flag --{name} is set to false",
            remedy=f"write {name.removeprefix('no-')}: true instead",
        )
    return [f"no-{name}: true"]


def _speculative_config(value: object) -> list[str]:
    if not isinstance(value, dict):
        raise RolloutError(
            "speculative-config is no mapping",
            found=repr(value),
            remedy="write its keys as YAML, not as JSON text",
        )
    if "speculative_token_tree" in value:
        raise RolloutError(
            "speculative-config has a speculative_token_tree, which vLLM silently ignores with DFlash: "
            "its drafts are chains",
            remedy="remove the key",
        )
    return _mapping("speculative-config", value)


def _mapping(name: str, value: dict) -> list[str]:
    """A mapping as a block of one key a line; what is nested deeper stands in flow style, which is JSON."""
    if not value:
        return [f"{name}: {{}}"]
    return [f"{name}:", *(f"  {_key(name, key)}: {_nested(name, item)}" for key, item in value.items())]


def _list(name: str, values: list) -> str:
    if not values:
        raise RolloutError(f"vLLM drops an empty list: --{name}", remedy="leave the flag out")
    return "[" + ", ".join(_argument(name, value) for value in values) + "]"


def _argument(name: str, value: object) -> str:
    """A value that vLLM puts on its argument list as str(value)."""
    if isinstance(value, str) and value.startswith("-"):
        raise RolloutError(f"vLLM would take the value of --{name} for a flag", found=repr(value))
    if isinstance(value, float) and value < 0:
        raise RolloutError(
            f"vLLM can't read a negative fraction from its config file: --{name}", found=repr(value)
        )
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise RolloutError(
            f"A value of --{name} is of a type that vLLM can't read from its config file",
            found=f"{value!r} ({type(value).__name__})",
            expected="text, a number, true or false, a list of texts or numbers, or a mapping",
        )
    return _scalar(name, value)


def _nested(name: str, value: object) -> str:
    """A value inside a mapping: vLLM hands the mapping on as JSON, so any JSON comes through."""
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_key(name, key)}: {_nested(name, item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_nested(name, item) for item in value) + "]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return _scalar(name, value)


def _key(name: str, key: object) -> str:
    if not isinstance(key, str):
        raise RolloutError(f"A key in the mapping of --{name} is no text", found=repr(key))
    return key if FLAG.fullmatch(key) and key not in YAML_WORDS else _quoted(key)


def _scalar(name: str, value: object) -> str:
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float) and math.isfinite(value):
        # YAML 1.1 sees a number only where there is a point: 1e-06 would come back as text.
        digits, exponent, power = repr(float(value)).partition("e")
        return (digits if "." in digits else digits + ".0") + exponent + power
    raise RolloutError(f"A value of --{name} is nothing that YAML can hold for vLLM", found=repr(value))


def _quoted(text: str) -> str:
    """Always in quotes, so that no text is read as a number, a date, a boolean or null."""
    return '"' + "".join(_character(character) for character in text) + '"'


def _character(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    if character == "\n":
        return "\\n"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
