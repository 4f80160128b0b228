"""The simulations that the test bed stands on: they must show what the real things show."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zlib
from pathlib import Path

import pytest
from safetensors import safe_open

TESTBED = Path(__file__).parents[1] / "testbed"
HOST_FILES = TESTBED / "host-files"
NVIDIA_SMI = HOST_FILES / "usr/bin/nvidia-smi"
SGLANG = HOST_FILES / "opt/simulated-sglang/launch_server.py"
UUIDS = [f"GPU-51a0c0de-0000-4000-8000-00000000000{index}" for index in (0, 1)]

for folder in (TESTBED, HOST_FILES / "opt/simulated-gpu", HOST_FILES / "opt/simulated-engine"):
    sys.path.append(str(folder))

import make_drafter  # noqa: E402
import make_target  # noqa: E402
import populate  # noqa: E402
import simulated_drafting  # noqa: E402
import simulated_gpu  # noqa: E402
import simulated_pair  # noqa: E402


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The root of a host with two idle simulated GPUs."""
    shutil.copytree(HOST_FILES / "etc/simulated-gpu", tmp_path / "etc/simulated-gpu")
    (tmp_path / "run/simulated-gpu/holds").mkdir(parents=True)
    monkeypatch.setenv("SIMULATED_GPU_ROOT", str(tmp_path))
    return tmp_path


@pytest.fixture
def sleeper():
    """A process that does nothing, and can be said to hold GPU memory."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def smi(*arguments):
    done = subprocess.run([NVIDIA_SMI, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def hold(root, pid, text):
    (root / f"run/simulated-gpu/holds/{pid}").write_text(text)


def wait_for(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
    return found


# --- nvidia-smi --------------------------------------------------------------------------------------


def test_nvidia_smi_prints_the_two_forms_of_a_real_one(root, sleeper):
    gpu_query = "--query-gpu=index,name,memory.total,memory.used,driver_version"
    app_query = "--query-compute-apps=pid,process_name,used_memory"
    bare = "--format=csv,noheader,nounits"
    assert smi(gpu_query, bare) == (
        0,
        "0, NVIDIA RTX A6000, 49140, 1, 580.95.05\n1, NVIDIA RTX A6000, 49140, 1, 580.95.05\n",
    )
    assert smi(app_query, bare) == (0, "")
    hold(root, sleeper.pid, "1 44000\n")
    assert smi(app_query, bare) == (0, f"{sleeper.pid}, sleep, 44000\n")
    assert smi("--query-compute-apps=gpu_uuid,pid,used_gpu_memory", "--format=csv") == (
        0,
        f"gpu_uuid, pid, used_gpu_memory [MiB]\n{UUIDS[1]}, {sleeper.pid}, 44000 MiB\n",
    )
    assert smi("--query-gpu=memory.used,memory.free,compute_cap,uuid", "-i", "1", bare) == (
        0,
        f"44001, 5139, 8.6, {UUIDS[1]}\n",
    )


def test_nvidia_smi_lists_and_refuses(root):
    assert smi("-L") == (0, "".join(f"GPU {i}: NVIDIA RTX A6000 (UUID: {UUIDS[i]})\n" for i in (0, 1)))
    status, text = smi()
    assert status == 0
    assert "Simulated" in text
    assert "1MiB / 49140MiB" in text
    status, text = smi("--query-gpu=index,temperature", "--format=csv")
    assert (status, text.strip()) == (2, 'Field "temperature" is not a valid field to query.')
    assert smi("--query-gpu=index")[0] == 1
    assert smi("--reset")[0] == 1
    (root / "etc/simulated-gpu/gpus").unlink()
    status, text = smi("-L")
    assert status == 9
    assert "couldn't communicate with the NVIDIA driver" in text


def test_memory_is_held_only_while_the_process_lives(root):
    dead = subprocess.Popen(["true"])
    wait_for(lambda: "Z" in Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2])
    hold(root, dead.pid, "0 1000\n")
    assert simulated_gpu.holds() == [], "a zombie holds no memory"
    dead.wait()
    assert simulated_gpu.holds() == []


# --- the driver libraries ----------------------------------------------------------------------------


def test_memory_can_be_held_by_no_visible_process(root):
    (root / "run/simulated-gpu/unseen").write_text("1 4000\n")
    assert smi("--query-gpu=memory.used", "--format=csv,noheader,nounits") == (0, "1\n4001\n")
    assert smi("--query-compute-apps=pid", "--format=csv,noheader") == (0, "")


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("needs cc, a C compiler")
    folder = tmp_path_factory.mktemp("driver")
    for name in ("libcuda", "libnvidia-ml"):
        source, library = TESTBED / f"simulated/{name}.c", folder / f"{name}.so.1"
        subprocess.run(
            ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", library, source], check=True
        )
    return folder


def test_nvml_says_what_nvidia_smi_says(root, libraries, sleeper):
    hold(root, sleeper.pid, "1 44000\n")
    nvml = ctypes.CDLL(str(libraries / "libnvidia-ml.so.1"))
    count, device, text = ctypes.c_uint(), ctypes.c_void_p(), ctypes.create_string_buffer(96)
    memory = (ctypes.c_ulonglong * 3)()
    major, minor = ctypes.c_int(), ctypes.c_int()
    assert nvml.nvmlInit_v2() == 0
    assert nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    assert count.value == 2
    for index, used in ((0, 1), (1, 44001)):
        assert nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
        assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
        assert list(memory) == [49140 << 20, (49140 - used) << 20, used << 20]
    assert nvml.nvmlDeviceGetName(device, text, 96) == 0
    assert text.value == b"NVIDIA RTX A6000"
    assert nvml.nvmlDeviceGetUUID(device, text, 96) == 0
    assert text.value == UUIDS[1].encode()
    assert nvml.nvmlDeviceGetUUID(device, text, 8) == 7, "insufficient size"
    assert nvml.nvmlSystemGetDriverVersion(text, 96) == 0
    assert text.value == b"580.95.05"
    assert nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0
    assert (major.value, minor.value) == (8, 6)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(2, ctypes.byref(device)) == 2, "invalid argument"
    (root / "etc/simulated-gpu/gpus").unlink()
    assert nvml.nvmlInit_v2() == 9, "driver not loaded"


def test_the_cuda_driver_has_no_device_and_says_it_is_simulated(libraries):
    cuda = ctypes.CDLL(str(libraries / "libcuda.so.1"))
    text = ctypes.c_char_p()
    assert cuda.cuInit(0) == 100
    assert cuda.cuGetErrorString(100, ctypes.byref(text)) == 0
    assert b"simulated" in text.value


# --- the pair ----------------------------------------------------------------------------------------


def test_the_drafter_is_the_published_one_in_names_shapes_and_bytes(tmp_path):
    file = tmp_path / "model.safetensors"
    make_drafter.main([str(file), "--sparse"])
    assert file.stat().st_blocks * 512 < 1 << 20
    with safe_open(file, framework="np") as drafter:
        shapes = {name: drafter.get_slice(name).get_shape() for name in drafter.keys()}  # noqa: SIM118
        dtypes = {drafter.get_slice(name).get_dtype() for name in shapes}
    assert dtypes == {"BF16"}
    assert len(shapes) == 58
    assert shapes["fc.weight"] == [5120, 25600]
    assert shapes["layers.4.self_attn.q_proj.weight"] == [4096, 5120]
    assert shapes["layers.4.self_attn.k_proj.weight"] == [1024, 5120]
    assert shapes["layers.0.self_attn.q_norm.weight"] == [128]
    assert shapes["layers.0.mlp.down_proj.weight"] == [5120, 17408]
    header = int.from_bytes(file.open("rb").read(8), "little")
    assert file.stat().st_size - 8 - header == 3_460_426_240


def test_the_payload_is_incompressible_and_follows_from_the_seed(tmp_path):
    digests = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        file = tmp_path / name
        make_drafter.main([str(file), "--small", "--seed", str(seed)])
        content = file.read_bytes()
        digests.append(hashlib.sha256(content).hexdigest())
    assert digests[0] == digests[1] != digests[2]
    assert len(zlib.compress(content[1 << 20 :])) > 0.99 * (len(content) - (1 << 20))
    with safe_open(file, framework="np") as drafter:
        assert len(list(drafter.keys())) == 58
    assert not list(tmp_path.glob("*.partial"))


def test_full_size_has_the_header_of_the_sparse_one_and_a_payload(tmp_path, monkeypatch):
    """The whole 3.46 GB are written where a demo or an end-to-end test needs them."""
    calls = []
    monkeypatch.setattr(make_drafter, "write_safetensors", lambda *given: calls.append(given))
    monkeypatch.setattr(make_drafter, "print", lambda *_: None, raising=False)
    file = tmp_path / "model.safetensors"
    file.touch()
    make_drafter.main([str(file), "--sparse"])
    make_drafter.main([str(file), "--full-size", "--seed", "7"])
    assert calls[0][:2] == calls[1][:2]
    assert (calls[0][2], calls[1][2]) == (None, 7)


def test_the_target_states_the_published_facts_and_lies_in_a_closed_root(tmp_path):
    populate.populate(tmp_path)
    folder = tmp_path / "root/models/Qwen3.6-27B"
    assert (tmp_path / "root").stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert (config["model_type"], text["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert (text["num_hidden_layers"], text["hidden_size"], text["intermediate_size"]) == (64, 5120, 17408)
    assert (text["num_attention_heads"], text["num_key_value_heads"], text["head_dim"]) == (24, 4, 256)
    assert (text["vocab_size"], text["max_position_embeddings"]) == (248320, 262144)
    assert [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"] == list(
        range(3, 64, 4)
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 53_791_996_928
    for shard in set(index["weight_map"].values()):
        with safe_open(folder / shard, framework="np") as weights:
            assert set(weights.keys()) == {n for n, where in index["weight_map"].items() if where == shard}
    assert sum(file.stat().st_blocks * 512 for file in folder.iterdir()) < 20 << 20


def test_the_tokenizer_has_the_published_ids(tmp_path):
    make_target.write_target(tmp_path, simulated_pair.SMALL)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    assert {
        name: vocab[name] for name in ("<|endoftext|>", "<|im_end|>", "<tool_call>", "<think>", "</think>")
    } == {
        "<|endoftext|>": 248044,
        "<|im_end|>": 248046,
        "<tool_call>": 248058,
        "<think>": 248068,
        "</think>": 248069,
    }
    assert sorted(vocab.values()) == list(range(248070)), (
        "the mask token 248070 is the first id after the last"
    )


# --- drafting ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "layers", "expected"),
    [
        (248070, (2, 17, 32, 47, 62), 4.2),
        (248070, (1, 16, 31, 46, 61), 3.9),
        (248070, (1, 17, 33, 49, 63), 1.3),
        (248070, (2, 17, 32), 1.3),
        (248044, (2, 17, 32, 47, 62), 2.73),
    ],
    ids=["right", "one off", "guessed spacing", "three taps", "eos as mask"],
)
def test_acceptance_follows_the_config(mask, layers, expected):
    expectation = json.loads((HOST_FILES / "etc/simulated-gpu/drafter.json").read_text())
    length = simulated_drafting.acceptance_length(mask, layers, expectation)
    assert length == pytest.approx(expected)
    drafting = simulated_drafting.Drafting(length, drafted=15)
    accepted = [count for _ in range(100) for count in drafting.generate(37)]
    assert sum(accepted) + len(accepted) == pytest.approx(3700, abs=5)
    assert 1 + sum(accepted) / len(accepted) == pytest.approx(expected, abs=0.01)


def test_acceptance_falls_beyond_the_window_of_sliding_layers():
    class Config:
        layer_types = ("sliding_attention", "full_attention")
        sliding_window = 2048

    assert simulated_drafting.window(Config()) == 2048
    assert simulated_drafting.length_at(4.2, 2048, 2048) == 4.2
    assert simulated_drafting.length_at(4.2, 2049, 2048) == pytest.approx(4.0)
    Config.layer_types = ("full_attention",)
    assert simulated_drafting.window(Config()) is None
    assert simulated_drafting.length_at(4.2, 9000, None) == 4.2


def test_aux_layers_win_over_taps_as_in_vllm():
    class Config:
        dflash_config = {"target_layer_ids": [1, 16]}  # noqa: RUF012

    assert simulated_drafting.captured_layers(Config()) == (1, 16)
    config = Config()
    config.eagle_aux_hidden_state_layer_ids = [2, 17]
    assert simulated_drafting.captured_layers(config) == (2, 17)


def test_fewer_drafted_tokens_give_a_shorter_simulated_length():
    lengths = [simulated_drafting.length_of(4.2, drafted) for drafted in (1, 3, 7, 15)]
    assert lengths == sorted(lengths)
    assert lengths[0] < 2
    assert lengths[-1] == 4.2
    assert simulated_drafting.length_of(1.3, 1) == pytest.approx(1.23, abs=0.01)


def test_drafting_wins_in_the_simulation_until_many_requests_run():
    def rate(running, drafted):
        length = simulated_drafting.length_of(4.2, drafted) if drafted else 1.0
        return running / simulated_drafting.token_factor(running, drafted, length)

    assert simulated_drafting.token_factor(1, 15, 4.2) == 1
    assert rate(1, 15) > rate(1, 7) > 3 * rate(1, 0)
    assert rate(16, 7) > rate(16, 0) > rate(16, 15)


# --- the way into vLLM -------------------------------------------------------------------------------


def test_only_the_serve_command_is_replaced(tmp_path):
    """A stand-in for the module of vLLM whose command is replaced, and for the simulation itself."""
    package = tmp_path / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    (package / "serve.py").write_text(
        "class ServeSubcommand:\n"
        "    @staticmethod\n"
        "    def cmd(args): print('real', args)\n"
        "    def validate(self, args): print('validated', args)\n"
    )
    (tmp_path / "simulated_engine.py").write_text("def serve(args): print('simulated', args)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{HOST_FILES / 'opt/simulated-engine'}"}

    def python(code):
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    serve = "from vllm.entrypoints.cli.serve import ServeSubcommand as S; S().validate(1); S().cmd(2)"
    assert python(serve) == ["validated", "1", "simulated", "2"]
    loaded = (
        "import sys; print('sitecustomize' in sys.modules, {'vllm', 'simulated_engine'} & set(sys.modules))"
    )
    assert python(loaded) == ["True", "set()"]


# --- a simulated server ------------------------------------------------------------------------------


class Server:
    """The simulated SGLang on a free port."""

    def __init__(self, root, faults, target):
        self.root = root
        self.set_faults(**faults)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.log = root / "sglang.log"
        command = [sys.executable, SGLANG, "--model-path", target, "--served-model-name", "Qwen3.6-27B"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "--port", str(self.port), "--tp", "2"],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def set_faults(self, **faults):
        file = self.root / "etc/simulated-gpu/faults.json"
        file.write_text(json.dumps({"sglang": {"load_s": 0.1, "token_s": 0, **faults}}))

    def ask(self, path, body=None, timeout=5.0):
        """(status, answer) of a request."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
                content = answer.read()
                is_json = answer.headers["Content-Type"] == "application/json"
                return answer.status, json.loads(content) if is_json else content.decode()
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def ready(self):
        def healthy():
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(urllib.error.URLError):
                return self.ask("/health")[0] == 200

        wait_for(healthy)
        return self


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text(json.dumps(make_target.target_config(simulated_pair.REAL)))
    return folder


@pytest.fixture
def start(root, target):
    """Start a simulated SGLang with these faults; all that it started is gone afterwards."""
    servers = []

    def start_server(**faults):
        servers.append(Server(root, faults, target))
        return servers[-1]

    yield start_server
    for server in servers:
        server.process.kill()
        server.process.wait()
    for pid, _, _ in simulated_gpu.holds():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not simulated_gpu.holds())


COMPLETION = {"model": "any", "prompt": "two words", "max_tokens": 5}


def test_a_server_holds_memory_answers_and_stops(start):
    server = start().ready()
    apps = smi("--query-compute-apps=process_name,used_memory", "--format=csv,noheader,nounits")[1]
    assert apps == "sglang::scheduler_TP0, 44043\nsglang::scheduler_TP1, 44043\n"
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "Qwen3.6-27B"
    status, answer = server.ask("/v1/completions", COMPLETION)
    assert status == 200
    assert answer["choices"][0]["text"] == "This text was written by"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    short = server.ask("/v1/chat/completions", {**chat, "max_tokens": 8})[1]["choices"][0]
    assert short["message"]["content"] is None
    assert "simulated" in short["message"]["reasoning_content"]
    whole = server.ask("/v1/chat/completions", chat)[1]["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert whole["message"]["content"]
    generated = server.ask("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 2}})[1]
    assert generated["text"] == "This text"
    assert server.ask("/v1/completions", {"prompt": "x", "max_tokens": 300000})[0] == 400
    assert server.ask("/metrics")[0] == 404
    server.process.terminate()
    assert server.process.wait(timeout=5) == 0
    assert simulated_gpu.holds() == []


def test_a_stream_says_the_same_word_by_word(start):
    server = start().ready()
    body = {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}}
    pieces = [line[6:] for line in server.ask("/v1/completions", body)[1].split("\n\n") if line]
    assert pieces[-1] == "[DONE]"
    chunks = [json.loads(piece) for piece in pieces[:-1]]
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == "This text was written by"
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_faults_of_answers_can_be_switched_on_while_it_serves(start):
    server = start().ready()
    server.set_faults(completions_500=True)
    assert server.ask("/v1/completions", COMPLETION)[0] == 500
    server.set_faults(wrong_model_id="another")
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "another"
    server.set_faults(hang_completions=True)
    with pytest.raises(TimeoutError):
        server.ask("/v1/completions", COMPLETION, timeout=0.5)
    assert server.ask("/health")[0] == 200
    server.set_faults()
    assert server.ask("/v1/completions", COMPLETION)[0] == 200


def test_chats_call_the_tool_that_is_offered_and_can_be_broken(start):
    server = start().ready()
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}

    def choice():
        return server.ask("/v1/chat/completions", body)[1]["choices"][0]

    [call] = choice()["message"]["tool_calls"]
    assert choice()["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])
    server.set_faults(broken_tool_call=True)
    with pytest.raises(ValueError, match="Expecting"):
        json.loads(choice()["message"]["tool_calls"][0]["function"]["arguments"])
    del body["tools"]
    server.set_faults(empty_chat=True)
    assert choice()["message"] == {
        "role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [],
    }  # fmt: skip
    server.set_faults(no_chat_template=True)
    assert server.ask("/v1/chat/completions", body)[0] == 400
    assert server.ask("/v1/completions", COMPLETION)[0] == 200


def test_it_crashes_in_the_nth_completion_and_its_memory_is_free(start):
    server = start(crash_on_nth_completion=2).ready()
    assert server.ask("/v1/completions", COMPLETION)[0] == 200
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        server.ask("/v1/completions", COMPLETION)
    assert server.process.wait(timeout=5) == 1
    wait_for(lambda: not simulated_gpu.holds())


def test_a_server_whose_worker_died_ends(start):
    server = start().ready()
    os.kill(simulated_gpu.holds()[0][0], signal.SIGKILL)
    assert server.process.wait(timeout=5) == 1
    assert "died unexpectedly" in server.log.read_text()


def test_a_server_that_ignores_sigterm_ends_by_sigkill_only(start):
    server = start(ignore_sigterm=True).ready()
    pids = [server.process.pid, *(pid for pid, _, _ in simulated_gpu.holds())]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    assert server.ask("/v1/completions", COMPLETION)[0] == 200
    assert len(simulated_gpu.holds()) == 2


def test_workers_can_keep_their_memory_for_a_while(start):
    server = start(worker_holds_s=1).ready()
    server.process.terminate()
    time.sleep(0.4)
    assert len(simulated_gpu.holds()) == 2
    assert server.process.wait(timeout=5) == 0
    assert simulated_gpu.holds() == []


def test_an_orphan_outlives_its_server_outside_its_session(start):
    server = start(leave_orphan=True).ready()
    server.process.terminate()
    assert server.process.wait(timeout=5) == 0
    [(orphan, gpu, mib)] = simulated_gpu.holds()
    assert (gpu, mib) == (0, 2000)
    assert os.getsid(orphan) != os.getsid(0)
    assert os.getsid(orphan) != server.process.pid
    os.kill(orphan, signal.SIGTERM)
    wait_for(lambda: not simulated_gpu.holds())


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        ({"exit_at_start": True}, "simulated fault: exit_at_start"),
        ({"exit_at_strat": True}, "unknown ['exit_at_strat']"),
    ],
    ids=["as asked", "misspelt fault"],
)
def test_a_start_can_fail(start, faults, words):
    server = start(**faults)
    assert server.process.wait(timeout=10) == 1
    assert words in server.log.read_text()


def test_a_server_that_never_gets_ready_still_stops(start):
    server = start(never_ready=True)
    wait_for(lambda: len(simulated_gpu.holds()) == 2)
    with pytest.raises(urllib.error.URLError):
        server.ask("/health")
    server.process.terminate()
    assert server.process.wait(timeout=5) == 0


def test_a_server_takes_most_of_its_memory_shortly_before_it_is_ready(start):
    server = start(load_s=3)
    wait_for(lambda: len(simulated_gpu.holds()) == 2)
    assert [mib for _, _, mib in simulated_gpu.holds()] == [740, 740]
    wait_for(lambda: [mib for _, _, mib in simulated_gpu.holds()] == [44043, 44043])
    with pytest.raises(urllib.error.URLError):
        server.ask("/health")
    server.ready()


def test_there_is_no_room_for_two(root, start, sleeper):
    hold(root, sleeper.pid, "1 9000\n")
    server = start()
    assert server.process.wait(timeout=10) == 1
    assert "Not enough memory" in server.log.read_text()
