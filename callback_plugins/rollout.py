# Licensed under the Apache License 2.0, see LICENSE.
"""Ansible's default output, but a task that follows something says how far it is instead of FAILED - RETRYING."""

from __future__ import annotations

DOCUMENTATION = r"""
name: rollout
type: stdout
short_description: The default output, with the progress of what is followed
description:
  - As P(ansible.builtin.default#callback), but where an attempt of a task with C(until) returned RV(ignore:msg), that is
    shown in the place of C(FAILED - RETRYING).
extends_documentation_fragment:
  - default_callback
  - result_format_callback
"""

from typing import TYPE_CHECKING

from ansible import constants as C
from ansible.plugins.callback.default import CallbackModule as Default

if TYPE_CHECKING:
    from ansible.executor.task_result import CallbackTaskResult


class CallbackModule(Default):
    """See DOCUMENTATION."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "stdout"
    CALLBACK_NAME = "rollout"

    def v2_runner_retry(self, result: CallbackTaskResult) -> None:
        """One line: host and what the attempt returned as msg."""
        text = result.result.get("msg")
        if not text or result.result.get("failed"):
            super().v2_runner_retry(result)
        else:
            self._display.display(f"{self.host_label(result)}: {text}", color=C.COLOR_DEBUG)
