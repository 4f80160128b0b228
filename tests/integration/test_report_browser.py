"""The page of a roll-out in a real browser, Debian's: without one the test skips; in CI it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from .conftest import ROOT

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "modules"), str(ROOT / "module_utils")]
from report_records import fleet  # noqa: E402
from test_report_html import write  # noqa: E402

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
# The page itself has no script and forbids any: this goes into a copy.
MEASURE = """<script>
const box = (one) => one.getBoundingClientRect();
const seen = [...document.querySelectorAll("svg")].map((drawing) => ({
  width: box(drawing).width,
  bars: [...drawing.querySelectorAll("rect")].filter((bar) => box(bar).width > 0.5).length,
  outside: [...drawing.querySelectorAll("rect, text")].filter(
    (one) => box(one).right > box(drawing).right + 2 || box(one).left < box(drawing).left - 2).length,
}));
document.title = JSON.stringify({
  wide: document.documentElement.scrollWidth, window: window.innerWidth, drawings: seen,
  paper: getComputedStyle(document.body).backgroundColor,
});
</script>"""


@pytest.fixture(scope="module")
def browser() -> str:
    """The program. 18 s where it has to be installed."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and os.environ.get("CI") == "true":
        apt = ["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=300"]
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run([*apt, "update"], env=env, check=True, timeout=300)
        subprocess.run(
            [*apt, "install", "--no-install-recommends", BROWSERS[0]], env=env, check=True, timeout=600
        )
        found = shutil.which(BROWSERS[0])
    if found is None:
        pytest.skip(f"no browser here; install one of {', '.join(BROWSERS)}")
    return found


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The page as the role writes it, and beside it a copy that measures itself."""
    folder = tmp_path_factory.mktemp("page")
    text, _ = write(folder, fleet())
    (page,) = folder.glob("*.html")
    copy = re.sub(r"<meta http-equiv=.*?>\n", "", text).replace("</body>", MEASURE + "</body>")
    (folder / "measured.htm").write_text(copy)
    return page


def look(browser: str, page: Path, width: int, *options: str) -> str:
    """What the browser prints, from a window of `width` pixels."""
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=2000",
         f"--user-data-dir={page.parent / 'profile'}", f"--window-size={width},700", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [1000, 390])
@pytest.mark.parametrize(("scheme", "paper"), [(1, "rgb(255, 255, 255)"), (0, "rgb(20, 24, 29)")])
def test_nothing_runs_out_of_the_window(browser, page, width, scheme, paper):
    copy = page.with_name("measured.htm")
    shown = look(browser, copy, width, "--dump-dom", f"--blink-settings=preferredColorScheme={scheme}")
    measured = json.loads(re.search(r"<title>(\{.*?\})</title>", shown)[1])
    assert measured["window"] == width
    assert measured["wide"] <= width
    assert measured["paper"] == paper
    assert [drawing["bars"] for drawing in measured["drawings"]] == [5, 30, 6, 5]
    assert all(0 < drawing["width"] <= width for drawing in measured["drawings"])
    assert not sum(drawing["outside"] for drawing in measured["drawings"])


@pytest.mark.parametrize("width", [1000, 390])
def test_nor_do_the_reasons_of_a_roll_out_that_did_not_end_well(browser, tmp_path, width):
    spec = importlib.util.spec_from_file_location("rollout_callback", ROOT / "callback_plugins/rollout.py")
    callback = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(callback)
    long = "/srv/" + "a_very_long_name_without_a_break" * 6
    text = f"The file is not there. Found: {long}. Expected: a file. What to do: copy it.\nGPU memory: too little"
    reason = {"task": "Say what is in the way", "phase": "preflight", "text": text}
    run = {
        "at": "2026-12-02T10:00:00+00:00",
        "line": "1 done, 1 did not pass preflight (gpu5.example.net).",
        "reasons": ["gpu5.example.net did not pass preflight, for the reasons above."],
        "hosts": {"gpu5.example.net": {"end": "did not pass preflight", "reasons": [reason]}},
    }
    html = callback.html_of(callback.page(fleet(), run))
    copy = tmp_path / "measured.htm"
    copy.write_text(re.sub(r"<meta http-equiv=.*?>\n", "", html).replace("</body>", MEASURE + "</body>"))
    shown = look(browser, copy, width, "--dump-dom")
    measured = json.loads(re.search(r"<title>(\{.*?\})</title>", shown)[1])
    assert measured["window"] == width
    assert measured["wide"] <= width
    assert "<strong>What to do:</strong> copy it." in shown


def colours(png: bytes) -> set[bytes]:
    """The pixels of a PNG without transparency or interlace (the specification's filters 0 to 4)."""
    place, packed, width, channels = 8, b"", 0, 3
    while place < len(png):
        size, kind = int.from_bytes(png[place : place + 4], "big"), png[place + 4 : place + 8]
        data = png[place + 8 : place + 8 + size]
        if kind == b"IHDR":
            width, channels = int.from_bytes(data[:4], "big"), {2: 3, 6: 4}[data[9]]
        packed += data if kind == b"IDAT" else b""
        place += size + 12
    raw, found = zlib.decompress(packed), set()
    above = bytearray(width * channels)
    for start in range(0, len(raw), width * channels + 1):
        kind, row = raw[start], bytearray(raw[start + 1 : start + 1 + width * channels])
        for at in range(len(row) if kind else 0):
            left = row[at - channels] if at >= channels else 0
            corner = above[at - channels] if at >= channels else 0
            up = above[at]
            guess = left + up - corner
            paeth = min((left, up, corner), key=lambda one, guess=guess: abs(guess - one))
            row[at] = (row[at] + (0, left, up, (left + up) // 2, paeth)[kind]) & 255
        found.update(bytes(row[at : at + 3]) for at in range(0, len(row), channels))
        above = row
    return found


def test_what_is_seen_has_the_colours_of_the_states(browser, page, tmp_path):
    shot = tmp_path / "page.png"
    look(browser, page, 700, f"--screenshot={shot}")
    found = colours(shot.read_bytes())
    named = dict(re.findall(r"--(\w+): #(\w{6})", page.read_text().partition("@media")[0]))
    for name in ("paper", "ink", "load", "down", "good", "warn", "bad"):
        assert bytes.fromhex(named[name]) in found, name
