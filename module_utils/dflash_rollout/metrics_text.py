"""The Prometheus text format (0.0.4), as far as /metrics of a server needs it.

Hosts have the standard library only. prometheus_client's own parser is the oracle of the tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import RolloutError

_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    r"(?:\{(?P<labels>.*)\})?[ \t]*"
    r"(?P<value>[^ \t{}]+)"
    r"(?:[ \t]+(?P<time>[-+]?[0-9]+))?"
)
_LABEL = re.compile(r'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*)"[ \t]*(?:,|$)')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Sample:
    """One line: the name as it is written (a counter's ends in `_total`), its labels, its value."""

    name: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def series(self) -> tuple:
        """What tells it from every other sample."""
        return self.name, tuple(sorted(self.labels.items()))


def _labels(text: str, line: str) -> dict[str, str]:
    found: dict[str, str] = {}
    place = 0
    while text[place:].strip(" \t"):
        match = _LABEL.match(text, place)
        if match is None:
            raise _broken(line)
        found[match[1]] = re.sub(r'\\[\\"n]', lambda escape: _ESCAPES[escape[0]], match[2])
        place = match.end()
    return found


def _broken(line: str) -> RolloutError:
    return RolloutError("A line of /metrics can't be read", found=line[:200], expected="name{labels} value")


def parse(text: str) -> list[Sample]:
    """The samples of an answer of /metrics, in its order. Raises RolloutError for a line that is none."""
    samples = []
    for line in text.split("\n"):
        stripped = line.strip(" \t\r")
        if not stripped or stripped.startswith("#"):
            continue
        match = _LINE.fullmatch(stripped)
        if match is None:
            raise _broken(line)
        try:
            value = float(match["value"])
        except ValueError:
            raise _broken(line) from None
        samples.append(Sample(match["name"], value, _labels(match["labels"] or "", line)))
    return samples
