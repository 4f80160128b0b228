"""The page as the role writes it, from records with hostile text in every place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "module_utils")]
from report_records import fleet  # noqa: E402

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7 * 7 }}{% raw %}{{ lookup('pipe', 'id') }}"
PLAY = """
- hosts: gpu_hosts
  gather_facts: false
  tasks:
    - ansible.builtin.fail:
      when: inventory_hostname == lost | default('')
    - ansible.builtin.import_role:
        name: rollout
        tasks_from: report_page
"""
VOID = {"meta", "br", "img"}


def write(folder: Path, records: dict, *options: str) -> tuple[str, str]:
    """What the role's own tasks make of `records` in `folder`: (the page, what ansible printed)."""
    for host, record in records.items():
        if record:
            (folder / f"{host}.json").write_text(json.dumps(record))
    play = folder / "play.yml"
    play.write_text(PLAY)
    inventory = folder / "hosts.json"
    inventory.write_text(json.dumps({"gpu_hosts": {"hosts": dict.fromkeys(records)}}))
    done = subprocess.run(
        ["ansible-playbook", "-i", inventory, play, "-e", f"rollout_records={folder}", *options],
        cwd=REPOSITORY,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCALHOST_WARNING": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (2 if any(option.startswith("lost=") for option in options) else 0), (
        done.stdout + done.stderr
    )
    pages = list(folder.glob("*.html"))
    assert len(pages) <= 1
    return pages[0].read_text() if pages else "", done.stdout


class Reader(HTMLParser):
    """Tags, attributes and text; open and closed have to match."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("p", "td", "th", "dt", "dd"):
            self.text += " "

    def handle_data(self, data):
        self.text += data


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    return folder, *write(folder, fleet())


def test_it_is_well_formed_and_needs_nothing_else(written):
    _, text, output = written
    reader = read(text)
    assert "roll-out-20261202T095131Z.html" in output
    assert not {"script", "img", "link", "iframe", "object", "form"} & set(reader.tags)
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"<!DOCTYPE[^>]*>", "", text)), (
        "no external asset"
    )
    assert not [one for one in reader.attributes if one[1].startswith("on") or one[1] in ("src", "style")]
    assert len(text) < 60_000


def test_it_says_what_a_ticket_needs(written):
    text = " ".join(read(written[1]).text.split())
    for wanted in (
        "1 CONFIRMED, 1 ROLLED_BACK, 1 STRANDED, 1 REFUSED, 1 without a switch",
        "outage 68.2 s",
        "Why: Port 30000 is held by another. What to do: End it.",
        "RuntimeError: no memory",
        "SIGKILL to pid 4143",
        "acceptance length 4.53, at least 3.78 expected",
        "known drafter z-lab/Qwen3.6-27B-DFlash",
        "[1, 16, 31, 46, 61]",
        "gpu5.example.net no switch is recorded",
    ):
        assert wanted in text


def test_drawings_have_a_name_a_description_and_a_table(written):
    _, text, _ = written
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawings) == 4, "three timelines (one was refused at once) and one chart"
    for drawing in drawings:
        names = re.search(r'role="img" aria-labelledby="(\S+) (\S+)"', drawing)
        assert f'<title id="{names[1]}">' in drawing
        assert f'<desc id="{names[2]}">' in drawing
    identifiers = [value for _, name, value in read(text).attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    assert read(text).tags.count("table") >= len(drawings)


def test_the_same_records_change_nothing(written):
    folder, text, _ = written
    again, output = write(folder, fleet())
    assert again == text
    assert re.search(r"changed=0 +unreachable=0 +failed=0", output), output


def test_check_mode_writes_nothing_and_no_record_is_no_page(tmp_path):
    text, output = write(tmp_path, {"gpu1": None})
    assert text == ""
    assert "failed=0" in output
    text, output = write(tmp_path, fleet(), "--check", "--diff")
    assert text == ""
    assert "changed=1" in output


def test_a_report_by_itself_has_its_page_although_a_host_is_lost(tmp_path):
    """There is no roll-out, whose end would make it."""
    text, _ = write(tmp_path, fleet(), "-e", "lost=gpu1.example.net")
    assert "gpu1.example.net" in text


def hostile(value):
    """Every text of a record but the ones that have a fixed form, with hostile text behind it."""
    if isinstance(value, dict):
        fixed = {"state", "at", "measured_at", "requested_at"}
        return {key: one if key in fixed else hostile(one) for key, one in value.items()}
    if isinstance(value, list):
        return [hostile(one) for one in value]
    return value + HOSTILE if isinstance(value, str) else value


def test_hostile_text_stays_text(tmp_path):
    text, _ = write(tmp_path, {host: hostile(record) for host, record in fleet().items()})
    reader = read(text)
    assert not {"script", "img"} & set(reader.tags)
    assert not [one for one in reader.attributes if one[1].startswith("on")]
    assert "<script" not in text
    assert reader.text.count("{{ 7 * 7 }}{% raw %}{{ lookup('pipe', 'id') }}") > 20
    assert "uid=0" not in text


def luminance(colour: str) -> float:
    """Relative luminance of #rrggbb, by WCAG 2."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_can_be_told_from_its_background(scheme):
    template = (REPOSITORY / "roles/rollout/templates/report.html.j2").read_text()
    colours = dict(
        re.findall(r"--(\w+): (#\w{6})", re.findall(r":root \{.*?\}", template, re.DOTALL)[scheme])
    )

    def contrast(ink, paper):
        high, low = sorted((luminance(colours[ink]), luminance(colours[paper])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for ink in ("ink", "soft", "good", "warn", "bad"):
        assert contrast(ink, "paper") >= 4.5, ink
    for fill in ("down", "load", "back"):
        assert contrast("on", fill) >= 4, fill
    for fill in ("begin", "down", "load", "back", "good", "warn", "bad", "short", "long"):
        assert contrast(fill, "paper") >= 2.9, fill
