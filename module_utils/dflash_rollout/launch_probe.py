"""The dry launch, as it runs inside the vLLM venv: `python -I -B - CONFIG < launch_probe.py`.

Sent on stdin by `launch_check.py`, so it can import nothing of this package; it is the one file here that
imports vLLM and torch. It does what `vllm serve --config CONFIG` does up to the point where a GPU is needed,
then builds vLLM's own drafter class on torch's meta device and has it load the tensors that the header of the
drafter's file promises. No GPU memory, no network, no port. Its answer is one JSON object between `BEGIN` and
`END` on stdout; everything else that it prints is vLLM's log. Written against vLLM 0.20.1
and 0.26.0; what differs between them is told apart by what the wheel has, not by its version.
"""

from __future__ import annotations

import glob
import json
import os
import resource
import sys
import time
import traceback
from collections import Counter, defaultdict

BEGIN = "<<<launch-probe "
END = " launch-probe>>>"


class ProbeError(Exception):
    """A finding of this probe itself, already written as a sentence."""


def parse(config: str):
    """Parse and validate as `vllm serve --config CONFIG` does; returns argparse's namespace.

    The steps are those of vllm/entrypoints/cli/main.py, cli/serve.py and openai/api_server.py:setup_server.
    """
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.openai.api_server import validate_api_server_args
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    try:
        from vllm.entrypoints.utils import cli_env_setup
    except ImportError:  # 0.26
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup

    class RaisingParser(FlexibleArgumentParser):
        def error(self, message):
            raise ProbeError(f"vllm serve: {message}")

    cli_env_setup()
    parser = RaisingParser()
    serve = ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    args = parser.parse_args(["serve", "--config", config])
    serve.validate(args)
    if args.model_tag is not None:
        args.model = args.model_tag
    if args.tool_parser_plugin:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    validate_api_server_args(args)
    drafter = (args.speculative_config or {}).get("model")
    for role, folder in (("target", args.model), ("drafter", drafter)):
        # vLLM would take a missing folder for the name of a repository and complain about its spelling.
        if folder and folder.startswith("/") and not os.access(os.path.join(folder, "config.json"), os.R_OK):
            raise ProbeError(
                f"the {role}'s folder {folder} has no config.json that user id {os.getuid()} can read"
            )
    return args


def engine_config(args):
    """vLLM's own engine config, with the token budget and every cross-check in it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(UsageContext.OPENAI_API_SERVER)
    speculative = config.speculative_config
    if speculative is None or speculative.method != "dflash":
        method = None if speculative is None else speculative.method
        raise ProbeError(f"the launch does not draft with DFlash: speculative-config's method is {method!r}")
    return config


def second_runner(config) -> bool:
    """Whether the workers will be vLLM's second model runner, which has code of its own for DFlash (from 0.26)."""
    return getattr(config, "use_v2_model_runner", False)


def aux_layers(config) -> list[int]:
    """The target layers whose output the drafter gets, from vLLM's own code; refuses ids no target layer has.

    Id k is what goes into target layer k, so n is the output of the last of n layers. vLLM collects by
    membership in layer order: an id beyond n, or one out of order, would silently feed fc the wrong features.
    """
    from types import SimpleNamespace

    if second_runner(config):
        from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import get_eagle3_aux_layers_from_config

        layers = get_eagle3_aux_layers_from_config(config.speculative_config)
    else:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        runner = SimpleNamespace(speculative_config=config.speculative_config)
        layers = GPUModelRunner._get_eagle3_aux_layers_from_config(runner)
    if not layers:
        raise ProbeError(
            "the drafter's config.json names no target layers (eagle_aux_hidden_state_layer_ids)"
        )
    layers = list(layers)
    target_layers = config.model_config.get_total_num_hidden_layers()
    if not all(type(layer) is int and 0 <= layer <= target_layers for layer in layers):
        raise ProbeError(f"auxiliary layers {layers} go beyond the target, which has {target_layers} layers")
    if layers != sorted(set(layers)):
        raise ProbeError(f"auxiliary layers {layers} are not in ascending order, each once")
    return layers


def mask_token(config) -> int:
    """The mask token id that vLLM's proposer would use; refuses one that the target's vocabulary lacks."""
    from types import SimpleNamespace

    drafter = config.speculative_config.draft_model_config
    if second_runner(config):
        from vllm.v1.worker.gpu.spec_decode.utils import get_parallel_drafting_token_id

        token = get_parallel_drafting_token_id(drafter.hf_config)
    else:
        from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

        proposer = SimpleNamespace(draft_model_config=drafter, pass_hidden_states_to_model=False)
        SpecDecodeBaseProposer._init_parallel_drafting_params(proposer)
        token = proposer.parallel_drafting_token_id
    vocabulary = config.model_config.get_vocab_size()
    if type(token) is not int or not 0 <= token < vocabulary:
        raise ProbeError(f"mask_token_id {token!r} is not a token of the target's vocabulary of {vocabulary}")
    return token


def listed(findings: list[str]) -> str:
    """The first of many findings, and how many more there are."""
    more = f" and {len(findings) - 2} more" if len(findings) > 2 else ""
    return "; ".join(findings[:2]) + more


def header_tensors(folder: str) -> dict:
    """name -> meta tensor of the shape and dtype in the safetensors headers of `folder`; reads no payload."""
    import torch
    from safetensors import safe_open

    dtypes = {
        "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
        "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    }  # fmt: skip
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    if not files:
        raise ProbeError(f"no safetensors file in the drafter's folder {folder}")
    tensors = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118 (not a dict)
                part = weights.get_slice(name)
                if part.get_dtype() not in dtypes:
                    raise ProbeError(
                        f"tensor {name} has dtype {part.get_dtype()}, which this check does not know"
                    )
                tensors[name] = torch.empty(part.get_shape(), dtype=dtypes[part.get_dtype()], device="meta")
    return tensors


def drafting_config(config):
    """The config as vLLM hands it to the drafter: from 0.26 its attention is chosen apart from the target's."""
    try:
        from vllm.config import replace
        from vllm.model_executor.models.qwen3_dflash import dflash_has_any_non_causal
    except ImportError:
        return config
    speculative = config.speculative_config
    attention = replace(
        config.attention_config,
        use_non_causal=dflash_has_any_non_causal(speculative.draft_model_config.hf_config),
        backend=speculative.attention_backend,
    )
    return replace(config, attention_config=attention)


def load_drafter(config, layers: list[int]) -> dict:
    """Build vLLM's drafter on the meta device, have it load the file's tensors, account for every value.

    With tensor parallelism the drafter is built whole, as the one rank of a gloo group: the sum of what
    the ranks will hold. The weights need no split for this; that the heads divide by the number of ranks is
    checked by vLLM's engine config.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.utils.torch_utils import set_default_torch_dtype

    speculative = config.speculative_config
    drafter_class, _ = get_model_architecture(speculative.draft_model_config)
    tensors = header_tensors(speculative.draft_model_config.model)

    def storage(tensor) -> int:
        return tensor.untyped_storage()._cdata

    names = {storage(tensor): name for name, tensor in tensors.items()}

    class Copies(TorchDispatchMode):
        """Which values of the file end in which parameter: vLLM's own set of names hides a part left out.

        Its loader for q, k and v takes as many rows as config.json says and drops the others without a word.
        """

        def __init__(self):
            super().__init__()
            self.filled, self.sources, self.used = Counter(), defaultdict(list), Counter()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is torch.ops.aten.copy_.default and storage(args[1]) in names:
                parameter, name = storage(args[0]), names[storage(args[1])]
                self.filled[parameter] += args[0].numel()
                self.sources[parameter].append(name)
                self.used[name] += args[1].numel()
            return function(*args, **(kwargs or {}))

    def tensor_at_fault(error: BaseException) -> str:
        """The name in the file of the tensor that vLLM's loader was at: its messages state shapes only."""
        for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
            weight = frame.f_locals.get("loaded_weight")
            if isinstance(weight, torch.Tensor) and storage(weight) in names:
                return names[storage(weight)]
        return "a tensor"

    torch.distributed.init_process_group(
        backend="gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        drafting = drafting_config(config)
        with set_current_vllm_config(drafting):
            parallel_state.init_distributed_environment(
                world_size=1, rank=0, local_rank=0, distributed_init_method="unused", backend="gloo"
            )
            parallel_state.initialize_model_parallel(backend="gloo")
            with set_default_torch_dtype(speculative.draft_model_config.dtype), torch.device("meta"):
                drafter = drafter_class(vllm_config=drafting)
                with Copies() as copies:
                    try:
                        drafter.load_weights(iter(tensors.items()))
                    except KeyError as error:
                        name = tensor_at_fault(error)
                        raise ProbeError(
                            f"the drafter as config.json describes it has no place for {name}"
                        ) from error
                    except AssertionError as error:
                        name = tensor_at_fault(error)
                        raise ProbeError(
                            f"vLLM's loader refuses {name} of the drafter's file: {error}"
                        ) from error
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()

    # The drafter uses the target's embedding and head unless its file brings its own, and from 0.26 a mask
    # embedding of its own only where a file beside the weights brings that.
    shared = [part for part in ("embed_tokens", "lm_head") if not any(part in name for name in tensors)]
    if not getattr(drafter.model, "has_separate_mask_embedding", True):
        shared.append("mask_embedding")
    incomplete = [
        f"{name} (from the file: {', '.join(copies.sources[storage(parameter)]) or 'nothing'})"
        for name, parameter in drafter.named_parameters()
        if copies.filled[storage(parameter)] != parameter.numel() and not any(part in name for part in shared)
    ]
    if incomplete:
        raise ProbeError(f"the drafter's file does not fill {listed(incomplete)} of vLLM's drafter")
    partly = [
        f"{name} {list(tensor.shape)}: {copies.used[name]} of {tensor.numel()} values"
        for name, tensor in tensors.items()
        if copies.used[name] != tensor.numel()
    ]
    if partly:
        raise ProbeError(
            f"vLLM with this config.json would not take all of the drafter's file, but of {listed(partly)}"
        )
    features = len(layers) * config.model_config.get_hidden_size()
    if drafter.model.fc.input_size != features:
        raise ProbeError(
            f"{len(layers)} auxiliary layers of the target's width {config.model_config.get_hidden_size()} "
            f"are {features} features, but the drafter's fc takes {drafter.model.fc.input_size}"
        )
    backends = sorted({layer.self_attn.attn.attn_backend.get_name() for layer in drafter.model.layers})
    windows = [layer.self_attn.attn.sliding_window for layer in drafter.model.layers]
    return {
        "drafter_class": drafter_class.__name__,
        "sliding_windows": windows,
        "tensors_loaded": len(copies.used),
        "tensors_expected": len(tensors),
        "attention_backend": ", ".join(backends),
    }


def main(config_path: str) -> dict:
    """Run the phases in order; returns the answer, or the phase that failed with its traceback."""
    started = time.monotonic()
    phase = "import"
    answer: dict = {}
    try:
        from importlib.metadata import version

        import torch

        answer["vllm_version"] = version("vllm")
        phase = "parse"
        args = parse(config_path)
        phase = "engine config"
        config = engine_config(args)
        answer |= {
            "scheduled_tokens": config.scheduler_config.max_num_scheduled_tokens,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "num_speculative_tokens": config.speculative_config.num_speculative_tokens,
        }
        phase = "aux layers"
        answer["aux_layers"] = aux_layers(config)
        phase = "mask token"
        answer["mask_token_id"] = mask_token(config)
        phase = "weights"
        answer |= load_drafter(config, answer["aux_layers"])
        answer["ok"] = True
    except ProbeError as error:
        answer |= {"ok": False, "phase": phase, "error": str(error)}
    except (Exception, SystemExit):
        answer |= {"ok": False, "phase": phase, "error": traceback.format_exc()}
    else:
        answer["cuda_initialized"] = torch.cuda.is_initialized()
    usage = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer["max_rss_mib"] = max(usage) // 1024
    answer["probe_seconds"] = round(time.monotonic() - started, 1)
    return answer


if __name__ == "__main__":
    # Before vLLM is imported: it reads these then. Bytecode is not written by its helper processes either.
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", PYTHONDONTWRITEBYTECODE="1", GLOO_SOCKET_IFNAME="lo"
    )
    result = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, f"\n{BEGIN}{json.dumps(result)}{END}\n".encode())
