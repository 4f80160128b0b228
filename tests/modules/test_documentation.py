"""What the documentation of modules, roles and code says is what they do: options, types, defaults, examples."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import ansible.module_utils
import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule

REPOSITORY = Path(__file__).parents[2]
MODULES = sorted(path.stem for path in (REPOSITORY / "library").glob("*.py"))
ROLES = sorted(path.name for path in (REPOSITORY / "roles").iterdir())


class Captured(Exception):
    """Stands where AnsibleModule would begin to work; carries its arguments."""


@pytest.fixture(params=MODULES)
def module(request, monkeypatch):
    """(name, the imported module, what it passes to AnsibleModule)."""
    path = [*ansible.module_utils.__path__, str(REPOSITORY / "module_utils")]
    monkeypatch.setattr(ansible.module_utils, "__path__", path)

    def capture(self, argument_spec, **options):
        raise Captured({"argument_spec": argument_spec, **options})

    monkeypatch.setattr(AnsibleModule, "__init__", capture)
    source = REPOSITORY / "library" / f"{request.param}.py"
    spec = importlib.util.spec_from_file_location(f"library_{request.param}", source)
    imported = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported)
    action = REPOSITORY / "action_plugins" / f"{request.param}.py"
    if action.exists():
        # The file in library/ is its documentation only.
        plugin = importlib.util.spec_from_file_location(f"action_{request.param}", action)
        done = importlib.util.module_from_spec(plugin)
        plugin.loader.exec_module(done)
        return request.param, imported, {"argument_spec": done.ARGUMENT_SPEC, "supports_check_mode": True}
    with pytest.raises(Captured) as caught:
        imported.main()
    return request.param, imported, caught.value.args[0]


def comparable(options, nested):
    """Options with every default of Ansible's own filled in; `nested` is what those inside a dict are called."""
    return {
        name: {
            "type": option.get("type", "str"),
            "required": option.get("required", False),
            "default": option.get("default"),
            "elements": option.get("elements"),
            "choices": option.get("choices"),
            "aliases": option.get("aliases", []),
            "inside": comparable(option.get(nested) or {}, nested),
        }
        for name, option in options.items()
    }


def test_options_are_as_documented(module):
    name, imported, given = module
    documented = yaml.safe_load(imported.DOCUMENTATION)
    assert documented["module"] == name
    assert comparable(documented.get("options") or {}, "suboptions") == comparable(
        given["argument_spec"], "options"
    )
    fragments = documented.get("extends_documentation_fragment", [])
    assert ("ansible.builtin.files" in fragments) == given.get("add_file_common_args", False)
    support = documented["attributes"]["check_mode"]["support"]
    assert (support == "full") == given.get("supports_check_mode", False)


def test_every_option_says_what_it_is(module):
    def undescribed(options):
        for name, option in options.items():
            if not option.get("description"):
                yield name
            yield from undescribed(option.get("suboptions") or {})

    documented = yaml.safe_load(module[1].DOCUMENTATION)
    assert documented["short_description"]
    assert list(undescribed(documented.get("options") or {})) == []


def test_examples_are_tasks_with_options_that_exist(module):
    name, imported, given = module
    spec = given["argument_spec"]
    # An example is a list of tasks, or of plays with tasks.
    tasks = [task for item in yaml.safe_load(imported.EXAMPLES) for task in item.get("tasks", [item])]
    used = [task[name] or {} for task in tasks if name in task]
    assert used, f"no example of {name}"
    for options in used:
        assert options.keys() <= spec.keys()
        assert {option for option, facts in spec.items() if facts.get("required")} <= options.keys()


def test_return_values_are_described(module):
    returned = yaml.safe_load(module[1].RETURN)
    assert returned
    for name, value in returned.items():
        assert {"description", "returned", "type"} <= value.keys(), name
        assert value["type"] in ("str", "int", "float", "bool", "list", "dict"), name
        assert ("elements" in value) == (value["type"] == "list"), name


def read(path):
    return yaml.safe_load((REPOSITORY / "roles" / path).read_text())


@pytest.mark.parametrize("role", ROLES)
def test_defaults_of_a_role_are_as_documented(role):
    (spec,) = read(f"{role}/meta/argument_specs.yml")["argument_specs"].values()
    documented = {
        # Ansible's check runs with the role's defaults, where a required one is empty until the inventory sets it.
        name: "" if option.get("required") else option["default"]
        for name, option in spec["options"].items()
    }
    assert read(f"{role}/defaults/main.yml") == documented
    assert [
        name for name, option in spec["options"].items() if option.get("required") and "default" in option
    ] == []
    assert all(name.startswith(f"{role}_") for name in documented)
    assert all(option["description"] for option in spec["options"].values())


def test_the_map_of_the_code_has_every_file_once():
    table = (REPOSITORY / "docs/architecture.md").read_text().partition("## The code")[2]
    named = re.findall(r"^\| `(\w+\.py)` \|", table, re.MULTILINE)
    there = [path.name for path in (REPOSITORY / "module_utils/dflash_rollout").glob("*.py")]
    assert sorted(named) == sorted(there)
