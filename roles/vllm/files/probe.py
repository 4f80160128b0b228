"""Runs inside the venv, on standard input: is this the vLLM that the lock promises, with what a DFlash launch needs.

Prints one JSON line, or ends with the reason.
"""

import importlib
import importlib.metadata
import json
import sys

WANTED = {
    "vllm.v1.spec_decode.dflash": "DFlashProposer",
    "vllm.v1.attention.backends.tree_attn": "TreeAttentionBackend",
}

expected = sys.argv[1]
found = importlib.metadata.version("vllm")
if found != expected:
    sys.exit(f"The venv holds vLLM {found}, and the lock is for {expected}: is the lock file the right one?")
for module, name in WANTED.items():
    try:
        getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError) as error:
        sys.exit(f"vLLM {found} has no usable {module}:{name}: {type(error).__name__}: {error}")
print(json.dumps({"vllm": found, "classes": sorted(WANTED.values())}))
