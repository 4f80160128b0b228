#!/usr/bin/env python3
"""The roll-out on a real GPU: pack here, carry, then prepare and run on a machine with a GPU. See README.md.

    proof.py pack --pair DIR [--into DIR] [--uv PROGRAM]      where packages can be had
    proof.py receive PIECES                                    on the GPU machine, once for each transfer
    proof.py prepare                                           there, once
    proof.py run --out DIR [--until SECONDS] PHASE…            there; phases: see README.md

Standard library only, root, Python >= 3.11.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "module_utils"))

import measure  # noqa: E402
import pack  # noqa: E402
import peak  # noqa: E402
from dflash_rollout.switch_state import seconds_in_states  # noqa: E402
from guest import SSH_PORT, Guest  # noqa: E402

HERE = Path(__file__).resolve().parent
# Not below /tmp, /var/tmp or a home: the sandbox of the server empties those.
BASE = Path("/srv/gpu-proof")
# A tmpfs: layers that are stacked over / can't lie in it.
MEMORY = BASE / "memory"
DATA = MEMORY / "data"
RELEASE = MEMORY / "release"
# What train.py wrote, if it ran.
TRAINED = DATA / "trained"
# A rehearsal without a GPU has others: simulations, a venv, a system.
LAYERS = os.environ.get("GPU_PROOF_LAYERS", f"{RELEASE}:{DATA}/tree:/").split(":")
IMAGE_PYTHON = os.environ.get("GPU_PROOF_PYTHON", "/opt/torch/.venv/bin/python3")
PORT = 30000
MODEL_ID = "tiny"
STATE = "/var/lib/vllm-dflash"
TINY = {
    "drafter_source": f"{DATA}/pair/drafter/model.safetensors",
    "drafter_profile": {
        "mask_token_id": 256,
        "block_size": 8,
        "target_layer_ids": [1, 3, 5, 7, 9],
        "layer_types": ["full_attention"] * 5,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    "vllm_service_target": f"{DATA}/pair/target",
    "vllm_service_args": {
        "tensor-parallel-size": 1,
        "max-model-len": 4096,
        "max-num-seqs": 32,
        "max-num-batched-tokens": 8192,
    },
    "vllm_service_speculative_config": {"num_speculative_tokens": 7},
}


def log(text: str) -> None:
    """One line with the time of day."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


# --- preparing -----------------------------------------------------------------------------------------


def receive(args: argparse.Namespace) -> int:
    """Keep a piece that was carried here."""
    into = BASE / "pieces"
    into.mkdir(parents=True, exist_ok=True)
    for piece in args.pieces.rglob("piece-*"):
        shutil.copyfile(piece, into / piece.name)
        log(f"received {piece.name}, {piece.stat().st_size} bytes")
    return 0


def prepare(_: argparse.Namespace) -> int:
    """Unpack the pieces, build the venv and the system layer."""
    begin = time.monotonic()
    MEMORY.mkdir(exist_ok=True)
    if not os.path.ismount(MEMORY):
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=0755,size=16g", "tmpfs", MEMORY], check=True)
    pack.unpack(BASE / "pieces", DATA)
    log(f"unpacked after {time.monotonic() - begin:.1f} s")
    kept = pack.keep_what_is_there(DATA / "tree")
    log(f"system layer: {kept} files that this machine lacks")
    shutil.rmtree(RELEASE, ignore_errors=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    image = subprocess.run(
        [IMAGE_PYTHON, "-c", where], capture_output=True, text=True, check=True
    ).stdout.strip()
    venv = pack.assemble_venv(DATA / "site", RELEASE, image)
    for directory, folders, files in os.walk(DATA / "pair"):
        for name in (*folders, *files, "."):
            path = Path(directory, name)
            path.chmod(0o755 if path.is_dir() else 0o644)
    log(f"venv {venv.name} after {time.monotonic() - begin:.1f} s")
    return 0


# --- one session of runs ---------------------------------------------------------------------------------


class Session:
    """A guest with the stand-in, the watchers, and what was found so far."""

    def __init__(self, out: Path, until: float, gib: float):
        self.out, self.gib = out, gib
        self.deadline = time.monotonic() + until
        # A session may go on in a guest that an earlier one kept.
        kept = out / "results.json"
        self.results: dict[str, object] = json.loads(kept.read_text()) if kept.exists() else {}
        self.guest = Guest(BASE / "guest", [Path(layer) for layer in LAYERS])
        self.watchers: list[subprocess.Popen] = []
        self.login = {"ansible_user": "ops", "ansible_become": True}

    def left(self) -> float:
        """Seconds until this session has to end."""
        return self.deadline - time.monotonic()

    def save(self) -> None:
        """What was found so far; after each step, since the machine may go at any time."""
        (self.out / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")

    def note(self, phase: str, **facts: object) -> None:
        """Add to the results of a phase."""
        self.results.setdefault(phase, {}).update(facts)  # type: ignore[union-attr]
        self.save()

    # --- start and end -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Watch the GPU, boot the guest, install the stand-in's unit."""
        self.guest.down()  # what an interrupted run left
        self.guest.mount()
        # The simulated system of a rehearsal has a unit of its own.
        unit = self.guest.root / "etc/systemd/system/sglang.service"
        if not unit.exists():
            unit.write_text(
                "[Unit]\nDescription=Stand-in for SGLang\n[Service]\n"
                f"ExecStart={IMAGE_PYTHON} {HERE}/standin.py --model {DATA}/pair/target --model-id {MODEL_ID}"
                f" --port {PORT} --gib {self.gib}\nRestart=always\nRestartSec=5\n"
                "[Install]\nWantedBy=multi-user.target\n"
            )
        seconds = self.guest.boot([str(DATA), str(REPO)])
        self.watch()
        about = {
            "date": time.strftime("%Y-%m-%d"),
            "kernel": os.uname().release,
            "gpu": self.guest.run(
                "nvidia-smi",
                "--query-gpu=name,memory.total,driver_version,compute_cap",
                "--format=csv,noheader",
            ).strip(),
            "systemd": self.guest.run("systemctl", "--version").split("\n")[0],
            "failed_units": self.guest.run(
                "systemctl", "--failed", "--plain", "--no-legend", check=False
            ).split("\n"),
            "boot_seconds": round(seconds, 1),
        }
        venv = self.guest.root / f"opt/vllm-dflash/venvs/{pack.lock_digest()}"
        if (venv / "bin/vllm").exists():
            about["not_as_locked"] = pack.differences(venv)
            begin = time.monotonic()
            probe = subprocess.run(
                self.guest.command(f"/opt/vllm-dflash/venvs/{venv.name}/bin/python", "-I", "-B", "-", "0.20.1"),
                input=(REPO / "module_utils/dflash_rollout/venv_probe.py").read_text(),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            about["probe"] = {
                "rc": probe.returncode,
                "said": (probe.stdout.strip().splitlines() or [""])[-1],
                "stderr": probe.stderr[-1500:],
                "seconds": round(time.monotonic() - begin, 1),
            }
        about["sudo"] = self.check_sudo()
        about["ensurepip"] = self.check_ensurepip()
        self.note("machine", **about)
        if "probe" in about and '"faults": []' not in about["probe"]["said"]:
            raise SystemExit(f"the venv doesn't pass the role's probe: {about['probe']}")
        log(f"guest up: {json.dumps({k: v for k, v in about.items() if k != 'not_as_locked'})[:1500]}")
        self.guest.run("systemctl", "enable", "--now", "sglang.service")
        log(f"stand-in ready after {self.wait_model(MODEL_ID, 90):.1f} s")

        # The switch attributes GPU memory by pid: does nvidia-smi say those of the guest?
        pids = self.guest.run(
            "nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
        )
        main = self.guest.run("systemctl", "show", "--value", "--property=MainPID", "sglang.service").strip()
        self.note("machine", stand_in={"main_pid": main, "nvidia_smi_in_the_guest": pids.splitlines()})
        log(f"stand-in is pid {main} in the guest, nvidia-smi says {pids.splitlines()}")

    def watch(self) -> None:
        """Write down the GPU's memory and who holds it, until `end`."""
        query = "nvidia-smi", "--format=csv,noheader,nounits"
        for name, what, every in (
            ("gpu-memory.csv", "--query-gpu=timestamp,memory.used", 100),
            ("gpu-processes.csv", "--query-compute-apps=timestamp,pid,process_name,used_memory", 500),
        ):
            with (self.out / name).open("a") as file, open(os.devnull, "wb") as null:
                try:
                    watcher = subprocess.Popen([*query, what, f"-lms={every}"], stdout=file, stderr=null)
                except FileNotFoundError:
                    continue
                self.watchers.append(watcher)

    def check_sudo(self) -> str:
        """Log in as ops, who must sudo; as root where the image's PAM and the carried sudo don't go together."""
        tried = self.guest.run(
            "runuser", "-u", "ops", "--", "sh", "-c", "sudo -n true 2>&1 && echo yes", check=False
        )
        if tried.strip().endswith("yes"):
            return "works"
        self.guest.run("sh", "-c", "cp /root/.ssh/id_ed25519.pub /root/.ssh/authorized_keys")
        self.login = {"ansible_user": "root", "ansible_become": False}
        return f"doesn't work, so Ansible logs in as root: {tried.strip()[-300:]}"

    def check_ensurepip(self) -> str:
        """Preflight wants what makes a venv. Here the venv is there already: an empty module says so."""
        look = "import importlib.util as u, os, venv; print(u.find_spec('ensurepip') is not None, os.path.dirname(os.__file__))"
        there, library = self.guest.run("/usr/bin/python3", "-c", look).split()
        if there == "True":
            return "the machine's own"
        stand_in = self.guest.root / library.lstrip("/") / "ensurepip/__init__.py"
        stand_in.parent.mkdir()
        stand_in.write_text(
            '"""A stand-in: the image lacks ensurepip, and this proof brings its venv along."""\n'
        )
        return "a stand-in"

    def end(self, keep: bool = False) -> None:
        """Write the journal, take everything away; with `keep` the guest stays for a next session."""
        for watcher in self.watchers:
            watcher.kill()
            watcher.wait()
        if self.guest.is_on():
            words = "journalctl", "--no-pager", "--output=short-precise"
            with (self.out / "journal.log").open("w") as file:
                subprocess.run(["timeout", "20", *self.guest.command(*words)], stdout=file, check=False)
        if not keep:
            self.guest.down()

    @contextlib.contextmanager
    def quiet(self):
        """While speed is measured nobody asks the driver ten times a second."""
        for watcher in self.watchers:
            watcher.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            for watcher in self.watchers:
                watcher.send_signal(signal.SIGCONT)

    # --- pieces of runs ------------------------------------------------------------------------------------

    def wait_model(self, model: str, seconds: float, port: int = PORT, unit: str = "sglang.service") -> float:
        """Seconds until /v1/models names `model` there. Raises at once when the unit has failed."""
        begin = time.monotonic()
        while time.monotonic() - begin < min(seconds, self.left()):
            try:
                answer = json.loads(measure.ask(f"http://127.0.0.1:{port}", "/v1/models", timeout=2))
                if model in [found["id"] for found in answer["data"]]:
                    return time.monotonic() - begin
            except (OSError, ValueError):
                state = self.guest.run("systemctl", "is-failed", unit, check=False).strip()
                if state == "failed":
                    tail = self.guest.run(
                        "journalctl", "--no-pager", "-o", "cat", "-n", "12", "-u", unit, check=False
                    )
                    raise RuntimeError(f"{unit} failed: {tail[-1500:]}") from None
            time.sleep(0.1)
        waited = time.monotonic() - begin
        raise RuntimeError(f"no {model} on port {port} within {waited:.0f} s")

    def inventory(self, variables: dict) -> Path:
        """An inventory of the one guest, over ssh, with sudo."""
        host = {
            "ansible_host": "127.0.0.1",
            "ansible_port": SSH_PORT,
            **self.login,
            "ansible_python_interpreter": "/usr/bin/python3",
            "rollout_records": "/root/records",
            **variables,
        }
        path = self.guest.root / "root/inventory.yml"
        path.write_text(json.dumps({"all": {"children": {"gpu_hosts": {"hosts": {"gpu1": host}}}}}, indent=1))
        return path

    def play(self, name: str, playbook: str, variables: dict, seconds: float = 420) -> dict[str, object]:
        """Run a playbook from the guest (its own control node); rc, seconds, and the record of the switch."""
        self.inventory(variables)
        env = {
            "PYTHONPATH": f"{DATA}/control",
            "ANSIBLE_CONFIG": f"{REPO}/ansible.cfg",
            "ANSIBLE_COLLECTIONS_PATH": f"{DATA}/control",
            "ANSIBLE_CALLBACKS_ENABLED": "ansible.posix.profile_tasks",
            "ANSIBLE_HOME": "/root/.ansible",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        limit = max(10, min(seconds, self.left() - 5))
        words = (
            *(
                "timeout",
                "--kill-after=5",
                str(int(limit)),
                os.environ.get("GPU_PROOF_CONTROL", "/usr/bin/python3"),
            ),
            *(
                "-c",
                "import sys; sys.argv[0] = 'ansible-playbook'; from ansible.cli.playbook import main; sys.exit(main())",
            ),
            *("-v", "-i", "/root/inventory.yml", playbook),
        )
        # A new order gets a new record: the old one must not be taken for it.
        before = self.guest.read_json(f"{STATE}/switch/record.json") or {}
        begin = time.monotonic()
        with (self.out / f"ansible-{name}.log").open("w") as file:
            rc = subprocess.run(
                self.guest.command(*words, env=env, cwd=str(REPO)), stdout=file, stderr=file, check=False
            ).returncode
        taken = round(time.monotonic() - begin, 1)
        record = self.guest.read_json(f"{STATE}/switch/record.json") or {}
        fresh = record if record.get("id") != before.get("id") else {}
        (self.out / f"record-{name}.json").write_text(json.dumps(fresh, indent=1) + "\n")
        text = (self.out / f"ansible-{name}.log").read_text()
        found = {
            "rc": rc,
            "seconds": taken,
            "state": fresh.get("state"),
            "cause": fresh.get("cause"),
            # Of every switch of this run: a gate that goes back makes a second one, whose record takes the first one's place.
            "outages_s": [float(seconds) for seconds in re.findall(r"^    outage_s: ([0-9.]+)$", text, re.M)],
            "switch": seconds_in_states(fresh) if fresh else [],
            "launch_check": self.launch_check(text),
            "gpu_memory": self.memory_of_states(fresh),
            "acceptance": said(text, "Say how well it drafts"),
            "vram_fit": said(text, "Show where the memory of a GPU goes"),
        }
        log(f"{name}: {playbook} rc {rc}, {taken} s, {found['state']}: {found['cause'] or found['switch']}")
        if rc and not fresh:
            log(text[-2500:])
        return found

    def launch_check(self, text: str) -> dict[str, object]:
        """What the launch check of an ansible log (-v) said, and the memory of the GPU meanwhile."""
        part, _, rest = text.partition("Check the launch with vLLM itself")[2].partition("\nTASK")
        keys = "seconds probe_seconds max_rss_mib cuda_initialized scheduled_tokens tensors_loaded tensors_expected"
        found: dict[str, object] = {}
        for key in keys.split():
            if match := re.search(rf"^\s*{key}: *(\S.*)$", part, re.M):
                found[key] = match[1]
        # profile_tasks prints when a task begins, to the second.
        stamp = r"^\w+ (\d+ \w+ \d{4}  \d\d:\d\d:\d\d) [+-]\d{4} "
        begin, end = re.search(stamp, part, re.M), re.search(stamp, rest, re.M)
        if found and begin and end:
            when = [time.mktime(time.strptime(match[1], "%d %B %Y  %H:%M:%S")) for match in (begin, end)]
            found["gpu_memory_mib"] = measure.gpu_memory(self.out / "gpu-memory.csv", *when)
        return found

    def memory_of_states(self, record: dict) -> dict[str, object]:
        """MiB on the GPU in each state of a switch. The record knows seconds since boot."""
        now = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        rows = record.get("states") or []
        return {
            first["state"]: measure.gpu_memory(
                self.out / "gpu-memory.csv", first["boot_s"] + now, following["boot_s"] + now
            )
            for first, following in itertools.pairwise(rows)
        }

    def phases_of_start(self, unit: str, since: float) -> dict[str, object]:
        """vLLM's own account of its last start, from the journal since a time (unix)."""
        text = self.guest.run(
            "journalctl", "--no-pager", "-o", "short-unix", "-u", unit, f"--since=@{int(since)}", check=False
        )
        return start_phases(text)


def said(text: str, task: str) -> list[str]:
    """The message of the last debug task of that name in an ansible log, by lines."""
    part = text.rpartition(f"{task}] *")[2] if f"{task}] *" in text else ""
    lines = part.partition("\nTASK")[0].partition("\nPLAY")[0].partition("msg:")[2].splitlines()
    return [line.strip(" -'").replace("''", "'") for line in lines if line.strip()]


START_LINES = {
    "engine_begins": r"Initializing a V1 LLM engine",
    "weights_begin": r"Starting to load model",
    "model_loading_s": r"Model loading took .* and ([0-9.]+) seconds",
    "model_memory_gib": r"Model loading took ([0-9.]+) ?Gi?B",
    "compile_cached": r"Directly load (?:AOT compilation|the compiled graph)",
    "compile_s": r"torch\.compile (?:and initial profiling/warmup run together )?took ([0-9.]+) s",
    "available_kv_gib": r"Available KV cache memory: ([0-9.]+) GiB",
    "kv_tokens": r"GPU KV cache size: ([0-9,]+) tokens",
    "concurrency": r"Maximum concurrency for .*: ([0-9.]+)x",
    "profile_s": r"Initial profiling/warmup run took ([0-9.]+) s",
    "graph_capture": r"Graph capturing finished in ([0-9.]+) secs?, took (-?[0-9.]+) GiB",
    "engine_init_s": r"init engine .* took ([0-9.]+) s(?: \(compilation: ([0-9.]+) s)?",
    "ready": r"Application startup complete",
}


def start_phases(text: str) -> dict[str, object]:
    """Times (seconds from the first line of the start) and numbers out of vLLM's log, in `short-unix` form."""
    lines = [line for line in text.splitlines() if re.match(r"\d+\.\d+ ", line)]
    # Only the last start.
    begins = [place for place, line in enumerate(lines) if "Starting vllm-dflash@" in line]
    lines = lines[begins[-1] :] if begins else lines
    found: dict[str, object] = {}
    if not lines:
        return found
    first = float(lines[0].split()[0])
    for line in lines:
        at = round(float(line.split()[0]) - first, 2)
        for name, pattern in START_LINES.items():
            if match := re.search(pattern, line):
                value = list(match.groups()) if match.groups() else None
                found.setdefault(name, []).append({"at": at, "value": value})  # type: ignore[union-attr]
    return found


# --- phases ------------------------------------------------------------------------------------------------


def rollout(session: Session) -> None:
    """Stand-in → vLLM with DFlash by site.yml, a second run that changes nothing, and the outage seen outside."""
    probe = measure.Probe(session.out / "probe-rollout.csv", f"http://127.0.0.1:{PORT}", MODEL_ID)
    probe.start()
    begin = time.time()
    found = session.play("rollout", "site.yml", TINY)
    time.sleep(1)
    probe.stop()
    session.note("rollout", first=found, outages=measure.outages(session.out / "probe-rollout.csv"))
    release = (session.guest.read_json(f"{STATE}/serving.json") or {}).get("serving") or {}
    if found["state"] != "CONFIRMED":
        raise RuntimeError("not CONFIRMED")
    session.note("rollout", start=session.phases_of_start(release["unit"], begin))
    # Some tokens, so that the counters say something of the very server that was rolled out.
    prompts = json.loads((DATA / "pair/prompt_ids.json").read_text())
    with session.quiet():
        served = measure.load(f"http://127.0.0.1:{PORT}", MODEL_ID, prompts, 256, 1)
    served.pop("texts")
    (session.out / "metrics.txt").write_bytes(measure.ask(f"http://127.0.0.1:{PORT}", "/metrics"))
    session.note("rollout", served=served, second_run=session.play("second", "site.yml", TINY, 120))


def gate(session: Session) -> None:
    """The same drafter with a wrong mask token, with the acceptance gate set to enforce: it has to go back.

    What it is compared with is what the gate itself measured of the right one in the second run of `rollout`.
    """
    wrong = {
        **TINY,
        "drafter_profile": {**TINY["drafter_profile"], "mask_token_id": 257},  # type: ignore[dict-item]
        "switchover_acceptance": "enforce",
    }
    before = session.guest.read_json(f"{STATE}/serving.json") or {}
    found = session.play("gate", "site.yml", wrong, 240)
    after = session.guest.read_json(f"{STATE}/serving.json") or {}
    units = [(serving.get("serving") or {}).get("unit") for serving in (before, after)]
    session.note("gate", wrong_mask=found, serving_before=units[0], serving_after=units[1])


def back(session: Session) -> None:
    """`rollback.yml` to the stand-in, unless it still serves."""
    serving = session.guest.read_json(f"{STATE}/serving.json")
    if not serving:
        return
    before = serving.get("previous") or {}
    if before.get("unit") != "sglang.service":
        raise RuntimeError(
            f"the way back leads to {before.get('unit')}, not to the stand-in: run this before gate"
        )
    found = session.play("rollback", "playbooks/rollback.yml", TINY, 120)
    session.note("back", rollback=found)
    if found["state"] != "CONFIRMED":
        raise RuntimeError("the stand-in doesn't serve again")


def kill_warmup(session: Session) -> None:
    """A roll-out whose new server is killed while it warms up."""
    _killed(session, "kill_warmup", "engine holds memory")


def kill_engine(session: Session) -> None:
    """A roll-out whose new server loses its engine process as soon as the port answers."""
    _killed(session, "kill_engine", "port answers")


def _killed(session: Session, name: str, when: str) -> None:
    seen: dict[str, object] = {}
    killer = threading.Thread(target=_kill_new, args=(session, when, seen), daemon=True)
    killer.start()
    found = session.play(name, "site.yml", TINY, 240)
    killer.join(5)
    left = session.guest.run(
        "nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"
    )
    words = "--all", "--plain", "--no-legend", "vllm-dflash@*", "sglang*"
    units = session.guest.run("systemctl", "list-units", *words, check=False)
    survivors = session.guest.run("pgrep", "-af", "vllm serve|EngineCore", check=False)
    session.note(
        name,
        **{
            "killed_when": when,
            "kill": seen,
            **found,
            "on_the_gpu_after": left.splitlines(),
            "units_after": units.splitlines(),
            "workers_after": survivors.splitlines(),
        },
    )


def again(session: Session) -> None:
    """A roll-out that is left alone: what comes next wants the right drafter to serve."""
    session.note("again", **session.play("again", "site.yml", TINY, 240))


def _kill_new(session: Session, when: str, seen: dict[str, object]) -> None:
    """SIGKILL to the new server's main process in warm-up, or to its engine as soon as the port answers."""
    try:
        record: dict = {}
        while record.get("state") != "NEW_STARTED":
            if session.left() < 20:
                raise TimeoutError("no new server was started while there was time")
            time.sleep(0.05)
            record = session.guest.read_json(f"{STATE}/switch/record.json") or {}
        # Only from here: staging and the old server's stop take what they take.
        end = time.monotonic() + 200
        unit = record["new"]["unit"]
        while time.monotonic() < end:
            if when == "port answers":
                try:
                    measure.ask(f"http://127.0.0.1:{PORT}", "/v1/models", timeout=1)
                    break
                except OSError:
                    time.sleep(0.02)
                    continue
            apps = session.guest.run(
                "nvidia-smi",
                "--query-compute-apps=pid,process_name,used_memory",
                "--format=csv,noheader,nounits",
            )
            held = [line.split(", ") for line in apps.splitlines()]
            if any(int(line[-1]) > 2000 for line in held if line[-1].isdigit()):
                seen["gpu_at_kill"] = held
                break
            time.sleep(0.1)
        else:
            raise TimeoutError(f"not within 200 s of its start: {when}")
        main = session.guest.run("systemctl", "show", "--value", "--property=MainPID", unit).strip()
        # By the name that vLLM gives it; nothing else in the guest has an engine.
        engine = session.guest.run("pgrep", "--full", "VLLM::EngineCore", check=False).split()
        if when == "port answers" and not engine:
            raise RuntimeError("the port answers, and no process is called VLLM::EngineCore")
        victim = engine[0] if when == "port answers" else main
        seen.update(main=main, engine=engine, victim=victim, at=time.time())
        session.guest.kill(int(victim))
    except Exception:  # in a thread: the result has to say it
        seen["error"] = traceback.format_exc()


def variants(session: Session) -> None:
    """Right and wrong configs of the same drafter, and none: same prompts, one server at a time.

    `right` is the release that the roles made of TINY; the others are its files with one thing changed.
    """
    # Not what serves: after a gate that went wrong this is the wrong one.
    mask = TINY["drafter_profile"]["mask_token_id"]  # type: ignore[index]
    configs = (session.guest.root / "opt/vllm-dflash/releases").glob("*/drafter/config.json")
    release = next(
        (
            path.parents[1]
            for path in sorted(configs)
            if json.loads(path.read_text())["dflash_config"]["mask_token_id"] == mask
        ),
        None,
    )
    if release is None:
        raise RuntimeError("no release to vary: run the phase rollout before")
    right = json.loads((release / "drafter/config.json").read_text())
    weights = os.readlink(release / "drafter/model.safetensors")
    guess = [round(i * (12 - 1) / 4) for i in range(5)]
    changes: dict[str, dict | None] = {
        "none": None,
        "right": {},
        "ids_unshifted": {"eagle_aux_hidden_state_layer_ids": None},
        "wrong_mask": {"dflash_config": {**right["dflash_config"], "mask_token_id": 257}},
        "guessed_taps": {
            "dflash_config": {**right["dflash_config"], "target_layer_ids": guess},
            "eagle_aux_hidden_state_layer_ids": [tap + 1 for tap in guess],
        },
    }
    drafters = {
        name: None if change is None else (weights, {**right, **change}) for name, change in changes.items()
    }
    short = json.loads((DATA / "pair/prompt_ids.json").read_text())
    loads = {
        "one_at_a_time": (short, 256, 1),
        "short": (measure.source_prompts(96, 200), 256, 16),
        "long": (measure.source_prompts(48, 3000), 512, 16),
    }
    _side_by_side(session, "variants", release, drafters, loads)


def trained(session: Session) -> None:
    """The pair of train.py: its sliding drafter by site.yml, then no drafter, the full one and the sliding one side by side.

    Inside the window: prompt and answer together are shorter than it. Beyond: the prompt alone is several windows long.
    """
    profiles = json.loads((TRAINED / "profiles.json").read_text())
    window = profiles["drafter-sliding"]["sliding_window"]
    found = session.play("trained", "site.yml", trained_pair("drafter-sliding"), 300)
    text = (session.out / "ansible-trained.log").read_text()
    warned = sorted(set(re.findall(r"[^\"'\n]*ignores the drafter's sliding window[^\"'\n]*", text)))
    training = json.loads((TRAINED / "training.json").read_text())
    session.note("trained", sliding=found, warned=warned, training=training, window=window)
    if found["state"] != "CONFIRMED":
        raise RuntimeError("not CONFIRMED")
    unit = (session.guest.read_json(f"{STATE}/serving.json") or {})["serving"]["unit"]
    name = unit.partition("@")[2].removesuffix(".service")
    release = session.guest.root / "opt/vllm-dflash/releases" / name
    drafters: dict[str, tuple[str, dict] | None] = {"none": None}
    for name, profile in profiles.items():
        told = session.out / f"profile-{name}.json"
        told.write_text(json.dumps(profile))
        rendered = subprocess.run(
            [
                *(sys.executable, "-m", "dflash_rollout.drafter_cli", "render", TRAINED / name),
                *("--target", TRAINED / "target", "--profile", told),
            ],
            env={**os.environ, "PYTHONPATH": str(REPO / "module_utils")},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        drafters[name] = (f"{TRAINED}/{name}/model.safetensors", json.loads(rendered.stdout))
    inside = window // 3
    loads = {
        "inside_the_window": (measure.source_prompts(96, inside), window - inside - 8, 16),
        "beyond_the_window": (measure.source_prompts(96, 5 * window), 2 * window, 16),
        "beyond_one_at_a_time": (measure.source_prompts(24, 5 * window), 2 * window, 1),
    }
    _side_by_side(session, "trained", release, drafters, loads)


def trained_pair(drafter: str) -> dict[str, object]:
    """Variables of the pair that train.py wrote, with one of its drafters."""
    profile = json.loads((TRAINED / "profiles.json").read_text())[drafter]
    return {
        **TINY,
        "drafter_source": f"{TRAINED}/{drafter}/model.safetensors",
        "drafter_profile": profile,
        "vllm_service_target": f"{TRAINED}/target",
    }


def _side_by_side(
    session: Session,
    phase: str,
    release: Path,
    drafters: dict[str, tuple[str, dict] | None],
    loads: dict[str, tuple[list, int, int]],
) -> None:
    """Servers like a release's with other drafters (weights and config; None for none), all on one card, each measured alone.

    What served is stopped before and started again after. loads: prompts, tokens of an answer, requests at a time.
    """
    serving = (session.guest.read_json(f"{STATE}/serving.json") or {}).get("serving") or {}
    for unit in (serving.get("unit"), "sglang.service"):
        if unit:
            session.guest.run("systemctl", "stop", unit, check=False)
    where = f"/opt/vllm-dflash/releases/{release.name}"
    flags = json.loads(_yaml_as_json(session, f"{where}/vllm.yaml"))
    work = session.guest.root / f"var/cache/vllm-dflash/{phase}"
    ports = {}
    begin = time.time()
    for number, (name, drafter) in enumerate(drafters.items()):
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        inside = f"/var/cache/vllm-dflash/{phase}/{name}"
        mine = {key: value for key, value in flags.items() if key not in ("port", "speculative-config")}
        mine |= {"port": 31000 + number, "served-model-name": [name], "gpu-memory-utilization": 0.15}
        # Fixed, so that servers starting side by side don't measure one another.
        mine["kv-cache-memory-bytes"] = 4 << 30
        if drafter is not None:
            weights, config = drafter
            kept = {key: value for key, value in config.items() if value is not None}
            (folder / "config.json").write_text(json.dumps(kept))
            if not (folder / "model.safetensors").is_symlink():
                (folder / "model.safetensors").symlink_to(weights)
            mine["speculative-config"] = {**flags["speculative-config"], "model": inside}
        (folder / "vllm.yaml").write_text(json.dumps(mine))
        session.guest.run("chown", "-R", "vllm-dflash:vllm-dflash", inside)
        ports[name] = 31000 + number
        session.guest.run(
            *("systemd-run", "--quiet", f"--unit={phase}-{name}", *_as_release(where)),
            *("--property=KillMode=control-group", "--property=TimeoutStopSec=10"),
            *(f"{where}/venv/bin/vllm", "serve", "--config", f"{inside}/vllm.yaml"),
        )
    for name, port in ports.items():
        try:
            session.wait_model(name, 150, port, f"{phase}-{name}.service")
        except RuntimeError as error:
            session.note(phase, **{name: {"error": str(error)}})
    log(f"{phase} started after {time.time() - begin:.1f} s")
    texts: dict[str, list[str]] = {}
    for name, port in ports.items():
        base = f"http://127.0.0.1:{port}"
        if session.left() < 25 or name in session.results.get(phase, {}):
            continue
        with session.quiet():
            prompts, tokens, _ = next(iter(loads.values()))
            measure.load(base, name, prompts[:4], min(tokens, 64), 1)
            found = {part: measure.load(base, name, *load) for part, load in loads.items()}
        texts[name] = next(iter(found.values()))["texts"]  # type: ignore[assignment]
        for part in found.values():
            part.pop("texts")
        reference = texts.get("none")
        if reference:
            found["same_text_as_without"] = sum(a == b for a, b in zip(texts[name], reference, strict=True))  # type: ignore[assignment]
        session.note(phase, **{name: found})
        log(f"{phase} {name}: {json.dumps(found)[:700]}")
    for name in ports:
        session.guest.run("systemctl", "stop", f"{phase}-{name}.service", check=False)
    # As it was: the next phase rolls out from a server that answers.
    unit = serving.get("unit") or "sglang.service"
    session.guest.run("systemctl", "start", unit, check=False)
    if session.left() < 90:
        session.note(phase, server_again="started, not waited for: no time left")
        return
    seconds = session.wait_model(serving.get("model_id") or MODEL_ID, 120, unit=unit)
    session.note(phase, server_again=f"{unit} answers after {seconds:.1f} s")


def calibrate(session: Session) -> None:
    """playbooks/calibrate.yml: without a drafter, and two numbers of drafted tokens, at 1 and 16 requests."""
    pair = trained_pair("drafter") if TRAINED.exists() else TINY
    chosen = "/root/calibrated.yml"
    variables = {
        **pair,
        "calibrate_num_speculative_tokens": [3],
        "calibrate_concurrencies": [1, 16],
        "calibrate_file": chosen,
    }
    found = session.play("calibrate", "playbooks/calibrate.yml", variables, 420)
    written = session.guest.run("cat", chosen, check=False)
    session.note("calibrate", **found, file=written.splitlines())


STARTS = {
    "as rendered": "",
    "engine forked": "Environment=VLLM_WORKER_MULTIPROC_METHOD=fork",
    "graphs not estimated": "Environment=VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0",
}


def _start_with(session: Session, line: str) -> dict[str, object]:
    """Start what serves again with one more line in its unit: seconds to the port and to the first completion; vLLM's account."""
    serving = (session.guest.read_json(f"{STATE}/serving.json") or {})["serving"]
    unit, model = serving["unit"], serving["model_id"]
    folder = f"/run/systemd/system/{unit}.d"
    session.guest.run("mkdir", "-p", folder)
    write = f"printf '%s\\n' '[Service]' \"$1\" >{folder}/90-proof.conf"
    session.guest.run("sh", "-c", write, "sh", line)
    try:
        session.guest.run("systemctl", "daemon-reload")
        session.guest.run("systemctl", "stop", unit, timeout=60)
        since, begin = time.time(), time.monotonic()
        session.guest.run("systemctl", "start", unit, timeout=60)
        ready = session.wait_model(model, 400, unit=unit)
        words = {"model": model, "prompt": "import ", "max_tokens": 8, "temperature": 0}
        measure.ask(f"http://127.0.0.1:{PORT}", "/v1/completions", words, timeout=60)
        first = time.monotonic() - begin
    finally:
        session.guest.run("rm", "-rf", folder)
        session.guest.run("systemctl", "daemon-reload")
    return {
        "ready_s": round(ready, 2),
        "first_completion_s": round(first, 2),
        "gpu_memory_mib": measure.gpu_memory(session.out / "gpu-memory.csv", time.time() - 1, time.time()),
        "phases": session.phases_of_start(unit, since),
    }


def starts(session: Session) -> None:
    """What serves is restarted, twice for each of STARTS in turn: seconds to the port and to the first completion."""
    rows: list[dict[str, object]] = []
    for name, line in [*STARTS.items()] * 2:
        if session.left() < 100:
            rows.append({"start": name, "error": "no time left"})
            continue
        found = {"start": name, **_start_with(session, line)}
        rows.append(found)
        log(f"start {name}: ready {found['ready_s']} s, first completion {found['first_completion_s']} s")
        session.note("starts", rows=rows)
    session.note("starts", rows=rows)


def _path_of(where: str) -> str:
    """PATH as the unit sets it, of the release in this folder."""
    return f"PATH={where}/venv/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin"


def _as_release(where: str) -> list[str]:
    """Options of systemd-run: the user and the environment of the release in this folder, and what a rehearsal adds."""
    return [
        *("--property=User=vllm-dflash", "--property=PrivateTmp=yes"),
        f"--property=EnvironmentFile={where}/environment",
        *(f"--setenv={pair}" for pair in os.environ.get("GPU_PROOF_SETENV", "").split()),
        f"--setenv={_path_of(where)}",
    ]


def _yaml_as_json(session: Session, path: str) -> str:
    venv = f"/opt/vllm-dflash/venvs/{pack.lock_digest()}/bin/python"
    return session.guest.run(
        venv, "-c", f"import json, yaml; print(json.dumps(yaml.safe_load(open({path!r}))))"
    )


def canonical(session: Session) -> None:
    """The shapes of Qwen3.6-27B with dummy weights: start by phase, cold and with the compile cache; memory by phase."""
    models = DATA / "models"  # in memory, and the guest sees it
    target, drafter = models / "Qwen3.6-27B", models / "drafter.safetensors"
    testbed = REPO / "tests/testbed"
    subprocess.run([sys.executable, testbed / "make_target.py", target], check=True)
    subprocess.run([sys.executable, testbed / "make_drafter.py", drafter, "--full-size"], check=True)
    shipped = json.loads(_yaml_as_json(session, f"{REPO}/inventory/group_vars/qwen3_6_27b_dflash.yml"))
    arguments = {
        **shipped["vllm_service_args"],
        "tensor-parallel-size": 1,
        "load-format": "dummy",
        # FlashInfer is not carried.
        "gdn-prefill-backend": "triton",
    }
    variables = {
        **shipped,
        "drafter_source": str(drafter),
        "vllm_service_target": str(target),
        "vllm_service_args": arguments,
    }
    begin = time.time()
    found = session.play("canonical", "site.yml", variables, 540)
    unit = ((session.guest.read_json(f"{STATE}/switch/record.json") or {}).get("new") or {}).get("unit", "")
    session.note("canonical", cold=found, cold_start=session.phases_of_start(unit, begin))
    if found["state"] != "CONFIRMED" or session.left() < 60:
        return
    # With the compile cache of the first start.
    for name in ("graphs not estimated", "as rendered"):
        if session.left() > 60:
            session.note("canonical", **{f"again, {name}": _start_with(session, STARTS[name])})


def memory(session: Session) -> None:
    """What vLLM's profile run has in memory at its peak, with what serves now: compiled as it serves, and line by line."""
    serving = (session.guest.read_json(f"{STATE}/serving.json") or {})["serving"]
    unit, release = serving["unit"], serving["unit"].split("@")[1].removesuffix(".service")
    where = f"/opt/vllm-dflash/releases/{release}"
    session.guest.run("systemctl", "stop", unit, timeout=60)
    for name, options in (("compiled", []), ("eager", ["--eager"])):
        if session.left() < 60:
            session.note("memory", **{name: {"error": "no time left"}})
            continue
        said = session.guest.run(
            *("systemd-run", "--quiet", "--wait", "--pipe", *_as_release(where)),
            *("sh", "-c", 'exec "$@" 2>&1', "sh"),
            *(f"{where}/venv/bin/python", str(HERE / "peak.py"), f"{where}/vllm.yaml", *options),
            check=False,
            timeout=session.left() - 20,
        )
        (session.out / f"memory-{name}.log").write_text(said)
        lines = [line for line in said.splitlines() if line.startswith(peak.BEGIN)]
        found = json.loads(lines[-1].removeprefix(peak.BEGIN)) if lines else {"error": said[-3000:]}
        session.note("memory", **{name: found})
        log(f"memory {name}: {json.dumps(found)[:6000]}")
    session.guest.run("systemctl", "start", unit, check=False)


def sandbox(session: Session) -> None:
    """What of the unit's sandbox this guest enforces; for CUDA that is what a start under it says."""
    unit = ((session.guest.read_json(f"{STATE}/serving.json") or {}).get("serving") or {}).get("unit", "")
    pid = session.guest.run("systemctl", "show", "--value", "--property=MainPID", unit, check=False).strip()
    found: dict[str, object] = {"unit": unit}
    if pid not in ("", "0"):
        status = session.guest.run("cat", f"/proc/{pid}/status")
        found["status"] = re.findall(r"^(?:Cap\w+|NoNewPrivs|Seccomp\w*):.*$", status, re.M)
        found["limits"] = re.findall(
            r"^Max (?:open files|core).*$", session.guest.run("cat", f"/proc/{pid}/limits"), re.M
        )
        found["security"] = session.guest.run("systemd-analyze", "security", "--no-pager", unit, check=False)[
            -300:
        ]
    found["proc_devices"] = re.findall(r"^ *\d+ nvidia.*$", session.guest.run("cat", "/proc/devices"), re.M)
    for name, properties in (
        ("closed", ["DevicePolicy=closed"]),
        ("closed_but_nvidia", ["DevicePolicy=closed", "DeviceAllow=char-nvidia* rw"]),
    ):
        found[name] = session.guest.run(
            "systemd-run", "--quiet", "--wait", "--pipe", *(f"--property={one}" for one in properties),
            "sh", "-c", "for d in /dev/nvidia*; do [ -c $$d ] || continue; "
            "(: <>$$d) 2>/dev/null && echo $$d opens || echo $$d refused; done; exit 0",
            check=False, timeout=20,
        ).splitlines()  # fmt: skip
    session.note("sandbox", **found)
    log(f"sandbox: {json.dumps(found)[:1500]}")


BEFORE = {
    *(
        "User",
        "Group",
        "WorkingDirectory",
        "CacheDirectory",
        "CacheDirectoryMode",
        "UMask",
        "NoNewPrivileges",
    ),
    *("PrivateTmp", "ProtectSystem", "ProtectHome", "BindReadOnlyPaths", "LimitNOFILE"),
}


def bisect(session: Session) -> None:
    """A server for each directive, cold and side by side, each under the sandbox that is known to work and that one more."""
    lines = (session.guest.root / "etc/systemd/system/vllm-dflash@.service").read_text().splitlines()
    lines = lines[lines.index("OOMPolicy=stop") + 1 :]
    lines = lines[: lines.index("")] if "" in lines else lines
    lines = [line for line in lines if re.match(r"[A-Z]\w+=", line)]
    base = [line for line in lines if line.split("=")[0] in BEFORE]
    groups: dict[str, list[str]] = {}
    for line in lines:
        key = line.split("=")[0]
        if line in base:
            continue
        if key.startswith("Device"):
            name = "devices"
        elif key.startswith("SystemCall"):
            name = "calls"
        elif key in (
            "RestrictAddressFamilies",
            "RestrictNamespaces",
            "ProtectKernelTunables",
            "ProtectProc",
            "CapabilityBoundingSet",
            "TemporaryFileSystem",
            "PrivateIPC",
        ):
            name = key
        else:
            name = "rest"
        groups.setdefault(name, []).append(line)
    groups["all"] = [line for line in lines if line not in base]
    groups["none"] = []
    release = sorted(
        (session.guest.root / "opt/vllm-dflash/releases").glob("*/vllm.yaml"), key=os.path.getmtime
    )[-1].parent
    where = f"/opt/vllm-dflash/releases/{release.name}"
    flags = json.loads(_yaml_as_json(session, f"{where}/vllm.yaml"))
    session.guest.run("systemctl", "stop", "sglang.service", "vllm-dflash@*", check=False)
    work = session.guest.root / "var/cache/vllm-dflash/bisect"
    for number, (name, extra) in enumerate(groups.items()):
        folder = work / name
        folder.mkdir(parents=True, exist_ok=True)
        inside = f"/var/cache/vllm-dflash/bisect/{name}"
        mine = flags | {"port": 32000 + number, "served-model-name": [name], "gpu-memory-utilization": 0.06}
        mine["kv-cache-memory-bytes"] = 4 << 30
        (folder / "vllm.yaml").write_text(json.dumps(mine))
        text = (release / "environment").read_text()
        (folder / "environment").write_text(text.replace("/var/cache/vllm-dflash", inside))
        session.guest.run("chown", "-R", "vllm-dflash:vllm-dflash", "/var/cache/vllm-dflash")
        properties = [*base, *extra, f"EnvironmentFile={inside}/environment", "TimeoutStopSec=10"]
        properties.append(f"Environment={_path_of(where)}")
        session.guest.run(
            "systemd-run", "--quiet", f"--unit=bisect-{name}", *(f"--property={one}" for one in properties),
            f"{where}/venv/bin/vllm", "serve", "--config", f"{inside}/vllm.yaml",
        )  # fmt: skip
    for number, name in enumerate(groups):
        begin = time.monotonic()
        unit = f"bisect-{name}.service"
        try:
            session.wait_model(name, 240, 32000 + number, unit)
            words = {"model": name, "prompt": "Hello", "max_tokens": 16}
            said_back = measure.ask(
                f"http://127.0.0.1:{32000 + number}", "/v1/completions", words, timeout=60
            )
            found = {"ready": True, "completion": str(said_back)[:100]}
        except Exception as error:  # the result has to say it
            tail = session.guest.run(
                "journalctl", "--no-pager", "-o", "cat", "-n", "60", "-u", unit, check=False
            )
            found = {"ready": False, "error": str(error)[-600:], "tail": tail[-4000:]}
        found["directives"] = groups[name]
        session.note("bisect", **{name: found})
        log(
            f"bisect {name}: {found['ready']} after {time.monotonic() - begin:.0f} s more {str(found.get('tail', ''))[-500:]}"
        )
    for name in groups:
        session.guest.run("systemctl", "stop", f"bisect-{name}.service", check=False)


# In this order: after `gate` the server before is the rejected one, and there is no way back to the stand-in.
PHASES = {
    "rollout": rollout,
    "back": back,
    "kill_warmup": kill_warmup,
    "kill_engine": kill_engine,
    "again": again,
    "gate": gate,
    "variants": variants,
    "trained": trained,
    "canonical": canonical,
    "memory": memory,
    "calibrate": calibrate,
    "starts": starts,
    "sandbox": sandbox,
    "bisect": bisect,
}


def run_phases(args: argparse.Namespace) -> int:
    """Boot, run the phases in order, keep what was found whatever happens."""
    if unknown := set(args.phases) - set(PHASES):
        raise SystemExit(f"no such phase: {', '.join(unknown)}; there are {', '.join(PHASES)}")
    args.out.mkdir(parents=True, exist_ok=True)
    session = Session(args.out, args.until, args.gib)
    failed = 0
    try:
        if session.guest.is_on():
            log(f"going on in the guest that is there; sudo {session.check_sudo()}")
            session.watch()
        else:
            session.start()
        for name in sorted(args.phases, key=list(PHASES).index):
            if session.left() < 30:
                session.note(name, error="no time left")
                continue
            log(f"phase {name}, {session.left():.0f} s left")
            begin = time.monotonic()
            if name in ("gate", "variants") and not session.guest.read_json(f"{STATE}/serving.json"):
                session.note(name, error="left out: no roll-out was confirmed before")
                continue
            try:
                PHASES[name](session)
            except Exception:  # the next phase may still tell something
                failed += 1
                session.note(name, error=traceback.format_exc())
                log(traceback.format_exc())
            session.note(name, phase_seconds=round(time.monotonic() - begin, 1))
    finally:
        session.end(args.keep)
        session.save()
    return 1 if failed else 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)
    verb = verbs.add_parser("pack")
    verb.add_argument(
        "--pair", type=Path, required=True, help="folder with target/, drafter/ and prompt_ids.json"
    )
    verb.add_argument("--into", type=Path, default=REPO / ".cache/gpu")
    verb.add_argument("--uv", default="uv")
    verb.set_defaults(function=lambda args: print(*pack.pack(args.into, args.pair, args.uv), sep="\n"))
    verb = verbs.add_parser("receive")
    verb.add_argument("pieces", type=Path)
    verb.set_defaults(function=receive)
    verbs.add_parser("prepare").set_defaults(function=prepare)
    verb = verbs.add_parser("run")
    verb.add_argument("--out", type=Path, required=True)
    verb.add_argument(
        "--until", type=float, default=3600, help="seconds; what doesn't fit is left out and named"
    )
    verb.add_argument(
        "--gib", type=float, default=100, help="GPU memory that the stand-in holds beside its model"
    )
    verb.add_argument("--keep", action="store_true", help="leave the guest on: the next run goes on in it")
    verb.add_argument("phases", nargs="*", help=" ".join(PHASES))
    verb.set_defaults(function=run_phases)
    args = parser.parse_args()
    os.umask(0o022)
    return args.function(args) or 0


if __name__ == "__main__":
    sys.exit(main())
