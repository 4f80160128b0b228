# Licensed under the Apache License 2.0, see LICENSE.
"""Action push_files: rsync files from the control node to a host. Documented in library/push_files.py."""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

from ansible import constants as C
from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "module_utils"))

from dflash_rollout import transfers
from dflash_rollout.transfer_job import size_text

REPORT_S = 5.0
#: What rsync answers when the connection broke: 10 socket, 12 protocol stream, 30 timeout, 255 ssh itself.
BROKEN = (10, 12, 30, 255)
ATTEMPTS = 5
IO_TIMEOUT_S = 60
AES = "aes128-gcm@openssh.com"

ARGUMENT_SPEC = {
    "files": {"type": "list", "elements": "dict", "required": True},
    "superseded": {"type": "list", "elements": "str", "default": []},
    "limit_s": {"type": "int", "default": 7200},
}


class ActionModule(ActionBase):
    """See library/push_files.py."""

    TRANSFERS_FILES = False

    def run(self, tmp=None, task_vars=None):
        """Make room, send, verify; each file under its `.incoming` name until its digest is proved."""
        result = super().run(tmp, task_vars)
        _, options = self.validate_argument_spec(argument_spec=ARGUMENT_SPEC)
        if self._connection.transport not in ("ssh", "local"):
            raise AnsibleActionFail(
                f"rsync can't go over the connection {self._connection.transport} of this host. "
                "What to do: use ssh, or bring the files by url or present."
            )
        self._host = task_vars["inventory_hostname"]
        local = self._connection.transport == "local"
        # Received as who logs in: no root shell for rsync, and sudo may ask for a password.
        owner = int(self._low_level_execute_command("id -u", sudoable=False)["stdout"].strip())
        ready = self._module(
            "model_files", {"files": options["files"], "state": "receiving", "owner": owner}, task_vars
        )
        if not ready.get("failed") and not ready["rsync"]:
            ready = {"failed": True, "msg": "Found no rsync on this host. What to do: apt install rsync."}
        if ready.get("failed") or self._task.check_mode:
            return {**result, **ready}
        self._count = _Count(self._task._uuid, task_vars)
        sent = 0
        for file in ready["missing"]:
            try:
                sent += self._send(file, local, ready["aes"], options["limit_s"])
            except _RsyncFailed as error:
                return {**result, "failed": True, "msg": str(error), "sent_bytes": sent}
        placed = self._module(
            "model_files",
            {"files": ready["missing"], "state": "placed", "superseded": options["superseded"]},
            task_vars,
        )
        self._count.done(self._host)
        return {**result, **placed, "sent_bytes": sent}

    def _module(self, name: str, arguments: dict, task_vars: dict) -> dict:
        done = self._execute_module(module_name=name, module_args=arguments, task_vars=task_vars)
        done.pop("invocation", None)
        return done

    def _rsh(self, aes: bool) -> tuple[list[str], dict[str, str]]:
        """The ssh command as the inventory connects, with a connection of its own: the shared one is one process more."""
        option = self._connection.get_option
        command = [option("ssh_executable") or "ssh"]
        environment = {}
        password = option("password")
        if password:
            if not shutil.which("sshpass"):
                raise AnsibleActionFail(
                    "This host's ssh wants a password. What to do: install sshpass here, or use a key."
                )
            command = ["sshpass", "-e", *command]
            environment["SSHPASS"] = password
        for name in ("ssh_args", "ssh_common_args", "ssh_extra_args"):
            command += shlex.split(option(name) or "")
        if option("host_key_checking") is False:
            command += ["-o", "StrictHostKeyChecking=no"]
        if option("port"):
            command += ["-p", str(option("port"))]
        if option("private_key_file"):
            command += ["-i", os.path.expanduser(option("private_key_file"))]
        if option("remote_user"):
            command += ["-l", option("remote_user")]
        # The first value that ssh reads counts.
        own = ["-o", "ControlPath=none", "-o", "ControlMaster=no", "-o", "Compression=no"]
        if aes and transfers.has_aes():
            own += ["-o", f"Ciphers=^{AES}"]
        at = command.index(option("ssh_executable") or "ssh") + 1
        return command[:at] + own + command[at:], environment

    def _send(self, file: dict, local: bool, aes: bool, limit_s: int) -> int:
        """Bytes that went out for one file. Goes on where a broken connection stopped it."""
        end = time.monotonic() + limit_s
        sent = 0
        for attempt in range(1, ATTEMPTS + 1):
            # The host ends what runs there by itself: a control node that fell off the network can't, and TCP may take hours.
            left = max(1, math.ceil(end - time.monotonic()))
            command, environment = self._rsync(file, local, aes, f"timeout --kill-after=5 {left} rsync")
            code, output, errors = self._follow(command, environment, file, end)
            found = re.search(r"Total bytes sent: ([\d,.]+)", output)
            sent += int(re.sub(r"\D", "", found[1])) if found else 0
            if code == 0:
                return sent
            reason = " / ".join(errors.strip().splitlines()[-3:]) or f"exit status {code}"
            if time.monotonic() >= end:
                raise _RsyncFailed(
                    f"{file['source']} was not sent within {limit_s} s (transfer_limit). Found: {reason}. "
                    "What to do: run again, it goes on with what arrived; raise the limit where the link is that slow."
                )
            if code not in BROKEN or attempt == ATTEMPTS:
                raise _RsyncFailed(
                    f"{file['source']} could not be sent. Found: {reason}. "
                    "What to do: see whether this host can be reached, then run again: it goes on with what arrived."
                )
            Display().display(
                f"{self._host}: the connection broke ({reason}), attempt {attempt + 1} of {ATTEMPTS} goes on"
            )
            time.sleep(2 * attempt)
        raise AssertionError("not reached")

    def _rsync(self, file: dict, local: bool, aes: bool, there: str) -> tuple[list[str], dict[str, str]]:
        """The command for one file, with what it needs in its environment; `there` is what runs on the host."""
        environment = {}
        # --inplace keeps what arrived under a name that isn't the final one; a second copy, as --partial-dir makes it on
        # resuming, would need twice the space. --ignore-times: only contents count.
        command = ["rsync", "--inplace", "--ignore-times", "--copy-links", "--no-compress", "--outbuf=L"]
        command += ["--info=progress2,stats2", f"--timeout={IO_TIMEOUT_S}"]
        target = file["incoming"]
        if not local:
            rsh, environment = self._rsh(aes)
            host = self._connection.get_option("host")
            command += ["--rsh", shlex.join(rsh), "--protect-args", f"--rsync-path={there}"]
            target = f"[{host}]:{target}" if ":" in host else f"{host}:{target}"
        if local:
            command.append("--no-whole-file")
        return [*command, "--", file["source"], target], environment

    def _follow(
        self, command: list[str], environment: dict[str, str], file: dict, end: float
    ) -> tuple[int, str, str]:
        """Run rsync, say every few seconds how far it is, and don't outlive the playbook, nor `end` (time.monotonic)."""
        parent, last = os.getppid(), time.monotonic()
        size = file["size"] or 0
        text = ""
        with tempfile.TemporaryFile("w+", errors="replace") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **environment, "LC_ALL": "C"},
            )
            try:
                with selectors.DefaultSelector() as selector:
                    selector.register(process.stdout, selectors.EVENT_READ)
                    while True:
                        if os.getppid() != parent:
                            raise _RsyncFailed("ansible-playbook is gone")
                        if time.monotonic() >= end:
                            process.terminate()
                            break
                        if not selector.select(1.0):
                            continue
                        chunk = os.read(process.stdout.fileno(), 65536)
                        if not chunk:
                            break
                        text = (text + chunk.decode(errors="replace"))[-8192:]
                        if time.monotonic() - last >= REPORT_S:
                            last = time.monotonic()
                            self._report(text, size)
                code = process.wait()
            finally:
                if process.poll() is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(5)
                    process.kill()
                    process.wait()
                process.stdout.close()
            errors.seek(0)
            return code, text, errors.read()

    def _report(self, text: str, size: int) -> None:
        found = re.findall(r"([\d,]+)\s+\d+%\s+([\d.]+)([kMG])B/s", text)
        if not found:
            return
        done = int(found[-1][0].replace(",", ""))
        # rsync counts in powers of two.
        rate = float(found[-1][1]) * {"k": 2**10, "M": 2**20, "G": 2**30}[found[-1][2]]
        share = f"{done * 100 // size} % of {size_text(size)}" if size else size_text(done)
        left = f", {(size - done) / rate:.0f} s left" if rate and size > done else ""
        Display().display(f"{self._host}: {share}, {rate / 1e6:.3g} MB/s{left}{self._count.text()}")


class _Count:
    """How many hosts of the play hold their files. Each host's task is a process; a folder of this run is what they share."""

    def __init__(self, task: str, task_vars: dict):
        self._folder = os.path.join(C.DEFAULT_LOCAL_TMP, f"push-{task}")
        os.makedirs(self._folder, exist_ok=True)
        hosts = task_vars["ansible_play_hosts"]
        self._hosts = len(hosts)
        held = [task_vars["hostvars"][host].get("transfer_held") for host in hosts]
        self._before = sum(bool(found) and not found["missing"] for found in held)

    def done(self, host: str) -> None:
        with open(os.path.join(self._folder, host), "w", encoding="ascii"):
            pass

    def text(self) -> str:
        """Empty where there is one host only."""
        if self._hosts < 2:
            return ""
        return f" ({self._before + len(os.listdir(self._folder))} of {self._hosts} hosts done)"


class _RsyncFailed(Exception):
    """For people: what broke, and what to do."""
