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
  - A roll-out (a run with a play whose C(rollout_phase) is V(switch)) that did not end well gets its page here. Ansible
    may end before the play that reports; where that play does run without a host that was lost, it leaves the page to this.
    The records of its switches are kept as well, from what the module M(switchover) returned. Nothing is written in check mode.
extends_documentation_fragment:
  - default_callback
  - result_format_callback
"""

import datetime
import json
import os
import sys
from typing import TYPE_CHECKING

import jinja2
from ansible import constants as C
from ansible import context
from ansible.plugins.callback.default import CallbackModule as Default
from ansible.template import Templar

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(os.path.join(_ROOT, "module_utils"))

from dflash_rollout.files import read_text, write_atomically, write_json
from dflash_rollout.report_page import escaped, page
from dflash_rollout.switch_state import END_STATES

if TYPE_CHECKING:
    from ansible.executor.stats import AggregateStats
    from ansible.executor.task_result import CallbackTaskResult
    from ansible.playbook import Playbook
    from ansible.playbook.play import Play
    from ansible.playbook.task import Task

SWITCH = "switchover"
DONE, UNTOUCHED = "done", "untouched"
_WORDS = {"ROLLED_BACK": "rolled back", "REFUSED": "refused", "STRANDED": "STRANDED"}


def end_of(outcomes: list[str], failed: bool, unreachable: bool, phase: str = "switch") -> str:
    """How a roll-out ended for one host, in a word or two, from the outcomes of its switches in their order.

    `phase` is where it failed.
    """
    last = outcomes[-1] if outcomes else ""
    if last in _WORDS:
        return _WORDS[last]
    if unreachable:
        return "unreachable"
    if failed and outcomes.count("CONFIRMED") > 1:
        return _WORDS["ROLLED_BACK"]  # confirmed, not accepted, and switched to the server before
    if failed and not outcomes and phase != "switch":
        return f"did not pass {phase}"
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


def html_of(shown: dict) -> str:
    """The page as text, from the template of the role."""
    template = read_text(os.path.join(_ROOT, "roles/rollout/templates/report.html.j2"))
    # The dialect of Ansible's own templates.
    engine = jinja2.Environment(trim_blocks=True, keep_trailing_newline=True, autoescape=False)  # noqa: S701 - escaped() did it
    return engine.from_string(template).render(__rollout_page=escaped(shown))


def _record_in(folder: str, host: str) -> dict | None:
    text = read_text(os.path.join(folder, f"{host}.json"))
    return json.loads(text) if text else None


def _drafter_before(before: dict, record: dict) -> dict | None:
    """What the record before says of the drafter, where that is of a release that this switch was to or from."""
    known = before.get("drafter") or {}
    releases = [(record.get(side) or {}).get("release") for side in ("new", "old")]
    return known if known.get("release") and known["release"] in releases else None


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
        # Of a roll-out: its play that switches, in which phase it is, and for its page the records and reasons by host.
        self._rollout: Play | None = None
        self._phase = ""
        self._records: dict[str, dict] = {}
        self._drafters: dict[str, dict] = {}
        self._reasons: dict[str, list[dict]] = {}
        self._for_all: list[str] = []

    def v2_playbook_on_start(self, playbook: Playbook) -> None:
        """Known before the first task: a roll-out may never come to its play that switches."""
        super().v2_playbook_on_start(playbook)
        switching = (play for play in playbook.get_plays() if play.vars.get("rollout_phase") == "switch")
        self._rollout = next(switching, None)

    def v2_playbook_on_play_start(self, play: Play) -> None:
        """With `serial`, each batch is such a start, with the inventory narrowed to it."""
        super().v2_playbook_on_play_start(play)
        inventory = play.get_variable_manager()._inventory
        self._hosts = {host.name for host in inventory.get_hosts(play.hosts, order=play.order)}
        # Also those of the batches that may never come.
        everybody = inventory.get_hosts(play.hosts, ignore_restrictions=True, order=play.order)
        self._reachable = [host.name for host in everybody]
        self._gone = set()
        self._phase = play.vars.get("rollout_phase", "")

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
        self._keep(result)
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
        if not ignore_errors:
            self._why(result)
        super().v2_runner_on_failed(result, ignore_errors)

    def v2_runner_on_unreachable(self, result: CallbackTaskResult) -> None:
        """The play goes on without it."""
        self._gone.add(result.host.get_name())
        self._why(result)
        super().v2_runner_on_unreachable(result)

    def v2_playbook_on_stats(self, stats: AggregateStats) -> None:
        """As by default, and how it ended for all."""
        super().v2_playbook_on_stats(stats)
        checked = bool(context.CLIARGS.get("check"))
        if not self._outcomes and (self._rollout is None or checked):
            return
        ends = {
            host: end_of(
                self._outcomes.get(host, []),
                self._failed(host, stats),
                host in stats.dark,
                self._failed_in(host),
            )
            for host in self._to_reach or self._all()
        }
        if not ends and not self._for_all:
            return
        well = set(ends.values()) == {DONE}
        text = "" if well else " Mend the cause and run the same again: what is done is left alone."
        self._display.display(f"{last_line(ends)}.{text}", color=C.COLOR_OK if well else C.COLOR_ERROR)
        if self._rollout is not None and not checked and not well:
            self._write_page(ends)

    def _all(self) -> list[str]:
        """The hosts that the roll-out was to switch, with the user's limit and without its batches."""
        inventory = self._rollout.get_variable_manager()._inventory
        return [host.name for host in inventory.get_hosts(self._rollout.hosts, ignore_restrictions=True)]

    def _failed(self, host: str, stats: AggregateStats) -> bool:
        """A gate that stops all of them fails on a host that is well itself."""
        return host in stats.failures and (
            self._rollout is None or bool(self._reasons.get(host)) or (host in self._outcomes)
        )

    def _failed_in(self, host: str) -> str:
        reasons = self._reasons.get(host)
        return reasons[-1]["phase"] if reasons else "switch"

    def _write_page(self, ends: dict[str, str]) -> None:
        """The records of this run's switches, and the page of all. Not in a task: there may be no host left for one."""
        try:
            manager = self._rollout.get_variable_manager()
            hosts = manager._inventory.get_hosts(
                self._rollout.hosts, ignore_restrictions=True, ignore_limits=True
            )
            if not hosts:
                return
            variables = manager.get_vars(play=self._rollout, host=hosts[0])
            folder = Templar(loader=self._rollout.get_loader(), variables=variables).template(
                variables["rollout_records"]
            )
            os.makedirs(folder, exist_ok=True)
            for host, record in self._records.items():
                before = _record_in(folder, host) or {}
                if before.get("states") == record["states"]:
                    continue  # the play that reports kept it, and asked the host for what is beside it
                drafter = self._drafters.get(host) or _drafter_before(before, record)
                write_json(os.path.join(folder, f"{host}.json"), {**record, "drafter": drafter})
            found = {host.name: _record_in(folder, host.name) for host in hosts}
            shown = page(
                found,
                {
                    "at": datetime.datetime.now(datetime.timezone.utc).isoformat(),
                    "line": f"{last_line(ends)}.",
                    "reasons": self._for_all,
                    "hosts": {
                        # A failure that was made good again is no reason.
                        host: {
                            "end": end,
                            "reasons": [] if end in (DONE, UNTOUCHED) else self._reasons.get(host, []),
                        }
                        for host, end in ends.items()
                    },
                },
            )
            path = os.path.join(folder, f"{shown['name']}.html")
            write_atomically(path, html_of(shown))
        except (OSError, ValueError, LookupError) as error:
            self._display.error(
                f"The page of this roll-out can't be written. Found: {error}. "
                "What to do: make room or give yourself the right to write in rollout_records, "
                "then run playbooks/report.yml."
            )
            return
        self._display.display(f"The page of this roll-out, for a browser or a ticket: {path}")

    def _why(self, result: CallbackTaskResult) -> None:
        """For the page: why a host, or all of them, went no further. A switch that ended says it in its record."""
        found = result.result
        ended = result.task.action == SWITCH and (found.get("record") or {}).get("state") in END_STATES
        if ended or result.task.vars.get("rollout_reason_above"):
            return
        items = [item for item in found.get("results") or [] if isinstance(item, dict) and item.get("failed")]
        said = [one["msg"] for one in (items or [found]) if one.get("msg")]
        texts = [str(line) for msg in said for line in (msg if isinstance(msg, list) else [msg])]
        text = (
            "\n".join(texts)
            or "It said nothing, or what it said is hidden because there may be secrets in it."
        )
        if result.task.run_once or result.host.get_name() == "localhost":
            self._for_all.append(text)
            return
        reason = {"phase": self._phase or "report", "task": result.task.get_name(), "text": text}
        self._reasons.setdefault(result.host.get_name(), []).append(reason)

    def _keep(self, result: CallbackTaskResult) -> None:
        """What the host said of its switch last; of one that was lost on the way that is how far it was seen."""
        found, host = result.result, result.host.get_name()
        if result.task.action == SWITCH and (found.get("record") or {}).get("states"):
            record = {**found["record"], "seconds": found.get("states")}
            self._records[host] = {**record, "acceptance": None, "advice": ""}
        if result.task.action == "acceptance" and host in self._records and found.get("record"):
            self._records[host]["acceptance"] = found["record"]
        facts = found.get("ansible_facts") or {}
        if facts.get("drafter_digest"):
            self._drafters[host] = {**self._drafters.get(host, {}), "drafter_sha256": facts["drafter_digest"]}
        if result.task.action == "dflash_config" and found.get("provenance"):
            rendered = {"provenance": found["provenance"], "config": found.get("config")}
            self._drafters[host] = {**self._drafters.get(host, {}), **rendered}

    def _note(self, result: CallbackTaskResult) -> None:
        self._keep(result)
        outcome = result.result.get("outcome") if result.task.action == SWITCH else None
        # In check mode there is none of these.
        if outcome in ("CONFIRMED", "UNCHANGED", *_WORDS):
            self._to_reach = self._reachable
            self._outcomes.setdefault(result.host.get_name(), []).append(outcome)

    def _begin(self, task: Task) -> None:
        self._done = set()
        self._alone = bool(task.run_once)
