# Licensed under the Apache License 2.0, see LICENSE.
"""Writes down which tasks a run had, what kind of work each was on each host, and when."""

from __future__ import annotations

DOCUMENTATION = r"""
name: tally
type: aggregate
short_description: Counts and times the tasks of a run, for the benchmarks
description:
  - Writes one JSON file at the end of a run. The tasks of each batch of each play, in order, with start and, per
    host, kind of work, change and seconds.
options:
  path:
    description: The file to write.
    type: path
    required: true
    env:
      - name: BENCH_TALLY
"""

import json
import time
from typing import TYPE_CHECKING

from ansible.plugins.callback import CallbackBase

if TYPE_CHECKING:
    from ansible.executor.task_result import CallbackTaskResult

#: Actions that run no module anywhere: what they do happens in the control node's own processes.
CONTROL_ONLY = {
    "add_host",
    "assert",
    "control_file",
    "debug",
    "fail",
    "group_by",
    "import_role",
    "include_role",
    "include_tasks",
    "include_vars",
    "meta",
    "model_source",
    "pause",
    "set_fact",
    "set_stats",
    "validate_argument_spec",
}


class CallbackModule(CallbackBase):
    """See DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "tally"
    CALLBACK_NEEDS_ENABLED = True

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict] = []
        self.started: dict[tuple[str, str], float] = {}

    def v2_playbook_on_play_start(self, play) -> None:
        """A play starts, or the next batch of a play with `serial`."""
        self.batches.append({"play": play.get_name(), "start": time.time(), "tasks": []})

    def v2_playbook_on_task_start(self, task, is_conditional) -> None:
        """A task starts on the first host."""
        self.batches[-1]["tasks"].append(
            {
                "uuid": task._uuid,
                "name": task.get_name(),
                "action": task.action,
                "run_once": bool(task.run_once),
                "start": time.time(),
                "hosts": {},
            }
        )

    def v2_playbook_on_handler_task_start(self, task) -> None:
        """A handler is a task as well."""
        self.v2_playbook_on_task_start(task, False)

    def v2_runner_on_start(self, host, task) -> None:
        """A worker begins with one host."""
        self.started[host.get_name(), task._uuid] = time.time()

    def _done(self, result: CallbackTaskResult, *, skipped: bool = False, failed: bool = False) -> None:
        host, uuid = result.host.get_name(), result.task._uuid
        task = next(task for task in reversed(self.batches[-1]["tasks"]) if task["uuid"] == uuid)
        # What a callback gets no longer says whether it was skipped or failed: which method was called does.
        if skipped:
            kind = "skipped"
        elif task["action"].rpartition(".")[2] in CONTROL_ONLY:
            kind = "control"
        elif "localhost" in (result.task_fields.get("delegate_to"), host):
            kind = "local"
        else:
            kind = "host"
        task["hosts"][host] = {
            "kind": kind,
            "changed": result.is_changed(),
            "failed": failed,
            "seconds": time.time() - self.started.get((host, uuid), task["start"]),
        }

    def v2_runner_on_ok(self, result: CallbackTaskResult) -> None:
        """A task ended well on a host."""
        self._done(result)

    def v2_runner_on_skipped(self, result: CallbackTaskResult) -> None:
        """A task's condition was false on a host."""
        self._done(result, skipped=True)

    def v2_runner_on_failed(self, result: CallbackTaskResult, ignore_errors: bool = False) -> None:
        """A task failed on a host."""
        self._done(result, failed=True)

    def v2_runner_on_unreachable(self, result: CallbackTaskResult) -> None:
        """A host is gone."""
        self._done(result, failed=True)

    def v2_playbook_on_stats(self, stats) -> None:
        """The run is over: write it down."""
        end = time.time()
        with open(self.get_option("path"), "w", encoding="utf-8") as stream:
            json.dump({"batches": self.batches, "end": end}, stream)
