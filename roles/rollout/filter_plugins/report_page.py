# Licensed under the Apache License 2.0, see LICENSE.
"""Filter report_page: records of switches as the template of the page wants them."""

from __future__ import annotations

import os
import sys

# As in action_plugins: the same code as the modules', in Ansible's own process.
_ROOT = os.path.abspath(__file__)
for _ in range(4):
    _ROOT = os.path.dirname(_ROOT)
sys.path.append(os.path.join(_ROOT, "module_utils"))

from dflash_rollout.report_page import escaped, page


class FilterModule:
    """What Ansible looks for."""

    def filters(self) -> dict:
        """name → function"""
        return {"report_page": lambda records: escaped(page(records))}
