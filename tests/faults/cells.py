"""The fault matrix as data: a row of the issue's table times a state where it can happen is a cell.

What is right for a cell is written here and judged by checker.py; how a fault is put is in run.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

FORWARD = ("PREPARED", "OLD_STOPPED", "GPU_FREE", "NEW_STARTED", "PROVED")
BACK = ("ROLLING_BACK", "NEW_GONE")
CONFIRMED, ROLLED_BACK, STRANDED, REFUSED = ("CONFIRMED",), ("ROLLED_BACK",), ("STRANDED",), ("REFUSED",)

EXITS = {"engine": {"exit_at_start": True}}
EXITED = r"exited before it was ready"


@dataclass(frozen=True)
class Cell:
    """One fault in one state.

    `state`: the program is held there while `inject` happens; None: the fault is there from the start.
    `faults`: faults.json from the order on; `old_faults`: already when the old server starts.
    `before`: done before the order. `cause`: what the program's own words have to say, for an end but CONFIRMED.
    `evidence`: how the observer's log has to show that the fault happened (see checker.py).
    `through`: "order" (order.py), "play" (switch.yml) or "site" (site.yml with the real wheel).
    """

    name: str
    row: str
    ends: tuple[str, ...]
    state: str | None = None
    inject: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    faults: dict = field(default_factory=dict)
    old_faults: dict = field(default_factory=dict)
    cause: str = ""
    evidence: str = ""
    through: str = "order"
    new: dict = field(default_factory=dict)
    old: dict = field(default_factory=dict)
    settings: dict = field(default_factory=dict)
    ci: bool = False
    note: str = ""

    def as_dict(self) -> dict:
        """For the checker, which knows nothing of this class."""
        return asdict(self)


def _cells() -> list[Cell]:
    made: list[Cell] = []

    def add(row: str, name: str, ends: tuple[str, ...], **rest: object) -> None:
        state = rest.get("state")
        made.append(Cell(f"{name} in {state}" if state else name, row, ends, **rest))  # type: ignore[arg-type]

    add("nothing", "no fault", CONFIRMED, ci=True)

    row = "control node killed"
    for state in FORWARD:
        add(
            row,
            "control node killed",
            CONFIRMED,
            state=state,
            inject=("kill-play",),
            through="play",
            evidence="play-killed",
            ci=state == "NEW_STARTED",
        )
    for state in BACK:
        add(
            row,
            "control node killed",
            ROLLED_BACK,
            state=state,
            inject=("kill-play",),
            through="play",
            faults=EXITS,
            cause=EXITED,
            evidence="play-killed",
        )
    row = "network cut"
    for state in ("OLD_STOPPED", "NEW_STARTED"):
        add(
            row,
            "network cut for 6 s",
            CONFIRMED,
            state=state,
            inject=("link-down", "go", "sleep 6", "link-up"),
            through="play",
            evidence="play-succeeded",
        )
    add(
        row,
        "network cut for 70 s, longer than ssh waits",
        CONFIRMED,
        state="NEW_STARTED",
        inject=("link-down", "go", "sleep 70", "link-up"),
        through="play",
        evidence="play-succeeded",
    )
    for state in ("PREPARED", "NEW_STARTED"):
        add(
            row,
            "network cut for good",
            CONFIRMED,
            state=state,
            inject=("link-down",),
            through="play",
            ci=state == "NEW_STARTED",
        )

    row = "power cut, boot"
    for state in FORWARD:
        add(
            row,
            "power cut",
            ROLLED_BACK,
            state=state,
            inject=("power-cut",),
            evidence="boots",
            cause=rf"restarted in {state}",
            ci=state in ("NEW_STARTED", "PROVED"),
        )
    for state in BACK:
        add(
            row,
            "power cut",
            ROLLED_BACK,
            state=state,
            inject=("power-cut",),
            evidence="boots",
            faults=EXITS,
            cause=EXITED,
        )
    add(row, "power cut", CONFIRMED, state="CONFIRMED", inject=("power-cut",), evidence="boots", ci=True)

    add(
        row,
        "power cut",
        ROLLED_BACK,
        state="ROLLED_BACK",
        inject=("power-cut",),
        evidence="boots",
        faults=EXITS,
        cause=EXITED,
    )

    row = "program killed (SIGKILL)"
    for state in FORWARD:
        add(
            row,
            "program killed",
            CONFIRMED,
            state=state,
            inject=("kill-program",),
            evidence="programs",
            ci=state in ("OLD_STOPPED", "NEW_STARTED", "PROVED"),
        )
    for state in BACK:
        add(
            row,
            "program killed",
            ROLLED_BACK,
            state=state,
            inject=("kill-program",),
            evidence="programs",
            faults=EXITS,
            cause=EXITED,
        )
    add(row, "program killed", CONFIRMED, state="CONFIRMED", inject=("kill-program",), evidence="programs")
    add(
        row,
        "program killed",
        ROLLED_BACK,
        state="ROLLED_BACK",
        inject=("kill-program",),
        evidence="programs",
        faults=EXITS,
        cause=EXITED,
    )

    row = "new engine fails"
    for name, knobs, words, ci in (
        ("exits", {"exit_at_start": True}, EXITED, True),
        ("is never ready", {"never_ready": True}, r"not ready within 6 s", True),
        ("says 200, completions hang", {"hang_completions": True}, r"no complete answer within", True),
        ("says 200, completions answer 500", {"completions_500": True}, r"answered 500", False),
        (
            "serves another model",
            {"wrong_model_id": "other-model"},
            r"other-model.* not Qwen3.6-27B as promised",
            False,
        ),
        (
            "crashes on the third completion",
            {"crash_on_nth_completion": 3},
            r"did not live through its proof",
            True,
        ),
    ):
        add(
            row,
            f"new engine {name}",
            ROLLED_BACK,
            faults={"engine": knobs},
            cause=words,
            ci=ci,
            new={"ready_timeout_s": 6} if "never_ready" in knobs else {},
        )
    add(row, "new engine dies", ROLLED_BACK, state="NEW_STARTED", inject=("kill-new",), cause=EXITED)
    add(
        row,
        "new engine is wedged by a stop signal",
        ROLLED_BACK,
        state="NEW_STARTED",
        inject=("stop-new",),
        cause=r"not ready within 6 s",
        new={"ready_timeout_s": 6},
    )

    row = "new engine won't go"
    add(
        row,
        "new engine fails and ignores SIGTERM",
        ROLLED_BACK,
        faults={"engine": {"completions_500": True, "ignore_sigterm": True}},
        cause=r"answered 500",
        ci=True,
    )
    add(
        row,
        "new engine fails and leaves an orphan with memory",
        ROLLED_BACK,
        faults={"engine": {"completions_500": True, "leave_orphan": True}},
        cause=r"answered 500",
    )
    add(
        row,
        "new engine fails, its orphan ignores SIGTERM",
        ROLLED_BACK,
        faults={"engine": {"completions_500": True, "leave_orphan": True, "ignore_sigterm": True}},
        cause=r"answered 500",
    )
    add(
        row,
        "new engine exits, its worker left the control group",
        ROLLED_BACK,
        state="NEW_STARTED",
        inject=("go", "wait-new-holds", "sleep 4", "move-worker VLLM::Worker_TP1", "kill-new"),
        faults={"engine": {"worker_holds_s": 300, "ignore_sigterm": True, "never_ready": True}},
        new={"ready_timeout_s": 60},
        cause=r"the unit is deactivating|exited before it was ready",
        note="attributable by descent only",
    )

    row = "old server won't go"
    add(
        row,
        "old ignores SIGTERM",
        CONFIRMED,
        old_faults={"sglang": {"ignore_sigterm": True}},
        old={"stop_timeout_s": 3},
        ci=True,
    )
    add(
        row,
        "old's worker holds memory 8 s",
        CONFIRMED,
        old_faults={"sglang": {"worker_holds_s": 8}},
        old={"stop_timeout_s": 20},
    )
    add(
        row,
        "old's worker holds memory 40 s",
        CONFIRMED,
        old_faults={"sglang": {"worker_holds_s": 40}},
        old={"stop_timeout_s": 60},
    )
    add(
        row,
        "old's worker left the control group and holds memory",
        CONFIRMED,
        before=("move-worker sglang::scheduler_TP1",),
        old_faults={"sglang": {"worker_holds_s": 300, "ignore_sigterm": True}},
        old={"stop_timeout_s": 3},
        settings={"gpu_free_timeout_s": 20},
    )
    add(
        row,
        "old restarts by its own policy",
        CONFIRMED,
        state="PREPARED",
        inject=("restart-policy", "kill-old"),
        note="Restart=always, RestartSec=0.1; its main process is killed from outside as the switch begins",
    )
    add(row, "somebody starts old again all the time", CONFIRMED, before=("watchdog",), ci=True)

    row = "old's memory held for ever"
    held = r"GPUs and port 30000 are not free after 6 s"
    add(
        row,
        "by an unattributable pid, old has no room",
        STRANDED,
        state="OLD_STOPPED",
        inject=("foreign 40000",),
        cause=rf"{held}.*40000 MiB.*Then, on the way back",
        evidence="foreign",
        ci=True,
    )
    add(
        row,
        "by an unattributable pid, old has room",
        ROLLED_BACK,
        state="OLD_STOPPED",
        inject=("foreign 4000",),
        cause=rf"{held}.*nobody.*4000 MiB",
        evidence="foreign",
    )
    add(
        row,
        "by no visible pid, old has no room",
        STRANDED,
        state="OLD_STOPPED",
        inject=("unseen 40000",),
        cause=rf"{held}.*MiB used on GPU 0",
    )
    add(
        row,
        "by no visible pid, old has room",
        ROLLED_BACK,
        state="OLD_STOPPED",
        inject=("unseen 4000",),
        cause=rf"{held}.*MiB used on GPU 0",
    )

    row = "foreign process on a GPU"
    add(
        row,
        "foreign process before",
        REFUSED,
        before=("foreign 2000",),
        cause=r"belongs to neither.*nobody.*2000 MiB",
        evidence="foreign",
        ci=True,
    )
    add(
        row,
        "foreign process on the port before",
        REFUSED,
        before=("stop-old", "foreign-port"),
        old={"absent": True},
        cause=r"Port 30000 is held by",
    )
    for state in ("PREPARED", "OLD_STOPPED", "GPU_FREE"):
        words = r"belongs to|4000 MiB" if state != "GPU_FREE" else EXITED
        add(
            row,
            "foreign process, 4000 MiB,",
            ROLLED_BACK,
            state=state,
            inject=("foreign 4000",),
            cause=words,
            evidence="foreign",
            ci=state == "OLD_STOPPED",
        )
    add(
        row,
        "foreign process, 20000 MiB,",
        STRANDED,
        state="GPU_FREE",
        inject=("foreign 20000",),
        cause=EXITED,
        evidence="foreign",
    )
    for state in ("NEW_STARTED", "PROVED"):
        add(
            row,
            "foreign process, 2000 MiB,",
            CONFIRMED,
            state=state,
            inject=("wait-new-holds", "foreign 2000"),
            evidence="foreign",
            note="the new server has its memory already and is proved",
        )
    for state in BACK:
        add(
            row,
            "foreign process, 20000 MiB,",
            STRANDED,
            state=state,
            inject=("foreign 20000",),
            faults=EXITS,
            cause=EXITED,
            evidence="foreign",
        )

    row = "state can't be written"
    for fault, words in (("full", r"No space left"), ("read-only", r"Read-only")):
        add(row, f"disk {fault} before", REFUSED, before=(fault,), cause=words, ci=fault == "read-only")
        add(row, f"disk {fault} after the order", REFUSED, before=(f"{fault}-after-order",), cause=words)
        for state in FORWARD:
            add(
                row,
                f"disk {fault}",
                ROLLED_BACK,
                state=state,
                inject=(fault,),
                cause=words,
                ci=(fault, state) in (("full", "PREPARED"), ("read-only", "PROVED")),
            )
        for state in BACK:
            add(row, f"disk {fault}", ROLLED_BACK, state=state, inject=(fault,), faults=EXITS, cause=EXITED)

    row = "old can't be started again"
    add(
        row,
        "old exits on rollback",
        STRANDED,
        faults={**EXITS, "sglang": {"exit_at_start": True}},
        cause=rf"{EXITED}.*Then, on the way back.*sglang",
        ci=True,
        old={"ready_timeout_s": 6},
    )
    add(
        row,
        "old is never ready on rollback",
        STRANDED,
        faults={**EXITS, "sglang": {"never_ready": True}},
        cause=rf"{EXITED}.*Then, on the way back.*not ready within 6 s",
        old={"ready_timeout_s": 6},
    )
    add(
        row,
        "old's unit is masked",
        STRANDED,
        state="ROLLING_BACK",
        inject=("mask-old",),
        faults=EXITS,
        cause=rf"{EXITED}.*Then, on the way back.*masked",
    )
    add(
        row,
        "power cut, and old doesn't come up",
        STRANDED,
        state="NEW_STARTED",
        inject=("old-breaks", "power-cut"),
        evidence="boots",
        cause=r"restarted in NEW_STARTED.*Then, on the way back",
        old={"ready_timeout_s": 6},
    )

    row = "clock jump of a day"
    for sign, days in (("+1 day", 86400), ("-1 day", -86400)):
        for state in FORWARD:
            add(
                row,
                f"clock jump {sign}",
                CONFIRMED,
                before=("fake-clock",),
                state=state,
                inject=(f"clock {days}",),
                evidence=f"clock {days}",
                ci=(sign, state) == ("-1 day", "NEW_STARTED"),
            )
        add(
            row,
            f"clock jump {sign}",
            ROLLED_BACK,
            before=("fake-clock",),
            state="ROLLING_BACK",
            inject=(f"clock {days}",),
            evidence=f"clock {days}",
            faults=EXITS,
            cause=EXITED,
        )

    row = "second switch while one runs"
    add(
        row,
        "second order",
        CONFIRMED,
        state="NEW_STARTED",
        inject=("second-order",),
        evidence="second-refused",
        ci=True,
    )
    add(
        row,
        "second program",
        CONFIRMED,
        state="OLD_STOPPED",
        inject=("second-program",),
        evidence="second-refused",
    )

    row = "real wheel through site.yml"
    add(
        row,
        "site.yml, control node killed",
        CONFIRMED,
        state="NEW_STARTED",
        inject=("kill-play",),
        through="site",
        evidence="play-killed",
    )
    add(row, "site.yml, new engine exits", ROLLED_BACK, faults=EXITS, cause=EXITED, through="site")
    add(
        row,
        "site.yml, new engine exits and old can't come back",
        STRANDED,
        faults={**EXITS, "sglang": {"exit_at_start": True}},
        cause=rf"{EXITED}.*Then, on the way back",
        through="site",
    )
    add(
        row,
        "site.yml, foreign process after the preflight",
        REFUSED,
        before=("foreign-at-stage 2000",),
        cause=r"belongs to neither.*2000 MiB",
        evidence="foreign",
        through="site",
    )
    return made


CELLS = _cells()
