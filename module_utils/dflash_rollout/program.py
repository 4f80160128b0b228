"""The program on the host: `python3 -IB <rollout_root>/program [--state DIR] [--run DIR] VERB`.

switch            carry out the pending order, or resume it (what llm-switchover.service runs)
may-start UNIT    exit 0 when the unit may start now, 1 when not (asked by ExecCondition=)
serve-boot        start what the last confirmed switch chose (what llm-serving.service runs)
rollback          switch to the server before, follow it to its end, say the outcome
status            JSON: what serves, proved, and served before, the last switch, what to do; exit 1 if there is any
prove             prove what serves, or a server described with --server JSON; exit 1 if it isn't proved
probe FILE        one completion of what serves, as metrics for node_exporter; exit 1 if there is none (llm-probe.timer)
inspect FILE      what a drafter's tensors say and what they don't (inspect --help)
render FILE       a drafter's config.json with a source for every value (render --help)
"""

from __future__ import annotations

import sys

from . import gate

# Numbers to which systemd gives no name of its own. After the first three it doesn't start the program again.
EXIT_REFUSED, EXIT_ROLLED_BACK, EXIT_STRANDED, EXIT_RUNNING = 10, 11, 12, 13


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    options, words = _parse(sys.argv[1:] if arguments is None else arguments)
    state_dir, run_dir = options.get("--state", gate.STATE_DIR), options.get("--run", gate.RUN_DIR)
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb == "may-start" and len(rest) == 1:
        # First and alone: every start of a server waits for it, so nothing heavy is imported.
        allowed, why = gate.may_start(rest[0], state_dir, run_dir)
        print(f"{rest[0]} {'may' if allowed else 'may not'} start: {why}")
        return 0 if allowed else 1
    if verb in ("inspect", "render"):
        from . import drafter_cli

        return drafter_cli.main(words)
    verbs = {
        "switch": _switch,
        "serve-boot": _serve_boot,
        "rollback": _rollback,
        "status": _status,
        "prove": _prove,
        "probe": _probe,
    }
    if verb == "probe" and len(rest) == 1:
        options["FILE"] = rest.pop()
    elif verb not in verbs or verb == "probe" or rest:
        print(__doc__, file=sys.stderr)
        return 2
    from .errors import RolloutError
    from .store import Store

    try:
        return verbs[verb](Store(state_dir, run_dir), options)
    except RolloutError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED


def _parse(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    options: dict[str, str] = {}
    words = []
    waiting = list(arguments)
    while waiting:
        word = waiting.pop(0)
        if word in ("--state", "--run", "--server") and waiting:
            options[word] = waiting.pop(0)
        else:
            words.append(word)
    return options, words


def _switch(store, options: dict) -> int:
    import fcntl
    import os

    from .serving import outcome_text
    from .switchover import Switchover

    # Only what the lock needs: a state directory that can't be written is for the switch to refuse.
    os.makedirs(store.run_dir, mode=0o755, exist_ok=True)
    with open(store.lock_path, "a+", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            order = store.order() or {}
            lock.seek(0)
            print(
                f"A switch is running already: {order.get('id')}, since {order.get('requested_at')}, "
                f"ordered by {order.get('requested_by')}, {lock.read().strip()}",
                file=sys.stderr,
            )
            return EXIT_RUNNING
        lock.truncate(0)
        lock.write(f"pid {os.getpid()}\n")
        lock.flush()
        record = Switchover(store).run()
    if record is None:
        print("There is no order.")
        return 0
    # The log lines below it stand in the journal already.
    print(outcome_text(record).splitlines()[0], flush=True)
    return _exit_status(record["state"])


def _exit_status(outcome: str) -> int:
    from .switch_state import REFUSED, ROLLED_BACK, STRANDED

    return {REFUSED: EXIT_REFUSED, ROLLED_BACK: EXIT_ROLLED_BACK, STRANDED: EXIT_STRANDED}.get(outcome, 0)


def _rollback(store, options: dict) -> int:
    from .errors import RolloutError
    from .orders import order_switch
    from .serving import way_back
    from .store import SETTINGS_SPEC, complete

    state = store.serving()
    if state is None or state["previous"] is None:
        raise RolloutError(
            "This host has no server to go back to",
            found=f"{state['serving']['unit']} serves, and none before it"
            if state
            else "no confirmed switch",
            remedy="status says what serves; to take another server, run site.yml",
        )
    problem = way_back(store)["problem"]
    if problem:
        raise RolloutError(problem)
    print(f"From {state['serving']['unit']} back to {state['previous']['unit']}", flush=True)
    _, result = order_switch(
        check_mode=False,
        old=state["serving"],
        new=state["previous"],
        # Who goes back does so because what serves is not well: that it can't be proved is no reason to stay.
        settings=complete(SETTINGS_SPEC, {"accept_unproven_old": True}),
        state_dir=store.state_dir,
        id=None,
        follow_timeout=float("inf"),
    )
    print(result.get("msg") or result["outcome"])
    return _exit_status(result["outcome"])


def _serve_boot(store, options: dict) -> int:
    from .serving import start_at_boot

    print(start_at_boot(store))
    return 0


def _status(store, options: dict) -> int:
    import json

    from .serving import inspect_serving

    answer = inspect_serving(state_dir=store.state_dir, run_dir=store.run_dir, prove=store.running() is None)
    print(json.dumps(answer, indent=1))
    return 1 if answer["advice"] else 0


def _prove(store, options: dict) -> int:
    import json

    from .errors import RolloutError
    from .proof import prove
    from .store import SERVER_SPEC, complete

    if "--server" in options:
        server = complete(SERVER_SPEC, json.loads(options["--server"]))
    else:
        server = (store.serving() or {}).get("serving")
    if server is None:
        raise RolloutError(
            "It isn't known here what serves",
            found="no confirmed switch on this host",
            remedy='describe the server: prove --server \'{"name": …, "unit": …, "port": …}\'',
        )
    result = prove(server)
    print(json.dumps({"server": server, **result.as_dict()}, indent=1))
    return 0 if result.proved else 1


def _probe(store, options: dict) -> int:
    from .errors import RolloutError
    from .probe import probe

    try:
        text, result = probe(store, options["FILE"])
    except OSError as error:
        raise RolloutError("What the probe found can't be written", found=str(error)) from error
    print(text)
    return 0 if result is None or result.proved else 1
