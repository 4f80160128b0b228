"""docs/faults.md from the rows of a run."""

from __future__ import annotations

from cells import CELLS

HEAD = """\
<!-- Written by tests/faults/run.py (`make faults`). -->
# Faults: what was put in, what came out

{good} of {all} cells are right.

Each cell is one fault in one state of a switch on a booted host. An observer on the host writes down ten times a
second who runs, listens and holds GPU memory (`tests/faults/observer.py`). `tests/faults/checker.py`, which knows
nothing of the program, judges that: never two servers, nothing killed but the two servers' processes, the right end, a
true message, what would boot, and that another run without the fault ends with the new server serving.

- GPUs, SGLang and engines are simulated. The rows of `site.yml` run the real vLLM 0.20.1 command line and parser; in
  the others `vllm` is a simulated one that starts in a second, in the unit, sandbox and user that the roles install.
- The program is held in a state while the fault is put there: `tests/faults/host/held_program.py` adds a pause after
  the state is entered and nothing else. A fault that came in another state makes the cell fail, it never counts. The
  rows of `site.yml` have no pause.
- A clock jump is one of the program and its children only, by a library in front of the C library's clock
  (CLOCK_REALTIME; what counts since boot stays, as it does on a host whose date is set): the guests share the
  machine's clock, which no test may set.
- A power cut ends the guest's PID 1 with the cable out. The page cache is the machine's and survives it: writes that a
  real power cut loses are not shown here.
- Time limits are those of the test (6 s for free GPUs, 6 s to stop) and several cells run at a time, so seconds say
  nothing about a real host. "seconds": the whole cell with its reset and another run. "dark": without a listener on
  the port, as the observer saw it. "outage": what the record says.

| fault | state | right | seen | seconds | dark | outage | |
|---|---|---|---|---|---|---|---|
"""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def table(rows: list[dict]) -> str:
    """The whole page."""
    good = sum(1 for row in rows if not row["wrong"])
    lines = []
    order = {cell.name: number for number, cell in enumerate(CELLS)}
    last = None
    for row in sorted(rows, key=lambda row: order[row["name"]]):
        if row["row"] != last:
            last = row["row"]
            lines.append(f"| **{last}** | | | | | | | |")
        shown = row["name"].removesuffix(f" in {row['state']}").rstrip(",")
        wrong = "; ".join(row["wrong"]).replace("|", "\\|").replace("\n", " ")[:400]
        cells = (
            shown, row["state"], row["expected"], row["seen"], _number(row["seconds"]), _number(row["dark_s"]),
            _number(row["outage_s"]), f"**wrong**: {wrong}" if wrong else row["note"],
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD.format(good=good, all=len(rows)) + "\n".join(lines) + "\n"
