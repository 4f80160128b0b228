"""Build what a GPU machine without a network needs, and put it together there.

`pack` runs where packages can be had, on a Debian or Ubuntu machine with apt-get and uv: it makes one
compressed archive and cuts it into pieces, since a transfer may be limited. `prepare` runs on the GPU machine,
whose own Python 3.12 has torch 2.11 with CUDA already: torch, Triton, NumPy and NVIDIA's libraries are used
from there and not carried; everything else of vLLM's lock is carried in the locked version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import BinaryIO

REPO = Path(__file__).resolve().parents[2]
LOCK = REPO / "roles/vllm/files/locks/vllm-0.20.1.txt"
PYTHON = "3.12"
PLATFORM = "x86_64-manylinux_2_35"
PIECE = 58 << 20


def _words(text: str) -> list[str]:
    return text.split()


# Of the lock: what the image has (large, or tied to its torch), and what a DFlash launch never imports.
FROM_IMAGE = _words("""
    torch torchvision torchaudio triton nvidia-cublas nvidia-cuda-cupti nvidia-cuda-nvrtc nvidia-cuda-runtime
    nvidia-cudnn-cu13 nvidia-cufft nvidia-cufile nvidia-curand nvidia-cusolver nvidia-cusparse
    nvidia-cusparselt-cu13 nvidia-ml-py nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvshmem-cu13 nvidia-nvtx
    cuda-toolkit cuda-bindings cuda-pathfinder numpy numba llvmlite opencv-python-headless sympy networkx mpmath
    grpcio pillow setuptools typing-extensions ninja hf-xet jinja2 markupsafe ml-dtypes
""")
LEFT_OUT = _words("""
    flashinfer-cubin flashinfer-python nvidia-cutlass-dsl nvidia-cutlass-dsl-libs-base nvidia-cudnn-frontend
    cuda-python cuda-tile z3-solver tilelang torch-c-dlpack-ext quack-kernels fastsafetensors
""")

# systemd, sshd and what the roles use, with the libraries that a container image tends to lack. A file that the
# GPU machine has already stays its own.
DEBS = _words("""
    systemd systemd-sysv libsystemd-shared libsystemd0 libudev1 dbus dbus-daemon dbus-bin dbus-session-bus-common
    dbus-system-bus-common libdbus-1-3 systemd-container openssh-server openssh-client openssh-sftp-server
    libwrap0 libnsl2 libtirpc3 libtirpc-common libkmod2 libapparmor1 libip4tc2 libseccomp2 libargon2-1
    libcryptsetup12 libdevmapper1.02.1 libjson-c5 libfdisk1 iproute2 libbpf1 libelf1 libmnl0 libxtables12
    libcap2-bin procps libproc2-0 sudo rsync libpam0g libpam-modules libaudit1 libcap-ng0 libselinux1 libcap2
    libacl1 libpcre2-8-0 libgssapi-krb5-2 libkrb5-3 libk5crypto3 libkrb5support0 libcom-err2 libkeyutils1
    libp11-kit0 libgcrypt20 libgpg-error0 liblz4-1 libzstd1 libcrypt1 libpopt0 libxxhash0 libffi8
""")
CONTROL = re.compile(
    r"(ansible|ansible-core|jinja2|markupsafe|packaging|pyyaml|resolvelib|cryptography|cffi|pycparser)$"
)


def run(*command: str | Path, **options) -> None:
    """Run a command, its output on ours; a failure ends this program with it."""
    subprocess.run([str(word) for word in command], check=True, **options)


def locked(text: str) -> dict[str, str]:
    """The blocks of a hash-locked requirements file by name; the last one wins (markers are left to uv)."""
    blocks: dict[str, str] = {}
    for block in re.split(r"\n(?=[a-z0-9])", "\n" + text):
        match = re.match(r"([a-z0-9][a-z0-9.-]*)==", block.strip())
        if match:
            blocks[match[1]] = blocks.get(match[1], "") + block.strip() + "\n"
    return blocks


def _install(uv: str, requirements: str, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    listed = target.with_suffix(".txt")
    listed.write_text(requirements)
    run(
        *(uv, "pip", "install", "--quiet", "--require-hashes", "--no-deps", f"--target={target}"),
        *(f"--python-version={PYTHON}", f"--python-platform={PLATFORM}", "--requirements", listed),
    )


def _system_tree(into: Path) -> None:
    """Unpack Debian packages into one tree with merged /usr, without what nobody reads there."""
    debs, tree = into / "debs", into / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    shutil.rmtree(debs, ignore_errors=True)
    for folder in (debs, tree):
        folder.mkdir(parents=True)
    run(
        "apt-get",
        "-q",
        "-o",
        "APT::Sandbox::User=root",
        "download",
        *DEBS,
        cwd=debs,
        stdout=subprocess.DEVNULL,
    )
    for deb in sorted(debs.glob("*.deb")):
        unpacked = into / "one"
        run("dpkg-deb", "--extract", deb, unpacked)
        for name in ("bin", "sbin", "lib", "lib64"):
            if (unpacked / name).is_dir() and not (unpacked / name).is_symlink():
                shutil.copytree(unpacked / name, unpacked / "usr" / name, symlinks=True, dirs_exist_ok=True)
                shutil.rmtree(unpacked / name)
        for name in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/lib/udev/hwdb.d", "var"):
            shutil.rmtree(unpacked / name, ignore_errors=True)
        run("cp", "-a", f"{unpacked}/.", tree)
        shutil.rmtree(unpacked)


def _compress(folder: Path, what: list[str], file: BinaryIO) -> None:
    """Append an archive of `what` in `folder`, in blocks that are unpacked side by side. Time counts more than a fifth piece."""
    tar = ["tar", f"--directory={folder}", "--sort=name", "--owner=0", "--group=0", *what]
    with subprocess.Popen(tar, stdout=subprocess.PIPE) as reader:
        xz = ["nice", "xz", "-1", "-T0", "--block-size=32MiB"]
        subprocess.run(xz, stdin=reader.stdout, stdout=file, check=True)
    if reader.returncode:
        raise SystemExit("tar failed")


def pack(into: Path, pair: Path, uv: str) -> list[Path]:
    """Build the pieces in `into`/pieces; what was built before is built anew. Returns their paths."""
    into.mkdir(parents=True, exist_ok=True)
    lock = locked(LOCK.read_text())
    wanted = [block for name, block in lock.items() if name not in (*FROM_IMAGE, *LEFT_OUT)]
    _install(uv, "".join(wanted), into / "site")
    control = locked((REPO / "requirements.txt").read_text())
    _install(uv, "".join(block for name, block in control.items() if CONTROL.match(name)), into / "control")
    collections = into / "control/ansible_collections"
    for folder in [*collections.iterdir(), *(collections / "ansible").iterdir()]:
        if folder.is_dir() and folder not in (collections / "ansible", collections / "ansible/posix"):
            shutil.rmtree(folder)
    _system_tree(into)
    shutil.rmtree(into / "pair", ignore_errors=True)
    shutil.copytree(pair, into / "pair")
    for cache in [*into.glob("*/**/__pycache__")]:
        shutil.rmtree(cache)
    pieces = into / "pieces"
    shutil.rmtree(pieces, ignore_errors=True)
    pieces.mkdir()
    archive = into / "carried.tar.xz"
    with archive.open("wb") as file:
        _compress(into, ["--mode=u+w,go=rX", "-c", "site", "control", "pair"], file)
        # Modes count in this one: sudo is setuid.
        _compress(into, ["-c", "tree"], file)
    with archive.open("rb") as file:
        number = 0
        while data := file.read(PIECE):
            number += 1
            # A folder each, so that one transfer can name one piece.
            folder = pieces / f"{number}"
            folder.mkdir()
            (folder / f"piece-{number:02}").write_bytes(data)
    return sorted(pieces.glob("*/piece-*"))


# --- on the GPU machine ------------------------------------------------------------------------------


def unpack(pieces: Path, into: Path) -> None:
    """Join the pieces and unpack them; on 16 cores a few seconds."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    joined = into.with_suffix(".tar.xz")
    with joined.open("wb") as whole:
        for piece in sorted(pieces.glob("piece-*")):
            with piece.open("rb") as part:
                shutil.copyfileobj(part, whole, 1 << 20)
    reader = subprocess.Popen(["xz", "-T0", "-dc", joined], stdout=subprocess.PIPE)
    # Two archives one after the other: hence -i.
    run("tar", "-i", "--directory", into, "-xp", stdin=reader.stdout)
    if reader.wait():
        raise SystemExit("a piece is missing or damaged")
    joined.unlink()


def keep_what_is_there(tree: Path, root: Path = Path("/")) -> int:
    """Take from the carried system tree what the machine has itself; returns how many files are left."""
    left = 0
    for directory, _, names in os.walk(tree):
        for name in names:
            path = Path(directory, name)
            if os.path.lexists(root / path.relative_to(tree)):
                path.unlink()
            else:
                left += 1
    return left


def lock_digest() -> str:
    """The name of the venv, as roles/vllm derives it."""
    return hashlib.sha256(LOCK.read_bytes()).hexdigest()[:16]


def assemble_venv(site: Path, layer: Path, image_site: str) -> Path:
    """Make the venv that roles/vllm finds complete: carried packages first, then those of the image's torch."""
    root = layer / "opt/vllm-dflash"
    venv = root / "venvs" / lock_digest()
    packages = venv / f"lib/python{PYTHON}/site-packages"
    packages.parent.mkdir(parents=True)
    site.rename(packages)
    (packages / "zz-image.pth").write_text(f"{image_site}\n")
    bin_ = venv / "bin"
    bin_.mkdir()
    for name in ("python", "python3", f"python{PYTHON}"):
        (bin_ / name).symlink_to(f"/usr/bin/python{PYTHON}" if name == "python" else "python")
    (venv / "pyvenv.cfg").write_text(
        f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {PYTHON}\n"
    )
    final = f"/opt/vllm-dflash/venvs/{lock_digest()}"
    # vLLM spawns its engine, which imports this file again: without the last condition every start ends there.
    (bin_ / "vllm").write_text(
        f"#!{final}/bin/python\nimport sys\nfrom vllm.entrypoints.cli.main import main\n"
        'if __name__ == "__main__":\n    sys.exit(main())\n'
    )
    (bin_ / "vllm").chmod(0o755)
    shutil.copy(LOCK, root / "venvs" / f"{lock_digest()}.txt")
    # As the role's --compile-bytecode does.
    subprocess.run(
        [bin_ / "python", "-m", "compileall", "-q", "-j0", packages], check=False, stdout=subprocess.DEVNULL
    )
    return venv


def differences(venv: Path) -> dict[str, dict[str, str | None]]:
    """Packages of the lock whose version in the venv is another, or that are not there: for the report."""
    wanted = {
        match[1]: match[2]
        for match in re.finditer(r"^([a-z0-9][a-z0-9.-]*)==([^ ;]+)", LOCK.read_text(), re.MULTILINE)
    }
    script = (
        "import importlib.metadata as m, json, re\n"
        "print(json.dumps({re.sub('[-_.]+','-',d.metadata['Name']).lower(): d.version"
        " for d in reversed(list(m.distributions()))}))"
    )
    found = json.loads(
        subprocess.run([venv / "bin/python", "-c", script], capture_output=True, check=True).stdout
    )
    return {
        name: {"lock": version, "there": found.get(name)}
        for name, version in sorted(wanted.items())
        if found.get(name) != version
    }
