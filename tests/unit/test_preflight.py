"""Is a host fit: each judgement both ways, from what would be seen there; and the few things that look at files."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import jinja2
import pytest
import yaml
from dflash_rollout import preflight
from dflash_rollout.errors import RolloutError
from dflash_rollout.gpus import Gpu, GpuProcess
from dflash_rollout.preflight import (
    Finding,
    Observed,
    Wanted,
    judge,
    missing_target_files,
    nearest_existing,
    numbers,
    observe,
    unreadable_for_others,
)

WANTED = Wanted(
    gpus=2,
    min_driver="580",
    min_compute_capability="8.0",
    root="/opt/vllm-dflash",
    needs={"/opt/vllm-dflash/venvs/0123": 16 * 2**30},
    python="/usr/bin/python3",
    target="/root/models/Qwen3.6-27B",
    port=30000,
    known_units=("sglang.service", "vllm-dflash@0123.service"),
)


def gpu(index=0, **different):
    card = Gpu(index, f"GPU-{index}", "NVIDIA RTX A6000", 49140, 1, "580.95.05", "8.6")
    return replace(card, **different)


def process(**different):
    held = GpuProcess(812, "GPU-0", 0, "python3", 2000, "alice", "python3 train.py", unit="training.service")
    return replace(held, **different)


def listener(**different):
    return {
        "pid": 99,
        "user": "www",
        "command": "nginx",
        "unit": "nginx.service",
        **different,
    }


def host(**different):
    """A host that is fit, but for what is given."""
    facts = {
        "gpus": [gpu(0), gpu(1)],
        "free_bytes": 100 * 2**30,
        "need_bytes": 20 * 2**30,
        "filesystem": "/opt",
        "python_version": (3, 11),
        "python_headers": True,
        "python_venv": True,
        "compiler": "/usr/bin/cc",
        "rsync": "/usr/bin/rsync",
        "systemd": 252,
    }
    return Observed(**{**facts, **different})


def sentences(wanted=WANTED, **different):
    return [str(finding) for finding in judge(host(**different), wanted)]


UNFIT = {
    "too few GPUs": (
        {"gpus": [gpu(0)]},
        "GPUs: found 1 (0: NVIDIA RTX A6000); expected 2, which tensor-parallel-size asks for. "
        "What to do: lower tensor-parallel-size, or see why nvidia-smi shows fewer cards.",
    ),
    "an old driver": (
        {"gpus": [gpu(0, driver_version="535.183.01"), gpu(1, driver_version="535.183.01")]},
        "NVIDIA driver: found 535.183.01; expected 580 or later (the wheel is built for CUDA 13). "
        "What to do: update the driver on this host, reboot, run preflight again.",
    ),
    "a driver whose version is no number": (
        {"gpus": [gpu(0, driver_version="N/A"), gpu(1)]},
        "NVIDIA driver: found N/A; expected 580 or later (the wheel is built for CUDA 13). "
        "What to do: update the driver on this host, reboot, run preflight again.",
    ),
    "a driver that withholds its version": (
        {"gpus": [gpu(0), gpu(1, driver_version="")]},
        "NVIDIA driver: found no version in what nvidia-smi says; expected 580 or later (the wheel is built for "
        "CUDA 13). What to do: update the driver on this host, reboot, run preflight again.",
    ),
    "an old card, be it the second": (
        {"gpus": [gpu(0), gpu(1, name="Tesla V100", compute_capability="7.0")]},
        "compute capability: found 7.0 (Tesla V100); expected 8.0 or higher. What to do: DFlash needs FLASH_ATTN, "
        "which these cards don't have: leave the host out with --limit.",
    ),
    "a card that doesn't say what it is": (
        {"gpus": [gpu(0, compute_capability=""), gpu(1)]},
        "compute capability: found none (NVIDIA RTX A6000); expected 8.0 or higher. What to do: DFlash needs "
        "FLASH_ATTN, which these cards don't have: leave the host out with --limit.",
    ),
    "a foreign process": (
        {"processes": [process()]},
        "foreign process on a GPU: found 2000 MiB on GPU 0 held by pid 812 of alice: python3 train.py (unit "
        "training.service); expected nobody or sglang.service or vllm-dflash@0123.service. What to do: end it, or "
        "name its unit in sglang_unit if it is the server to replace; this roll-out kills nothing that isn't its own.",
    ),
    "a foreign process of which little is known": (
        {
            "processes": [
                process(gpu_index=None, used_mib=None, user=None, command=None, unit=None, name=None)
            ]
        },
        "foreign process on a GPU: found unknown memory on GPU GPU-0 held by pid 812 of an unknown user: unknown "
        "command (unit none); expected nobody or sglang.service or vllm-dflash@0123.service. What to do: end it, or "
        "name its unit in sglang_unit if it is the server to replace; this roll-out kills nothing that isn't its own.",
    ),
    "a foreign listener": (
        {"listeners": [listener()]},
        "port 30000: found held by pid 99 of www: nginx (unit nginx.service); expected nobody or sglang.service or "
        "vllm-dflash@0123.service. What to do: end it, set rollout_port, or name its unit in sglang_unit if it is "
        "the server to replace.",
    ),
    "a listener that can't be seen": (
        {"listeners": [listener(pid=None, user=None, command=None, unit=None)]},
        "port 30000: found held by a process that can't be seen from here; expected nobody or sglang.service or "
        "vllm-dflash@0123.service. What to do: end it, set rollout_port, or name its unit in sglang_unit if it is "
        "the server to replace.",
    ),
    "a full disk": (
        {"free_bytes": 20 * 2**30 - 1, "need_bytes": 21 * 2**30 + 2**29},
        "disk: found 20.0 GiB free on the filesystem of /opt; expected 21.5 GiB for /opt/vllm-dflash. "
        "What to do: free space there, or set rollout_root to another filesystem.",
    ),
    "a Python that doesn't run": (
        {"python_version": None, "python_error": "no answer within 30 s"},
        "Python: found /usr/bin/python3: no answer within 30 s; expected Python 3.10 to 3.13 that an unprivileged "
        "user can run. What to do: set vllm_python to the distribution's python3.",
    ),
    "an old Python": (
        {"python_version": (3, 9)},
        "Python: found /usr/bin/python3 is 3.9; expected Python 3.10 to 3.13 that an unprivileged user can run. "
        "What to do: set vllm_python to another interpreter.",
    ),
    "a Python that is too new": (
        {"python_version": (3, 14)},
        "Python: found /usr/bin/python3 is 3.14; expected Python 3.10 to 3.13 that an unprivileged user can run. "
        "What to do: set vllm_python to another interpreter.",
    ),
    "no venv module": (
        {"python_venv": False},
        "venv module: found none in /usr/bin/python3; expected venv and ensurepip. "
        "What to do: apt install python3.11-venv.",
    ),
    "no headers": (
        {"python_headers": False},
        "Python.h: found none for /usr/bin/python3; expected the C headers of the interpreter: Triton compiles at "
        "start. What to do: apt install python3.11-dev.",
    ),
    "no compiler": (
        {"compiler": None},
        "C compiler: found no cc, gcc or clang; expected one: Triton compiles at start. "
        "What to do: apt install gcc libc6-dev.",
    ),
    "no rsync": (
        {"rsync": None},
        "rsync: found none; expected rsync: files come from the control node by it. What to do: apt install rsync.",
    ),
    "an old systemd": (
        {"systemd": 246},
        "systemd: found 246; expected 247 or later. What to do: upgrade the distribution.",
    ),
    "no systemd": (
        {"systemd": None},
        "systemd: found no answer of systemctl --version; expected 247 or later. What to do: upgrade the "
        "distribution.",
    ),
    "no target": (
        {"target_missing": ["/root/models/Qwen3.6-27B"]},
        "target: found no folder /root/models/Qwen3.6-27B; expected the target model on this host. "
        "What to do: put it there, or set vllm_service_target.",
    ),
    "half a target": (
        {"target_missing": ["tokenizer.json", "*.safetensors"]},
        "target: found /root/models/Qwen3.6-27B without tokenizer.json, *.safetensors; expected a complete model "
        "folder. What to do: bring the missing files.",
    ),
    "a closed target": (
        {"target_unreadable": "/root/models/Qwen3.6-27B/config.json"},
        "target: found /root/models/Qwen3.6-27B/config.json is closed to other users; expected files that the "
        "service user can read. What to do: chmod -R o+rX /root/models/Qwen3.6-27B.",
    ),
}

FIT = {
    "all is well": {},
    "more GPUs than needed": {"gpus": [gpu(0), gpu(1), gpu(2)]},
    "the oldest driver, to the number": {
        "gpus": [gpu(0, driver_version="580"), gpu(1, driver_version="580.0")]
    },
    "the oldest card, to the number": {"gpus": [gpu(0, compute_capability="8.0"), gpu(1)]},
    # As text, "10.0" would be below "8.0" and "1000" below "580".
    "a new card": {"gpus": [gpu(0, compute_capability="10.0"), gpu(1, driver_version="1000.1")]},
    "cards that don't say their memory": {
        "gpus": [gpu(0, memory_total_mib=None, memory_used_mib=None), gpu(1)]
    },
    "the old server's process and ours": {
        "processes": [process(unit="sglang.service"), process(unit="vllm-dflash@0123.service")]
    },
    "the old server's listener": {"listeners": [listener(unit="sglang.service")]},
    "just enough disk": {"free_bytes": 7, "need_bytes": 7},
    "the oldest Python": {"python_version": (3, 10)},
    "the newest Python": {"python_version": (3, 13)},
    "the oldest systemd": {"systemd": 247},
}


@pytest.mark.parametrize(("different", "sentence"), UNFIT.values(), ids=UNFIT)
def test_what_a_person_reads_of_an_unfit_host(different, sentence):
    assert sentences(**different) == [sentence]


@pytest.mark.parametrize("different", FIT.values(), ids=FIT)
def test_a_fit_host_has_no_findings(different):
    assert sentences(**different) == []


def test_all_reasons_at_once_in_the_order_of_mending():
    trouble = Finding("GPUs", "no nvidia-smi on PATH", "the NVIDIA driver with its tools", "install it")
    seen = Observed(
        trouble=[trouble],
        listeners=[listener()],
        need_bytes=1,
        python_error="gone",
        target_missing=[WANTED.target],
    )
    assert [finding.check for finding in judge(seen, WANTED)] == [
        "GPUs",
        "port 30000",
        "disk",
        "Python",
        "C compiler",
        "rsync",
        "systemd",
        "target",
    ]


def test_without_an_answer_of_nvidia_smi_the_cards_are_not_said_to_be_too_few():
    trouble = Finding("GPUs", "no nvidia-smi on PATH", "the NVIDIA driver with its tools", "install it")
    assert judge(host(gpus=[], trouble=[trouble]), WANTED) == [trouble]


def test_cards_are_judged_though_their_processes_could_not_be_listed():
    trouble = Finding("GPUs", "no answer within 30 s", "an answer of nvidia-smi", "reboot the host")
    findings = judge(host(gpus=[gpu(0, driver_version="535.1"), gpu(1)], trouble=[trouble]), WANTED)
    assert [finding.check for finding in findings] == ["GPUs", "NVIDIA driver"]


def test_one_card_after_the_other_is_one_finding():
    assert len(sentences(gpus=[gpu(0, driver_version="535.1"), gpu(1, driver_version="535.1")])) == 1


def test_without_a_known_unit_nobody_may_hold_the_port():
    (sentence,) = sentences(replace(WANTED, known_units=()), listeners=[listener()])
    assert "; expected nobody. What to do" in sentence


def test_a_least_version_that_is_none_is_the_callers_fault():
    with pytest.raises(ValueError, match="'new' is not dotted numbers"):
        judge(host(), replace(WANTED, min_driver="new"))


@pytest.mark.parametrize(
    ("version", "expected"), [("580.95.05", (580, 95, 5)), ("8.6", (8, 6)), ("580", (580,))]
)
def test_numbers(version, expected):
    assert numbers(version) == expected


@pytest.mark.parametrize("version", ["", "N/A", "580.", ".5", "580.x", "-1.0", "8 .6", "1_0", "8.6\n", "٨.٦"])
def test_not_numbers(version):
    with pytest.raises(ValueError, match="is not dotted numbers"):
        numbers(version)


def test_nearest_existing(tmp_path, monkeypatch):
    assert nearest_existing(str(tmp_path)) == str(tmp_path)
    assert nearest_existing(str(tmp_path / "a" / "b")) == str(tmp_path)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert nearest_existing(str(tmp_path / "broken" / "b")) == str(tmp_path)
    assert nearest_existing("/nowhere-at-all/b") == "/"
    monkeypatch.chdir(tmp_path)
    assert nearest_existing("relative/b") == str(tmp_path)


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "Qwen [27B]"  # brackets mean something to glob
    folder.mkdir(mode=0o755)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model-1.safetensors"):
        (folder / name).write_text("{}")
        (folder / name).chmod(0o644)
    folder.chmod(0o755)
    return folder


def test_a_complete_target_lacks_nothing(target):
    assert missing_target_files(str(target)) == []


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        ("config.json", ["config.json"]),
        ("tokenizer.json", ["tokenizer.json"]),
        ("tokenizer_config.json", ["tokenizer_config.json"]),
        ("model-1.safetensors", ["*.safetensors"]),
    ],
)
def test_what_a_target_lacks(target, gone, missing):
    (target / gone).unlink()
    assert missing_target_files(str(target)) == missing


def test_a_target_that_is_not_there_or_is_a_file(target):
    assert missing_target_files(str(target / "x")) == [str(target / "x")]
    assert missing_target_files(str(target / "config.json")) == [str(target / "config.json")]


def test_a_folder_in_the_place_of_a_file_is_missing(target):
    (target / "config.json").unlink()
    (target / "config.json").mkdir()
    assert missing_target_files(str(target)) == ["config.json"]


def test_weights_may_be_links_that_lead_somewhere(target, tmp_path):
    blob = tmp_path / "blob"
    (target / "model-2.safetensors").symlink_to(blob)
    assert missing_target_files(str(target)) == ["model-2.safetensors"]
    blob.write_text("")
    assert missing_target_files(str(target)) == []


def test_an_open_target_is_readable_for_others(target):
    assert unreadable_for_others(str(target)) is None


def test_a_closed_file_is_named(target):
    (target / "tokenizer.json").chmod(0o640)
    assert unreadable_for_others(str(target)) == str(target / "tokenizer.json")


@pytest.mark.parametrize("mode", [0o750, 0o754, 0o751])
def test_a_folder_needs_to_be_read_and_entered(target, mode):
    target.chmod(mode)
    assert unreadable_for_others(str(target)) == str(target)


def test_a_closed_folder_below_is_named(target):
    (target / "below").mkdir()
    (target / "below").chmod(0o700)
    assert unreadable_for_others(str(target)) == str(target / "below")


def test_the_file_that_a_link_leads_to_counts(target, tmp_path):
    blob = tmp_path / "blob"
    blob.write_text("")
    (target / "model-2.safetensors").symlink_to(blob)
    blob.chmod(0o600)
    assert unreadable_for_others(str(target)) == str(target / "model-2.safetensors")
    blob.chmod(0o644)
    assert unreadable_for_others(str(target)) is None


def test_the_path_above_does_not_count(target, tmp_path):
    tmp_path.chmod(0o700)
    assert unreadable_for_others(str(target)) is None


def look(monkeypatch, tmp_path, python, gpus=lambda: [gpu(0)], processes=lambda gpus: [], **wanted):
    """observe() with simulated GPUs."""
    monkeypatch.setattr(preflight, "query_gpus", gpus)
    monkeypatch.setattr(preflight, "query_processes", processes)
    described = {"python": str(python), "root": str(tmp_path / "new" / "root"), "target": str(tmp_path / "t")}
    return observe(replace(WANTED, **{**described, **wanted}), [])


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def open_path():
    """A folder that the unprivileged user of the probe can enter; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_what_is_seen_of_a_python(monkeypatch, tmp_path, open_path):
    seen = look(monkeypatch, tmp_path, script(open_path / "python", "echo 3.12 1 0"))
    assert (seen.python_version, seen.python_headers, seen.python_venv) == ((3, 12), True, False)
    seen = look(monkeypatch, tmp_path, script(open_path / "python", "echo 3.9 0 1"))
    assert (seen.python_version, seen.python_headers, seen.python_venv) == ((3, 9), False, True)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("echo 'Unknown option: -I' >&2; exit 2", "Unknown option: -I"),
        ("exit 3", "exit status 3"),
        ("true", "its answer is not that of a Python: ''"),
        ("echo 3.11 yes", "its answer is not that of a Python: '3.11 yes\\n'"),
        ("printf '\\377'", "its answer is not that of a Python: '\ufffd'"),
        ("exec sleep 60", "no answer within 0.3 s"),
    ],
)
def test_a_python_that_is_none(monkeypatch, tmp_path, open_path, body, error):
    monkeypatch.setattr(preflight, "TIMEOUT_S", 0.3 if "sleep" in body else 30.0)
    seen = look(monkeypatch, tmp_path, script(open_path / "python", body))
    assert (seen.python_version, seen.python_error) == (None, error)


def test_a_python_that_is_not_there(monkeypatch, tmp_path):
    assert "No such file" in look(monkeypatch, tmp_path, "/nowhere/python3").python_error


@pytest.mark.skipif(os.geteuid() != 0, reason="only root looks as somebody else")
def test_a_python_that_works_for_root_alone(monkeypatch, tmp_path, open_path):
    python = script(open_path / "python", "echo 3.12 1 1")
    python.chmod(0o700)
    assert "Permission denied" in look(monkeypatch, tmp_path, python).python_error


@pytest.mark.parametrize(
    ("body", "version"),
    [
        ("echo 'systemd 252 (252.39-1~deb12u1)'", 252),
        ("exit 1", None),
        ("echo systemd", None),
        ("echo systemd is", None),
        ("exec sleep 60", None),
    ],
)
def test_systemd(monkeypatch, tmp_path, body, version):
    bin_path = tmp_path / "bin"
    bin_path.mkdir()
    script(bin_path / "systemctl", body)
    monkeypatch.setenv("PATH", f"{bin_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "TIMEOUT_S", 0.3 if "sleep" in body else 30.0)
    assert look(monkeypatch, tmp_path, tmp_path / "none").systemd == version


def test_tools_are_looked_for_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    seen = look(monkeypatch, tmp_path, tmp_path / "none")
    assert (seen.compiler, seen.rsync, seen.systemd) == (None, None, None)
    script(tmp_path / "clang", "")
    script(tmp_path / "rsync", "")
    seen = look(monkeypatch, tmp_path, tmp_path / "none")
    assert (seen.compiler, seen.rsync) == (str(tmp_path / "clang"), str(tmp_path / "rsync"))


def test_disk_counts_what_is_not_there_yet(monkeypatch, tmp_path):
    (tmp_path / "there").mkdir()
    needs = {str(tmp_path / "there"): 5, str(tmp_path / "a"): 7, str(tmp_path / "b"): 11}
    seen = look(monkeypatch, tmp_path, tmp_path / "none", needs=needs)
    assert (seen.need_bytes, seen.filesystem) == (18, str(tmp_path))
    assert seen.free_bytes > 0


def test_trouble_with_nvidia_smi_is_a_finding(monkeypatch, tmp_path):
    def fails(*_):
        raise RolloutError("nvidia-smi hangs", found="no answer within 30 s", remedy="reboot the host")

    seen = look(monkeypatch, tmp_path, tmp_path / "none", gpus=fails)
    sentence = (
        "GPUs: found no answer within 30 s; expected an answer of nvidia-smi. What to do: reboot the host."
    )
    assert [str(finding) for finding in seen.trouble] == [sentence]
    assert seen.gpus == []
    seen = look(monkeypatch, tmp_path, tmp_path / "none", processes=fails)
    assert [str(finding) for finding in seen.trouble] == [sentence]
    assert seen.gpus == [gpu(0)]


def test_a_target_is_looked_into(monkeypatch, tmp_path, target):
    (target / "config.json").chmod(0o600)
    seen = look(monkeypatch, tmp_path, tmp_path / "none", target=str(target))
    assert (seen.target_missing, seen.target_unreadable) == ([], str(target / "config.json"))
    (target / "config.json").unlink()
    seen = look(monkeypatch, tmp_path, tmp_path / "none", target=str(target))
    assert (seen.target_missing, seen.target_unreadable) == (["config.json"], None)


def test_a_container_of_the_server_before_is_no_stranger():
    """Its cgroup need not be a unit (/docker/<id>), and the engine holds its port."""
    group = "/docker/3f4c"
    wanted = replace(WANTED, known_units=("sglang",), known_group=group)
    inside = process(unit=None, cgroup=f"{group}/worker")
    proxy = listener(unit="docker.service", own=True)
    assert judge(host(processes=[inside], listeners=[proxy]), wanted) == []
    other = process(unit=None, cgroup="/docker/3f4cd", command="python3 other.py")
    (found,) = judge(host(processes=[inside, other]), wanted)
    assert "python3 other.py" in str(found)


@pytest.mark.parametrize(
    ("drafter", "target", "wheelhouse", "needed"),
    [
        ("url", "present", "", False),
        ("url", "present", "/srv/wheels", True),
        ("rsync", "present", "", True),
        ("url", "swarm", "", True),
    ],
)
def test_rsync_is_asked_for_where_something_comes_by_it(drafter, target, wheelhouse, needed):
    role = yaml.safe_load((Path(__file__).parents[2] / "roles/gpu_host/vars/main.yml").read_text())
    template = jinja2.Environment().from_string(role["__gpu_host_needs_rsync"])  # noqa: S701, no HTML
    rendered = template.render(
        drafter_transport=drafter, __gpu_host_target_transport=target, vllm_wheelhouse=wheelhouse
    )
    assert rendered == str(needed)
