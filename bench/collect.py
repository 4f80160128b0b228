#!/usr/bin/env python3
"""Write docs/bench-results.md, or the file that is named, from the tables that the benchmarks left in bench/results/."""

from __future__ import annotations

import sys
from pathlib import Path

from common import RESULTS, ROOT

HEAD = """# Results of the benchmarks

Written by `bench/collect.py` from what the commands printed; what each shows stands in [bench/README.md](../bench/README.md).
GPUs, SGLang and the engine are simulated in all of them. Hosts and control node share one machine's cores.
"""


def main() -> None:
    """Write the page."""
    sections = [f"## {path.stem}\n\n{path.read_text()}" for path in sorted(RESULTS.glob("*.md"))]
    if not sections:
        raise SystemExit("no results yet: make bench")
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs/bench-results.md"
    page.write_text("\n".join([HEAD, *sections]))


if __name__ == "__main__":
    main()
