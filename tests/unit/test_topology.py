"""nvidia-smi topo -m and what /sys says, from text and from simulated devices."""

from __future__ import annotations

import pytest
from dflash_rollout import topology
from dflash_rollout.errors import RolloutError
from dflash_rollout.topology import acs_redirects, obstacles, parse

HEAD = "\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
TABLE = (
    HEAD
    + "GPU0\t X \tNV4\tSYS\tPHB\t0-31\t0\t\tN/A\n"
    + "GPU1\tNV4\t X \tNODE\tSYS\t0-31\t0\t\tN/A\n"
    + "GPU2\tSYS\tNODE\t X \tPIX\t32-63\t1\t\tN/A\n"
    + "NIC0\tPHB\tSYS\tPIX\t X \n\nLegend:\n\n  X    = Self\n"
)


def test_parse():
    assert parse(TABLE) == {(0, 1): "NV4", (0, 2): "SYS", (1, 2): "NODE"}


def test_one_gpu_has_no_pairs():
    assert parse("\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n") == {}


def test_no_matrix():
    with pytest.raises(RolloutError, match="no matrix"):
        parse("No devices were found\n")


def space(control: int, number: int = 0x000D) -> bytes:
    """A simulated configuration space: another capability at 0x100, then one of this number at 0x148."""
    raw = bytearray(4096)
    raw[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    raw[0x148:0x14C] = (number | 1 << 16).to_bytes(4, "little")
    raw[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(raw)


def test_acs():
    assert acs_redirects(space(0x1D))
    assert not acs_redirects(space(0x01))
    assert not acs_redirects(space(0x1D, number=0x000E))
    assert not acs_redirects(bytes(256))  # what a user without rights reads
    loop = bytearray(4096)
    loop[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert not acs_redirects(bytes(loop))


@pytest.fixture
def sys(tmp_path):
    """Simulated: a GPU behind a bridge."""
    bridge = tmp_path / "devices/pci0000:00/0000:00:01.0"
    device = bridge / "0000:01:00.0"
    (device / "iommu_group").mkdir(parents=True)
    (device / "config").write_bytes(bytes(256))
    (bridge / "config").write_bytes(space(0))
    (device / "iommu_group/type").write_text("identity\n")
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:01:00.0").symlink_to(device)
    return tmp_path, device, bridge


def test_obstacles(sys):
    root, device, bridge = sys
    ids = ["00000000:01:00.0"]
    assert obstacles(ids, str(root)) == []
    (device / "iommu_group/type").write_text("DMA-FQ\n")
    (bridge / "config").write_bytes(space(0x1D))
    assert obstacles(ids, str(root)) == [
        "the IOMMU translates for 00000000:01:00.0 (DMA-FQ)",
        "ACS on the bridge 0000:00:01.0 above 00000000:01:00.0",
    ]


def test_hints(monkeypatch):
    answers = {"topo": TABLE, "--query-gpu=index,pci.bus_id": "0, A\n1, B\n2, C\n"}
    monkeypatch.setattr(topology, "_ask", lambda first, *_: answers[first])
    monkeypatch.setattr(topology, "obstacles", lambda ids: [f"seen {' '.join(ids)}"])
    assert topology.hints(2) == []  # NVLink: no PCIe in the way
    far, blocked = topology.hints(3)
    assert "GPUs 0-2 talk over the interconnect between NUMA nodes (SYS)" in far
    assert "seen A B C" in blocked
    for text in (far, blocked):
        assert "NCCL_P2P_DISABLE" in text
        assert "disable-custom-all-reduce" in text


def test_a_driver_without_an_answer_is_said(monkeypatch):
    def fail(*_):
        raise RolloutError("nvidia-smi fails", found="nothing")

    monkeypatch.setattr(topology, "_ask", fail)
    (said,) = topology.hints(2)
    assert said.startswith("GPU topology: not known (nvidia-smi fails")
