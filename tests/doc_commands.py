"""The commands that README.md and the other pages tell people to type.

A command stands in a block fenced as `sh`, one a line, or between backticks in a sentence if it begins with one of PROGRAMS.
What is left for the reader to fill in is written in capitals (HOST) or as an ellipsis.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = ("README.md", "docs/**/*.md", "tests/*/README.md", "examples/**/README*", "bench/README.md")
#: What a block can be, by the word after its fence.
KINDS = {
    "sh": "commands",
    "yaml": "variables or an inventory",
    "json": "a file",
    "text": "output, or anything else",
}
PROGRAMS = {"ansible-playbook", "make", "python3", "uvx", "hf", "git", "bed.py", "-e", "--limit", "--tags"}
#: In sentences these are commands on the pages for whoever is on call; elsewhere they tell how the code works.
HOST_PROGRAMS = {"systemctl", "journalctl", "docker", "podman", "nvidia-smi", "ss"}
FOR_THE_NIGHT = ("docs/runbook.md", "examples/", "README.md")


@dataclass(frozen=True)
class Command:
    """One command: its text without comments, the folder it is typed in (from `cd` lines before it), and where it stands."""

    text: str
    folder: str
    page: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[Path]:
    """Every page that has commands for people."""
    return sorted({path for pattern in PATTERNS for path in root.glob(pattern)})


def uncommented(line: str) -> str:
    """A line of shell without its comment; a # inside quotes or a word is none."""
    return re.match(r"""(?:'[^']*'|"[^"]*"|[^#'"]|(?<=\S)#)*""", line)[0].strip()


def words(text: str) -> list[str]:
    """The words of a command; a pipe or && is a word of its own."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def simple_commands(text: str) -> list[list[str]]:
    """The words of each command of a pipeline or list, without the variables set before it."""
    found: list[list[str]] = [[]]
    for word in words(text):
        if word in ("|", "&&", "||", ";"):
            found.append([])
        elif found[-1] or not re.fullmatch(r"[A-Z_]+=.*", word):
            found[-1].append(word)
    return found


@dataclass(frozen=True)
class Block:
    """A fenced block: the word after its fence, its lines without the indentation, and the line of its fence."""

    kind: str
    lines: list[str]
    line: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, also those inside lists."""
    found, open_at = [], None
    lines = text.splitlines()
    for number, line in enumerate(lines, 1):
        fence = re.match(r"( *)```(\S*)\s*$", line)
        if not fence:
            continue
        if open_at is None:
            open_at = (number, len(fence[1]), fence[2])
        else:
            start, indent, kind = open_at
            found.append(Block(kind, [one[indent:] for one in lines[start : number - 1]], start))
            open_at = None
    if open_at is not None:
        raise ValueError(f"line {open_at[0]}: this block has no end")
    return found


def block_commands(block: Block, page: str) -> list[Command]:
    """The commands of a `sh` block."""
    found, folder, begun = [], ".", ""
    for number, line in enumerate(block.lines, block.line + 1):
        text = begun + uncommented(line)
        if text.endswith("\\"):
            begun = text[:-1].rstrip() + " "
            continue
        begun = ""
        if text.startswith("cd "):
            folder = text.removeprefix("cd ")
        elif text:
            found.append(Command(text, folder, page, number))
    return found


def inline_commands(text: str, page: str) -> list[Command]:
    """What stands between backticks outside of blocks and is a command."""
    inside = {
        number for block in blocks(text) for number in range(block.line, block.line + len(block.lines) + 2)
    }
    known = PROGRAMS | (HOST_PROGRAMS if page.startswith(FOR_THE_NIGHT) else set())
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if number in inside:
            continue
        for span in re.findall(r"`([^`]+)`", line):
            said = span.split()
            script = said[0].endswith(".py") and len(said) > 1
            if (said[0] in known and len(said) > 1) or script or said[0].startswith(".venv/bin/"):
                found.append(Command(span, ".", page, number))
    return found


def commands(text: str, page: str) -> list[Command]:
    """All commands of a page."""
    found = [one for block in blocks(text) if block.kind == "sh" for one in block_commands(block, page)]
    return found + inline_commands(text, page)


def all_commands(root: Path = ROOT) -> dict[str, list[Command]]:
    """Text of each distinct command → where it stands."""
    found: dict[str, list[Command]] = {}
    for path in pages(root):
        page = str(path.relative_to(root))
        for one in commands(path.read_text("utf-8"), page):
            found.setdefault(one.text, []).append(one)
    return found


if __name__ == "__main__":
    for text, places in all_commands().items():
        print(f"{text!r}: {', '.join(one.where for one in places)}")
