"""The batches of a roll-out, and its last line, by real plays over hosts that are this machine and a made-up switch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
MADE_UP_SWITCH = """\
from ansible.plugins.action import ActionBase
class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        outcome = self._task.args["outcome"]
        return {"outcome": outcome, "failed": outcome not in ("CONFIRMED", "UNCHANGED"), "msg": "made up"}
"""


@pytest.fixture(scope="module")
def callback():
    spec = importlib.util.spec_from_file_location(
        "rollout_callback", REPOSITORY / "callback_plugins/rollout.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("outcomes", "failed", "unreachable", "end"),
    [
        ([], False, False, "untouched"),
        ([], True, False, "failed before its switch"),
        (["CONFIRMED"], False, False, "done"),
        (["UNCHANGED"], False, False, "done"),
        (["ROLLED_BACK"], True, False, "rolled back"),
        (["REFUSED"], True, False, "refused"),
        (["CONFIRMED", "STRANDED"], True, False, "STRANDED"),
        # not accepted, and brought back by a second switch
        (["CONFIRMED", "CONFIRMED"], True, False, "rolled back"),
        (["CONFIRMED"], True, False, "failed after its switch"),
        (["CONFIRMED"], False, True, "unreachable"),
        ([], False, True, "unreachable"),
    ],
)
def test_how_it_ended_for_a_host(callback, outcomes, failed, unreachable, end):
    assert callback.end_of(outcomes, failed, unreachable) == end


def test_the_last_line_names_who_is_not_done(callback):
    ends = {"a": "done", "b": "done", "c": "rolled back", "d": "untouched", "e": "untouched"}
    assert callback.last_line(ends) == "2 done, 1 rolled back (c), 2 untouched (d, e)"
    assert callback.last_line({"a": "refused"}) == "0 done, 1 refused (a)"
    many = {f"h{number}": "untouched" for number in range(10)}
    assert callback.last_line(many) == "0 done, 10 untouched (h0, h1, h2, h3, h4, h5, h6, h7, …)"


def play(folder: Path, serial: object, ends: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    """The keywords of playbooks/switch.yml over seven hosts that end as told, one that isn't CONFIRMED."""
    real = yaml.safe_load((REPOSITORY / "playbooks/switch.yml").read_text())[0]
    keywords = {name: real[name] for name in ("hosts", "gather_facts", "serial", "max_fail_percentage")}
    hosts = [f"h{number}" for number in range(1, 8)]
    tasks = [
        {
            "name": "Switch",
            "block": [{"switchover": {"outcome": "{{ ends[inventory_hostname] | default('CONFIRMED') }}"}}],
            "rescue": [{"ansible.builtin.set_fact": {"switchover_failed": "see above"}}],
        },
        {
            "name": "End",
            "ansible.builtin.fail": {"msg": "{{ switchover_failed }}"},
            "when": "switchover_failed is defined",
        },
    ]
    first = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [{"ansible.builtin.meta": "noop"}]}
    (folder / "play.yml").write_text(yaml.safe_dump([first, {**keywords, "tasks": tasks}], sort_keys=False))
    variables = {"rollout_serial": serial, "ends": ends, "ansible_connection": "local"}
    variables["ansible_python_interpreter"] = "{{ ansible_playbook_python }}"
    inventory = {
        "all": {"children": {"gpu_hosts": {"hosts": {host: {} for host in hosts}, "vars": variables}}}
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    # In the place of the module: it runs in the play's own process, and seven hosts take no time.
    (folder / "action").mkdir(exist_ok=True)
    (folder / "action/switchover.py").write_text(MADE_UP_SWITCH)
    return subprocess.run(
        ["ansible-playbook", "-i", folder / "hosts.yml", folder / "play.yml", *options],
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_ACTION_PLUGINS": str(folder / "action"),
            "ANSIBLE_LIBRARY": str(REPOSITORY / "library"),
            "ANSIBLE_STDOUT_CALLBACK": "rollout",
            "ANSIBLE_CALLBACK_PLUGINS": str(REPOSITORY / "callback_plugins"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORKS": "7",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("serial", "failing", "batches", "line"),
    [
        (2, {}, 4, "7 done."),
        ("40%", {}, 4, "7 done."),
        ([1, "50%"], {}, 3, "7 done."),
        (1, {"h2": "ROLLED_BACK"}, 2, "1 done, 1 rolled back (h2), 5 untouched (h3, h4, h5, h6, h7). Mend"),
        # who shares the batch of a failure ends what it has begun
        ([1, 3, "100%"], {"h2": "STRANDED"}, 2, "3 done, 1 STRANDED (h2), 3 untouched (h5, h6, h7). Mend"),
    ],
    ids=["number", "percent", "canary and then halves", "stops at the second", "stops after its batch"],
)
def test_batches(tmp_path, serial, failing, batches, line):
    done = play(tmp_path, serial, failing)
    assert done.stdout.count("TASK [switchover]") == batches, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(line), done.stdout
    assert (done.returncode == 0) == (not failing)


def test_a_limit_narrows_who_is_counted(tmp_path):
    done = play(tmp_path, [1], {"h5": "REFUSED"}, "--limit", "h4,h5,h6")
    assert done.stdout.splitlines()[-1].startswith("1 done, 1 refused (h5), 1 untouched (h6)."), done.stdout
