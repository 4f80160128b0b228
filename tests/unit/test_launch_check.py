"""The launch check without vLLM: its answer, its errors in plain words, the ways to run it.

The tracebacks were recorded with vLLM 0.20.1 (frames in the middle left out). What vLLM itself accepts and
refuses is tested in tests/integration/test_launch_check.py.
"""

from __future__ import annotations

import json
import os
import pwd
import sys
import textwrap
import time

import pytest
from dflash_rollout.launch_check import (
    PARAGRAPH_LENGTH,
    LaunchCheckFailed,
    all_reduce,
    error_paragraph,
    missing,
    read_answer,
    run,
)
from dflash_rollout.launch_probe import BEGIN, END

BUDGET = """\
Traceback (most recent call last):
  File "<stdin>", line 234, in main
  File "<stdin>", line 65, in engine_config
  File "/venv/lib/python3.11/site-packages/vllm/engine/arg_utils.py", line 2121, in create_engine_config
    config = VllmConfig(
             ^^^^^^^^^^^
  File "/venv/lib/python3.11/site-packages/pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, max_num_scheduled_tokens is set to -1536 based on the speculative decoding settings, which does not \
allow any tokens to be scheduled. Increase max_num_batched_tokens to accommodate the additional draft token slots, \
or decrease num_speculative_tokens or max_num_seqs. [type=value_error, input_value=ArgsKwargs((), \
{'model_co...'shutdown_timeout': 30}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""

UNKNOWN_KEY = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
num_spec
  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=15, input_type=int]
    For further information visit https://errors.pydantic.dev/2.13/v/unexpected_keyword_argument
"""

NO_DRAFTER = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig
  Value error, Invalid repository ID or local directory specified: '/opt/x/drafter'.
Please verify the following requirements:
1. Provide a valid Hugging Face repository ID.
2. Specify a local directory that contains a recognized configuration file.
   - For Hugging Face models: ensure the presence of a 'config.json'.
   - For Mistral models: ensure the presence of a 'params.json'.
 [type=value_error, input_value=ArgsKwargs((), {'model': ...config_format': 'auto'}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""

TOOL_PARSER = """\
Traceback (most recent call last):
  File "<stdin>", line 232, in main
  File "<stdin>", line 56, in parse
  File "/venv/lib/python3.11/site-packages/vllm/entrypoints/openai/api_server.py", line 518, in \
validate_api_server_args
    raise KeyError(
KeyError: 'invalid tool call parser: qwen4_coder (chose from { hermes,qwen3_coder,qwen3_xml })'
"""

LAYER_TYPES = """\
ValueError: `num_hidden_layers` (6) must be equal to the number of layer types (5)

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/huggingface_hub/dataclasses.py", line 253, in validate
    raise StrictDataclassClassValidationError(validator=validator.__name__, cause=e) from e
huggingface_hub.errors.StrictDataclassClassValidationError: Class validation error for validator \
'validate_layer_type':
    ValueError: `num_hidden_layers` (6) must be equal to the number of layer types (5)
"""

YAML = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/yaml/parser.py", line 549, in parse_flow_mapping_key
    raise ParserError("while parsing a flow mapping", self.marks[-1],
yaml.parser.ParserError: while parsing a flow mapping
  in "/opt/x/vllm.yaml", line 1, column 1
expected ',' or '}', but got '<stream end>'
  in "/opt/x/vllm.yaml", line 2, column 1
"""

INSPECTION = """\
Traceback (most recent call last):
  File "/venv/lib/python3.11/site-packages/pydantic/_internal/_dataclasses.py", line 121, in __init__
    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)
pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, Model architectures ['Qwen3_5ForConditionalGeneration'] failed to be inspected. Please check the logs \
for more details. [type=value_error, input_value=ArgsKwargs((), {'model': ...config_format': 'auto'}), \
input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.13/v/value_error
"""
INSPECTION_LOG = """\
ERROR 12-02 04:24:30 [registry.py:912] Error in inspecting model architecture 'Qwen3_5ForConditionalGeneration'
ERROR 12-02 04:24:30 [registry.py:912]   File "<frozen os>", line 225, in makedirs
ERROR 12-02 04:24:30 [registry.py:912] FileNotFoundError: [Errno 2] No such file or directory: '/proc/.triton'
ERROR 12-02 04:24:30 [registry.py:912] 
"""  # noqa: W291


@pytest.mark.parametrize(
    ("text", "paragraph"),
    [
        (
            BUDGET,
            "VllmConfig: max_num_scheduled_tokens is set to -1536 based on the speculative decoding settings, which "
            "does not allow any tokens to be scheduled. Increase max_num_batched_tokens to accommodate the additional "
            "draft token slots, or decrease num_speculative_tokens or max_num_seqs.",
        ),
        (UNKNOWN_KEY, "SpeculativeConfig: num_spec: Unexpected keyword argument"),
        (
            NO_DRAFTER,
            "SpeculativeConfig: Invalid repository ID or local directory specified: '/opt/x/drafter'. Please verify "
            "the following requirements: 1. Provide a valid Hugging Face repository ID. 2. Specify a local directory "
            "that contains a recognized configuration file. - For Hugging Face models: ensure the presence of a "
            "'config.json'. - For Mistral models: ensure the presence of a 'params.json'.",
        ),
        (TOOL_PARSER, "invalid tool call parser: qwen4_coder (chose from { hermes,qwen3_coder,qwen3_xml })"),
        (
            LAYER_TYPES,
            "Class validation error for validator 'validate_layer_type': ValueError: `num_hidden_layers` (6) must be "
            "equal to the number of layer types (5)",
        ),
        (
            YAML,
            "while parsing a flow mapping in \"/opt/x/vllm.yaml\", line 1, column 1 expected ',' or '}', but got "
            "'<stream end>' in \"/opt/x/vllm.yaml\", line 2, column 1",
        ),
        (
            "Traceback (most recent call last):\n  File \"x\", line 1, in y\nKeyError: 'layers'\n",
            "KeyError: layers",
        ),
        ('Traceback (most recent call last):\n  File "x", line 1, in y\nAssertionError\n', "AssertionError"),
        ("a sentence of the probe", "a sentence of the probe"),
        ("INFO one\n\nINFO two\nERROR three\nKilled\n", "INFO two ERROR three Killed"),
        ("", "no message"),
    ],
)
def test_error_paragraph(text, paragraph):
    assert error_paragraph(text) == paragraph


def test_error_paragraph_is_short():
    long = error_paragraph("ValueError: not supported. Supported: " + ", ".join(["LlamaForCausalLM"] * 300))
    assert len(long) <= PARAGRAPH_LENGTH + 2
    assert long.endswith("…")


def test_read_answer():
    output = f'INFO one\n\n{BEGIN}{{"ok": true, "aux_layers": [2]}}{END}\nWARNING two\n'
    assert read_answer(output) == ({"ok": True, "aux_layers": [2]}, ["INFO one", "WARNING two"])


@pytest.mark.parametrize("output", ["INFO one\nKilled\n", f'INFO one\n{BEGIN}{{"ok": tr'])
def test_read_answer_of_a_probe_that_broke_off(output):
    answer, log = read_answer(output)
    assert answer is None
    assert log == output.splitlines()


def test_missing(tmp_path):
    (tmp_path / "vllm.yaml").touch()
    config, absent = str(tmp_path / "vllm.yaml"), str(tmp_path / "absent")
    assert missing(absent, str(tmp_path / "release/vllm.yaml")) == "no release yet"
    assert missing(absent, config) == missing(absent, absent) == "no venv yet"
    assert missing(sys.executable, absent) == "no config yet"
    assert missing(sys.executable, config) == ""


@pytest.fixture
def simulated_python(tmp_path):
    """A shell script in the place of a venv's Python."""

    def make(script: str) -> str:
        path = tmp_path / "python"
        path.write_text("#!/bin/sh\n" + textwrap.dedent(script))
        path.chmod(0o755)
        return str(path)

    return make


def accepts(report: str) -> str:
    """A script that reads the probe and answers that the launch is accepted, with `report` as shell text."""
    return f"""
        cat > /dev/null
        echo "INFO a line of the log"
        printf '%s\\n' '{BEGIN}{{"ok": true, "report": "'"{report}"'"}}{END}'
    """


def test_python_without_vllm():
    """The probe itself, in a Python that can't import vLLM: the phase and the reason come back."""
    with pytest.raises(LaunchCheckFailed, match=r"vLLM refuses this launch \(import\)") as caught:
        run("/absent/vllm.yaml", sys.executable)
    assert caught.value.phase == "import"
    assert "torch" in str(caught.value) or "vllm" in str(caught.value)


def test_as_child(simulated_python, tmp_path):
    environment_file = tmp_path / "environment"
    environment_file.write_text("B=from-file\nC=c\n")
    python = simulated_python(accepts("$* A=$A B=$B C=$C HOME=$HOME PWD=$PWD"))
    answer = run(
        "/x/vllm.yaml", python, environment={"A": "a", "B": "b"}, environment_file=str(environment_file)
    )
    home = pwd.getpwuid(os.getuid()).pw_dir
    assert answer["report"] == f"-I -B - /x/vllm.yaml A=a B=from-file C=c HOME={home} PWD=/"
    assert answer["seconds"] >= 0
    assert "ok" not in answer


def test_child_gets_a_fresh_environment(simulated_python, monkeypatch):
    monkeypatch.setenv("A_SECRET_OF_THE_CALLER", "x")
    answer = run("/x/vllm.yaml", simulated_python(accepts("[$A_SECRET_OF_THE_CALLER]")))
    assert answer["report"] == "[]"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_as_another_user(simulated_python, tmp_path):
    for folder in (tmp_path, *tmp_path.parents):
        if "pytest-of-" in str(folder):
            folder.chmod(0o755)
    answer = run("/x/vllm.yaml", simulated_python(accepts("$(id -un) $(id -gn)")), user="nobody")
    assert answer["report"] == "nobody nogroup"


def test_unknown_user(simulated_python):
    with pytest.raises(LaunchCheckFailed, match="no user absent-user"):
        run("/x/vllm.yaml", simulated_python(accepts("")), user="absent-user")


@pytest.fixture
def simulated_systemd_run(tmp_path, monkeypatch):
    """In the place of systemd-run: writes its arguments down and runs the command after `--`.

    And in that of journalctl, which knows one line of any unit.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in {
        "systemd-run": f'printf "%s\\n" "$@" > {tmp_path}/asked\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"',
        "journalctl": 'echo "2026-12-02T05:02:12+0000 gpu1 (python)[412]: journal of $*"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return lambda: (tmp_path / "asked").read_text().splitlines()


def test_in_a_unit(simulated_python, simulated_systemd_run):
    answer = run(
        "/x/vllm.yaml",
        simulated_python(accepts("$*")),
        user="someone",
        environment={"A": "two words"},
        environment_file="/x/environment",
        unit_properties=["ProtectSystem=strict", "CacheDirectory=x"],
        timeout=77,
    )
    assert answer["report"] == "-I -B - /x/vllm.yaml"
    asked = simulated_systemd_run()
    options = asked[: asked.index("--")]
    assert set(options) == {
        f"--unit=vllm-launch-check-{os.getpid()}.service",
        "--service-type=exec",
        *("--pipe", "--wait", "--collect", "--quiet"),
        "--property=RuntimeMaxSec=77",
        "--property=TimeoutStopSec=10",
        "--property=ProtectSystem=strict",
        "--property=CacheDirectory=x",
        "--property=User=someone",
        "--property=EnvironmentFile=/x/environment",
        "--setenv=A=two words",
    }


def test_no_answer_from_a_unit(simulated_python, simulated_systemd_run):
    """What systemd says of a sandbox that can't be set up stands in the journal."""
    with pytest.raises(LaunchCheckFailed) as caught:
        run("/x/vllm.yaml", simulated_python("exit 226"), unit_properties=["PrivateTmp=yes"])
    assert "(exit status 226): journal of " in str(caught.value)
    assert f"--unit=vllm-launch-check-{os.getpid()}.service" in str(caught.value)
    assert len(caught.value.log_tail) == 1


@pytest.mark.parametrize(
    ("script", "words", "phase"),
    [
        ("cat > /dev/null; echo a reason; exit 3", r"broke off \(exit status 3\): a reason", "start"),
        ("cat > /dev/null; kill -SEGV $$", r"broke off \(killed by SIGSEGV\)", "start"),
        ("exit 0", r"broke off \(exit status 0\): no message", "start"),
    ],
)
def test_no_answer(simulated_python, script, words, phase):
    with pytest.raises(LaunchCheckFailed, match=words) as caught:
        run("/x/vllm.yaml", simulated_python(script))
    assert caught.value.phase == phase


def test_refused_with_the_cause_from_the_log(simulated_python, tmp_path):
    """vLLM's message says that the reason is in the log: the paragraph has both."""
    output = (
        INSPECTION_LOG
        + BEGIN
        + json.dumps({"ok": False, "phase": "engine config", "error": INSPECTION})
        + END
    )
    (tmp_path / "output").write_text(output)
    with pytest.raises(LaunchCheckFailed) as caught:
        run("/x/vllm.yaml", simulated_python(f"cat > /dev/null; cat {tmp_path}/output"))
    assert str(caught.value) == (
        "vLLM refuses this launch (engine config): ModelConfig: Model architectures "
        "['Qwen3_5ForConditionalGeneration'] failed to be inspected. Please check the logs for more details. "
        "The log says: FileNotFoundError: [Errno 2] No such file or directory: '/proc/.triton'."
    )
    assert caught.value.log_tail == INSPECTION_LOG.splitlines()


def test_ranks_that_add_up(simulated_python, simulated_systemd_run):
    said = json.dumps({"ok": True, "said": "last all-reduce: 8.1 ms"})
    python = simulated_python(f"cat > /dev/null; echo '{BEGIN}{said}{END}'")
    answer = all_reduce(python, 2, unit_properties=["DevicePolicy=closed"], timeout=120)
    assert (answer["ranks"], answer["said"]) == (2, "last all-reduce: 8.1 ms")
    assert "--property=DevicePolicy=closed" in simulated_systemd_run()


def test_a_rank_that_fails_is_named_with_what_it_printed_and_the_two_settings():
    """The probe itself, in a Python without torch: its ranks end, none is left waiting."""
    with pytest.raises(LaunchCheckFailed, match=r"2 GPUs don't work together over NCCL.*torch") as caught:
        all_reduce(sys.executable, 2, timeout=60)
    assert caught.value.phase == "nccl"
    assert "NCCL_P2P_DISABLE" in str(caught.value)
    assert "disable-custom-all-reduce" in str(caught.value)


def test_ranks_that_hang_are_ended(simulated_python):
    with pytest.raises(LaunchCheckFailed, match=r"over NCCL: .*did not end within 1 s") as caught:
        all_reduce(simulated_python("cat > /dev/null; sleep 60"), 2, timeout=1)
    assert caught.value.phase == "nccl"
    assert "NCCL_P2P_DISABLE" in str(caught.value)


def test_timeout_ends_all_of_it(simulated_python, tmp_path):
    script = f"cat > /dev/null; sleep 300 & echo $! > {tmp_path}/pid; echo so far; wait"
    started = time.monotonic()
    with pytest.raises(LaunchCheckFailed, match="did not end within 1 s") as caught:
        run("/x/vllm.yaml", simulated_python(script), timeout=1)
    assert time.monotonic() - started < 30
    assert caught.value.phase == "timeout"
    assert caught.value.log_tail == ["so far"]
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while running(pid):
        assert time.monotonic() < deadline, f"process {pid} outlived its check"
        time.sleep(0.05)


def running(pid: int) -> bool:
    """Whether the process is there and more than an unreaped entry in the process table."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
