"""How the GPUs of a host are connected: `nvidia-smi topo -m`, and what in the way of peer access /sys shows.

For tensor parallelism only. It refuses nothing: what comes of it are hints, with the two settings that help by name.
"""

from __future__ import annotations

import os
import re
import subprocess

from .errors import RolloutError
from .gpus import TIMEOUT_S

WORKAROUNDS = (
    "if two ranks hang or answer garbage: vllm_service_environment {NCCL_P2P_DISABLE: '1'}, and "
    "vllm_service_args {disable-custom-all-reduce: true}"
)
#: The legend of nvidia-smi, from near to far.
LINKS = {
    "PIX": "at most one PCIe bridge",
    "PXB": "several PCIe bridges",
    "PHB": "a PCIe host bridge, so through the CPU",
    "NODE": "the interconnect between host bridges of one NUMA node",
    "SYS": "the interconnect between NUMA nodes",
}
_GPU = re.compile(r"GPU(\d+)")
_LINK = re.compile(r"NV\d+|PIX|PXB|PHB|NODE|SYS")

# PCI Express: extended capabilities begin at 0x100, number 13 is ACS, its control register 6 bytes in; bits 2 and 3
# send peer requests and completions up to the root complex. (PCI Express Base Specification, "ACS Extended Capability")
_EXTENDED, _ACS, _CONTROL, _REDIRECT = 0x100, 0x000D, 6, 0b1100


def parse(text: str) -> dict[tuple[int, int], str]:
    """The matrix of `nvidia-smi topo -m` → {(GPU, GPU): link} for each pair, the lower index first.

    Raises RolloutError for a text without such a matrix.
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the head is underlined
    columns: list[str] = []
    links = {}
    for row in text.splitlines():
        cells = [cell.strip() for cell in row.split("\t")]
        name = _GPU.fullmatch(cells[0])
        if not columns and any(_GPU.fullmatch(cell) for cell in cells[1:]) and not cells[0]:
            columns = cells
        elif columns and name:
            for column, cell in zip(columns, cells, strict=False):
                other = _GPU.fullmatch(column)
                if other and _LINK.fullmatch(cell) and int(name[1]) < int(other[1]):
                    links[int(name[1]), int(other[1])] = cell
    if not columns:
        raise RolloutError("nvidia-smi topo -m shows no matrix of GPUs", found=repr(text[:80]))
    return links


def _ask(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RolloutError("nvidia-smi doesn't answer", found=str(error)) from error
    if done.returncode:
        raise RolloutError(f"nvidia-smi {' '.join(arguments)} fails", found=done.stdout.strip()[:200])
    return done.stdout


def acs_redirects(config: bytes) -> bool:
    """Whether a PCI bridge with this configuration space (4096 bytes, as root reads it) sends peers' requests upwards."""
    offset, seen = _EXTENDED, set()
    while _EXTENDED <= offset <= len(config) - 8 and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == _ACS:
            return bool(
                int.from_bytes(config[offset + _CONTROL : offset + _CONTROL + 2], "little") & _REDIRECT
            )
        offset = header >> 20
    return False


def obstacles(bus_ids: list[str], sys: str = "/sys") -> list[str]:
    """What on the way between these PCI devices can break peer access: an IOMMU that translates, ACS on a bridge above."""
    found = []
    for bus_id in bus_ids:
        # nvidia-smi: 00000000:01:00.0, the kernel: 0000:01:00.0
        device = os.path.realpath(f"{sys}/bus/pci/devices/{bus_id.lower()[-12:]}")
        try:
            with open(f"{device}/iommu_group/type", encoding="ascii") as stream:
                kind = stream.read().strip()
            if kind.startswith("DMA"):
                found.append(f"the IOMMU translates for {bus_id} ({kind})")
        except OSError:
            pass  # no IOMMU, or none that is at work
        above = os.path.dirname(device)
        while os.path.exists(f"{above}/config"):
            with open(f"{above}/config", "rb") as stream:
                if acs_redirects(stream.read()):
                    found.append(f"ACS on the bridge {os.path.basename(above)} above {bus_id}")
            above = os.path.dirname(above)
    return list(dict.fromkeys(found))


def hints(count: int) -> list[str]:
    """What to know of the first `count` GPUs before they are to work together; [] when there is nothing to say."""
    try:
        links = parse(_ask("topo", "-m"))
        listed = _ask("--query-gpu=index,pci.bus_id", "--format=csv,noheader").splitlines()
    except RolloutError as error:
        return [f"GPU topology: not known ({error})"]
    said = []
    wanted = {pair: link for pair, link in links.items() if max(pair) < count}
    far = {link for link in wanted.values() if not link.startswith("NV")}
    if not far:
        return []
    worst = max(far, key=list(LINKS).index)
    if worst in ("NODE", "SYS", "PHB"):
        pairs = ", ".join(f"{a}-{b}" for (a, b), link in sorted(wanted.items()) if link == worst)
        said.append(f"GPU topology: GPUs {pairs} talk over {LINKS[worst]} ({worst}); {WORKAROUNDS}")
    ids = [line.split(",")[1].strip() for line in listed if int(line.split(",")[0]) < count]
    blocked = obstacles(ids)
    if blocked:
        said.append(f"GPU topology: {'; '.join(blocked)}: peer access may hang; {WORKAROUNDS}")
    return said
