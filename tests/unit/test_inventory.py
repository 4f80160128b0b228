"""What the inventory check refuses, and what it must not."""

from __future__ import annotations

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from dflash_rollout import inventory
from dflash_rollout.errors import RolloutError
from hypothesis import given
from hypothesis import strategies as st

SPECS = {
    "drafter": {
        "main": {
            "options": {
                "drafter_source": {"type": "path", "required": True, "description": "The weights."},
                "drafter_verify": {"type": "str", "choices": ["stamp", "full"]},
                "drafter_profile": {
                    "type": "dict",
                    "options": {
                        "block_size": {"type": "int"},
                        "mask_token_id": {"type": "int", "required": True},
                        "layer_types": {"type": "list", "elements": "str", "choices": ["full", "sliding"]},
                        "taps": {
                            "type": "list",
                            "elements": "dict",
                            "options": {"layer": {"type": "int"}},
                        },
                        "token": {"type": "int", "no_log": True},
                    },
                },
            }
        }
    },
    "rollout": {
        "main": {"options": {"rollout_port": {"type": "int"}, "rollout_skip_unfit": {"type": "bool"}}},
        "again": {
            "options": {"rollout_port": {"type": "int", "required": True}, "__rollout_x": {"required": True}}
        },
    },
    "vllm": {"main": {"options": {"vllm_version": {"type": "str"}}}},
    "vllm_service": {
        "main": {"options": {"vllm_service_args": {"type": "dict"}, "vllm_service_raw": {"type": "raw"}}}
    },
}
GOOD = {"drafter_source": "/models/model.safetensors"}


def faults(**variables):
    """The faults of one host with these variables beside the required ones."""
    values = {**GOOD, **variables}
    return [fault.text for fault in inventory.check("gpu_hosts", {"h": values}, {"h": list(values)}, SPECS)]


def test_a_right_inventory_has_no_fault():
    assert (
        faults(
            drafter_verify="full",
            drafter_profile={
                "block_size": 16,
                "mask_token_id": "248070",
                "layer_types": ["full"],
                "taps": [{"layer": 1}],
            },
            rollout_port="30000",
            rollout_skip_unfit="yes",
            vllm_version="0.20.1",
            vllm_service_args={"any": None, "thing": [1]},
            vllm_service_raw=None,
            ansible_host="10.0.0.1",
            ansible_drafter_source="theirs",
            inventory_hostname="h",
            my_own_variable={"x": 1},
        )
        == []
    )


def test_an_empty_group_says_how_to_fill_it():
    (fault,) = inventory.check("gpu_hosts", {}, {}, SPECS)
    assert "Group gpu_hosts has no hosts" in fault.text
    assert "ansible-inventory --graph gpu_hosts" in fault.text
    assert fault.hosts == ()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("drafter_sorce", "drafter_source"),
        ("vllm_service_arg", "vllm_service_args"),
        ("vllm_verison", "vllm_version"),
        ("rollout_skip_unfitt", "rollout_skip_unfit"),
    ],
)
def test_an_unknown_name_with_our_prefix_gets_the_nearest(name, near):
    assert faults(**{name: 1}) == [
        f"{name} is not a variable of this roll-out. What to do: did you mean {near}?"
    ]


def test_an_unknown_name_near_nothing():
    assert faults(drafter_zzzzzzzz=1) == [
        "drafter_zzzzzzzz is not a variable of this roll-out. "
        "What to do: remove it; no variable has a name like it"
    ]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("drafer_source", "drafter_source"),
        ("dratfer_source", "drafter_source"),
        ("Drafter_Source", "drafter_source"),
        ("draftersource", "drafter_source"),
        ("vlm_service_args", "vllm_service_args"),
        ("rolout_port", "rollout_port"),
    ],
)
def test_a_near_miss_without_our_prefix_is_refused(name, near):
    assert faults(**{name: 1}) == [f"{name} looks like {near} misspelt. What to do: rename it."]


@pytest.mark.parametrize("name", ["source", "port", "server_port", "http_port", "model_source", "version"])
def test_names_of_others_pass(name):
    assert faults(**{name: 1}) == []


def test_private_names_are_refused():
    (text,) = faults(__drafter_digest="x")
    assert "__drafter_digest is private" in text
    assert faults(__mine="x") == []


@pytest.mark.parametrize(
    ("variables", "found", "expected"),
    [
        ({"rollout_port": "abc"}, '"abc"', "a whole number"),
        ({"rollout_port": 1.5}, "1.5", "a whole number"),
        ({"rollout_port": True}, "true", "a whole number"),
        ({"rollout_port": [1]}, "a list", "a whole number"),
        ({"rollout_port": "1e999999999"}, '"1e999999999"', "a whole number"),
        ({"rollout_port": "snan"}, '"snan"', "a whole number"),
        ({"rollout_port": 10**400}, "1" + "0" * 78 + "…", "a whole number"),
        ({"rollout_port": None}, "nothing", "a whole number"),
        ({"rollout_skip_unfit": "maybe"}, '"maybe"', "true or false"),
        ({"rollout_skip_unfit": 2}, "2", "true or false"),
        ({"vllm_version": 0.2}, "0.2", "a string"),
        ({"vllm_version": True}, "true", "a string"),
        ({"drafter_source": 7}, "7", "a path"),
        ({"drafter_source": {"a": 1}}, "a dictionary", "a path"),
        ({"vllm_service_args": "HF_TOKEN=hunter2"}, "a string", "a dictionary"),
        ({"vllm_service_args": []}, "a list", "a dictionary"),
    ],
)
def test_wrong_types(variables, found, expected):
    (name,) = variables
    (text,) = faults(**variables)
    assert text.startswith(f"{name} has the wrong type. Found: {found}. Expected: {expected}.")
    assert "hunter2" not in text


@pytest.mark.parametrize("value", [30000, "30000", 30000.0, "3e4", " 30000 "])
def test_a_number_may_come_from_the_command_line(value):
    assert faults(rollout_port=value) == []


@pytest.mark.parametrize("value", [True, "true", "False", "yes", "off", 0, 1, "1"])
def test_a_bool_may_come_from_the_command_line(value):
    assert faults(rollout_skip_unfit=value) == []


def test_a_number_too_big_for_a_float():
    (text,) = inventory.check_value("x", 10**400, {"type": "float"})
    assert "Expected: a number." in text


def test_choices():
    assert faults(drafter_verify="ful") == [
        'drafter_verify has a value that isn\'t offered. Found: "ful". Expected: one of "stamp", "full".'
    ]


@pytest.mark.parametrize(
    ("profile", "text"),
    [
        (
            {"block_sise": 1},
            "drafter_profile.block_sise is not a variable of this roll-out. "
            "What to do: did you mean block_size?",
        ),
        (
            {"qqq": 1},
            "drafter_profile.qqq is not a variable of this roll-out. What to do: remove it; "
            "drafter_profile knows block_size, mask_token_id, layer_types, taps, token",
        ),
        (
            {"block_size": "big"},
            'drafter_profile.block_size has the wrong type. Found: "big". Expected: a whole number.',
        ),
        (
            {"layer_types": ["full", "slide"]},
            "drafter_profile.layer_types[1] has a value that isn't offered. "
            'Found: "slide". Expected: one of "full", "sliding".',
        ),
        (
            {"layer_types": [["full"]]},
            "drafter_profile.layer_types[0] has the wrong type. Found: a list. Expected: a string.",
        ),
        (
            {"taps": [{"layer": 1}, {"layer": "x"}]},
            'drafter_profile.taps[1].layer has the wrong type. Found: "x". Expected: a whole number.',
        ),
        (
            {"token": "hunter2"},
            "drafter_profile.token has the wrong type. Found: a string. Expected: a whole number.",
        ),
    ],
)
def test_the_inside_of_a_dictionary(profile, text):
    assert faults(drafter_profile={"mask_token_id": 1, **profile}) == [text]


def test_missing_inside_a_dictionary():
    (text,) = faults(drafter_profile={})
    assert text.startswith("drafter_profile.mask_token_id is required and not set.")


def test_a_string_for_a_list_says_how_to_write_it():
    (text,) = faults(drafter_profile={"mask_token_id": 1, "layer_types": "full,full"})
    assert "Found: a string. Expected: a list." in text
    assert "-e '{\"drafter_profile\": ...}'" in text


def test_required_ones():
    (fault,) = inventory.check("g", {"h": {}}, {"h": []}, SPECS)
    assert fault.text == (
        "drafter_source is required and not set. Expected: a path: The weights. "
        "What to do: set drafter_source in the inventory."
    )
    # rollout_port is required by an entry point that a playbook calls with it: no fault above
    assert faults(drafter_source="") == [
        "drafter_source is empty. What to do: give it a value, it is required."
    ]


def test_one_fault_of_many_hosts_is_said_once():
    hosts = {f"gpu{n}": {**GOOD, "rollout_port": "abc"} for n in range(8)}
    hosts["gpu3"]["drafer_source"] = "x"
    hosts["gpu5"]["vllm_version"] = 0.2
    hosts["gpu6"]["vllm_version"] = 0.2
    names = {host: list(values) for host, values in hosts.items()}
    found = inventory.check("gpu_hosts", hosts, names, SPECS)
    assert inventory.report(found, 8) == (
        "The inventory has 3 faults; no host was touched.\n"
        '- all 8 hosts: rollout_port has the wrong type. Found: "abc". Expected: a whole number.\n'
        "- gpu3: drafer_source looks like drafter_source misspelt. What to do: rename it.\n"
        "- gpu5, gpu6: vllm_version has the wrong type. Found: 0.2. Expected: a string. "
        "What to do: put it in quotes."
    )


def test_the_report_of_one_host_names_it():
    found = inventory.check("g", {"h": {}}, {"h": []}, SPECS)
    assert inventory.report(found, 1).startswith(
        "The inventory has one fault; no host was touched.\n- h: drafter_source is required"
    )


def test_a_type_that_the_check_does_not_know_is_no_silent_pass():
    with pytest.raises(RolloutError, match="doesn't know"):
        list(inventory.check_value("x", "1", {"type": "jsonarg"}))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.text(max_size=6)
    | st.sampled_from(["yes", "no", "1", "0", "1.0", "1.5", " 7 ", "nan", "inf", "1e3", "true", "0x1", "１"])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def ansible_refuses(spec, value):
    """Ansible's validator as the oracle. Its conversion of "inf" to an int raises instead of saying no (2.19)."""
    try:
        return bool(ArgumentSpecValidator({"x": spec}).validate({"x": value}).error_messages)
    except OverflowError:
        return True


@pytest.mark.parametrize("value", ["inf", "INF", "-Infinity", float("inf"), "nan"])
def test_what_is_no_finite_number_is_no_whole_number(value):
    assert ansible_refuses({"type": "int"}, value)
    assert list(inventory.check_value("x", value, {"type": "int"}))
    assert list(inventory.check_value("x", [value], {"type": "list", "elements": "int"}))


@pytest.mark.parametrize("value", ["0.0", "1.0"])
def test_a_text_that_is_no_bool_though_its_number_is(value):
    assert ansible_refuses({"type": "bool"}, value)
    assert list(inventory.check_value("x", value, {"type": "bool"}))
    assert not list(inventory.check_value("x", float(value), {"type": "bool"}))


@given(value=VALUES, wanted=st.sampled_from(["str", "path", "int", "float", "bool", "list", "dict", "raw"]))
def test_what_ansible_refuses_is_refused(value, wanted):
    """Ansible's own validator is the oracle in one direction; the other is stricter on purpose."""
    spec = {"type": wanted, "required": True}
    if ansible_refuses(spec, value):
        assert list(inventory.check_value("x", value, spec))


@given(value=VALUES, element=st.sampled_from(["str", "int", "float", "bool", "dict"]))
def test_what_ansible_refuses_in_a_list_is_refused(value, element):
    spec = {"type": "list", "elements": element}
    if ansible_refuses(spec, [value]):
        assert list(inventory.check_value("x", [value], spec))


@pytest.mark.parametrize(
    ("values", "right"),
    [
        ({"vllm_service_args": {"api-key": "marker"}}, "vllm_service_api_key"),
        ({"vllm_service_args": {"api_key": ["marker"]}}, "vllm_service_api_key"),
        ({"vllm_service_environment": {"HF_TOKEN": "marker"}}, "vllm_service_hub_token"),
        ({"vllm_service_environment": {"VLLM_API_KEY": "marker"}}, "vllm_service_api_key"),
    ],
)
def test_a_secret_in_a_world_readable_file_is_refused(values, right):
    (text,) = inventory.misplaced_secrets(values)
    assert text.endswith(f"set {right} instead.")
    assert "marker" not in text
    (fault,) = inventory.check("gpu_hosts", {"a": values}, {"a": []}, {})
    assert fault.text == text


def test_other_arguments_are_no_secrets():
    assert not list(
        inventory.misplaced_secrets(
            {"vllm_service_args": {"max-model-len": 1}, "vllm_service_environment": "{{ x }}"}
        )
    )


def test_hooks_of_a_pool_come_in_pairs_and_are_files(tmp_path):
    tasks = tmp_path / "drain.yml"
    tasks.write_text("[]")
    both = {"rollout_drain_tasks": str(tasks), "rollout_rejoin_tasks": str(tasks)}
    assert list(inventory.pool_faults(both)) == []
    assert list(inventory.pool_faults({})) == []
    [alone] = inventory.pool_faults({"rollout_drain_tasks": str(tasks)})
    assert alone.startswith("rollout_rejoin_tasks is empty")
    [missing] = inventory.pool_faults({**both, "rollout_rejoin_tasks": str(tmp_path / "no.yml")})
    assert "rollout_rejoin_tasks is no file" in missing
    [relative] = inventory.pool_faults({**both, "rollout_drain_tasks": "pool/drain.yml"})
    assert "whole path" in relative


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "drafter_source is not set, and drafter_transport is rsync"),
        ({"drafter_source": ""}, "drafter_source is not set"),
        ({"drafter_transport": "swarm"}, "drafter_transport is swarm"),
        ({"drafter_transport": "url", "drafter_sha256": "ab"}, "drafter_url is not set"),
        (
            {"drafter_transport": "url", "drafter_url": "https://models.example/d"},
            "drafter_sha256 is not set",
        ),
        ({"drafter_transport": "present", "drafter_source": "/d"}, "drafter_path is not set"),
        ({"drafter_transport": "present", "drafter_path": "/d"}, "drafter_sha256 is not set"),
        (
            {"drafter_source": "/d", "vllm_service_target_transport": "rsync"},
            "vllm_service_target_source is not set",
        ),
    ],
)
def test_models_that_nobody_could_bring_are_refused(values, words):
    [text] = inventory.transfer_faults(values)
    assert words in text
    assert "What to do: set " in text


@pytest.mark.parametrize(
    "values",
    [
        {"drafter_source": "/d"},
        {"drafter_transport": "swarm", "drafter_source": "/d"},
        {"drafter_transport": "url", "drafter_url": "https://models.example/d", "drafter_sha256": "ab"},
        {"drafter_transport": "url", "drafter_url": "https://models.example/d", "drafter_source": "/d"},
        {"drafter_transport": "present", "drafter_path": "/d", "drafter_sha256": "ab"},
        {
            "drafter_source": "/d",
            "vllm_service_target_transport": "rsync",
            "vllm_service_target_source": "/t",
        },
    ],
)
def test_models_that_can_be_brought(values):
    assert not list(inventory.transfer_faults(values))
