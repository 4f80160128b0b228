"""A booted guest on this machine's own files, with its GPUs: systemd as PID 1, sshd, a user `ops` who must sudo.

The guest's disk is an overlay: its own upper folder over the carried layers over this machine's root. Its
network is the machine's (sshd on port 2222, loopback only), its devices are the machine's /dev/nvidia*.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "testbed"))

from bedlib.machine import hierarchies, kill_cgroup, make_cgroups

SSH_PORT = 2222
DRIVER = "/usr/local/nvidia"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _words(text: str) -> list[str]:
    return text.split()


MASKED = _words("""
    apt-daily-upgrade.timer apt-daily.timer console-getty.service dpkg-db-backup.timer e2scrub_all.timer
    e2scrub_reap.service fstrim.timer getty.target motd-news.timer ssh.service ssh.socket systemd-logind.service
    systemd-networkd.service systemd-networkd.socket systemd-networkd-wait-online.service systemd-resolved.service
    systemd-timesyncd.service systemd-tmpfiles-clean.timer
""")

SSHD = """[Unit]
Description=sshd of the GPU proof
[Service]
ExecStart=/usr/sbin/sshd -D -e -f /etc/ssh/gpu_proof_config
RuntimeDirectory=sshd
RuntimeDirectoryPreserve=yes
[Install]
WantedBy=multi-user.target
"""
SSHD_CONFIG = f"""Port {SSH_PORT}
ListenAddress 127.0.0.1
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile .ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
"""


def _run(*command: str | Path, **options) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(map(str, command))[:300]} exited {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


class Guest:
    """One guest. `folder` holds its disk and goes with it; `layers` are stacked, uppermost first.

    No layer may lie in another on the same filesystem: those over `/` need one of their own.
    """

    def __init__(self, folder: Path, layers: list[Path], name: str = "gpu1"):
        self.folder, self.layers, self.name = folder, layers, name
        self.root, self.upper = folder / "root", folder / "upper"
        self.group = f"gpu-proof-{name}"
        self.process: subprocess.Popen | None = None

    # --- on and off ----------------------------------------------------------------------------------

    def mount(self) -> None:
        """Make the disk and put the guest's identity on it."""
        for part in ("upper", "work", "root"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        lower = ":".join(map(str, self.layers))
        options = f"lowerdir={lower},upperdir={self.upper},workdir={self.folder / 'work'}"
        _run("mount", "-t", "overlay", "-o", options, "overlay", self.root)
        self._write("etc/machine-id", uuid.uuid4().hex + "\n")
        self._write("etc/hostname", f"{self.name}\n")
        self._write("etc/hosts", f"127.0.0.1 localhost {self.name}\n")
        self._write("etc/ssh/gpu_proof_config", SSHD_CONFIG)
        self._write("etc/systemd/system/gpu-proof-sshd.service", SSHD)
        self._write("etc/sudoers.d/ops", "ops ALL=(ALL:ALL) NOPASSWD: ALL\n", 0o440)
        # Dropped lines would hide phases of a start.
        self._write(
            "etc/systemd/journald.conf.d/10-gpu-proof.conf",
            "[Journal]\nStorage=persistent\nRateLimitIntervalSec=0\n",
        )
        units = self.root / "etc/systemd/system"
        for unit in MASKED:
            self._link(units / unit, "/dev/null")
        self._link(units / "default.target", "/usr/lib/systemd/system/multi-user.target")
        wants = units / "multi-user.target.wants"
        # What the machine's image or this package enables has no business in the guest.
        if wants.is_dir():
            shutil.rmtree(wants)
        wants.mkdir(parents=True)
        self._link(wants / "gpu-proof-sshd.service", "../gpu-proof-sshd.service")
        script = (
            "for u in messagebus sshd systemd-network; do id $u >/dev/null 2>&1 || useradd -r -s /usr/sbin/nologin $u; "
            "done; getent group systemd-journal >/dev/null || groupadd -r systemd-journal;"
            # Without PAM sshd takes a locked account for a closed one.
            "id ops >/dev/null 2>&1 || useradd -m -s /bin/bash ops; usermod -p '*' ops; install -d -m 0700 /root/.ssh;"
            "rm -f /etc/ssh/ssh_host_ed25519_key* /root/.ssh/id_ed25519*;"
            "ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key;"
            "ssh-keygen -q -t ed25519 -N '' -f /root/.ssh/id_ed25519;"
            "install -d -m 0700 -o ops -g ops /home/ops/.ssh;"
            "install -m 0600 -o ops -g ops /root/.ssh/id_ed25519.pub /home/ops/.ssh/authorized_keys;"
            f"sed 's/^/[127.0.0.1]:{SSH_PORT} /' /etc/ssh/ssh_host_ed25519_key.pub > /root/.ssh/known_hosts;"
            "mkdir -p /var/log/journal; [ -e /usr/bin/python3 ] || ln -s python3.12 /usr/bin/python3;"
            # The machine's own cache names its driver, which isn't bound in here yet.
            "[ -e /etc/ld.so.cache ] || ldconfig"
        )
        _run("chroot", self.root, "/bin/sh", "-ec", script)

    def _write(self, name: str, text: str, mode: int = 0o644) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not through a link: /etc/hosts and the like may be one.
        if path.is_symlink():
            path.unlink()
        path.write_text(text)
        path.chmod(mode)

    def _link(self, path: Path, target: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(path):
            path.unlink()
        path.symlink_to(target)

    def boot(self, binds: list[str], timeout: float = 60) -> float:
        """Start systemd in there; returns the seconds until its sshd answers."""
        begin = time.monotonic()
        groups = " ".join(map(str, make_cgroups(self.group)))
        # The machine has no systemd-nspawn of its own: take the carried one with its libraries.
        own = shutil.which("systemd-nspawn")
        layer = next((part for part in self.layers if (part / "usr/bin/systemd-nspawn").exists()), Path("/"))
        libraries = layer / "usr/lib/x86_64-linux-gnu"
        nspawn = [
            own or str(layer / "usr/bin/systemd-nspawn"),
            *("--boot", "--quiet", "--register=no", "--keep-unit", f"--directory={self.root}"),
            *(f"--machine={self.name}", f"--hostname={self.name}", "--link-journal=no", "--resolv-conf=off"),
            *("--timezone=off", "--console=pipe", *(f"--bind-ro={path}" for path in binds)),
            *(f"--bind={device}" for device in glob.glob("/dev/nvidia*")),
            *([f"--bind-ro={DRIVER}"] if os.path.isdir(DRIVER) else []),
        ]
        environment = {
            "PATH": PATH,
            **({} if own else {"LD_LIBRARY_PATH": f"{libraries / 'systemd'}:{libraries}"}),
            # /tmp and /dev/shm as on a server, not a tenth of the memory.
            "SYSTEMD_NSPAWN_TMPFS_TMP": "0",
            # Else its own filter refuses bpf(), and a unit's DevicePolicy= is accepted in there and not enforced.
            "SYSTEMD_SECCOMP": "0",
        }
        # nspawn can't clean up behind a guest when /run isn't a tmpfs.
        script = (
            f"for g in {groups}; do echo $$ > $g/cgroup.procs; done; mkdir -p /run/systemd/nspawn;"
            'mount -t tmpfs -o mode=0755 tmpfs /run/systemd/nspawn; exec "$@"'
        )
        with open(self.folder / "console.log", "ab") as console:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--propagation", "slave", "sh", "-ec", script, "guest", *nspawn],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        while time.monotonic() - begin < timeout:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", SSH_PORT), 1):
                return time.monotonic() - begin
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        raise SystemExit(f"the guest doesn't boot:\n{(self.folder / 'console.log').read_text()[-3000:]}")

    def pid(self) -> int:
        """The guest's PID 1, seen from here."""
        for top in hierarchies():
            for init in top.glob(f"vllm-dflash-testbed/{self.group}/**/init.scope/cgroup.procs"):
                return int(init.read_text().split()[0])
        raise RuntimeError("the guest is off")

    def is_on(self) -> bool:
        """Does it run, whoever started it?"""
        try:
            return self.pid() > 0
        except (RuntimeError, OSError, IndexError):
            return False

    def down(self) -> None:
        """End the guest with all its processes, unmount its disk, remove it."""
        kill_cgroup(self.group)
        if self.process:
            self.process.wait(20)
        with contextlib.suppress(SystemExit):
            _run("umount", self.root)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- in there ------------------------------------------------------------------------------------

    def command(self, *words: str, env: dict[str, str] | None = None, cwd: str = "/") -> list[str]:
        """A command line that runs `words` as root in the guest."""
        pairs = [
            f"{key}={value}" for key, value in {"PATH": PATH, "HOME": "/root", "LANG": "C.UTF-8"}.items()
        ]
        pairs += [f"{key}={value}" for key, value in (env or {}).items()]
        flags = ["--mount", "--uts", "--ipc", "--net", "--pid", f"--wdns={cwd}"]
        return ["nsenter", f"--target={self.pid()}", *flags, "env", "-i", *pairs, *words]

    def run(self, *words: str, check: bool = True, timeout: float | None = None, **options) -> str:
        """What a command in the guest prints; a failure raises unless `check` is false."""
        try:
            done = subprocess.run(
                self.command(*words, **options), capture_output=True, text=True, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            if check:
                raise
            return ""
        if check and done.returncode:
            raise RuntimeError(
                f"{' '.join(words)[:200]} exited {done.returncode}: {done.stdout}{done.stderr}"[:3000]
            )
        return done.stdout

    def read_json(self, path: str) -> dict | None:
        """A JSON file of the guest, None where there is none (yet)."""
        try:
            return json.loads((self.root / path.lstrip("/")).read_text())
        except (OSError, ValueError):
            return None

    def kill(self, pid: int) -> None:
        """SIGKILL to a process, by its pid in the guest."""
        self.run("kill", f"-{signal.SIGKILL.value}", str(pid))
