"""Hands an order to the installed program, as the module `switchover` does, and prints what that says.

Standard input: {"old": …, "new": …, "settings": …, "id": …, "follow_timeout": seconds}. Without Ansible, since a cell
that takes seconds needn't wait for it; the cells named "play" go through the role.
"""

from __future__ import annotations

import json
import sys

sys.path.insert(0, "/opt/vllm-dflash/program")

from dflash_rollout.errors import RolloutError
from dflash_rollout.orders import order_switch
from dflash_rollout.store import SERVER_SPEC, SETTINGS_SPEC, complete

order = json.load(sys.stdin)
try:
    failed, result = order_switch(
        check_mode=False,
        old=order["old"] and complete(SERVER_SPEC, order["old"]),
        new=complete(SERVER_SPEC, order["new"]),
        settings=complete(SETTINGS_SPEC, order["settings"]),
        state_dir="/var/lib/vllm-dflash",
        id=order.get("id"),
        follow_timeout=order["follow_timeout"],
    )
    print(json.dumps({"failed": failed, **result}))
except RolloutError as error:
    print(json.dumps({"failed": True, "outcome": "REFUSED", "finished": True, "msg": str(error)}))
