"""Unit tests import the package as the program on a host does: `from dflash_rollout.gpus import …`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "module_utils"))
