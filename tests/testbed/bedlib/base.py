"""The base image: the machine's own release, bootstrapped once, shared read-only by all hosts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

from .machine import CACHE, TESTBED, BedError, digest, lock, log, program, run

BASES = CACHE / "bases"
KEY = CACHE / "id_ed25519"
SIMULATED = TESTBED / "simulated"

PACKAGES = [
    "ca-certificates",
    "curl",
    "dbus",
    "gcc",
    "iproute2",
    "libc6-dev",
    "openssh-server",
    "procps",
    "python3",
    "python3-apt",
    "python3-dev",
    "python3-venv",
    "rsync",
    "sudo",
    "systemd",
    "systemd-sysv",
]

# Nothing of this is needed by a test; each costs boot time, fails inside a container, or wakes up at random.
MASKED = [
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty.target",
    "motd-news.timer",
    "ssh.socket",
    "systemd-networkd-wait-online.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
]

FILES = {
    # ops: what ansible logs in as. root's key is for people who look around.
    "etc/sudoers.d/ops": "ops ALL=(ALL:ALL) NOPASSWD: ALL\n",
    "etc/ssh/sshd_config.d/10-testbed.conf": (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nPasswordAuthentication no\nMaxStartups 100\nMaxSessions 100\n"
    ),
    "etc/default/locale": "LANG=C.UTF-8\n",
    # The journal of a host outlives its reboots and power cuts, and no line is dropped in a burst.
    "etc/systemd/journald.conf.d/10-testbed.conf": (
        "[Journal]\nStorage=persistent\nSystemMaxUse=256M\nRateLimitIntervalSec=0\n"
    ),
}

_PREPARE = """
set -e
useradd --create-home --shell /bin/bash ops
update-ca-certificates >/dev/null 2>&1
systemctl enable systemd-networkd.service ssh.service
systemctl mask $MASKED
apt-get clean
rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* /etc/resolv.conf /var/log/*.log /var/log/apt
mkdir -p /var/log/journal
for home in /root /home/ops; do
    install -d -m 0700 "$home/.ssh"
    printf '%s\\n' "$PUBLIC_KEY" > "$home/.ssh/authorized_keys"
done
chown -R ops:ops /home/ops
# Empty, not missing: each host gets its own before its first boot, so no host boots in "first boot" mode.
: > /etc/machine-id
"""


def _os_release() -> dict[str, str]:
    pairs = (line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return {name: value.strip("\"'") for name, value in pairs}


def _apt_sources() -> list[dict[str, list[str]]]:
    """Entries of the machine's apt sources, both formats: types, uris, suites, components, signed-by."""
    entries = []
    directory = Path("/etc/apt/sources.list.d")
    for path in sorted(directory.glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            fields: dict[str, list[str]] = {}
            for line in stanza.splitlines():
                if line[:1] not in ("#", " ", "\t", "") and ":" in line:
                    name, value = line.split(":", 1)
                    fields[name.lower()] = value.split()
            if fields.get("enabled") != ["no"]:
                entries.append(fields)
    for path in [Path("/etc/apt/sources.list"), *sorted(directory.glob("*.list"))]:
        for line in path.read_text().splitlines() if path.exists() else []:
            match = re.match(r"deb\s+(?:\[(.*?)\]\s+)?(\S+)\s+(\S+)\s+(.*)", line.strip())
            if match:
                signed = re.search(r"signed-by=(\S+)", match[1] or "")
                entries.append(
                    {
                        "types": ["deb"],
                        "uris": [match[2]],
                        "suites": [match[3]],
                        "components": match[4].split("#")[0].split(),
                        "signed-by": [signed[1]] if signed else [],
                    }
                )
    return entries


def release_and_mirror() -> tuple[str, str, list[str], Path | None]:
    """Codename, mirror, components and keyring of the machine's own release, as its apt uses them."""
    system = _os_release()
    codename = system.get("VERSION_CODENAME") or system.get("UBUNTU_CODENAME")
    if not codename:
        raise BedError("/etc/os-release names no VERSION_CODENAME: this needs Debian or Ubuntu")
    for entry in _apt_sources():
        if "deb" in entry.get("types", []) and codename in entry.get("suites", []) and entry.get("uris"):
            uri = entry["uris"][0]
            if uri.startswith("mirror+file:"):
                uri = Path(uri.removeprefix("mirror+file:")).read_text().split()[0]
            keyring = next((Path(p) for p in entry.get("signed-by", []) if p.startswith("/")), None)
            # On Ubuntu python3-dev's and python3-venv's dependencies are spread over main and universe.
            components = ["main", "universe"] if system.get("ID") == "ubuntu" else ["main"]
            return codename, uri.rstrip("/"), components, keyring
    raise BedError(f"no apt source of this machine offers {codename}; the base image is made from it")


def extra_certificates() -> list[Path]:
    """Certificate authorities that this machine trusts on top of its distribution's."""
    return sorted(Path("/usr/local/share/ca-certificates").rglob("*.crt"))


def ssh_key() -> Path:
    """The private key for all hosts, made once in the cache."""
    with lock(CACHE / "key.lock"):
        if not KEY.exists():
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "vllm-dflash-testbed", "-f", KEY)
    return KEY


def _recipe() -> str:
    codename, mirror, components, _ = release_and_mirror()
    return digest(
        codename,
        mirror,
        *components,
        *PACKAGES,
        *MASKED,
        *(f"{name}\n{text}" for name, text in FILES.items()),
        _PREPARE,
        ssh_key().with_suffix(".pub").read_text(),
        *(path.read_bytes() for path in extra_certificates()),
    )


def ensure_base() -> Path:
    """The base image (a directory with `tree/`), built if its recipe has none yet."""
    BASES.mkdir(parents=True, exist_ok=True)
    base = BASES / _recipe()
    with lock(CACHE / "base.lock"):
        for stale in BASES.glob(".*.partial"):
            shutil.rmtree(stale)
        if not base.exists():
            _build(base)
    os.utime(base)
    return base


def _build(base: Path) -> None:
    codename, mirror, components, keyring = release_and_mirror()
    partial = BASES / f".{base.name}.partial"
    tree = partial / "tree"
    tree.mkdir(parents=True)
    partial.chmod(0o755)
    begin = time.monotonic()
    log(f"building the base image: debootstrap {codename} (about a minute)")
    # Own mount and pid namespaces, ended by the death of this process: whatever debootstrap mounts or starts
    # is gone before the next call clears the half-made tree away.
    contained = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child"]
    bootstrap = [
        program("debootstrap") or "debootstrap",
        "--variant=minbase",
        f"--components={','.join(components)}",
        f"--include={','.join(PACKAGES)}",
        *([f"--keyring={keyring}"] if keyring else []),
        codename,
        str(tree),
        mirror,
    ]
    with open(CACHE / "debootstrap.log", "w") as output:
        done = subprocess.run([*contained, *bootstrap], stdout=output, stderr=output, check=False)
    if done.returncode != 0:
        tail = "\n".join((CACHE / "debootstrap.log").read_text().splitlines()[-15:])
        raise BedError(f"debootstrap failed ({CACHE / 'debootstrap.log'}):\n{tail}")
    for name, text in FILES.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tree / "etc/sudoers.d/ops").chmod(0o440)
    for certificate in extra_certificates():
        shutil.copy(certificate, tree / "usr/local/share/ca-certificates" / certificate.name)
    run(
        *contained,
        "chroot",
        tree,
        "sh",
        "-c",
        _PREPARE,
        env={
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
            "MASKED": " ".join(MASKED),
            "PUBLIC_KEY": ssh_key().with_suffix(".pub").read_text().strip(),
        },
    )
    partial.rename(base)
    log(f"base image {base} built in {time.monotonic() - begin:.0f} s")


def ensure_driver() -> dict[str, Path]:
    """The simulated driver libraries, compiled when their sources changed: soname -> file."""
    sources = {"libnvidia-ml.so.1": "libnvidia-ml.c", "libcuda.so.1": "libcuda.c"}
    missing = [name for name in sources.values() if not (SIMULATED / name).exists()]
    if missing:
        raise BedError(f"{SIMULATED} lacks {', '.join(missing)}")
    texts = [path.read_bytes() for path in sorted(SIMULATED.glob("*.[ch]"))]
    folder = CACHE / "driver" / digest(*texts)
    libraries = {soname: folder / soname for soname in sources}
    with lock(CACHE / "driver.lock"):
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            for soname, source in sources.items():
                flags = ["-shared", "-fPIC", "-O2", "-Wall", f"-Wl,-soname,{soname}"]
                run("gcc", *flags, "-o", partial / soname, SIMULATED / source)
            partial.rename(folder)
    return libraries


def multiarch() -> str:
    """The multiarch triplet of this machine, e.g. x86_64-linux-gnu."""
    return run("gcc", "-print-multiarch").strip() or f"{os.uname().machine}-linux-gnu"
