"""What the switch keeps on disk, and the shape of an order: the one place that knows the file names."""

from __future__ import annotations

import contextlib
import json
import os

from . import switch_state
from .errors import RolloutError
from .files import fsync_directory, read_json, write_json
from .gate import GATE, RUN_DIR, SERVING, STATE_DIR

KEPT_RECORDS = 20

# As Ansible's argument specs, which fill in the defaults: an order is always complete.
SERVER_SPEC = {
    "name": {"type": "str", "required": True},
    "unit": {"type": "str", "required": True},
    "port": {"type": "int", "required": True},
    "host": {"type": "str", "default": "127.0.0.1"},
    "model_id": {"type": "str"},
    "metrics": {"type": "bool", "default": False},
    "chat": {"type": "bool", "default": False},
    "tools": {"type": "bool", "default": False},
    "ready_timeout_s": {"type": "int", "default": 1200},
    "stop_timeout_s": {"type": "int", "default": 180},
    "release": {"type": "str"},
    "runtime": {"type": "str", "choices": ["systemd", "docker", "podman"], "default": "systemd"},
    "restart_policy": {"type": "str"},
    # A path, no secret.
    "api_key_file": {"type": "path", "no_log": False},
}
SETTINGS_SPEC = {
    "accept_unproven_old": {"type": "bool", "default": False},
    "gpus": {"type": "list", "elements": "int"},
    "gpu_free_mib": {"type": "int", "default": 500},
    "gpu_free_stable_s": {"type": "float", "default": 2.0},
    "gpu_free_timeout_s": {"type": "float", "default": 120.0},
    "leftover_grace_s": {"type": "float", "default": 10.0},
    "proof_completions": {"type": "int", "default": 3},
    "proof_timeout_s": {"type": "float", "default": 120.0},
}


def complete(spec: dict, values: dict) -> dict:
    """`values` with the defaults of `spec`, for descriptions that don't come through a module.

    Raises RolloutError for a missing or an unknown key.
    """
    unknown = sorted(set(values) - set(spec))
    missing = sorted(key for key, option in spec.items() if option.get("required") and key not in values)
    if unknown or missing:
        raise RolloutError(
            "The description of a server isn't right",
            found=f"unknown: {', '.join(unknown) or 'none'}; missing: {', '.join(missing) or 'none'}",
            expected=", ".join(spec),
        )
    return {key: values.get(key, option.get("default")) for key, option in spec.items()}


class Store:
    """The files below rollout_state and on /run. Reading gives None for what is not there.

    Writing raises OSError and leaves what was there; a document that can't be parsed raises RolloutError.
    """

    def __init__(self, state_dir: str = STATE_DIR, run_dir: str = RUN_DIR):
        self.state_dir = state_dir
        self.run_dir = run_dir
        self.switch_dir = os.path.join(state_dir, "switch")
        self.history_dir = os.path.join(self.switch_dir, "history")
        self.lock_path = os.path.join(run_dir, "lock")
        self._serving = os.path.join(state_dir, SERVING)
        self._pending = os.path.join(self.switch_dir, "pending.json")
        self._record = os.path.join(self.switch_dir, "record.json")
        self._fallback = os.path.join(run_dir, "record.json")
        self._gate = os.path.join(run_dir, GATE)

    def make_directories(self) -> None:
        """Make what is missing; the mode is for everyone to read, units ask as their own users."""
        for directory in (self.history_dir, self.run_dir):
            os.makedirs(directory, mode=0o755, exist_ok=True)

    @staticmethod
    def _read(path: str) -> dict | None:
        try:
            return read_json(path)
        except ValueError as error:
            raise RolloutError(
                f"{path} can't be read",
                found=str(error),
                remedy="look at it, and move it away if it is broken",
            ) from error

    def serving(self) -> dict | None:
        """{"serving": SERVER, "previous": SERVER or null, "switch_id": …}, from the last confirmed switch."""
        return self._read(self._serving)

    def confirm(self, record: dict) -> None:
        """The outcome: one rename makes the new server the one that boots.

        Returns normally whenever the rename was done, even if making it durable failed afterwards.
        """
        previous, before = record["old"], self.serving()
        chosen = record.get("way_back")
        if previous is None and before is not None and before["serving"]["unit"] == record["new"]["unit"]:
            # The same server was started anew: the way back is the one that it had.
            previous = before["previous"]
        if chosen is not None:
            # On trial: back leads to what served before all trials. To itself there is none.
            previous = None if chosen["unit"] == record["new"]["unit"] else chosen
        value = {"serving": record["new"], "previous": previous, "switch_id": record["id"]}
        try:
            write_json(self._serving, value)
        except OSError:
            if self.serving() != value:
                raise

    def order(self) -> dict | None:
        """The order that is being carried out or waits for it."""
        return self._read(self._pending)

    def hand_over(self, order: dict) -> None:
        """Put an order in place. Raises FileExistsError when one is there already."""
        os.makedirs(self.switch_dir, mode=0o755, exist_ok=True)
        temporary = os.path.join(self.switch_dir, f".pending.{order['id']}")
        write_json(temporary, order)
        try:
            os.link(temporary, self._pending)  # unlike a rename, a link never replaces
        finally:
            os.unlink(temporary)
        fsync_directory(self.switch_dir)

    def close_order(self) -> None:
        """Take the order away: it has ended."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._pending)
            fsync_directory(self.switch_dir)

    def record(self) -> dict | None:
        """The record of the running or the last switch.

        A copy on /run is newer: it is there only when the state directory could not be written.
        """
        return self._read(self._fallback) or self._read(self._record)

    def write_record(self, record: dict) -> None:
        """Keep the record. Where it can't be written it goes to /run, and OSError is raised."""
        try:
            write_json(self._record, record)
        except OSError:
            write_json(self._fallback, record)
            raise
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._fallback)

    def archive(self) -> None:
        """Move the record of an earlier switch into the history, of which the newest 20 are kept."""
        earlier = self.record()
        if earlier is None:
            return
        write_json(os.path.join(self.history_dir, f"{earlier['id']}.json"), earlier)
        for path in (self._record, self._fallback):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        kept = [entry for entry in os.scandir(self.history_dir) if entry.name.endswith(".json")]
        kept.sort(key=lambda entry: entry.stat().st_mtime, reverse=True)
        for entry in kept[KEPT_RECORDS:]:
            os.unlink(entry.path)

    def find(self, order_id: str) -> dict | None:
        """The record of an order: the running or last one, or one of the history."""
        current = self.record()
        if current is not None and current["id"] == order_id:
            return current
        return self._read(os.path.join(self.history_dir, f"{os.path.basename(order_id)}.json"))

    def running(self) -> dict | None:
        """The order whose switch has not ended, or None."""
        order = self.order()
        if order is None:
            return None
        record = self.record()
        if record is not None and record["id"] == order["id"] and record["state"] in switch_state.END_STATES:
            return None
        return order

    def set_gate(self, unit: str | None) -> None:
        """During a switch: only `unit` may start, or none."""
        if self.gate() != {"may_start": unit}:
            write_json(self._gate, {"may_start": unit})

    def gate(self) -> dict | None:
        """What the gate says, None when no switch closes it."""
        try:
            return read_json(self._gate)
        except json.JSONDecodeError:
            return {}

    def open_gate(self) -> None:
        """After a switch: serving.json decides again."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._gate)
