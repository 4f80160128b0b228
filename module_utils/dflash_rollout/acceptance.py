"""How well the server drafts: measured by its own counters around fixed prompts, judged, kept on the host.

Runs after the outage: the server is proved and confirmed, and answers other clients meanwhile. Why that, and
what it can't see: docs/decisions/acceptance.md.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterable

from . import acceptance_prompts as prompts
from .acceptance_record import BELOW, NOT_DRAFTING, NOT_JUDGED, OFF, PASSED, goes_back, kept, path_of
from .errors import RolloutError
from .files import write_json
from .metrics_text import Sample, parse
from .proof import Deadline, NoProof, ask, ask_json, model_ids
from .store import SERVER_SPEC, Store, complete

LEFT_OUT = "left out"  # of one set: it says nothing of this server, and wouldn't the next time
# The worst of the sets is the verdict.
_WORST_FIRST = (NOT_DRAFTING, BELOW, NOT_JUDGED, PASSED)

# Below it a trained drafter is not drafting at all: a wrong pair accepts next to nothing (1.0), while the
# worst fault that still drafts, a wrong mask token, was measured at 2.73.
FLOOR = 1.2
# Of the tokens that the server generated meanwhile, how many must be ours.
OWN_SHARE = 0.8
# A set with fewer of them says nothing: the model ended its answers early.
MIN_TOKENS = 128
ATTEMPTS = 3
PAUSE_S = 2.0
# vLLM counts a step after it has answered; so long the counters may lag.
SETTLE_S = 3.0
# A long prompt is so many times the drafter's window; of a drafter without one, so many tokens.
BEYOND = 1.5
NO_WINDOW_TOKENS = 3072
SMALLEST_LONG = 256

GENERATED = "vllm:generation_tokens_total"
DRAFTS = "vllm:spec_decode_num_drafts_total"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
COUNTERS = (GENERATED, DRAFTS, DRAFT_TOKENS, ACCEPTED, PER_POSITION)
CREATED = "vllm:generation_tokens_created"

# What the figures depend on beside the prompts: an argument spec. References are kept under all of it.
DRAFTING_SPEC = {
    "drafter_sha256": {"type": "str", "required": True},
    "target": {"type": "str", "required": True},
    "vllm_version": {"type": "str", "required": True},
    "num_speculative_tokens": {"type": "int", "required": True},
    "sliding_window": {"type": "int"},
    "trained": {"type": "bool", "default": True},
}
REFERENCE_SPEC = {"short": {"type": "float"}, "long": {"type": "float"}}


# ---- counters: pure ----------------------------------------------------------------------------------------


def difference(before: Iterable[Sample], after: Iterable[Sample]) -> dict | None:
    """What the counters of a server grew by between two readings, summed over its models and engines.

    `drafts`, `draft_tokens`, `accepted`, `generated` and `per_position` (accepted tokens of each draft
    position, from the first); `drafts` is None for a server without counters of drafts. None when a counter
    was reset: the server was started again in between.
    """
    then = {sample.series: sample.value for sample in before if sample.name in (*COUNTERS, CREATED)}
    now = {sample.series: sample for sample in after if sample.name in (*COUNTERS, CREATED)}
    for series, value in then.items():
        if series not in now or now[series].value < value:
            return None
        if series[0] == CREATED and now[series].value != value:
            return None
    grown = dict.fromkeys(COUNTERS, 0.0)
    positions: dict[int, float] = {}
    for series, sample in now.items():
        if sample.name == CREATED:
            continue
        growth = sample.value - then.get(series, 0.0)
        grown[sample.name] += growth
        if sample.name == PER_POSITION:
            position = int(sample.labels["position"])
            positions[position] = positions.get(position, 0.0) + growth
    drafting = any(sample.name == DRAFTS for sample in now.values())
    return {
        "drafts": grown[DRAFTS] if drafting else None,
        "draft_tokens": grown[DRAFT_TOKENS],
        "accepted": grown[ACCEPTED],
        "generated": grown[GENERATED],
        "per_position": [positions[position] for position in sorted(positions)],
    }


def figures_of(grown: dict, own_tokens: int, seconds: float) -> dict:
    """What a set's answers say, from the growth of the counters and our own count.

    Acceptance length is 1 + accepted / drafts, as vLLM logs it (vllm/v1/spec_decode/metrics.py); the rate of a
    position is accepted there / drafts. `tokens_per_s` counts our own tokens over the time of our requests,
    the reading of their prompts included.
    """
    drafts = grown["drafts"]
    return {
        "drafts": None if drafts is None else int(drafts),
        "draft_tokens": int(grown["draft_tokens"]),
        "accepted": int(grown["accepted"]),
        "length": round(1 + grown["accepted"] / drafts, 4) if drafts else None,
        "per_position": [round(rate / drafts, 4) for rate in grown["per_position"]] if drafts else [],
        "tokens": own_tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(own_tokens / seconds, 1) if seconds > 0 else None,
        "own_share": round(own_tokens / grown["generated"], 4) if grown["generated"] else None,
    }


# ---- judgement: pure ---------------------------------------------------------------------------------------


def disturbed(figures: dict) -> str | None:
    """Why these figures are not the server's answer to our prompts alone, or None."""
    share = figures["own_share"]
    if share is None or share > 1:
        return "the server's counter of generated tokens doesn't account for ours"
    if share < OWN_SHARE:
        return (
            f"other clients were generating: {share:.0%} of the tokens were ours, {OWN_SHARE:.0%} are needed"
        )
    return None


def judge_set(figures: dict, reference: float | None, ratio: float) -> tuple[str, str]:
    """(verdict, sentence) for one set. `reference` is an acceptance length, of which `ratio` is needed."""
    if "left_out" in figures:
        return LEFT_OUT, figures["left_out"]
    if "problem" in figures:
        return NOT_JUDGED, figures["problem"]
    reason = disturbed(figures)
    if reason is not None:
        return NOT_JUDGED, reason
    if figures["tokens"] < MIN_TOKENS:
        return LEFT_OUT, f"the answers ended after {figures['tokens']} tokens, {MIN_TOKENS} are needed"
    length = figures["length"]
    if length is None:
        why = "the server has no counters of drafts" if figures["drafts"] is None else "it made no draft"
        return NOT_DRAFTING, f"{why} in {figures['tokens']} tokens"
    if length < FLOOR:
        return NOT_DRAFTING, f"acceptance length {length:.2f}, a trained drafter has at least {FLOOR}"
    if reference is None:
        return PASSED, f"acceptance length {length:.2f}, without a reference"
    needed = ratio * reference
    text = f"acceptance length {length:.2f}, at least {needed:.2f} expected ({ratio:.0%} of {reference:.2f})"
    return PASSED if length + 1e-9 >= needed else BELOW, text  # 0.9 * 4.2 is a little more than 3.78


def judge(sets: dict[str, dict], reference: dict, ratio: float) -> tuple[str, str]:
    """(verdict, sentence) for all sets: that of the worst. `reference`: set → acceptance length, or none."""
    verdicts = {
        name: judge_set(figures, reference.get(name), ratio) for name, figures in sorted(sets.items())
    }
    found = {verdict for verdict, _ in verdicts.values()}
    worst = next((verdict for verdict in _WORST_FIRST if verdict in found), NOT_JUDGED)
    details = "; ".join(
        f"{name} prompts: {'' if verdict in (PASSED, worst) else verdict + ', '}{text}"
        for name, (verdict, text) in sorted(verdicts.items(), reverse=True)
    )
    return worst, details


def lengths(sets: dict[str, dict]) -> dict[str, float]:
    """Set → acceptance length, of those that pass without a reference: what a canary commits."""
    return {name: found["length"] for name, found in sets.items() if judge_set(found, None, 1.0)[0] == PASSED}


def digest_of(conditions: dict) -> str:
    """A name for what determines acceptance; a reference is good for the same name only."""
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16]


# ---- asking the server -------------------------------------------------------------------------------------


def _body(server: dict, model: str, prompt: str, **more: object) -> dict:
    chat = api_of(server) == "chat"
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return {"model": model, **asked, **more}


def api_of(server: dict) -> str:
    """Drafters are trained on chats, so those are asked where the server has them."""
    return "chat" if server.get("chat") else "completions"


def answer(server: dict, model: str, prompt: str, tokens: int, deadline: Deadline) -> tuple[int, int]:
    """(prompt tokens, generated tokens) of one greedy answer, as the server counts them. Raises NoProof."""
    path = "/v1/chat/completions" if api_of(server) == "chat" else "/v1/completions"
    answer = ask_json(server, path, deadline, _body(server, model, prompt, max_tokens=tokens, temperature=0))
    try:
        return int(answer["usage"]["prompt_tokens"]), int(answer["usage"]["completion_tokens"])
    except (KeyError, TypeError, ValueError) as error:
        raise NoProof(f"{path} answered without usage: {str(answer)[:200]}") from error


def _tokens_of(server: dict, model: str, prompt: str, deadline: Deadline) -> tuple[int, int]:
    """(tokens of the prompt, the model's length), by /tokenize of vLLM. Raises NoProof."""
    answer = ask_json(server, "/tokenize", deadline, _body(server, model, prompt))
    try:
        return int(answer["count"]), int(answer["max_model_len"])
    except (KeyError, TypeError, ValueError) as error:
        raise NoProof(f"/tokenize answered without a count: {str(answer)[:200]}") from error


class LeftOut(Exception):
    """Why a set can't be asked of this server."""


def fit_long(count: Callable[[str], tuple[int, int]], window: int | None, tokens: int) -> tuple[str, ...]:
    """Long prompts of 1.5 times the drafter's window, or of what the model's length leaves beyond it.

    `count`: prompt → (its tokens, the model's length). Raises LeftOut when none fits beyond the window.
    """
    entries = 32
    measured, length = count(prompts.long_prompts(entries)[0])
    room = length - tokens
    wanted = min(math.ceil(BEYOND * window) if window else NO_WINDOW_TOKENS, room)
    least = max(window or 0, SMALLEST_LONG)
    entries = max(1, math.ceil(wanted * entries / measured))
    for _ in range(20):
        if wanted <= least:
            break
        found = prompts.long_prompts(entries)
        counts = [count(prompt)[0] for prompt in found]
        if min(counts) > least and max(counts) <= room:
            return found
        entries += 1 if min(counts) <= least else -1
    raise LeftOut(
        f"no prompt beyond the drafter's window ({window or 'none'}) fits beside {tokens} tokens of answer into "
        f"the model's {length} tokens"
    )


def read_counters(server: dict, deadline: Deadline) -> list[Sample]:
    return parse(ask(server, "/metrics", deadline).decode(errors="replace"))


def measure_set(server: dict, model: str, asked: Iterable[str], tokens: int, deadline: Deadline) -> dict:
    """The figures of one set of prompts, one after the other. Raises NoProof where the server doesn't answer.

    When other clients were generating it is tried again, `ATTEMPTS` times in all.
    """
    asked = list(asked)
    figures: dict = {}
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(min(PAUSE_S, deadline.left()))
        before = read_counters(server, deadline)
        begin = time.monotonic()
        answers = [answer(server, model, prompt, tokens, deadline) for prompt in asked]
        seconds = time.monotonic() - begin
        own = sum(generated for _, generated in answers)
        settled = time.monotonic() + SETTLE_S
        grown = difference(before, read_counters(server, deadline))
        while grown is not None and grown["generated"] < own and time.monotonic() < settled:
            time.sleep(0.1)
            grown = difference(before, read_counters(server, deadline))
        if grown is None:
            return {"problem": "the server's counters were reset meanwhile: it was started again"}
        figures = {
            **figures_of(grown, own, seconds),
            "prompt_tokens": [read for read, _ in answers],
            "attempts": attempt + 1,
        }
        if disturbed(figures) is None:
            break
    return figures


def measure(server: dict, window: int | None, tokens: int, timeout_s: float) -> dict[str, dict]:
    """The figures of both sets, or under "problem" or "left_out" why there are none. Never raises for a server."""
    deadline = Deadline(timeout_s)
    sets: dict[str, dict] = {}
    try:
        model = server["model_id"] or model_ids(server, deadline.left())[0]
        for name in ("short", "long"):
            sets[name] = {"problem": "not asked"}
            asked: tuple[str, ...] = prompts.SHORT
            if name == "long":
                asked = fit_long(lambda text: _tokens_of(server, model, text, deadline), window, tokens)
            sets[name] = measure_set(server, model, asked, tokens, deadline)
    except LeftOut as reason:
        sets["long"] = {"left_out": str(reason)}
    except (NoProof, RolloutError) as reason:
        for name in ("short", "long"):
            if "tokens" not in sets.get(name, {}):
                sets[name] = {"problem": str(reason)}
    return sets


# ---- the gate ----------------------------------------------------------------------------------------------


def gate(
    *,
    check_mode: bool,
    server: dict,
    mode: str,
    drafting: dict,
    reference: dict | None,
    references: dict,
    ratio: float,
    tokens: int,
    timeout_s: float,
    state_dir: str,
) -> dict:
    """What the module `acceptance` returns (see its documentation).

    Raises RolloutError when `server` is not what the last switch confirmed, and OSError when the record can't
    be written.
    """
    server = complete(SERVER_SPEC, server)
    store = Store(state_dir)
    serving = store.serving()
    if serving is None or serving["serving"]["unit"] != server["unit"]:
        if check_mode:
            return _would(f"measure acceptance once {server['unit']} serves")
        raise RolloutError(
            "Only what serves can be measured",
            found=serving["serving"]["unit"] if serving else "no confirmed switch",
            expected=server["unit"],
        )
    conditions = {**drafting, "prompts": prompts.SET, "tokens": tokens, "api": api_of(server)}
    basis = {
        "release": server["release"],
        "switch_id": serving["switch_id"],
        "mode": mode,
        "way_back": (serving.get("previous") or {}).get("unit"),
        "key": digest_of(conditions),
    }
    before = kept(state_dir, serving)
    if before is not None and any(before[name] != value for name, value in basis.items()):
        before = None
    measured_at, sets = None, {}
    if before is not None and before["verdict"] != NOT_JUDGED:
        measured_at, sets = before["measured_at"], before["sets"]
    elif drafting["trained"]:
        if check_mode:
            return _would(f"measure acceptance of {server['unit']}")
        sets = measure(server, drafting["sliding_window"], tokens, timeout_s)
        measured_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    by_hand = {name: value for name, value in (reference or {}).items() if value is not None}
    committed = references.get(basis["key"], {}).get("lengths", {})
    used = by_hand or committed
    if drafting["trained"]:
        verdict, text = judge(sets, used, ratio)
    else:
        verdict, text = OFF, "the drafter is marked as untrained: whatever it drafts says nothing"
    commit = verdict == PASSED and not used
    if commit:
        used = lengths(sets)
        verdict, text = judge(sets, used, ratio)
    record = {
        **basis,
        "verdict": verdict,
        "text": text,
        "reference": used or None,
        "reference_from": ("inventory" if by_hand else "canary") if used else None,
        "conditions": conditions,
        "measured_at": measured_at,
        "sets": sets,
    }
    # Still not judged: what was kept says the same, and a run that finds nothing new changes nothing.
    same = before is not None and (before == record or before["verdict"] == verdict == NOT_JUDGED)
    if not same and not check_mode:
        path = path_of(state_dir, server["release"])
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        write_json(path, record)
    return {
        "changed": not same,
        "verdict": verdict,
        "msg": f"{server['unit']}: {verdict}. {text[:1].upper()}{text[1:]}.",
        "record": record,
        "commit": {basis["key"]: {"lengths": used, "conditions": conditions, "at": measured_at}}
        if commit
        else {},
        "roll_back": goes_back(mode, verdict),
    }


def _would(what: str) -> dict:
    return {
        "changed": True,
        "verdict": NOT_JUDGED,
        "msg": f"Would {what}.",
        "record": None,
        "commit": {},
        "roll_back": False,
    }
