"""Which settings are the fastest on this host: what to try, what was measured of it, what to keep. docs/operations.md.

All but `measure` is pure. A candidate is {"name", "speculation", "args", "speculative", "profile"}: what it changes in
vllm_service_args, vllm_service_speculative_config and drafter_profile. A result is a candidate with "loads", what
`measure` returned of it, and "server", its description.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import time

from . import acceptance_prompts as prompts
from .acceptance import OWN_SHARE, SETTLE_S, answer, difference, read_counters
from .errors import RolloutError
from .proof import Deadline, NoProof, model_ids

STAGES = ("config", "drafting", "requests")
OFF = "no drafter"
#: Requests of each client in one measurement, and at least so many in all.
ROUNDS, LEAST = 2, 8
#: Two candidates nearer to each other than this are as fast: a second run may turn them round.
TIE = 0.02


# ---- what to try -------------------------------------------------------------------------------------------


def candidate(name: str, **changes: object) -> dict:
    """A candidate, from what it changes."""
    return {"name": name, "speculation": True, "args": {}, "speculative": {}, "profile": {}, **changes}


def _key(entry: dict) -> tuple:
    return tuple(repr(entry[part]) for part in ("speculation", "args", "speculative", "profile"))


def uncertain_configs(provenance: dict, config: dict, profiles: list[dict]) -> list[dict]:
    """What the drafter's config could be instead, where it is not known: parts of a drafter_profile.

    `provenance` says of each key where it comes from (drafter_config.py). Derived taps may be one off either way.
    `profiles` are what a person wants to have tried.
    """
    found = list(profiles)
    if provenance.get("dflash_config.target_layer_ids", "").startswith("derived"):
        taps = config["dflash_config"]["target_layer_ids"]
        shifted = [[tap + step for tap in taps] for step in (-1, 1)]
        found += [{"target_layer_ids": taps} for taps in shifted if min(taps) >= 0]
    return found


def plan(
    stage: str,
    *,
    drafted: int,
    token_counts: list[int],
    max_num_seqs: list[int],
    seqs_now: int | None,
    configs: list[dict],
    results: list[dict],
) -> list[dict]:
    """The candidates of a stage that are not among `results`, best first known.

    "config": the inventory as it is, and `configs`. "drafting": no drafter, and the best config with each of
    `token_counts` other than `drafted`, the inventory's. "requests": the best so far and no drafter, with each of
    `max_num_seqs` other than `seqs_now`.
    """
    base = candidate(f"{drafted} tokens")
    drafting = [result for result in results if result["speculation"]]
    best = _fastest(drafting) if drafting else base
    if stage == "config":
        wanted = [base]
        for profile in configs:
            what = ", ".join(f"{key} {value}" for key, value in sorted(profile.items()))
            wanted.append(candidate(f"{drafted} tokens, {what}", profile=profile))
    elif stage == "drafting":
        wanted = [candidate(OFF, speculation=False)]
        suffix = best["name"].partition(", ")[2]
        for count in token_counts:
            if count != drafted:
                name = f"{count} tokens" + (f", {suffix}" if suffix else "")
                speculative = {"num_speculative_tokens": count}
                wanted.append(candidate(name, profile=best["profile"], speculative=speculative))
    else:
        off = candidate(OFF, speculation=False)
        wanted = [
            {
                **{part: entry[part] for part in ("speculation", "speculative", "profile")},
                "name": f"{entry['name']}, {seqs} at once",
                "args": {**entry["args"], "max-num-seqs": seqs},
            }
            for seqs in max_num_seqs
            if seqs != seqs_now
            for entry in (best, off)
        ]
    tried = {_key(result) for result in results}
    return [entry for entry in wanted if _key(entry) not in tried]


# ---- what was measured -------------------------------------------------------------------------------------


def rates(result: dict) -> dict[int, float]:
    """Concurrency → tokens per second."""
    return {load["concurrency"]: load["tokens_per_s"] for load in result["loads"]}


def _geometric(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def _mean(result: dict) -> float:
    return _geometric(list(rates(result).values()))


def _fastest(results: list[dict]) -> dict:
    """Of those that are as fast as the fastest, the first: the inventory is measured first, and what changes most last."""
    fastest = max(map(_mean, results))
    return next(result for result in results if _mean(result) >= fastest * (1 - TIE))


def ratios(result: dict, off: dict) -> dict[int, float]:
    """Concurrency → how many times as fast as without a drafter."""
    base = rates(off)
    return {concurrency: rate / base[concurrency] for concurrency, rate in rates(result).items()}


def crossing(result: dict, off: dict) -> tuple[int | None, int | None]:
    """(the last concurrency at which drafting still wins, the first from which on it loses).

    The first is None where it loses everywhere, the second where it wins up to the highest that was measured.
    """
    found = sorted(ratios(result, off).items())
    lost = [concurrency for concurrency, _ in itertools.takewhile(lambda item: item[1] < 1, reversed(found))]
    won = [concurrency for concurrency, _ in found if concurrency not in lost]
    return (won[-1] if won else None), (min(lost) if lost else None)


def crossing_text(result: dict, off: dict) -> str:
    """The same as a sentence."""
    won, lost = crossing(result, off)
    if lost is None:
        return f"drafting wins up to {won} requests at once, the most that was measured"
    if won is None:
        return f"drafting loses at every load that was measured, from {lost} on"
    return f"drafting loses somewhere between {won} and {lost} requests at once"


def choose(results: list[dict], margin: float) -> dict:
    """{"best", "off", "gain", "kept", "text", "table"}: the fastest that drafts, and whether it is to be kept.

    How fast is the geometric mean of tokens per second over the loads, each of them counting the same. Of candidates
    that differ by less than TIE the one measured first is the fastest, so that noise changes no inventory. It is kept
    when it beats serving without a drafter (at its own best) by `margin`.
    """
    off = max((result for result in results if not result["speculation"]), key=_mean)
    best = _fastest([result for result in results if result["speculation"]])
    gain = _geometric(list(ratios(best, off).values()))
    kept = gain >= 1 + margin
    verdict = f"{best['name']}: {gain:.2f} times as fast as without a drafter, over all loads"
    text = (
        f"{verdict}. {crossing_text(best, off)[:1].upper()}{crossing_text(best, off)[1:]}."
        if kept
        else f"Nothing beats serving without a drafter by {margin:.0%}. The best, {verdict}. What served before serves on. "
        "To serve without a drafter: vllm_service_speculation: false"
    )
    return {
        "best": best,
        "off": off,
        "gain": round(gain, 3),
        "kept": kept,
        "text": text,
        "table": table(results, best, off),
    }


def table(results: list[dict], best: dict, off: dict) -> list[str]:
    """Lines for people: every candidate at every load."""
    loads = sorted(rates(off))
    wide = max(len(result["name"]) for result in results) + 2
    lines = [
        f"{'tokens/s with so many requests at once':{wide}}"
        if wide > 40
        else "tokens/s with so many requests at once:",
        f"{'':{wide}}"
        + "".join(f"{load:>9}" for load in loads)
        + f"{'mean/off':>10}{'accepted':>10}  loses from",
    ]
    for result in results:
        lengths = [load["length"] for load in result["loads"] if load["length"]]
        lost = crossing(result, off)[1] if result["speculation"] else None
        lines.append(
            f"{'* ' if result is best else '  '}{result['name']:{wide - 2}}"
            + "".join(f"{rates(result)[load]:9.1f}" for load in loads)
            + f"{_geometric(list(ratios(result, off).values())):10.2f}"
            + (f"{sum(lengths) / len(lengths):10.2f}" if lengths else f"{'-':>10}")
            + f"  {'-' if lost is None else lost}"
        )
    return lines


def variables(best: dict, base: dict) -> dict:
    """The inventory's variables that `best` changes, whole: Ansible replaces a dictionary, it doesn't merge it.

    `base`: the inventory's "args", "speculative" and "profile".
    """
    names = {
        "args": "vllm_service_args",
        "speculative": "vllm_service_speculative_config",
        "profile": "drafter_profile",
    }
    return {
        name: {**base[part], **best[part]}
        for part, name in names.items()
        if any(base[part].get(key) != value for key, value in best[part].items())
    }


# ---- measuring ---------------------------------------------------------------------------------------------


def measure_load(server: dict, model: str, concurrency: int, tokens: int, deadline: Deadline) -> dict:
    """The figures of `concurrency` clients that ask one after the other, warmed up. Raises NoProof for one failed request.

    Kernels are compiled when a size of batch is seen for the first time: on an H200 the first round of 16 took seven times
    as long as the second (docs/gpu-results.md, 16). So each load has a round before it that doesn't count.
    """
    count = max(LEAST, ROUNDS * concurrency)
    asked = list(itertools.islice(itertools.cycle(prompts.SHORT), count))
    taken: list[float] = []

    def one(prompt: str) -> int:
        begin = time.monotonic()
        generated = answer(server, model, prompt, tokens, deadline)[1]
        taken.append(time.monotonic() - begin)
        return generated

    with concurrent.futures.ThreadPoolExecutor(concurrency) as clients:
        for _ in clients.map(one, asked[: max(2, concurrency)]):
            pass
        taken.clear()
        before = read_counters(server, deadline)
        begin = time.monotonic()
        own = sum(clients.map(one, asked))
        seconds = time.monotonic() - begin
    settled = time.monotonic() + SETTLE_S
    grown = difference(before, read_counters(server, deadline))
    while grown is not None and grown["generated"] < own and time.monotonic() < settled:
        time.sleep(0.1)
        grown = difference(before, read_counters(server, deadline))
    if grown is None:
        raise NoProof("the server's counters were reset while it was measured: it was started again")
    if own < OWN_SHARE * grown["generated"]:
        raise NoProof(
            f"other clients were generating: {own} of {grown['generated']:.0f} tokens were ours. Take the host out of its "
            "pool (rollout_drain_tasks)"
        )
    taken.sort()
    return {
        "concurrency": concurrency,
        "requests": count,
        "tokens": own,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(own / seconds, 1),
        "p50_s": round(taken[len(taken) // 2], 3),
        "p99_s": round(taken[len(taken) * 99 // 100], 3),
        "length": round(1 + grown["accepted"] / grown["drafts"], 3) if grown["drafts"] else None,
    }


def measure(server: dict, concurrencies: list[int], tokens: int, timeout_s: float) -> list[dict]:
    """The figures of each load, the smallest first. Raises RolloutError where the server fails a request."""
    deadline = Deadline(timeout_s)
    try:
        model = server["model_id"] or model_ids(server, deadline.left())[0]
        return [
            measure_load(server, model, concurrency, tokens, deadline)
            for concurrency in sorted(concurrencies)
        ]
    except NoProof as reason:
        raise RolloutError(
            f"{server['unit']} can't be measured", found=str(reason), remedy="see its log (journalctl -u)"
        ) from reason
