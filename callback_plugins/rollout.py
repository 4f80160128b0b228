# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible's default output, but a task that follows something says how far it is instead of FAILED - RETRYING."""

from __future__ import annotations

DOCUMENTATION = r"""
name: rollout
type: stdout
short_description: The default output, with the progress of what is followed
description:
  - As P(ansible.builtin.default#callback), but where an attempt of a task with C(until) returned RV(ignore:msg), that is
    shown in the place of C(FAILED - RETRYING), with how many hosts of the play are done with the task where it has several.
  - After a play that switches servers, one last line counts how it ended for all hosts that the play was to reach.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
"""

from typing import TYPE_CHECKING

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

if TYPE_CHECKING:
    from ansible.executor.stats import AggregateStats
    from ansible.executor.task_result import CallbackTaskResult
    from ansible.playbook.play import Play
    from ansible.playbook.task import Task

SWITCH = "switchover"
DONE, UNTOUCHED = "done", "untouched"
_WORDS = {"ROLLED_BACK": "rolled back", "REFUSED": "refused", "STRANDED": "STRANDED"}


def end_of(outcomes: list[str], failed: bool, unreachable: bool) -> str:
    """How a roll-out ended for one host, in a word or two, from the outcomes of its switches in their order."""
    last = outcomes[-1] if outcomes else ""
    if last in _WORDS:
        return _WORDS[last]
    if unreachable:
        return "unreachable"
    if failed and outcomes.count("CONFIRMED") > 1:
        return _WORDS["ROLLED_BACK"]  # confirmed, not accepted, and switched to the server before
    if failed:
        return "failed after its switch" if last in ("CONFIRMED", "UNCHANGED") else "failed before its switch"
    return DONE if last in ("CONFIRMED", "UNCHANGED") else UNTOUCHED


def last_line(ends: dict[str, str]) -> str:
    """ "2 done, 1 rolled back (gpu3), 5 untouched (gpu4, …)" from how it ended for each host, in their order."""
    order = [DONE, *dict.fromkeys(end for end in ends.values() if end not in (DONE, UNTOUCHED)), UNTOUCHED]
    parts = []
    for end in order:
        hosts = [host for host, its in ends.items() if its == end]
        named = f" ({', '.join(hosts[:8])}{', …' if len(hosts) > 8 else ''})" if hosts and end != DONE else ""
        if hosts or end == DONE:
            parts.append(f"{len(hosts)} {end}{named}")
    return ", ".join(parts)


class CallbackModule(Default):
    """See DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "rollout"

    def __init__(self) -> None:
        super().__init__()
        self._hosts: set[str] = set()
        self._gone: set[str] = set()
        self._done: set[str] = set()
        self._alone = False
        # Of plays that switch: all hosts that they were to reach, and the outcomes of each host's switches.
        self._to_reach: list[str] = []
        self._outcomes: dict[str, list[str]] = {}
        self._reachable: list[str] = []

    def v2_playbook_on_play_start(self, play: Play) -> None:
        """With `serial`, each batch is such a start, with the inventory narrowed to it."""
        super().v2_playbook_on_play_start(play)
        inventory = play.get_variable_manager()._inventory
        self._hosts = {host.name for host in inventory.get_hosts(play.hosts, order=play.order)}
        # Also those of the batches that may never come.
        everybody = inventory.get_hosts(play.hosts, ignore_restrictions=True, order=play.order)
        self._reachable = [host.name for host in everybody]
        self._gone = set()

    def v2_playbook_on_task_start(self, task: Task, is_conditional: bool) -> None:
        """A new task: nobody is done with it."""
        self._begin(task)
        super().v2_playbook_on_task_start(task, is_conditional)

    def v2_playbook_on_handler_task_start(self, task: Task) -> None:
        """A handler is a task too."""
        self._begin(task)
        super().v2_playbook_on_handler_task_start(task)

    def v2_runner_retry(self, result: CallbackTaskResult) -> None:
        """One line: host, what the attempt returned as msg, and how many hosts are done."""
        text = result.result.get("msg")
        if not text or result.result.get("failed"):
            super().v2_runner_retry(result)
            return
        hosts = self._hosts - self._gone
        if len(hosts) > 1 and not self._alone:
            text += f" ({len(self._done & hosts)} of {len(hosts)} hosts done)"
        self._display.display(f"{self.host_label(result)}: {text}", color=C.COLOR_DEBUG)

    def v2_runner_on_ok(self, result: CallbackTaskResult) -> None:
        """As by default, and counted."""
        self._done.add(result.host.get_name())
        self._note(result)
        super().v2_runner_on_ok(result)

    def v2_runner_on_skipped(self, result: CallbackTaskResult) -> None:
        """Who skips the task has nothing left to do of it."""
        self._done.add(result.host.get_name())
        super().v2_runner_on_skipped(result)

    def v2_runner_on_failed(self, result: CallbackTaskResult, ignore_errors: bool = False) -> None:
        """A failed host is done with this task too; whether it goes on is for its next task to show."""
        self._done.add(result.host.get_name())
        self._note(result)
        super().v2_runner_on_failed(result, ignore_errors)

    def v2_runner_on_unreachable(self, result: CallbackTaskResult) -> None:
        """The play goes on without it."""
        self._gone.add(result.host.get_name())
        super().v2_runner_on_unreachable(result)

    def v2_playbook_on_stats(self, stats: AggregateStats) -> None:
        """As by default, and how it ended for all."""
        super().v2_playbook_on_stats(stats)
        if not self._outcomes:
            return
        ends = {
            host: end_of(self._outcomes.get(host, []), host in stats.failures, host in stats.dark)
            for host in self._to_reach
        }
        well = set(ends.values()) == {DONE}
        text = "" if well else " Mend the cause and run the same again: what is done is left alone."
        self._display.display(f"{last_line(ends)}.{text}", color=C.COLOR_OK if well else C.COLOR_ERROR)

    def _note(self, result: CallbackTaskResult) -> None:
        outcome = result.result.get("outcome") if result.task.action == SWITCH else None
        # In check mode there is none of these.
        if outcome in ("CONFIRMED", "UNCHANGED", *_WORDS):
            self._to_reach = self._reachable
            self._outcomes.setdefault(result.host.get_name(), []).append(outcome)

    def _begin(self, task: Task) -> None:
        self._done = set()
        self._alone = bool(task.run_once)
