#!/usr/bin/env python3
"""Cuts a version of this project out of the fragments in changelogs/fragments/.

release.py check            is every fragment one that users can be shown
release.py cut VERSION      CHANGELOG.md, pyproject.toml, the fragments taken away; a commit and the tag vVERSION

A fragment is YAML: a section of SECTIONS → sentences. `cut` wants a clean tree, a version above the last one, and a row for it in
docs/upgrading.md, where it says what has to be done. Nothing is pushed.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from pathlib import Path

import yaml

# Those of Ansible's own changelogs, in the order of their weight for who upgrades.
SECTIONS = {
    "breaking_changes": "Breaking changes",
    "removed_features": "Removed",
    "security_fixes": "Security",
    "major_changes": "Major changes",
    "minor_changes": "Minor changes",
    "deprecated_features": "Deprecated",
    "bugfixes": "Fixed",
    "known_issues": "Known issues",
}
VERSION = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)")
HEAD = "# Changelog\n\nFragments of what comes next lie in `changelogs/fragments/`.\n"


class Refused(Exception):
    """Why there is no such release; for people."""


def read_fragments(folder: Path) -> dict[str, list[str]]:
    """Section → sentences, of all fragments by their names. Raises Refused naming all that are none."""
    found: dict[str, list[str]] = {section: [] for section in SECTIONS}
    wrong = []
    for path in sorted(folder.iterdir()):
        if path.name == ".gitkeep":
            continue
        try:
            content = yaml.safe_load(path.read_text("utf-8"))
            wrong += [f"{path.name}: {problem}" for problem in problems(path.name, content)]
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            wrong.append(f"{path.name}: no YAML: {error}")
            continue
        if not wrong:
            for section, sentences in content.items():
                found[section] += [" ".join(sentence.split()) for sentence in sentences]
    if wrong:
        raise Refused("\n".join(wrong))
    return found


def problems(name: str, content: object) -> list[str]:
    """What is wrong with a fragment."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]*\.yml", name):
        return ["its name isn't like what-it-is-about.yml"]
    if not isinstance(content, dict) or not content:
        return [f"no mapping of {', '.join(SECTIONS)}"]
    wrong = [f"unknown section {section}" for section in content if section not in SECTIONS]
    for section, sentences in content.items():
        if not isinstance(sentences, list) or not sentences:
            wrong.append(f"{section} is no list")
            continue
        for sentence in sentences:
            if not isinstance(sentence, str):
                # `- a: b` is a mapping in YAML.
                wrong.append(f"{section}: {sentence!r} is no text; put it in quotes")
            elif not sentence.strip().endswith((".", ")", "`")):
                wrong.append(f"{section}: {sentence.strip()[:60]!r} is no sentence")
    return wrong


def section_of(version: str, date: str, fragments: dict[str, list[str]]) -> str:
    """The part of CHANGELOG.md for one version."""
    lines = [
        f"## {version} ({date})",
        "",
        "What to do when you come from an older one: [docs/upgrading.md](docs/upgrading.md).",
    ]
    for section, title in SECTIONS.items():
        if fragments[section]:
            lines += ["", f"### {title}", *(f"- {sentence}" for sentence in fragments[section])]
    return "\n".join(lines) + "\n"


def released(root: Path) -> list[str]:
    """The versions that CHANGELOG.md has, the newest first."""
    return re.findall(r"^## (\S+) \(", (root / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)


def cut(root: Path, version: str, date: str) -> None:
    """Do it all, or raise Refused with nothing changed."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    if not VERSION.fullmatch(version):
        raise Refused(f"{version} is no version such as 1.2.3")
    known = released(root)
    if known and tuple(map(int, version.split("."))) <= tuple(map(int, known[0].split("."))):
        raise Refused(f"{version} is not above the last one, {known[0]}")
    if git("status", "--porcelain"):
        raise Refused("the tree is not clean: commit or stash first")
    if f"v{version}" in git("tag", "--list").split():
        raise Refused(f"there is a tag v{version} already")
    folder = root / "changelogs/fragments"
    fragments = read_fragments(folder)
    if not any(fragments.values()):
        raise Refused("there is no fragment, so nothing that users would notice")
    if not re.search(
        rf"^\| .* → {re.escape(version)} \|", (root / "docs/upgrading.md").read_text("utf-8"), re.MULTILINE
    ):
        raise Refused(
            f"docs/upgrading.md has no row for {version}: say what has to be done, or that nothing has"
        )
    project = root / "pyproject.toml"
    text, changed = re.subn(r'(?m)^version = ".*"$', f'version = "{version}"', project.read_text("utf-8"))
    if changed != 1:
        raise Refused("pyproject.toml has no version, or several")
    older = (root / "CHANGELOG.md").read_text("utf-8").removeprefix(HEAD).strip()
    newest = section_of(version, date, fragments)
    project.write_text(text, "utf-8")
    (root / "CHANGELOG.md").write_text(f"{HEAD}\n{newest}" + (f"\n{older}\n" if older else ""), "utf-8")
    for path in folder.glob("*.yml"):
        path.unlink()
    # git keeps no empty folder.
    (folder / ".gitkeep").touch()
    git("add", "--all")
    git("commit", "--message", f"Release {version}")
    git("tag", "--annotate", f"v{version}", "--message", f"Release {version}")


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=["check", "cut"])
    parser.add_argument("version", nargs="?", default="")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    given = parser.parse_args()
    try:
        if given.verb == "check":
            read_fragments(given.root / "changelogs/fragments")
        else:
            today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
            cut(given.root, given.version, today)
            print(f"Committed and tagged v{given.version}. To publish it: git push --follow-tags")
    except Refused as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
