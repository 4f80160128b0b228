"""The prompts by which acceptance is measured. Whoever changes a letter of them gives SET a new number:
figures of two versions are not comparable, and references are kept by it."""

from __future__ import annotations

SET = 1

# Of different kinds, since a drafter is better at code than at verse.
SHORT = (
    "Write a short story about a lighthouse keeper who finds a letter that was posted forty years ago.",
    "Write a Python function that reads a CSV file of temperatures and returns the mean for each month. "
    "Explain it line by line.",
    "List twelve things to check before a long bicycle tour, one a line, each with a reason.",
    "Why is the sky blue by day and red in the evening? Explain it to a curious twelve-year-old.",
    "Write a JSON document that describes a small library: three shelves, four books on each, with title, "
    "author, year and the name of the reader who has borrowed it.",
    "Two friends argue whether a town should close its main street to cars. Write their dialogue.",
)

# Asked after the long text. Their answers draw on all of it.
QUESTIONS = (
    "Write a report about the harbour on these days in full sentences: what arrived, what was missing, and "
    "what should be done differently.",
    "Write a Python program that reads entries like these from a file and prints for each ship what it "
    "carried.",
)

_SHIPS = ("Anna", "Morning Star", "Halcyon", "Tern", "Old Margaret", "Swift", "Saint Olaf")
_GOODS = (
    "barrels of salt",
    "crates of oranges",
    "sacks of barley",
    "bundles of slate",
    "rolls of canvas",
    "casks of lamp oil",
    "baskets of herring",
    "planks of larch",
    "boxes of nails",
    "coils of rope",
    "bales of wool",
)
_PLACES = ("north pier", "customs house", "old mill", "fish market", "dry dock")
_WEATHER = (
    "fog until noon",
    "a steady wind from the west",
    "rain in the night",
    "clear sky",
    "heavy swell",
    "first snow",
    "still air",
    "thunder over the hills",
    "a low tide",
    "thin ice in the basin",
    "warm haze",
    "hail at dusk",
    "a rainbow",
)
_FORMS = (
    "The {ship} came in at {hour} with {count} {goods} and was unloaded at the {place}; there was {weather}.",
    "With {weather}, work began late. {count} {goods} from the {ship} were counted twice at the {place}.",
    "Of {count} {goods} that the {ship} should have brought, {few} were missing. The {place} was told at {hour}.",
    "At {hour} the {ship} left the {place}. On board: {count} {goods}. The log says: {weather}.",
    "Nobody claimed the {few} {goods} that lie at the {place} since the {ship} sailed in spite of {weather}.",
    "The master of the {ship} paid for {count} {goods} and asked that {few} of them stay at the {place}.",
)


def long_text(entries: int) -> str:
    """A harbour's day book of so many entries, about 30 tokens each and no two alike: reading it back is of
    no use to a drafter, as it would be with one sentence over and over."""
    lines = []
    for number in range(1, entries + 1):
        line = _FORMS[number * 5 % len(_FORMS)].format(
            ship=_SHIPS[number * 3 % len(_SHIPS)],
            goods=_GOODS[number * 7 % len(_GOODS)],
            place=_PLACES[number * 2 % len(_PLACES)],
            weather=_WEATHER[number * 4 % len(_WEATHER)],
            hour=f"{5 + number * 7 % 15}:{number * 17 % 60:02}",
            count=11 + number * 37 % 183,
            few=2 + number * 13 % 8,
        )
        lines.append(f"Entry {number}. {line}")
    return "The day book of a small harbour.\n\n" + "\n".join(lines)


def long_prompts(entries: int) -> tuple[str, ...]:
    """The long prompts: the same text before each question, so that a prefix cache reads it once."""
    return tuple(f"{long_text(entries)}\n\n{question}" for question in QUESTIONS)
