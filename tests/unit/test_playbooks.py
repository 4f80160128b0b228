"""What is easily got wrong in the plays and seen late."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PLAYS = [
    (f"{path.name}: {play['name']}", play.get("tasks", []))
    for path in sorted(ROOT.glob("playbooks/*.yml"))
    for play in yaml.safe_load(path.read_text())
    if "hosts" in play
]


def notifies(role: str, tasks: str = "main") -> bool:
    """Does this tasks file of a role, or one that it takes in, notify a handler?"""
    text = (ROOT / f"roles/{role}/tasks/{tasks.removesuffix('.yml')}.yml").read_text()
    taken_in = re.findall(r"(?:include|import)_tasks: *(?:\n +file: *)?([\w.]+)", text)
    return "notify:" in text or any(notifies(role, name) for name in taken_in)


def flat(tasks: list[dict]) -> list[dict]:
    """The tasks and blocks, and what is in the blocks."""
    inner = [flat(task.get(part, [])) for task in tasks for part in ("block", "rescue", "always")]
    return [*tasks, *(one for tasks in inner for one in tasks)]


def imports(tasks: list[dict]) -> list[tuple[dict, dict]]:
    """Each import of a role, with its task."""
    return [
        (task, task["ansible.builtin.import_role"])
        for task in flat(tasks)
        if "ansible.builtin.import_role" in task
    ]


def any_notifies(tasks: list[dict]) -> bool:
    return any(notifies(role["name"], role.get("tasks_from", "main")) for _, role in imports(tasks))


@pytest.mark.parametrize("tasks", [tasks for _, tasks in PLAYS], ids=[name for name, _ in PLAYS])
def test_no_condition_lies_on_handlers(tasks):
    """Ansible puts the `when` of an import on the handlers of that role's dependencies, for the whole play."""
    if any_notifies(tasks):
        blocks = [task for task in flat(tasks) if "block" in task]
        assert [
            task["name"] for task in [*(task for task, _ in imports(tasks)), *blocks] if "when" in task
        ] == []


def test_staging_and_switching_notify():
    assert [name.split(":")[0] for name, tasks in PLAYS if any_notifies(tasks)] == [
        "rollback.yml",
        "stage.yml",
        "switch.yml",
    ]
