"""Runs inside a venv, on the standard input of its Python: is this the vLLM that the lock promises, and does it load.

`python -I -B - VERSION < venv_probe.py`, as a user without rights. Sent by `venv.py`, so it can import nothing of
this package. Its answer is one line of JSON: `faults`, each a list of found, expected and remedy, and what it saw.
The classes are looked up in the source: importing them would take torch, and a GPU's driver, for a name.
"""

from __future__ import annotations

import ast
import ctypes
import glob
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile

# Where vLLM keeps what a DFlash launch starts from.
PROPOSER = ("vllm.v1.spec_decode.dflash", "DFlashProposer")
# It plays no part in a DFlash launch, but its lack would tell of a wheel that is not the one: 0.26 has it no more.
TREE = ("vllm.v1.attention.backends.tree_attn", "TreeAttentionBackend")
COMPILE_TIMEOUT_S = 60


def package_folder(name: str) -> str | None:
    """Where a package lies, without importing it; None when it is not there."""
    found = importlib.util.find_spec(name)
    return (
        next(iter(found.submodule_search_locations)) if found and found.submodule_search_locations else None
    )


def python_version() -> str:
    """Of this interpreter, as `3.11`."""
    return ".".join(map(str, sys.version_info[:2]))


def has_class(folder: str, module: str, name: str) -> bool:
    """Whether the source of `module`, below its package's `folder`, defines class `name` at its top."""
    path = os.path.join(folder, *module.split(".")[1:]) + ".py"
    if not os.path.exists(path):
        return False
    with open(path, encoding="utf-8") as stream:
        tree = ast.parse(stream.read(), path)
    return any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body)


def installed(name: str) -> str | None:
    """The version of a distribution from its metadata, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def compile_fault() -> list[str] | None:
    """Compile what Triton compiles at every start: a C file that includes Python.h."""
    compiler = os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None)
    if compiler is None:
        return [
            "no C compiler",
            "gcc, which Triton starts when it loads a kernel",
            "apt install gcc libc6-dev",
        ]
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "probe.c")
        with open(source, "w", encoding="utf-8") as stream:
            stream.write("#include <Python.h>\nint probe(void) { return PY_MAJOR_VERSION; }\n")
        include = sysconfig.get_path("include")
        command = [compiler, "-shared", "-fPIC", f"-I{include}", source, "-o", f"{folder}/probe.so"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False
            )
            problem = done.stderr.strip().splitlines()[:1] if done.returncode else []
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = [str(error)]
    if not problem:
        return None
    return [
        f"a C file that includes Python.h can't be compiled: {problem[0]}",
        f"{compiler} and the headers in {include}, usable by the service user",
        f"apt install gcc libc6-dev python{python_version()}-dev",
    ]


def load_fault(folder: str) -> list[str] | None:
    """Load vLLM's compiled extension. It is linked against torch's libraries and the driver's libcuda.so.1."""
    extensions = sorted(glob.glob(os.path.join(glob.escape(folder), "_C*.so")))
    if not extensions:
        return [
            "vLLM has no compiled extension _C",
            "the wheel for CUDA",
            "install from the lock, no source build",
        ]
    try:
        import torch  # noqa: F401 (for its libraries, which the extension finds where they are loaded)

        for extension in extensions:
            ctypes.CDLL(extension)
    except (ImportError, OSError) as error:
        remedy = "remove the venv and run again"
        if "libcuda" in str(error):
            remedy = "install the NVIDIA driver's libcuda1 of the version that nvidia-smi shows"
        return [f"vLLM's extension can't be loaded: {error}", "libraries that fit together", remedy]
    return None


def main(expected: str) -> dict:
    """All of it; nothing is started that needs a GPU."""
    version, folder = installed("vllm"), package_folder("vllm")
    if version is None or folder is None:
        fault = ["no vLLM in this venv", f"vLLM {expected}", "remove the venv and run again"]
        return {"faults": [fault], "vllm": None}
    faults = []
    if version != expected:
        faults.append(
            [f"vLLM {version}", f"vLLM {expected}", "see whether the lock of this version is the right one"]
        )
    if not has_class(folder, *PROPOSER):
        faults.append(
            [f"no {':'.join(PROPOSER)}", "a vLLM with DFlash, 0.20 or later", "use a locked version"]
        )
    tree = has_class(folder, *TREE)
    if not tree and version.startswith("0.20."):
        faults.append(
            [f"no {':'.join(TREE)}", "the wheel as it was published", "remove the venv and run again"]
        )
    faults += filter(None, (compile_fault(), load_fault(folder)))
    runtime = installed("nvidia-cuda-runtime")
    return {
        "faults": faults,
        "vllm": version,
        "torch": installed("torch"),
        "cuda": runtime and ".".join(runtime.split(".")[:2]),
        "tree_attention": tree,
        "python": python_version(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
