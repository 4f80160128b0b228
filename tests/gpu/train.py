#!/usr/bin/env python3
"""Train a tiny pair for the GPU proof: a byte-level Qwen3 target and two DFlash drafters for it. See README.md.

    train.py DIR [--steps N] [--drafter-steps N] …

The target (12 layers, 9 M parameters) learns the sources of Python's standard library. Then it writes texts of its own,
greedily, and the drafters learn these: in each text blocks begin at random places; a block is the token there and
masks after it, its layers see the target's states of all places before (the taps, put together by `fc`) and the whole block, in
both directions; each mask has to tell the token of its own place. Embedding and head are the target's.
One drafter attends to everything, the other has four layers with a sliding window.

DIR gets target/, drafter/, drafter-sliding/ (weights alone, as drafters are sent), profiles.json (what the tensors don't say),
prompt_ids.json and training.json (losses, and acceptance by this program's own count). Needs torch, transformers, tokenizers
and safetensors; a GPU is used where there is one.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

MASK, EOS, VOCAB = 256, 257, 272
# After the bytes; the parsers of the proof's flags look for the last four.
SPECIAL = ["<|MASK|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
TAPS = [1, 3, 5, 7, 9]  # outputs of these target layers, counted from 0
BLOCK = 8
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, WIDE, LAYERS = 256, 4, 2, 64, 768, 12
DRAFTER_LAYERS = 5
EPS, THETA = 1e-6, 1e6


def log(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- the target --------------------------------------------------------------------------------------------------


def corpus() -> torch.Tensor:
    """The sources of this Python's standard library as one row of bytes, in an order that doesn't depend on the disk."""
    top = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted(top.rglob("*.py"))
        if "site-packages" not in file.parts and "test" not in file.parts
    ]
    random.Random(0).shuffle(files)  # noqa: S311
    data = b"\n\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def cuts(data: torch.Tensor, rows: int, length: int, device: str) -> torch.Tensor:
    """`rows` pieces of `length` bytes from random places."""
    begins = torch.randint(len(data) - length, (rows,)).tolist()
    return torch.stack([data[begin : begin + length] for begin in begins]).long().to(device)


def train_target(
    data: torch.Tensor, args: argparse.Namespace, device: str
) -> tuple[Qwen3ForCausalLM, list[float]]:
    """The target after `args.steps` steps, and its losses, one of each tenth of the steps."""
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=WIDE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": THETA},
        rms_norm_eps=EPS, tie_word_embeddings=False, eos_token_id=EOS, bos_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(args.steps):
        set_rate(optimizer, 1.5e-3, step, args.steps)
        text = cuts(data, args.batch, args.length, device)
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=text, labels=text).loss
        learn(loss, model, optimizer)
        if step % max(1, args.steps // 10) == 0 or step == args.steps - 1:
            losses.append(round(loss.item(), 3))
            log(f"target {step}: {losses[-1]}")
    return model.to(torch.bfloat16).eval().requires_grad_(False), losses


def set_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, steps: int) -> None:
    """A short rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / max(1, min(100, steps // 10)))
    for group in optimizer.param_groups:
        group["lr"] = peak * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def learn(loss: torch.Tensor, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step down."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@torch.no_grad()
def written(
    model: Qwen3ForCausalLM, data: torch.Tensor, rows: int, start: int, length: int, device: str
) -> torch.Tensor:
    """Texts [rows, start + length] that begin as sources do and that the target goes on with, greedily."""
    prompts = cuts(data, rows, start, device)
    return model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, min_new_tokens=length,
        do_sample=False, pad_token_id=EOS,
    )  # fmt: skip


# --- the drafter -------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), EPS).to(x.dtype)


def turned(x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [rows, heads, n, HEAD_DIM] at places [rows, n]."""
    rates = THETA ** (-torch.arange(0, HEAD_DIM, 2, device=x.device) / HEAD_DIM)
    angles = places[:, None, :, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Queries are the block's; keys and values are the context's and the block's."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(HIDDEN, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.q_norm, self.k_norm = Norm(HEAD_DIM), Norm(HEAD_DIM)

    def forward(self, x, context, places, context_places, seen):
        rows, count, _ = x.shape
        both = torch.cat((context, x), dim=1)
        query = self.q_norm(self.q_proj(x).view(rows, count, HEADS, HEAD_DIM)).transpose(1, 2)
        key = self.k_norm(self.k_proj(both).view(rows, -1, KV_HEADS, HEAD_DIM)).transpose(1, 2)
        value = self.v_proj(both).view(rows, -1, KV_HEADS, HEAD_DIM).transpose(1, 2)
        query, key = turned(query, places), turned(key, torch.cat((context_places, places), dim=1))
        out = F.scaled_dot_product_attention(
            query, key.to(query.dtype), value.to(query.dtype), attn_mask=seen[:, None], enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(rows, count, -1))


class Mlp(nn.Module):
    """Gated, with SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, WIDE, bias=False)
        self.up_proj = nn.Linear(HIDDEN, WIDE, bias=False)
        self.down_proj = nn.Linear(WIDE, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), Mlp()
        self.input_layernorm, self.post_attention_layernorm = Norm(HIDDEN), Norm(HIDDEN)

    def forward(self, x, *around):
        x = x + self.self_attn(self.input_layernorm(x), *around)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The tensors of a DFlash drafter by their published names. `window`: of the first four layers, None for none."""

    def __init__(self, window: int | None):
        super().__init__()
        self.windows = [window] * (DRAFTER_LAYERS - 1) + [None]
        self.fc = nn.Linear(len(TAPS) * HIDDEN, HIDDEN, bias=False)
        self.hidden_norm, self.norm = Norm(HIDDEN), Norm(HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(DRAFTER_LAYERS))

    def forward(
        self,
        target: Qwen3ForCausalLM,
        texts: torch.Tensor,
        taps: torch.Tensor,
        anchors: torch.Tensor,
        blind=False,
    ):
        """Logits [rows, blocks, BLOCK - 1, VOCAB] of the masks of the blocks that begin at anchors [rows, blocks].

        `blind` leaves the windows out, as vLLM before 0.26 does.
        """
        rows, blocks = anchors.shape
        length = texts.shape[1]
        places = (anchors[:, :, None] + torch.arange(BLOCK, device=texts.device)).flatten(1)
        tokens = torch.full((rows, blocks, BLOCK), MASK, device=texts.device)
        tokens[:, :, 0] = texts.gather(1, anchors)
        x = target.model.embed_tokens(tokens.flatten(1)).to(self.fc.weight.dtype)
        context = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)))
        context_places = torch.arange(length, device=texts.device).expand(rows, -1)
        number = torch.arange(blocks, device=texts.device).repeat_interleave(BLOCK)
        same = (number[:, None] == number).expand(rows, -1, -1)
        begins = anchors.repeat_interleave(BLOCK, dim=1)
        before = context_places[:, None] < begins[:, :, None]
        for layer, window in zip(self.layers, self.windows, strict=True):
            near = before
            if window and not blind:
                near = before & (places[:, :, None] - context_places[:, None] < window)
            x = layer(x, context, places, context_places, torch.cat((near, same), dim=2))
        x = self.norm(x).view(rows, blocks, BLOCK, HIDDEN)[:, :, 1:]
        return target.lm_head(x.to(target.lm_head.weight.dtype))


@torch.no_grad()
def tapped(target: Qwen3ForCausalLM, texts: torch.Tensor) -> torch.Tensor:
    """The target's states at the taps, put side by side: [rows, length, taps * HIDDEN]."""
    states = target.model(input_ids=texts, output_hidden_states=True).hidden_states
    # The first is the embedding's.
    return torch.cat([states[tap + 1] for tap in TAPS], dim=-1)


def labels_of(texts: torch.Tensor, anchors: torch.Tensor) -> torch.Tensor:
    """The tokens that the masks stand for: [rows, blocks, BLOCK - 1]."""
    places = anchors[:, :, None] + torch.arange(1, BLOCK, device=texts.device)
    return texts.gather(1, places.flatten(1)).view(places.shape)


def train_drafter(target, texts: torch.Tensor, start: int, window: int | None, args: argparse.Namespace):
    """A drafter after `args.drafter_steps` steps, and its losses."""
    device = str(texts.device)
    model = Drafter(window).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    # The first masks count most: what comes after a wrong one is thrown away.
    weight = torch.exp(-torch.arange(BLOCK - 1, device=device) / 4)
    losses = []
    for step in range(args.drafter_steps):
        set_rate(optimizer, 1e-3, step, args.drafter_steps)
        some = texts[torch.randint(len(texts), (args.batch,), device=device)]
        anchors = torch.randint(start, texts.shape[1] - BLOCK, (args.batch, args.blocks), device=device)
        with torch.autocast(device.partition(":")[0], torch.bfloat16):
            logits = model(target, some, tapped(target, some), anchors)
        each = F.cross_entropy(
            logits.float().flatten(0, 2), labels_of(some, anchors).flatten(), reduction="none"
        )
        loss = (each.view(-1, BLOCK - 1) * weight).mean() / weight.mean()
        learn(loss, model, optimizer)
        if step % max(1, args.drafter_steps // 10) == 0 or step == args.drafter_steps - 1:
            losses.append(round(loss.item(), 3))
            log(f"drafter, window {window}, {step}: {losses[-1]}")
    return model.to(torch.bfloat16).eval(), losses


@torch.no_grad()
def acceptance(
    target, drafter: Drafter, texts: torch.Tensor, begin: int, end: int, blind: bool = False
) -> float:
    """Acceptance length in [begin, end) of texts that the target wrote greedily: a block begins where the last one ended."""
    total = count = 0
    for some in texts.split(4):
        taps = tapped(target, some)
        right = []
        for places in torch.arange(begin, end, device=texts.device).split(64):
            anchors = places.expand(len(some), -1)
            guessed = drafter(target, some, taps, anchors, blind).argmax(-1)
            right.append((guessed == labels_of(some, anchors)).long().cumprod(-1).sum(-1) + 1)
        for lengths in torch.cat(right, dim=1).tolist():
            at = 0
            while at < len(lengths):
                total, count, at = total + lengths[at], count + 1, at + lengths[at]
    return round(total / count, 3)


# --- all of it ---------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> None:
    """Bytes, one token each, with ids 0 to 255, and the special tokens after them."""
    letters = {letter: number for number, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    if [tokenizer.token_to_id(word) for word in SPECIAL[:2]] != [MASK, EOS]:
        raise SystemExit("the special tokens got other ids than the config says")
    if tokenizer.encode("a\n€").ids != list("a\n€".encode()):
        raise SystemExit("a byte got another id than its own")
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[1], "mask_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=1) + "\n")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: its own where it can be seen, else one from 256 on."""
    seen = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)]


def profile(window: int | None) -> dict[str, object]:
    """What the tensors of a drafter don't say, as `drafter_profile` wants it."""
    kind = "sliding_attention" if window else "full_attention"
    found: dict[str, object] = {
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "target_layer_ids": TAPS,
        "layer_types": [kind] * (DRAFTER_LAYERS - 1) + ["full_attention"],
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
        "hidden_act": "silu",
    }
    return {**found, "sliding_window": window} if window else found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("dir", type=Path)
    for name, value, words in (
        ("steps", 3000, "of the target"),
        ("drafter-steps", 3000, "of each drafter"),
        ("batch", 32, "texts in a step"),
        ("length", 1024, "bytes of a text that the target learns, and of one that it writes"),
        ("texts", 2048, "that the target writes for its drafters"),
        ("blocks", 48, "in a text and step"),
        ("window", 128, "of the second drafter"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{words} (default: {value})")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = corpus()
    # The last part is for measuring.
    learned, kept = data[: len(data) * 19 // 20], data[len(data) * 19 // 20 :]
    log(f"{len(data)} bytes, on {device}")
    target, losses = train_target(learned, args, device)
    args.dir.joinpath("target").mkdir(parents=True, exist_ok=True)
    target.save_pretrained(args.dir / "target")
    write_tokenizer(args.dir / "target")
    start = max(BLOCK, args.length // 16)
    count = max(4, min(32, args.texts // 8))
    told = [
        written(target, learned, min(256, args.texts - at), start, args.length - start, device)
        for at in range(0, args.texts, 256)
    ]
    texts, unseen = torch.cat(told), written(target, kept, count, start, args.length - start, device)
    log(f"the target wrote {tuple(texts.shape)}")
    found: dict[str, object] = {"arguments": {**vars(args), "dir": None}, "target": losses}
    profiles = {}
    middle = start + (args.length - start) // 2
    for name, window in (("drafter", None), ("drafter-sliding", args.window)):
        drafter, losses = train_drafter(target, texts, start, window, args)
        (args.dir / name).mkdir(exist_ok=True)
        tensors = {key: value.contiguous().cpu() for key, value in drafter.state_dict().items()}
        save_file(tensors, args.dir / name / "model.safetensors", {"format": "pt"})
        profiles[name] = profile(window)
        found[name] = {"losses": losses}
        for part, begin, end in (("early", start, middle), ("late", middle, args.length - BLOCK)):
            found[name][part] = acceptance(target, drafter, unseen, begin, end)  # type: ignore[index]
            if window:
                found[name][f"{part}_window_ignored"] = acceptance(target, drafter, unseen, begin, end, True)  # type: ignore[index]
        log(f"{name}: {json.dumps(found[name])}")
    (args.dir / "profiles.json").write_text(json.dumps(profiles, indent=1) + "\n")
    (args.dir / "training.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.dir / "prompt_ids.json").write_text(json.dumps(cuts(kept, 24, 96, "cpu").tolist()) + "\n")


if __name__ == "__main__":
    main()
