#!/usr/bin/env python3
"""Make a simulated DFlash drafter for Qwen3.6-27B: the canonical 58 BF16 tensors, untrained.

make_drafter.py FILE --full-size [--seed N]   3.46 GB that can't be compressed (about 20 s)
make_drafter.py FILE --sparse                 the same header and length, no blocks on the disk (instant)
make_drafter.py FILE --small [--seed N]       the same names in small shapes, for a target made with --small
make_drafter.py FILE --size MB [--seed N]     the same names, at least so large: to be carried about, fits no target
"""

from __future__ import annotations

import argparse
from pathlib import Path

from simulated_pair import DRAFTER_LAYERS, REAL, SMALL, TAPS, Pair, Tensors, payload_bytes, write_safetensors


def drafter_tensors(pair: Pair) -> Tensors:
    """The tensors of a DFlash drafter, sorted by name as the safetensors library does for one dtype."""
    hidden, wide = pair.hidden, pair.intermediate
    heads, kv_heads, head_dim = pair.drafter_heads
    tensors: Tensors = [
        ("fc.weight", (hidden, TAPS * hidden)),
        ("hidden_norm.weight", (hidden,)),
        ("norm.weight", (hidden,)),
    ]
    for layer in range(DRAFTER_LAYERS):
        tensors += [
            (f"layers.{layer}.{name}.weight", shape)
            for name, shape in (
                ("input_layernorm", (hidden,)),
                ("post_attention_layernorm", (hidden,)),
                ("self_attn.q_proj", (heads * head_dim, hidden)),
                ("self_attn.k_proj", (kv_heads * head_dim, hidden)),
                ("self_attn.v_proj", (kv_heads * head_dim, hidden)),
                ("self_attn.o_proj", (hidden, heads * head_dim)),
                ("self_attn.q_norm", (head_dim,)),
                ("self_attn.k_norm", (head_dim,)),
                ("mlp.gate_proj", (wide, hidden)),
                ("mlp.up_proj", (wide, hidden)),
                ("mlp.down_proj", (hidden, wide)),
            )
        ]
    return sorted(tensors)


def pair_of(size: int) -> Pair:
    """The smallest pair in about the real one's proportions whose drafter has `size` bytes or more."""
    hidden = 64
    while True:
        kv_heads = max(1, round(hidden / 320))
        pair = Pair(
            hidden, hidden * 17 // 5, SMALL.target_heads, SMALL.linear_heads, (4 * kv_heads, kv_heads, 64)
        )
        if payload_bytes(drafter_tensors(pair)) >= size:
            return pair
        hidden += 8


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    size = parser.add_mutually_exclusive_group(required=True)
    for option in ("--full-size", "--sparse", "--small"):
        size.add_argument(option, action="store_true")
    size.add_argument("--size", type=int, metavar="MB", help="10**6 bytes")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives another file (default: 0)")
    args = parser.parse_args(argv)
    pair = pair_of(args.size * 10**6) if args.size else SMALL if args.small else REAL
    tensors = drafter_tensors(pair)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(args.file, tensors, None if args.sparse else args.seed)
    print(f"simulated drafter: {len(tensors)} tensors, {args.file.stat().st_size} bytes, {args.file}")


if __name__ == "__main__":
    main()
