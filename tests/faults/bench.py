"""One booted host as the fault cells use it: reset, order, the fault in its state, the end, another run.

Worked on through its console (nsenter): that needs no network of the host, which may be the fault.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))

from bedlib import hosts as beds
from bedlib import network
from cells import Cell

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OLD_UNIT = "sglang.service"
RELEASE = "fa57fa57fa57fa57"
NEW_UNIT = f"vllm-dflash@{RELEASE}.service"
QUICK = {"sglang": {"load_s": 0.3}, "engine": {"load_s": 0.7}}
COMMON = {
    "port": 30000,
    "host": "127.0.0.1",
    "model_id": "Qwen3.6-27B",
    "ready_timeout_s": 20,
    "stop_timeout_s": 6,
}
OLD = {**COMMON, "name": "sglang", "unit": OLD_UNIT, "metrics": False}
NEW = {**COMMON, "name": "vllm-dflash", "unit": NEW_UNIT, "metrics": True, "release": RELEASE}
SETTINGS = {
    "gpu_free_stable_s": 1.0,
    "gpu_free_timeout_s": 6.0,
    "leftover_grace_s": 1.0,
    "proof_timeout_s": 4.0,
}
ENDS = ("CONFIRMED", "ROLLED_BACK", "STRANDED", "REFUSED")
OBSERVER_UNIT = """[Unit]
Description=Observer of the fault tests
DefaultDependencies=no
After=local-fs.target systemd-tmpfiles-setup.service
[Service]
ExecStart=/usr/bin/python3 -IS /opt/faults/observer.py
Restart=always
RestartSec=0
[Install]
WantedBy=sysinit.target
"""
HELD_DROP_IN = """[Service]
ExecStart=
ExecStart=/usr/bin/python3 -IB /opt/faults/held_program.py --state /var/lib/vllm-dflash switch
"""


class NotSo(Exception):
    """The cell could not be carried out as it was meant."""


def merged(*layers: dict) -> dict:
    """faults.json of several layers, each {"sglang": {…}, "engine": {…}}."""
    return {
        name: {k: v for layer in layers for k, v in layer.get(name, {}).items()}
        for name in ("sglang", "engine")
    }


class Bench:
    """One booted host. `do_…` are the faults that cells name."""

    all: ClassVar[list[Bench]] = []

    def __init__(self, bed_name: str, host_name: str, scratch: Path) -> None:
        Bench.all.append(self)
        self.bed = beds.require(bed_name)
        self.host = self.bed.host(host_name)
        self.scratch = scratch
        self.play: subprocess.Popen | None = None
        self.play_log = scratch / f"{self.host.name}-play.log"
        self.cursor = ""

    # ---- the console -------------------------------------------------------------------------------------

    def pid(self) -> int:
        pid = beds.guest_init(self.bed, self.host)
        if pid is None:
            raise NotSo(f"{self.host.name} is off")
        return pid

    def run(self, *command: str, text_in: str | None = None, check: bool = True, timeout: float = 120) -> str:
        """Run a command on the host as root; what it printed."""
        done = subprocess.run(
            ["nsenter", "-t", str(self.pid()), "-m", "-u", "-i", "-n", "-p", "--", *command],
            input=text_in,
            stdin=subprocess.DEVNULL if text_in is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"},
        )
        if check and done.returncode:
            raise NotSo(f"{' '.join(command)[:200]} ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + ("" if check else done.stderr)

    def sh(self, script: str, *, check: bool = True) -> str:
        return self.run("sh", "-c", script, check=check)

    def put(self, path: str, content: str | bytes, mode: str = "0644") -> None:
        data = content if isinstance(content, bytes) else content.encode()
        text = base64.b64encode(data).decode()
        self.run("sh", "-c", f"base64 -d > {path} && chmod {mode} {path}", text_in=text)

    def read(self, path: str) -> str | None:
        """A file of the host, read from outside without a process on it."""
        try:
            return Path(f"/proc/{self.pid()}/root{path}").read_text()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return os.path.lexists(f"/proc/{self.pid()}/root{path}")

    def record(self) -> dict | None:
        for path in ("/run/vllm-dflash/record.json", "/var/lib/vllm-dflash/switch/record.json"):
            text = self.read(path)
            if text:
                return json.loads(text)
        return None

    def note(self, **values: object) -> None:
        self.run("/usr/bin/python3", "-IS", "/opt/faults/observer.py", "note", json.dumps(values))

    # ---- once --------------------------------------------------------------------------------------------

    def install(self, library: bytes, *, held: bool) -> None:
        """The observer and the tools of the tests, and a release whose vLLM is simulated."""
        self.sh("mkdir -p /opt/faults /run/faults; touch /etc/simulated-gpu/faults.json")
        for source in (HERE / "observer.py", *sorted((HERE / "host").iterdir())):
            if source.suffix in (".py", ".sh"):
                self.put(f"/opt/faults/{source.name}", source.read_text(), "0755")
        self.put("/opt/faults/fake_clock.so", library, "0755")
        self.put("/etc/systemd/system/faults-observer.service", OBSERVER_UNIT)
        if held:
            folder = f"/opt/vllm-dflash/releases/{RELEASE}"
            self.sh(
                f"mkdir -p {folder}/venv/bin {folder}/drafter /etc/systemd/system/llm-switchover.service.d && "
                f"touch {folder}/environment {folder}/drafter/config.json {folder}/drafter/model.safetensors"
                f" && ln -sf /opt/faults/simulated_vllm.py {folder}/venv/bin/vllm"
            )
            config = {
                "port": 30000,
                "served-model-name": ["Qwen3.6-27B"],
                "model": "/root/models/Qwen3.6-27B",
                "max-model-len": 32768,
                "tensor-parallel-size": 2,
                "gpu-memory-utilization": 0.92,
            }
            self.put(f"{folder}/vllm.yaml", json.dumps(config))
            self.put("/etc/systemd/system/llm-switchover.service.d/90-faults.conf", HELD_DROP_IN)
        self.sh(
            "systemctl daemon-reload; systemctl enable -q faults-observer.service; systemctl restart faults-observer.service"
        )

    # ---- one cell ----------------------------------------------------------------------------------------

    def carry_out(self, cell: Cell) -> tuple[list[dict], dict]:
        """Do it; the observer's log and the facts, for the checker."""
        network.set_link(self.host.interface, "up")
        self.cursor = self.run(
            "sh", "/opt/faults/reset.sh", json.dumps(merged(QUICK, cell.old_faults))
        ).strip()
        for action in cell.before:
            self.act(action)
        self.put("/etc/simulated-gpu/faults.json", json.dumps(merged(QUICK, cell.faults)))
        if cell.state:
            self.put("/run/faults/hold", json.dumps({"state": cell.state, "seconds": 30}))
        order_id = f"cell-{uuid.uuid4().hex[:8]}"
        self.note(what="order")
        time.sleep(0.3)  # some samples of what was before
        answer = self.begin(cell, order_id)
        injected = None
        if answer.get("outcome") != "REFUSED" and cell.state:
            injected = self.inject(cell)
        if answer.get("outcome") != "REFUSED":
            self.wait_end(cell)
            answer = self.outcome(cell, order_id)
        time.sleep(0.3)
        end = self.facts(cell)
        converged, healed = self.converge(cell)
        text = self.read("/var/log/faults-observer.jsonl") or ""
        log = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        return log, {
            "injected": injected,
            "answer": answer,
            "end": end,
            "converged": converged,
            "healed": healed,
        }

    def begin(self, cell: Cell, order_id: str) -> dict:
        old = None if cell.old.get("absent") else {**OLD, **cell.old}
        order = {
            "old": old,
            "new": {**NEW, **cell.new},
            "settings": {**SETTINGS, **cell.settings},
            "id": order_id,
        }
        after_order = [action for action in cell.before if action.endswith("-after-order")]
        if cell.through == "play":
            variables = {
                "sglang_serving": order["old"],
                "switchover_new": order["new"],
                "switchover_proof_timeout": 4,
            }
            self.start_play(["tests/faults/switch.yml", "-e", json.dumps(variables)])
            return {}
        if after_order:
            # The order is on disk, the program has not begun yet.
            self.sh(
                "systemctl stop llm-switchover.service; mkdir -p /run/systemd/system/llm-switchover.service.d; printf"
                " '[Service]\\nExecStartPre=/bin/sh -c \"until test -e /run/faults/begin; do sleep 0.05; done\"\\n'"
                " > /run/systemd/system/llm-switchover.service.d/96-wait.conf; systemctl daemon-reload"
            )
        answer = self.order(order, 0)
        if after_order:
            self.act(after_order[0].removesuffix("-after-order"))
            self.sh(
                "rm /run/systemd/system/llm-switchover.service.d/96-wait.conf; touch /run/faults/begin; systemctl daemon-reload"
            )
        return answer

    def order(self, order: dict, follow: float) -> dict:
        text = self.run(
            "/usr/bin/python3",
            "-IB",
            "/opt/faults/order.py",
            text_in=json.dumps({**order, "follow_timeout": follow}),
        )
        return json.loads(text)

    def start_play(self, arguments: list[str]) -> None:
        environment = {**os.environ, "ANSIBLE_NOCOLOR": "1"}
        if "tests/faults/switch.yml" in arguments:
            # No connection that is shared and outlives the play: it ends with it, as with its control node.
            environment["ANSIBLE_SSH_ARGS"] = "-o ControlMaster=no -o ServerAliveInterval=5"
        with open(self.play_log, "w", encoding="utf-8") as log:
            self.play = subprocess.Popen(
                [
                    "ansible-playbook",
                    "-i",
                    str(self.bed.run / "inventory.yml"),
                    "--limit",
                    self.host.name,
                    *arguments,
                ],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def inject(self, cell: Cell) -> str | None:
        """Wait until the program is held in the state, and put the fault there; the state that was seen."""
        if cell.through == "site":
            limit, held = 600, lambda: (self.record() or {}).get("state") == cell.state
        else:
            limit, held = 60, lambda: self.exists("/run/faults/held")
        until = time.monotonic() + limit
        while not held():
            if time.monotonic() > until:
                raise NotSo(f"never held in {cell.state}; it is in {(self.record() or {}).get('state')}")
            if self.play and self.play.poll() not in (None, 0):
                raise NotSo(f"the play ended first: {self.play_log.read_text()[-1500:]}")
            time.sleep(0.02)
        state = (self.record() or {}).get("state")
        self.note(what="inject", cell=cell.name, state=state)
        time.sleep(0.15)  # the observer has a sample of it
        for action in cell.inject:
            self.act(action)
        if "power-cut" not in cell.inject:
            self.sh("mkdir -p /run/faults; touch /run/faults/go")
        return state

    def act(self, action: str) -> None:
        """Put one fault."""
        verb, _, value = action.partition(" ")
        verb = verb.replace("-", "_")
        if verb.endswith("_after_order"):
            return
        getattr(self, f"do_{verb}")(*([value] if value else []))

    def wait_end(self, cell: Cell) -> None:
        """Until the record is in an end state and the program's unit rests."""
        limit = 600 if cell.through == "site" else 150
        until = time.monotonic() + limit
        while time.monotonic() < until:
            record = self.record()
            waits = self.play is not None and self.play.poll() is None
            if record is not None and record["state"] in ENDS:
                state = self.run(
                    "systemctl", "show", "--value", "-p", "ActiveState", "llm-switchover.service"
                ).strip()
                if state in ("inactive", "failed") and not (waits and cell.through == "site"):
                    return
            elif self.play is not None and not waits and record is None:
                return  # the play failed before there was an order
            time.sleep(0.1)
        raise NotSo(f"no end after {limit} s: {(self.record() or {}).get('state')}")

    def outcome(self, cell: Cell, order_id: str) -> dict:
        """What the asking side says of the end."""
        if self.play is None:
            return self.order(
                {
                    "old": {**OLD, **cell.old} if not cell.old.get("absent") else None,
                    "new": {**NEW, **cell.new},
                    "settings": SETTINGS,
                    "id": order_id,
                },
                10,
            )
        if "link-down" in cell.inject and "link-up" not in cell.inject:
            self.end_play()
            network.set_link(self.host.interface, "up")
        until = time.monotonic() + 120
        while self.play.poll() is None and time.monotonic() < until:
            time.sleep(0.1)
        status = self.play.poll()
        self.end_play()
        record = self.record() or {}
        return {"outcome": record.get("state"), "status": status, "msg": self.play_log.read_text()[-6000:]}

    def end_play(self) -> None:
        """Kill the play's whole process group, as the end of a control node does."""
        if self.play is not None and self.play.poll() is None:
            os.killpg(self.play.pid, signal.SIGKILL)
            self.play.wait()

    def facts(self, cell: Cell, new: str = NEW_UNIT) -> dict:
        new = "" if cell.through == "site" else new
        text = self.run("/usr/bin/python3", "-IS", "/opt/faults/facts.py", new, OLD_UNIT, self.cursor)
        return json.loads(text)

    def converge(self, cell: Cell) -> tuple[dict, dict]:
        """Take the fault away and switch again."""
        self.play = None
        self.note(what="heal")
        self.sh(
            "for unit in faults-watchdog.service 'faults-foreign*.service'; do"
            ' systemctl kill -s SIGKILL "$unit" 2>/dev/null; done;'
            "rm -f /run/simulated-gpu/unseen /run/faults/clock /var/lib/vllm-dflash/filler;"
            "mount -o remount,rw /var/lib/vllm-dflash 2>/dev/null;"
            "away=/opt/faults/sglang.service.away; unit=/etc/systemd/system/sglang.service;"
            "test ! -e $away || { mv -f $away $unit; systemctl daemon-reload; }"
        )
        self.put("/etc/simulated-gpu/faults.json", json.dumps(QUICK))
        self.sh("while systemctl is-active -q faults-foreign.service; do sleep 0.05; done")
        if cell.through == "site":
            self.start_play([*self.site_arguments])
            assert self.play is not None
            status = self.play.wait(timeout=900)
            self.play = None
            said = self.play_log.read_text()[-3000:]
            answer = {"outcome": (self.record() or {}).get("state"), "failed": status != 0, "msg": said}
            return answer, self.facts(cell)
        # An old server that systemd starts again by its own policy, now that it can: an operator would see that too.
        # One that hangs since the fault is restarted, as the remedy of STRANDED says.
        self.sh(
            "answers() { curl -sf -m 2 -o /dev/null http://127.0.0.1:30000/v1/models; };"
            "settle() { tries=0; while test $tries -lt 100; do state=$(systemctl is-active sglang.service);"
            " case $state in inactive|failed) return 0;; esac; answers && return 0;"
            " sleep 0.1; tries=$((tries+1)); done; return 1; };"
            "settle || { systemctl restart sglang.service; settle; }"
        )
        serving = self.read("/var/lib/vllm-dflash/serving.json")
        runs = self.run("systemctl", "is-active", OLD_UNIT, check=False).strip() == "active"
        old = json.loads(serving)["serving"] if serving else (OLD if runs else None)
        answer = self.order(
            {"old": old, "new": NEW, "settings": SETTINGS, "id": f"again-{uuid.uuid4().hex[:8]}"}, 60
        )
        return answer, self.facts(cell)

    # ---- faults ------------------------------------------------------------------------------------------

    def do_go(self) -> None:
        self.sh("touch /run/faults/go")

    def do_sleep(self, seconds: str) -> None:
        time.sleep(float(seconds))

    def do_kill_play(self) -> None:
        assert self.play is not None
        if self.play.poll() is not None:
            raise NotSo("the play had ended before it could be killed")
        self.end_play()
        self.note(what="play killed")

    def do_link_down(self) -> None:
        network.set_link(self.host.interface, "down")

    def do_link_up(self) -> None:
        network.set_link(self.host.interface, "up")

    def do_power_cut(self) -> None:
        beds.power_cut(self.bed, self.host)
        beds.power_on(self.bed, self.host)

    def do_kill_program(self) -> None:
        self.run("systemctl", "kill", "--kill-who=main", "--signal=SIGKILL", "llm-switchover.service")

    def do_kill_new(self) -> None:
        self.do_wait_new_holds()
        self.run("systemctl", "kill", "--kill-who=main", "--signal=SIGKILL", NEW_UNIT)

    def do_stop_new(self) -> None:
        self.run("systemctl", "kill", "--signal=SIGSTOP", NEW_UNIT)

    def do_kill_old(self) -> None:
        self.run("systemctl", "kill", "--kill-who=main", "--signal=SIGKILL", OLD_UNIT)

    def do_stop_old(self) -> None:
        self.run("systemctl", "stop", OLD_UNIT)

    def do_restart_policy(self) -> None:
        self.drop_in(OLD_UNIT, "[Service]\nRestart=always\nRestartSec=100ms\n")

    def do_mask_old(self) -> None:
        # A unit file in /etc goes before a mask in /run: take the file's place.
        self.sh(
            "mv /etc/systemd/system/sglang.service /opt/faults/sglang.service.away;"
            "ln -s /dev/null /etc/systemd/system/sglang.service; systemctl daemon-reload"
        )

    def do_old_breaks(self) -> None:
        self.put(
            "/etc/simulated-gpu/faults.json", json.dumps(merged(QUICK, {"sglang": {"exit_at_start": True}}))
        )

    def do_watchdog(self) -> None:
        self.run(
            "systemd-run",
            "-q",
            "--unit=faults-watchdog",
            "sh",
            "-c",
            "while :; do systemctl start --no-block sglang.service; sleep 0.2; done",
        )

    def do_foreign(self, mib: str) -> None:
        self.run(
            "systemd-run",
            "-q",
            "--unit=faults-foreign",
            "--uid=nobody",
            "-p",
            "User=nobody",
            "/usr/bin/python3",
            "-IS",
            "/opt/faults/foreign.py",
            "0",
            mib,
        )
        self.sh(
            "tries=0; until grep -qs . /run/simulated-gpu/holds/$(systemctl show --value -p MainPID faults-foreign.service);"
            " do sleep 0.05; tries=$((tries+1)); test $tries -lt 100 || exit 1; done"
        )
        time.sleep(0.25)

    def do_foreign_port(self) -> None:
        self.run(
            "systemd-run",
            "-q",
            "--unit=faults-foreign",
            "--uid=nobody",
            "/usr/bin/python3",
            "-IS",
            "/opt/faults/foreign.py",
            "0",
            "0",
            "--listen",
            "30000",
        )
        time.sleep(0.5)

    def do_foreign_at_stage(self, mib: str) -> None:
        """In the background: as soon as a release has been made, which is after the preflight."""

        def later() -> None:
            until = time.monotonic() + 600
            while time.monotonic() < until:
                if self.exists("/opt/vllm-dflash/releases") and any(
                    re.fullmatch("[0-9a-f]+", name)
                    for name in os.listdir(f"/proc/{self.pid()}/root/opt/vllm-dflash/releases")
                ):
                    self.do_foreign(mib)
                    return
                time.sleep(0.2)

        threading.Thread(target=later, daemon=True).start()

    def do_unseen(self, mib: str) -> None:
        self.put("/run/simulated-gpu/unseen", f"0 {mib}\n")

    def do_move_worker(self, title: str) -> None:
        """Into another control group, as a session manager or a container runtime does; it stays a child."""
        self.do_wait_holder(title)
        self.sh(
            f"pid=$(pgrep -f -o '^{title}'); "
            "for top in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do"
            " test -e $top/cgroup.procs || continue;"
            " mkdir -p $top/faults-escaped; echo $pid > $top/faults-escaped/cgroup.procs; done"
        )

    def do_wait_holder(self, title: str) -> None:
        self.sh(
            f"tries=0; until nvidia-smi --query-compute-apps=process_name --format=csv,noheader | grep -q '{title}';"
            " do sleep 0.1; tries=$((tries+1)); test $tries -lt 100 || exit 1; done"
        )
        time.sleep(0.2)

    def do_wait_new_holds(self) -> None:
        self.do_wait_holder("VLLM::Worker_TP1")

    def small_state(self) -> None:
        """A small filesystem of its own for the state, with what is there."""
        self.sh(
            "mkdir /run/faults/state; mount -t tmpfs -o size=256k,mode=0755 tmpfs /run/faults/state;"
            "cp -a /var/lib/vllm-dflash/. /run/faults/state/; mount --bind /run/faults/state /var/lib/vllm-dflash;"
            "umount -l /run/faults/state"
        )

    def do_full(self) -> None:
        self.small_state()
        self.sh("cat /dev/zero > /var/lib/vllm-dflash/filler 2>/dev/null; true")

    def do_read_only(self) -> None:
        self.small_state()
        self.sh("mount -o remount,ro /var/lib/vllm-dflash")

    def do_fake_clock(self) -> None:
        self.drop_in(
            "llm-switchover.service", "[Service]\nEnvironment=LD_PRELOAD=/opt/faults/fake_clock.so\n"
        )

    def do_clock(self, seconds: str) -> None:
        self.put("/run/faults/clock", seconds)

    def do_second_order(self) -> None:
        other = {**NEW, "unit": "vllm-dflash@0000000000000000.service", "release": "0000000000000000"}
        answer = self.order({"old": OLD, "new": other, "settings": SETTINGS}, 5)
        self.note(what="second", said=answer["msg"] if answer["failed"] else "not refused")

    def do_second_program(self) -> None:
        said = self.run("/usr/bin/python3", "-IB", "/opt/vllm-dflash/program", "switch", check=False)
        self.note(what="second", said=said)

    def drop_in(self, unit: str, text: str) -> None:
        self.sh(f"mkdir -p /etc/systemd/system/{unit}.d")
        self.put(f"/etc/systemd/system/{unit}.d/95-faults-cell.conf", text)
        self.run("systemctl", "daemon-reload")

    site_arguments: tuple[str, ...] = ()


class Site(Bench):
    """A host that site.yml takes through everything, with the program as it is installed."""

    def begin(self, cell: Cell, order_id: str) -> dict:
        self.start_play([*self.site_arguments])
        return {}
