"""The variables of an inventory against the roles' argument specs, before any host is touched.

Ansible's own check of argument specs sees neither a misspelt name nor a second host's fault, and comes when
the role runs. Scalars are as Ansible casts them ("30000" is an int, "yes" a bool); lists and dicts have to be
what they are, since a role gets the value as it was written, not as the check would cast it.
"""

from __future__ import annotations

import decimal
import difflib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from .errors import RolloutError

# From here on a name without our prefix is one of ours with a typing error: one wrong letter in ten or more.
NEAR_MISS = 0.88

_TRUE = {"y", "yes", "on", "1", "true", "t"}
_FALSE = {"n", "no", "off", "0", "false", "f"}

_KINDS = {
    "str": "a string",
    "path": "a path",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a dictionary",
}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, in words, with the hosts that have it in the inventory's order."""

    text: str
    hosts: tuple[str, ...]


class _Bad(Exception):
    """The value isn't of the type that the specification asks for."""


def _kind(value: object) -> str:
    """What a value is, in the words of _KINDS."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true or false"
    names = {str: "str", int: "int", float: "float", list: "list", dict: "dict"}
    return next((_KINDS[name] for kind, name in names.items() if isinstance(value, kind)), "something else")


def _cast(value: object, wanted: str) -> object:
    """The scalar as Ansible would cast it for an option of type `wanted`. Raises _Bad."""
    if wanted == "raw":
        return value
    if wanted == "str":
        # A float or a bool has already lost what was written: 0.20 became 0.2, yes became true.
        if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
            return str(value)
    elif wanted == "path":
        if isinstance(value, str):
            return value
    elif wanted == "bool":
        # The number 1.0 is true to Ansible, the text is not.
        number = isinstance(value, float) and value in (0.0, 1.0)
        word = str(int(value) if number else value).strip().lower()
        if isinstance(value, (str, int, float)) and word in _TRUE | _FALSE:
            return word in _TRUE
    elif wanted in ("int", "float"):
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            try:
                number = decimal.Decimal(value) if wanted == "int" else float(value)
                if math.isfinite(number) and (wanted == "float" or number == int(number)):
                    return int(number) if wanted == "int" else number
            except (decimal.InvalidOperation, ValueError, OverflowError):
                raise _Bad from None
    elif wanted in ("list", "dict"):
        if isinstance(value, {"list": list, "dict": dict}[wanted]):
            return value
    else:
        raise RolloutError(
            "An argument spec uses a type that the inventory check doesn't know",
            found=wanted,
            expected=", ".join([*_KINDS, "raw"]),
        )
    raise _Bad


def _shown(value: object, secret: bool) -> str:
    """A wrong value as it may be printed: containers and secrets only by their kind."""
    if secret or value is None or isinstance(value, (list, dict)):
        return _kind(value)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:79] + "…"


def _wrong_type(name: str, value: object, spec: dict, wanted: str) -> str:
    remedy = ""
    # A string in the place of a list or dictionary may hold anything: an environment with a token in it.
    shown = _kind(value) if wanted in ("list", "dict") else _shown(value, bool(spec.get("no_log")))
    if value is None:
        remedy = "remove the line, or give it a value"
    elif wanted in ("list", "dict") and isinstance(value, str):
        top = name.split(".")[0]
        remedy = f"write it as YAML in the inventory; on the command line as JSON, -e '{{\"{top}\": ...}}'"
    elif wanted == "str" and isinstance(value, (float, bool)):
        remedy = "put it in quotes"
    return str(
        RolloutError(f"{name} has the wrong type", found=shown, expected=_KINDS[wanted], remedy=remedy)
    )


def check_value(name: str, value: object, spec: dict) -> Iterator[str]:
    """Say in words what is wrong with `value`, and inside it, for the option `spec` of an argument spec."""
    wanted = spec.get("type", "str")
    try:
        value = _cast(value, wanted)
    except _Bad:
        yield _wrong_type(name, value, spec, wanted)
        return
    if value == "" and spec.get("required"):
        yield str(RolloutError(f"{name} is empty", remedy="give it a value, it is required"))
        return
    choices = spec.get("choices")
    if wanted == "list":
        element = {
            "type": spec.get("elements", "raw"),
            "choices": choices,
            "options": spec.get("options"),
            "no_log": spec.get("no_log"),
        }
        for number, item in enumerate(value):
            yield from check_value(f"{name}[{number}]", item, element)
    elif choices and value not in choices:
        yield str(
            RolloutError(
                f"{name} has a value that isn't offered",
                found=_shown(value, bool(spec.get("no_log"))),
                expected="one of " + ", ".join(json.dumps(choice) for choice in choices),
            )
        )
    if wanted == "dict" and spec.get("options") is not None:
        yield from _check_dict(name, value, spec["options"])


def _check_dict(name: str, value: dict, options: dict[str, dict]) -> Iterator[str]:
    for key, item in value.items():
        if key in options:
            yield from check_value(f"{name}.{key}", item, options[key])
        else:
            yield _unknown(f"{name}.{key}", str(key), list(options), f"{name} knows " + ", ".join(options))
    for key, option in options.items():
        if option.get("required") and key not in value:
            yield _missing(f"{name}.{key}", option)


def _missing(name: str, option: dict) -> str:
    description = option.get("description", "")
    text = " ".join(description) if isinstance(description, list) else description
    return str(
        RolloutError(
            f"{name} is required and not set",
            expected=f"{_KINDS.get(option.get('type', 'str'), 'a value')}{': ' + text if text else ''}",
            remedy=f"set {name} in the inventory",
        )
    )


def _unknown(shown: str, name: str, known: list[str], otherwise: str) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    remedy = f"did you mean {near[0]}?" if near else f"remove it; {otherwise}"
    return f"{shown} is not a variable of this roll-out. What to do: {remedy}"


def check_name(name: str, prefixes: list[str], known: list[str]) -> str | None:
    """What is wrong with the name of a variable, or None. Names that are nobody's concern here are right."""
    if name in known or name.startswith("ansible_"):
        return None
    if any(name.startswith(f"__{prefix}") for prefix in prefixes):
        return f"{name} is private to its role. What to do: remove it from the inventory."
    if any(name.startswith(prefix) for prefix in prefixes):
        return _unknown(name, name, known, "no variable has a name like it")
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=NEAR_MISS)
    if near:
        return f"{name} looks like {near[0]} misspelt. What to do: rename it."
    return None


#: What would put a secret into a world-readable file of the release: (variable, key) → the variable to use.
_MISPLACED = {
    ("vllm_service_args", "api-key"): "vllm_service_api_key",
    ("vllm_service_args", "hf-token"): "vllm_service_hub_token",
    ("vllm_service_environment", "VLLM-API-KEY"): "vllm_service_api_key",
    ("vllm_service_environment", "HF-TOKEN"): "vllm_service_hub_token",
    ("vllm_service_environment", "HUGGING-FACE-HUB-TOKEN"): "vllm_service_hub_token",
}


def misplaced_secrets(values: dict) -> Iterator[str]:
    """Secrets where everybody on the host could read them, in words and without the value."""
    for name in sorted({name for name, _ in _MISPLACED}):
        entries = values.get(name)
        for key in entries if isinstance(entries, dict) else ():
            right = _MISPLACED.get((name, str(key).replace("_", "-")))
            if right:
                yield f"{name} holds a secret ({key}), and is world-readable on the host. What to do: set {right} instead."


def pool_faults(values: dict) -> Iterator[str]:
    """What would leave a host out of its pool: a hook without its counterpart, a file of tasks that isn't there."""
    hooks = {name: values.get(name) or "" for name in ("rollout_drain_tasks", "rollout_rejoin_tasks")}
    for name, path in hooks.items():
        if not path and any(hooks.values()):
            yield f"{name} is empty, and its counterpart is set. What to do: set both, or none."
        elif path and not (os.path.isabs(str(path)) and os.path.isfile(str(path))):
            yield str(
                RolloutError(
                    f"{name} is no file of tasks on this control node",
                    found=str(path),
                    expected="the whole path, as in {{ inventory_dir }}/pool/drain.yml",
                )
            )


def transfer_faults(values: dict) -> Iterator[str]:
    """Models that nobody could bring or judge: what each transport needs, and a source or a digest of the drafter."""
    transport = values.get("drafter_transport") or "rsync"
    needed, expected = {
        "url": ("drafter_url", "where hosts fetch the weights"),
        "present": ("drafter_path", "where the hosts have the weights"),
    }.get(transport, ("drafter_source", "the drafter's model.safetensors on the control node"))
    if not values.get(needed):
        yield str(
            RolloutError(
                f"{needed} is not set, and drafter_transport is {transport}",
                expected=expected,
                remedy=f"set {needed} in the inventory, or another drafter_transport",
            )
        )
    elif not (values.get("drafter_source") or values.get("drafter_sha256")):
        yield str(
            RolloutError(
                f"drafter_sha256 is not set, and drafter_transport is {transport} without a drafter_source",
                expected="the digest by which the hosts know the right file",
                remedy="set drafter_sha256, or drafter_source to a copy of the file on the control node",
            )
        )
    transport = values.get("vllm_service_target_transport") or "present"
    if transport != "present" and not values.get("vllm_service_target_source"):
        yield str(
            RolloutError(
                f"vllm_service_target_source is not set, and vllm_service_target_transport is {transport}",
                expected="the target's folder on the control node",
                remedy="set vllm_service_target_source, or leave the transport at present",
            )
        )


def known_options(specs: dict[str, dict]) -> dict[str, dict]:
    """The public options of all roles: name → its part of the argument spec.

    `specs` maps a role to its `argument_specs`. What another entry point than `main` requires is given to it
    by a playbook, so that it isn't required of an inventory.
    """
    options: dict[str, dict] = {}
    for entry_points in specs.values():
        for entry_point, spec in entry_points.items():
            for name, option in (spec.get("options") or {}).items():
                if not name.startswith("_"):
                    required = entry_point == "main" and bool(option.get("required"))
                    if entry_point == "main" or name not in options:
                        options[name] = {**option, "required": required}
    return options


def check(
    group: str, hosts: dict[str, dict], names: dict[str, list[str]], specs: dict[str, dict]
) -> list[Fault]:
    """Everything that is wrong with the variables of all hosts; the same fault of several hosts is one.

    `hosts`: host → variables with their values (others than ours are not looked at).
    `names`: host → the names of all its variables.
    `specs`: role → `argument_specs` of its meta/argument_specs.yml; `<role>_` is a prefix of ours.
    """
    if not names:
        text = RolloutError(
            f"Group {group} has no hosts",
            expected="one entry for each GPU host",
            remedy=f"add your hosts to {group}, or to a group below it, in the inventory; then look with "
            f"'ansible-inventory --graph {group}' (an empty group can also come from --limit or a wrong -i)",
        )
        return [Fault(str(text), ())]
    options = known_options(specs)
    prefixes = [f"{role}_" for role in specs]
    known = list(options)
    verdicts = {
        name: check_name(name, prefixes, known) for name in sorted({n for own in names.values() for n in own})
    }
    found: dict[str, list[str]] = {}
    for host, own_names in names.items():
        values = hosts.get(host, {})
        texts = [verdicts[name] for name in own_names if verdicts[name]]
        texts.extend(misplaced_secrets(values))
        texts.extend(pool_faults(values))
        if "drafter_transport" in options:
            texts.extend(transfer_faults(values))
        for name, option in options.items():
            if name in values:
                texts.extend(check_value(name, values[name], option))
            elif option["required"]:
                texts.append(_missing(name, option))
        for text in texts:
            found.setdefault(text, []).append(host)
    return [Fault(text, tuple(hosts_of)) for text, hosts_of in found.items()]


def report(faults: list[Fault], host_count: int) -> str:
    """One message for all faults, each on a line of its own after the hosts that have it."""
    lines = []
    for fault in faults:
        hosts = ", ".join(fault.hosts) if len(fault.hosts) < host_count else f"all {host_count} hosts"
        hosts = fault.hosts[0] if host_count == 1 and fault.hosts else hosts
        lines.append(f"- {hosts}: {fault.text}" if fault.hosts else f"- {fault.text}")
    count = "one fault" if len(faults) == 1 else f"{len(faults)} faults"
    return f"The inventory has {count}; no host was touched.\n" + "\n".join(lines)
