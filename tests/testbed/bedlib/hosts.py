"""A bed: its state, its hosts' disks, booting them, cutting their power, taking everything away."""

from __future__ import annotations

import concurrent.futures
import configparser
import contextlib
import dataclasses
import hashlib
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from populate import populate

from . import network
from .base import ensure_driver, extra_certificates, multiarch, ssh_key
from .machine import (
    CACHE,
    CGROUP,
    RUN,
    TESTBED,
    BedError,
    cgroup_pids,
    hierarchies,
    kill_cgroup,
    lock,
    log,
    make_cgroups,
    program,
    run,
    wait_cgroup_empty,
)

HOST_FILES = TESTBED / "host-files"
ALL_BEDS = RUN / "beds.lock"
# Held shared while a bed picks its images, exclusively while old images are removed.
IMAGES = CACHE / "images.lock"
BOOT_SECONDS = 120


@dataclasses.dataclass
class Host:
    """One host of a bed. `machine` is short: the kernel's names for interfaces end at 15 characters."""

    name: str
    address: str
    machine: str
    rate: str = ""  # of its cable, each way, as tc writes it; "" is no limit

    @property
    def interface(self) -> str:
        """The machine's end of the host's cable."""
        return f"vb-{self.machine}"


@dataclasses.dataclass
class Bed:
    """What `up` decided; written to /run before anything is made, so that `down` knows all of it."""

    name: str
    bridge: str
    subnet: str
    hosts: list[Host]
    images: list[str]  # directories with tree/, uppermost first
    layer: bool  # is the release layer among them
    sglang: bool
    outside: bool
    small: bool  # is the simulated target the narrow one
    disks: str
    rate: str = ""  # of the control node's cable, each way; with one, the control node has a cable of its own

    @property
    def control(self) -> str:
        """The network namespace of the control node, where the bed has rates."""
        return f"{self.bridge.removeprefix('vd-')}-ctl"

    @property
    def run(self) -> Path:
        return RUN / self.name

    def save(self) -> None:
        self.run.mkdir(parents=True, exist_ok=True)
        partial = self.run / ".bed.json.partial"
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=2))
        partial.rename(self.run / "bed.json")

    def host(self, name: str) -> Host:
        """The host called `name`, with or without the bed's own prefix."""
        for host in self.hosts:
            if name in (host.name, host.name.removeprefix(f"{self.name}-")):
                return host
        raise BedError(f"bed {self.name} has no host {name}, only {', '.join(h.name for h in self.hosts)}")


def load(name: str) -> Bed | None:
    """The bed called `name`, if it is up."""
    path = RUN / name / "bed.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    # Beds of other checkouts are up at the same time, and may know more than this one.
    known = {field.name for field in dataclasses.fields(Host)}
    hosts = [Host(**{key: host[key] for key in host if key in known}) for host in data["hosts"]]
    return Bed(
        **{
            **{field.name: data[field.name] for field in dataclasses.fields(Bed) if field.name in data},
            "hosts": hosts,
        }
    )


def require(name: str) -> Bed:
    """The bed called `name`; a BedError if it isn't up."""
    bed = load(name)
    if bed is None:
        raise BedError(f"bed {name} isn't up; there are: {', '.join(b.name for b in beds()) or 'none'}")
    return bed


def beds() -> list[Bed]:
    """All beds that are up."""
    return [bed for path in sorted(RUN.glob("*/bed.json")) if (bed := load(path.parent.name))]


def bed_lock(name: str) -> contextlib.AbstractContextManager[bool]:
    """One process at a time works on a bed; beds don't wait for one another."""
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,23}", name):
        raise BedError(f"bed name {name!r}: expected a-z, 0-9 and -, starting with a letter, at most 24")
    return lock(RUN / f"{name}.lock")


# --- up ----------------------------------------------------------------------------------------------


def up(
    name: str,
    count: int,
    images: Callable[[], list[Path]],
    *,
    layer: bool,
    sglang: bool,
    outside: bool,
    small: bool,
    rate: str = "",
) -> Bed:
    """Boot what of the bed isn't running, wait until every host answers ssh, write inventory and ssh_config.

    `images` is called for a new bed only: a bed that is up keeps the images it has, newer ones or not.
    Call with bed_lock(name) held.
    """
    bed = load(name)
    wanted = {
        "hosts": count,
        "layer": layer,
        "sglang": sglang,
        "outside": outside,
        "small": small,
        "rate": rate,
    }
    if bed is None:
        bed = _new_bed(name, images, **wanted)
    else:
        found = {**{key: getattr(bed, key) for key in wanted}, "hosts": len(bed.hosts)}
        if found != wanted:
            raise BedError(f"bed {name} is up with {found}, wanted {wanted}; first: bed.py down {name}")
    network.raise_bridge(bed.bridge, bed.subnet)
    if bed.rate:
        network.raise_control(bed.control, bed.bridge, bed.subnet)
        set_rate(bed, None, bed.rate)
    if bed.outside:
        with lock(ALL_BEDS):
            network.open_outside(bed.bridge, bed.subnet)
    _write_inventory(bed)
    _write_ssh_config(bed)
    begin = time.monotonic()
    booting = [host for host in bed.hosts if not running(bed, host)]
    with concurrent.futures.ThreadPoolExecutor(len(bed.hosts)) as pool:
        list(pool.map(lambda host: _make_disk(bed, host), bed.hosts))
        _write_known_hosts(bed)
        for host in booting:
            _start(bed, host)
        list(pool.map(lambda host: wait_ssh(bed, host), bed.hosts))
    for host in booting:
        _shape(bed, host)
    if booting:
        log(f"{', '.join(h.name for h in booting)}: ssh open after {time.monotonic() - begin:.1f} s")
    return bed


def _new_bed(
    name: str,
    images: Callable[[], list[Path]],
    *,
    hosts: int,
    layer: bool,
    sglang: bool,
    outside: bool,
    small: bool,
    rate: str,
) -> Bed:
    _remove_remains(name, CACHE / "beds" / name)
    tag = hashlib.sha256(name.encode()).hexdigest()[:6]
    found = images()
    with lock(ALL_BEDS), lock(IMAGES, shared=True):
        if not all(image.exists() for image in found):
            raise BedError(f"{found} just vanished: another process removes old images; try again")
        subnet = network.pick_subnet(name, [bed.subnet for bed in beds()])
        first = ipaddress.ip_network(subnet).network_address + 10
        bed = Bed(
            name=name,
            bridge=f"vd-{tag}",
            subnet=subnet,
            hosts=[
                Host(name=f"{name}-gpu{n}", address=str(first + n), machine=f"{tag}-gpu{n}", rate=rate)
                for n in range(1, hosts + 1)
            ],
            images=[str(image) for image in found],
            layer=layer,
            sglang=sglang,
            outside=outside,
            small=small,
            rate=rate,
            disks=str(CACHE / "beds" / name),
        )
        bed.save()
    return bed


def _disk(bed: Bed, host: Host) -> Path:
    return Path(bed.disks, host.name)


def _make_disk(bed: Bed, host: Host) -> None:
    """The host's own layer: identity, network, simulated hardware. Kept as it is if it exists."""
    disk = _disk(bed, host)
    if (disk / "upper").exists():
        return
    seed = disk / "seed"
    shutil.rmtree(disk, ignore_errors=True)
    for folder in (seed, disk / "work", disk / "root"):
        folder.mkdir(parents=True)
    lower = [Path(image, "tree") for image in bed.images]
    _write(seed, lower, "etc/hostname", f"{host.name}\n")
    names = "".join(f"{h.address} {h.name}\n" for h in bed.hosts)
    _write(seed, lower, "etc/hosts", f"127.0.0.1 localhost\n::1 localhost\n{names}")
    # Not left to the first boot: an empty id makes systemd preset, that is enable, every unit it finds.
    _write(seed, lower, "etc/machine-id", f"{uuid.uuid4().hex}\n")
    servers = network.nameservers() if bed.outside else []
    _write(seed, lower, "etc/resolv.conf", "".join(f"nameserver {server}\n" for server in servers))
    gateway = next(ipaddress.ip_network(bed.subnet).hosts())
    _write(
        seed,
        lower,
        "etc/systemd/network/10-host0.network",
        f"[Match]\nName=host0\n[Network]\nAddress={host.address}/24\n"
        + (f"Gateway={gateway}\n" if bed.outside else "")
        + "LinkLocalAddressing=no\nIPv6AcceptRA=no\nLLMNR=no\n",
    )
    key = seed / "etc/ssh/ssh_host_ed25519_key"
    _directory(seed, lower, key.parent)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", host.name, "-f", key)
    for soname, library in ensure_driver().items():
        _install(seed, lower, library, seed / "usr/lib" / multiarch() / soname)
    _copy_host_files(seed, lower)
    _enable_units(seed, sglang=bed.sglang)
    populate(seed, small=bed.small)
    seeded = [str(p.relative_to(seed)) for p in seed.rglob("*") if p.is_symlink() or not p.is_dir()]
    (disk / "seeded.json").write_text(json.dumps(sorted(seeded)))
    seed.rename(disk / "upper")


def _directory(seed: Path, lower: list[Path], path: Path) -> None:
    """Make a directory in the seed, looking as it does in the images below; root's 0755 if it is new.

    (A directory of an upper layer hides mode and owner of the one below.)
    """
    for folder in [*reversed(path.relative_to(seed).parents), path.relative_to(seed)]:
        ours = seed / folder
        if ours.exists():
            continue
        ours.mkdir()
        below = next((tree / folder for tree in lower if (tree / folder).is_dir()), None)
        status = below.stat() if below else None
        os.chown(ours, status.st_uid if status else 0, status.st_gid if status else 0)
        ours.chmod(status.st_mode & 0o7777 if status else 0o755)


def _write(seed: Path, lower: list[Path], name: str, text: str) -> None:
    _directory(seed, lower, (seed / name).parent)
    (seed / name).write_text(text)
    (seed / name).chmod(0o644)


def _install(seed: Path, lower: list[Path], source: Path, target: Path) -> None:
    """Copy one file as root's; of its mode only the executable bit counts, which is what git keeps."""
    _directory(seed, lower, target.parent)
    shutil.copyfile(source, target)
    target.chmod(0o755 if os.access(source, os.X_OK) and source.stat().st_mode & 0o111 else 0o644)


def _copy_host_files(seed: Path, lower: list[Path]) -> None:
    """host-files/ as it is; a link that leads out of it (to a simulation) is followed."""

    def copy(source: Path, target: Path) -> None:
        if source.is_symlink() and source.resolve().is_relative_to(HOST_FILES):
            _directory(seed, lower, target.parent)
            target.symlink_to(os.readlink(source))
        elif source.is_symlink() and os.readlink(source).startswith("/"):
            # An absolute link is meant for the host.
            _directory(seed, lower, target.parent)
            target.symlink_to(os.readlink(source))
        elif source.is_dir():
            if source.name == "__pycache__":
                return
            _directory(seed, lower, target)
            for child in sorted(source.iterdir()):
                copy(child, target / child.name)
        else:
            _install(seed, lower, source, target)

    for entry in sorted(HOST_FILES.iterdir()):
        if entry.name != "enable":
            copy(entry, seed / entry.name)


def _enable_units(seed: Path, *, sglang: bool) -> None:
    listed = HOST_FILES / "enable"
    for line in listed.read_text().splitlines() if listed.exists() else []:
        unit = line.split("#")[0].strip()
        if not unit or (unit == "sglang.service" and not sglang):
            continue
        path = seed / "etc/systemd/system" / unit
        if not path.exists():
            raise BedError(f"{listed} lists {unit}, and there is no {path.relative_to(seed)} in host-files")
        parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
        parser.optionxform = str  # type: ignore[assignment, method-assign]
        parser.read_string(path.read_text())
        for target in parser.get("Install", "WantedBy", fallback="").split():
            wants = path.parent / f"{target}.wants"
            wants.mkdir(exist_ok=True)
            (wants / unit).symlink_to(f"/etc/systemd/system/{unit}")


# --- boot, power -------------------------------------------------------------------------------------

# Runs in a mount namespace of its own: its mounts go when its last process goes, whatever killed it.
# The tmpfs: nspawn can't clean up behind a guest that reboots when /run isn't one.
# 133: the guest rebooted; with --keep-unit nspawn leaves booting again to its caller. Its cgroup has to be a
# new one then: one that passed controllers down takes no process any more.
_LOOP = """
set -eu
for group in $CGROUPS; do echo $$ > "$group/loop/cgroup.procs"; done
mount -t tmpfs -o mode=0755 tmpfs /run/systemd/nspawn
mount -t overlay -o "$OVERLAY" overlay "$ROOT"
[ -e "$UPPER/etc/ld.so.cache" ] || chroot "$ROOT" /sbin/ldconfig
while :; do
    for group in $CGROUPS; do
        while [ -e "$group/nspawn" ] && ! find "$group/nspawn" -depth -type d -delete; do sleep 0.05; done
        mkdir "$group/nspawn"
    done
    code=0
    sh -c 'for g in $CGROUPS; do echo $$ > "$g/nspawn/cgroup.procs"; done; exec "$@"' sh "$@" || code=$?
    [ "$code" -eq 133 ] || exit "$code"
done
"""


def _start(bed: Bed, host: Host) -> None:
    """Switch the host on. Its leftovers from the last run are gone: running() said so."""
    kill_cgroup(bed.name, host.name)
    run("ip", "link", "del", host.interface, check=False)
    disk = _disk(bed, host)
    lower = ":".join(f"{image}/tree" for image in bed.images)
    # Each host's own: nspawn with --keep-unit puts the guest below the group that nspawn is in.
    groups = [group.parent for group in make_cgroups(bed.name, host.name, "loop")]
    Path("/run/systemd/nspawn").mkdir(parents=True, exist_ok=True)
    nspawn = [
        program("systemd-nspawn") or "systemd-nspawn",
        "--boot",
        "--quiet",
        "--register=no",
        "--keep-unit",
        f"--directory={disk / 'root'}",
        f"--machine={host.machine}",
        f"--hostname={host.name}",
        f"--network-bridge={bed.bridge}",
        "--link-journal=no",
        "--resolv-conf=off",
        "--timezone=off",
        "--console=pipe",
    ]
    environment = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "CGROUPS": " ".join(map(str, groups)),
        "OVERLAY": f"lowerdir={lower},upperdir={disk}/upper,workdir={disk}/work"
        ",index=off,metacopy=off,redirect_dir=off",
        "ROOT": str(disk / "root"),
        "UPPER": str(disk / "upper"),
        # /tmp on the disk, as on a server: nspawn's own tmpfs is a tenth of the machine's memory.
        "SYSTEMD_NSPAWN_TMPFS_TMP": "0",
    }
    # The disk's folder, not /run: there the console would fill memory.
    with open(disk / "console.log", "ab") as console:
        subprocess.Popen(
            ["unshare", "--mount", "--propagation", "slave", "sh", "-c", _LOOP, "host", *nspawn],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=console,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
    # Until the shell is in its cgroup, nothing would tell that the host is on.
    end = time.monotonic() + 10
    while not cgroup_pids(bed.name, host.name):
        if time.monotonic() > end:
            raise BedError(f"{host.name} doesn't start:\n{_console_tail(bed, host)}")
        time.sleep(0.01)


def running(bed: Bed, host: Host) -> bool:
    """Is the host switched on (booting, up, or rebooting)?"""
    return bool(cgroup_pids(bed.name, host.name))


def guest_init(bed: Bed, host: Host) -> int | None:
    """The machine's pid of the host's PID 1, if there is one."""
    for top in hierarchies():
        payload = top / CGROUP / bed.name / host.name / "nspawn/payload"
        for group in (payload / "init.scope", payload):
            with contextlib.suppress(OSError):
                if pids := (group / "cgroup.procs").read_text().split():
                    return int(pids[0])
    return None


def power_cut(bed: Bed, host: Host) -> None:
    """Off without a word: the cable first, so that no peer sees a connection closed, then PID 1."""
    network.set_link(host.interface, "down")
    pid = guest_init(bed, host)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_cgroup_empty(bed.name, host.name, seconds=2)
    # nspawn and its loop, should they not have gone with the guest.
    kill_cgroup(bed.name, host.name)


def power_off(bed: Bed, host: Host, *, seconds: float = 60) -> None:
    """A clean shutdown from within (SIGRTMIN+4 asks systemd for poweroff); waits for its end."""
    pid = guest_init(bed, host)
    if pid is not None:
        os.kill(pid, signal.SIGRTMIN + 4)
    if not wait_cgroup_empty(bed.name, host.name, seconds=seconds):
        raise BedError(f"{host.name} doesn't power off in {seconds:.0f} s:\n{_console_tail(bed, host)}")


def power_on(bed: Bed, host: Host) -> None:
    """Boot the host from its disk as it is now; waits for ssh. Nothing if it runs."""
    if not running(bed, host):
        _start(bed, host)
    wait_ssh(bed, host)
    _shape(bed, host)


def set_rate(bed: Bed, host: Host | None, rate: str) -> None:
    """Limit a host's cable each way, or with None the control node's; "" is no limit. Kept for later boots.

    A host that reboots by itself comes back with a cable that has no limit.
    """
    if host is not None:
        host.rate = rate
        _shape(bed, host)
    elif not bed.rate:
        raise BedError(
            f"the control node of bed {bed.name} has no cable of its own: bed.py up {bed.name} --rate …"
        )
    else:
        network.bits_per_second(rate)  # no limit is no cable of its own
        bed.rate = rate
        network.shape("uplink", rate, inside=str(network.namespace_path(bed.control)))
        network.shape(f"vb-{bed.control}", rate)
    bed.save()


def _shape(bed: Bed, host: Host) -> None:
    """Give the host's cable its rate: the machine's end limits what it gets, its own end what it sends."""
    pid = guest_init(bed, host)
    if pid is None:
        return  # off: it gets its rate when it is switched on
    network.shape(host.interface, host.rate)
    network.shape("host0", host.rate, inside=f"/proc/{pid}/ns/net")


def wait_ssh(bed: Bed, host: Host) -> None:
    """Wait until `ops` can log in."""
    end = time.monotonic() + BOOT_SECONDS
    while time.monotonic() < end and running(bed, host):
        try:
            with socket.create_connection((host.address, 22), timeout=1) as connection:
                banner = connection.recv(64)
        except OSError:
            banner = b""
        # Before systemd-user-sessions has run, sshd answers but turns everyone away.
        if banner.startswith(b"SSH-") and _ssh_works(bed, host):
            return
        time.sleep(0.05)
    state = "gives no ssh login" if running(bed, host) else "went off while booting"
    raise BedError(
        f"{host.name} {state}; {_disk(bed, host) / 'console.log'} ends:\n{_console_tail(bed, host)}"
    )


def _ssh_works(bed: Bed, host: Host) -> bool:
    command = ["ssh", "-F", str(bed.run / "ssh_config"), "-o", "ConnectTimeout=5", host.name, "true"]
    return subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _console_tail(bed: Bed, host: Host) -> str:
    path = _disk(bed, host) / "console.log"
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.exists() else "(no console)"


# --- what others read --------------------------------------------------------------------------------


def _write_known_hosts(bed: Bed) -> None:
    lines = []
    for host in bed.hosts:
        public = (_disk(bed, host) / "upper/etc/ssh/ssh_host_ed25519_key.pub").read_text().split()
        lines.append(f"{host.address},{host.name} {public[0]} {public[1]}\n")
    (bed.run / "known_hosts").write_text("".join(lines))


def _write_inventory(bed: Bed) -> None:
    control = bed.run / "cp"
    control.mkdir(mode=0o700, exist_ok=True)
    variables: dict[str, object] = {
        "ansible_user": "ops",
        "ansible_become": True,
        "ansible_ssh_private_key_file": str(ssh_key()),
        "ansible_ssh_common_args": f"-F /dev/null -o UserKnownHostsFile={bed.run / 'known_hosts'}"
        " -o GlobalKnownHostsFile=/dev/null -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes",
        "ansible_control_path_dir": str(control),
        "ansible_python_interpreter": "/usr/bin/python3",
        "rollout_records": str(bed.run / "records"),
    }
    if extra_certificates() or os.environ.get("SSL_CERT_FILE"):
        # uv trusts a list of its own unless told otherwise; the guests know this machine's authorities.
        bundle = "/etc/ssl/certs/ca-certificates.crt"
        variables["vllm_install_environment"] = {"SSL_CERT_FILE": bundle}
    hosts = {host.name: {"ansible_host": host.address} for host in bed.hosts}
    # In the pair's group as well, with its variables; never by way of the project's own inventory: there may be
    # real hosts in that, and a demo must not switch them.
    group_vars = bed.run / "group_vars"
    group_vars.unlink(missing_ok=True)
    group_vars.symlink_to(TESTBED.parents[1] / "inventory" / "group_vars")
    group = {"children": {"qwen3_6_27b_dflash": {"hosts": hosts}}, "vars": variables}
    inventory = {"all": {"children": {"gpu_hosts": group}}}
    # JSON is YAML, and the standard library can write it.
    (bed.run / "inventory.yml").write_text(json.dumps(inventory, indent=2) + "\n")


def _write_ssh_config(bed: Bed) -> None:
    blocks = [
        f"Host {host.name} {host.name.removeprefix(f'{bed.name}-')}\n"
        f"  HostName {host.address}\n  HostKeyAlias {host.name}\n"
        for host in bed.hosts
    ]
    common = (
        f"Host *\n  User ops\n  IdentityFile {ssh_key()}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {bed.run / 'known_hosts'}\n  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n  BatchMode yes\n  LogLevel ERROR\n"
    )
    (bed.run / "ssh_config").write_text("".join(blocks) + common)


def status() -> dict[str, object]:
    """All beds, for people and scripts."""
    return {
        bed.name: {
            "inventory": str(bed.run / "inventory.yml"),
            "ssh_config": str(bed.run / "ssh_config"),
            "subnet": bed.subnet,
            "outside": bed.outside,
            "small": bed.small,
            "layer": bed.layer,
            "sglang": bed.sglang,
            "rate": bed.rate,
            "images": bed.images,
            "hosts": {
                host.name: {
                    "address": host.address,
                    "rate": host.rate,
                    "running": running(bed, host),
                    "pid": guest_init(bed, host),
                    "console": str(_disk(bed, host) / "console.log"),
                    "upper": str(_disk(bed, host) / "upper"),
                }
                for host in bed.hosts
            },
        }
        for bed in beds()
    }


# --- down --------------------------------------------------------------------------------------------


def down(name: str) -> None:
    """Take the bed away with everything it made; fine if it isn't there. Call with bed_lock(name) held."""
    bed = load(name)
    if bed is not None:
        network_down = [host.interface for host in bed.hosts]
        kill_cgroup(name)
        for interface in network_down:
            run("ip", "link", "del", interface, check=False)
        with lock(ALL_BEDS):
            if bed.outside:
                others = [b for b in beds() if b.name != name and b.outside]
                network.close_outside(bed.bridge, last=not others)
            network.remove_control(bed.control)
            network.remove_bridge(bed.bridge)
    _remove_remains(name, Path(bed.disks) if bed else CACHE / "beds" / name)


def _remove_remains(name: str, disks: Path) -> None:
    """What a crash of this program or of the machine may have left of a bed, and its disks and records."""
    kill_cgroup(name)
    if disks.exists():
        shutil.rmtree(disks)
    if (RUN / name).exists():
        shutil.rmtree(RUN / name)
