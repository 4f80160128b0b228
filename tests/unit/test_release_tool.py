"""tools/release.py: what a fragment has to be, and a version cut in a repository made for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools/release.py"
NOTES = "# Upgrading\n\n| from → to | to be done |\n|---|---|\n| 0.1.0 → 0.2.0 | nothing |\n| 0.2.0 → 0.3.0 | set a |\n"


def tool(root: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments, "--root", str(root)],
        capture_output=True,
        text=True,
        check=False,
    )


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(root: Path) -> None:
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "work")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A repository with one fragment, a version, and notes on two upgrades."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "someone@example.net")
    (tmp_path / "changelogs/fragments").mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/upgrading.md").write_text(NOTES)
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text((ROOT / "CHANGELOG.md").read_text().partition("\n## ")[0])
    fragment(tmp_path, "one", "bugfixes:\n  - A thing is\n    mended.\nbreaking_changes: [Set b.]\n")
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return tmp_path


def fragment(project: Path, name: str, text: str) -> None:
    (project / f"changelogs/fragments/{name}.yml").write_text(f"---\n{text}")


def test_the_fragments_of_this_repository_are_fit_to_be_shown():
    done = tool(ROOT, "check")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a", "minor: [A thing.]", "unknown section minor"),
        ("a", "bugfixes: A thing.", "bugfixes is no list"),
        ("a", "bugfixes: []", "bugfixes is no list"),
        ("a", "bugfixes:\n  - rollout_x: mended.", "is no text; put it in quotes"),
        ("a", "bugfixes: [without an end]", "is no sentence"),
        ("a", "[A thing.]", "no mapping of breaking_changes"),
        ("a", "", "no mapping of"),
        ("a", "bugfixes: [", "no YAML"),
        ("A b", "bugfixes: [A thing.]", "its name isn't like"),
    ],
)
def test_what_is_no_fragment_is_named(project, name, text, words):
    fragment(project, name, text)
    done = tool(project, "check")
    assert done.returncode == 1
    assert f"{name}.yml: " in done.stderr
    assert words in done.stderr


def test_a_version_is_cut_and_the_next_one_goes_above_it(project):
    assert tool(project, "cut", "0.2.0").returncode == 0
    text = (project / "CHANGELOG.md").read_text()
    assert "## 0.2.0 (20" in text
    assert "\n### Breaking changes\n- Set b.\n\n### Fixed\n- A thing is mended.\n" in text
    assert 'version = "0.2.0"' in (project / "pyproject.toml").read_text()
    assert list((project / "changelogs/fragments").glob("*.yml")) == []
    assert git(project, "tag", "--list") == "v0.2.0"
    assert git(project, "status", "--porcelain") == ""
    assert tool(project, "check").returncode == 0
    fragment(project, "two", "major_changes: [It does more.]")
    commit(project)
    assert tool(project, "cut", "0.3.0").returncode == 0
    after = (project / "CHANGELOG.md").read_text()
    assert after.index("## 0.3.0") < after.index("## 0.2.0")
    assert (
        after.count("# Changelog")
        == after.count("Fragments of what comes next")
        == after.count("Set b.")
        == 1
    )
    assert after.endswith(text[text.index("## 0.2.0") :])


def test_what_makes_no_release_is_refused_and_changes_nothing(project):
    def refused(version: str, words: str):
        before = git(project, "rev-parse", "HEAD"), (project / "CHANGELOG.md").read_text()
        done = tool(project, "cut", version)
        assert done.returncode == 1
        assert words in done.stderr
        assert (git(project, "rev-parse", "HEAD"), (project / "CHANGELOG.md").read_text()) == before

    refused("", "is no version")
    refused("1.2", "is no version")
    refused("0.9.0", "docs/upgrading.md has no row for 0.9.0")
    (project / "stray").write_text("")
    refused("0.2.0", "the tree is not clean")
    (project / "stray").unlink()
    git(project, "tag", "v0.2.0")
    refused("0.2.0", "there is a tag v0.2.0 already")
    git(project, "tag", "--delete", "v0.2.0")
    assert tool(project, "cut", "0.2.0").returncode == 0
    refused("0.2.0", "is not above the last one, 0.2.0")
    refused("0.3.0", "there is no fragment")
