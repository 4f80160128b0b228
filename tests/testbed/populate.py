#!/usr/bin/env python3
"""Put the simulated target where the seed has its model: /root/models/Qwen3.6-27B, in a closed /root.

populate.py UPPER_DIR [--small]    UPPER_DIR becomes the root of a host, or lies over it
"""

from __future__ import annotations

import argparse
from pathlib import Path

from make_target import write_target
from simulated_pair import REAL, SMALL

TARGET = "root/models/Qwen3.6-27B"


def populate(upper: Path, small: bool = False) -> None:
    """Make the target below `upper`. /root stays closed: the service user needs a bind mount."""
    folder = upper / TARGET
    folder.mkdir(parents=True, exist_ok=True)
    (upper / "root").chmod(0o700)
    folder.parent.chmod(0o755)
    write_target(folder, SMALL if small else REAL)


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("upper", type=Path)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    populate(args.upper, args.small)


if __name__ == "__main__":
    main()
