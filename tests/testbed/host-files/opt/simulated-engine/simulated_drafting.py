"""How well a drafter "drafts" in the simulated engine.

It follows from the config that the drafter is given, compared with what
/etc/simulated-gpu/drafter.json expects. The rule is made up around what was measured on a real GPU with a
trained pair (4.16; one off 3.88; wrong mask 2.73):
    the expected mask token and captured layers     the acceptance length of that file (4.2)
    every captured layer one off                    0.3 less
    any other captured layers                       1.3
    another mask token                              2.73 at most
    a prompt longer than the drafter's window       0.2 less, as vLLM 0.20.1 ignores sliding layers
    fewer drafted tokens                            each position is accepted with the same chance, those beyond are lost

How fast it is follows a made-up rule too: a step reads the weights once, whatever is in it, until it holds so many
tokens (those that are verified of every running request) that computing them takes longer than that. So drafting
wins while few requests run, and loses when many do.
"""

from __future__ import annotations

OFF_BY_ONE_LOSS = 0.3
WRONG_LAYERS = 1.3
WRONG_MASK = 2.73
BEYOND_WINDOW_LOSS = 0.2
FULL_DRAFT = 15
# Tokens in a step that take no longer than one; what each drafted token costs of such a step.
CHEAP_TOKENS = 48
DRAFT_COST = 0.01


def captured_layers(drafter_config: object) -> tuple[int, ...]:
    """The layers that vLLM 0.20.1 takes: its own key's, else the taps as they are."""
    layers = getattr(drafter_config, "eagle_aux_hidden_state_layer_ids", None)
    return tuple(layers or (getattr(drafter_config, "dflash_config", None) or {}).get("target_layer_ids", ()))


def acceptance_length(mask: object, layers: tuple[int, ...], expected: dict) -> float:
    """Acceptance length with this mask token and these captured layers; see the module's text."""
    length = expected["acceptance_length"]
    wanted = expected["aux_layers"]
    if layers != tuple(wanted):
        shifts = {abs(layer - right) for layer, right in zip(layers, wanted, strict=False)}
        one_off = len(layers) == len(wanted) and shifts == {1}
        length = length - OFF_BY_ONE_LOSS if one_off else WRONG_LAYERS
    return length if mask == expected["mask_token_id"] else min(length, WRONG_MASK)


def chance(length: float, drafted: int) -> float:
    """The chance of each drafted token, once those before it are accepted, which gives this length: 1 + c + c² + …"""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if 1 + sum(middle**n for n in range(1, drafted + 1)) < length else (low, middle)
        )
    return low


def length_of(length: float, drafted: int) -> float:
    """The acceptance length with `drafted` tokens of a drafter that has `length` with all that its block holds."""
    if drafted >= FULL_DRAFT:
        return length
    each = chance(min(length, FULL_DRAFT), FULL_DRAFT)
    return 1 + sum(each**n for n in range(1, drafted + 1))


def step_s(running: int, drafted: int) -> float:
    """Time of one step with so many requests, in times of one that only reads the weights."""
    return max(1.0, running * (drafted + 1) / CHEAP_TOKENS) + DRAFT_COST * drafted


def token_factor(running: int, drafted: int, length: float) -> float:
    """Time of one token of one request; 1 for one request, a full draft and a length of 4.2."""
    return step_s(running, drafted) / length / (step_s(1, FULL_DRAFT) / 4.2)


def window(drafter_config: object) -> int | None:
    """The window of the drafter's sliding layers, in tokens; None where none slides."""
    slides = "sliding_attention" in (getattr(drafter_config, "layer_types", None) or ())
    return getattr(drafter_config, "sliding_window", None) if slides else None


def length_at(length: float, prompt_tokens: int, sliding_window: int | None) -> float:
    """The acceptance length after a prompt of so many tokens."""
    beyond = sliding_window is not None and prompt_tokens > sliding_window
    return max(1.0, length - BEYOND_WINDOW_LOSS) if beyond else length


class Drafting:
    """Counts drafts so that 1 + accepted / drafts tends to the acceptance length, without chance."""

    def __init__(self, length: float, drafted: int) -> None:
        self.accepted_per_draft = min(length - 1, drafted)
        self.drafted = drafted
        self.drafts = 0
        self.tokens_owed = 0.0

    def generate(self, tokens: int) -> list[int]:
        """How many tokens of each draft were accepted, for as many drafts as this many tokens took."""
        accepted_tokens = []
        self.tokens_owed += tokens
        while self.tokens_owed > 0:
            before, self.drafts = self.drafts, self.drafts + 1
            accepted = int(self.drafts * self.accepted_per_draft) - int(before * self.accepted_per_draft)
            accepted_tokens.append(accepted)
            self.tokens_owed -= 1 + accepted
        return accepted_tokens
