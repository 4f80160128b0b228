"""The release layer: the real vLLM, installed once by the real role, stacked under every host of a bed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from . import hosts
from .base import BASES, ensure_base
from .machine import CACHE, REPO, TESTBED, BedError, digest, lock, log

LAYERS = CACHE / "layers"
BUILDER = "layer-builder"
COMMAND = 'ansible-playbook -i "$INVENTORY" tests/testbed/layer.yml'
KEEP = 2

# What belongs to one host, or to one boot, and not to an installed release.
_NOT_RELEASE = [
    "etc/.pwd.lock",
    "etc/.updated",
    "etc/group-",
    "etc/gshadow-",
    "etc/ld.so.cache",
    "etc/passwd-",
    "etc/shadow-",
    "home/ops/.ansible",
    "root/.ansible",
    "run",
    "tmp",
    "var/.updated",
    "var/lib/systemd",
    "var/log",
    "var/tmp",
]


def key(base: Path, command: str) -> str:
    """Names the layer by all that goes into it: base, the role with its lock, what installs, the playbook, the command."""
    inputs = sorted(p for p in (REPO / "roles/vllm").rglob("*") if p.is_file() and p.suffix != ".pyc")
    installer = (
        "library/vllm_venv.py",
        "module_utils/dflash_rollout/venv.py",
        "module_utils/dflash_rollout/venv_probe.py",
    )
    inputs += [TESTBED / "layer.yml", *(REPO / name for name in installer)]
    parts: list[str | bytes] = [base.name, command]
    for path in inputs:
        if path.exists():
            parts += [str(path.relative_to(REPO)), path.read_bytes()]
    return digest(*parts)


def ensure_layer(command: str = COMMAND) -> list[Path]:
    """The images [layer, base], the layer built if there is none yet."""
    base = ensure_base()
    LAYERS.mkdir(parents=True, exist_ok=True)
    layer = LAYERS / key(base, command)
    with lock(CACHE / "layer.lock"):
        _clean_up()
        if not layer.exists():
            _build(layer, base, command)
    os.utime(layer)
    return [layer, base]


def _clean_up() -> None:
    """What an interrupted build left. Call with layer.lock held: so no build is running."""
    with hosts.bed_lock(BUILDER):
        hosts.down(BUILDER)
    for partial in LAYERS.glob(".*.partial"):
        shutil.rmtree(partial)


def _build(layer: Path, base: Path, command: str) -> None:
    begin = time.monotonic()
    log("building the release layer: a builder host, the real install, its image (minutes, gigabytes)")
    try:
        with hosts.bed_lock(BUILDER):
            bed = hosts.up(BUILDER, 1, lambda: [base], layer=False, sglang=False, outside=True, small=True)
        host = bed.hosts[0]
        installed = time.monotonic()
        code = subprocess.run(["sh", "-c", command], cwd=REPO, env=_environment(bed), check=False).returncode
        if code != 0:
            raise BedError(f"{command} exited {code}: no layer")
        log(f"installed in {time.monotonic() - installed:.0f} s, powering the builder off")
        hosts.power_off(bed, host)
        partial = LAYERS / f".{layer.name}.partial"
        partial.mkdir()
        disk = Path(bed.disks, host.name)
        # A rename: whiteouts and overlay's own attributes mean the same in a lower layer.
        (disk / "upper").rename(partial / "tree")
        _strip(partial / "tree", json.loads((disk / "seeded.json").read_text()))
        (partial / "layer.json").write_text(json.dumps({"base": base.name, "command": command}))
        partial.rename(layer)
    finally:
        _clean_up()
    log(f"release layer {layer} built in {time.monotonic() - begin:.0f} s")


def _environment(bed: hosts.Bed) -> dict[str, str]:
    venvs = [Path(sys.prefix, "bin"), REPO / ".venv/bin"]
    path = [str(p) for p in venvs if (p / "ansible-playbook").exists()]
    return {
        **os.environ,
        "PATH": ":".join([*path, os.environ.get("PATH", "")]),
        "INVENTORY": str(bed.run / "inventory.yml"),
        "ANSIBLE_HOME": str(bed.run / "ansible"),
    }


def _strip(tree: Path, seeded: list[str]) -> None:
    """Take the builder's identity, simulated hardware and logs out of what is to be the layer."""
    for name in [*seeded, *_NOT_RELEASE]:
        path = tree / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    # Folders that only held what is gone now. (One that is empty for another reason is not missed either,
    # unless it hides a folder below: then its place in the image below shows again, which is right here.)
    for name in seeded:
        for parent in (tree / name).parents:
            if parent == tree or not parent.is_dir() or any(parent.iterdir()):
                break
            parent.rmdir()


def prune() -> None:
    """Remove old images: of those that no bed uses, the newest KEEP of each kind stay."""
    with lock(CACHE / "layer.lock", wait=False) as layers_free, lock(CACHE / "base.lock", wait=False) as free:
        if not (layers_free and free):
            return  # somebody is building; the next call prunes
        with lock(hosts.IMAGES):
            used = {Path(image) for bed in hosts.beds() for image in bed.images}
            kept = used | set(_newest(LAYERS, used))
            for layer in [p for p in kept if p.parent == LAYERS]:
                kept.add(BASES / json.loads((layer / "layer.json").read_text())["base"])
            kept |= set(_newest(BASES, kept))
            for folder in (LAYERS, BASES):
                for image in folder.glob("[!.]*"):
                    if image not in kept:
                        log(f"removing the old image {image}")
                        shutil.rmtree(image)


def _newest(folder: Path, used: set[Path]) -> list[Path]:
    idle = [image for image in folder.glob("[!.]*") if image not in used]
    return sorted(idle, key=lambda image: image.stat().st_mtime, reverse=True)[:KEEP]


def down_all() -> None:
    """Every bed, remains of crashed ones included; a layer that is being built right now is left alone."""
    names = {bed.name for bed in hosts.beds()}
    if (CACHE / "beds").exists():
        names |= {path.name for path in (CACHE / "beds").iterdir()}
    if BUILDER in names:
        with lock(CACHE / "layer.lock", wait=False) as free:
            if free:
                _clean_up()
            else:
                log("the layer is being built: its builder stays")
    for name in sorted(names - {BUILDER}):
        with hosts.bed_lock(name):
            hosts.down(name)
        log(f"bed {name} is down")
