"""Every command on a page for people is accounted for in ACCOUNTED, and all that can be checked of it without a host holds.

What a command names (playbook, variable, limit, make target, verb, option, unit) is checked for each. ACCOUNTED says beside it
which test runs it; that this test exists, and has the playbook with its options or the words named in its source, is checked too.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
import doc_commands
from doc_commands import ROOT
from drafters import drafter_shapes, write_sparse


@dataclass(frozen=True)
class By:
    """A test function (`file::name`) or another file that runs it, and words that its source has to have."""

    source: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Here:
    """A test of this file runs it."""

    test: str


@dataclass(frozen=True)
class Checked:
    """It is not run by a test, for this reason; only what it names is checked."""

    reason: str


INTEGRATION = "tests/integration"
PROGRAM = Here("test_the_program_takes_the_verb")
HOST = Checked("for a person on a GPU host; the units that it names are those of the roles")
DOCKER = Checked("the test bed's docker is a simulation and has no such view for people")
GPU = Checked("needs a GPU")
BED = By("tests/integration/test_testbed.py", ('bed("up"',))
LONG = Checked("takes too long for a test; its parts have their own")
TYPED = Checked("for the person at the keyboard: ssh, packages and clones are not this project's")

ACCOUNTED = {
    "make demo": Checked(
        "boots hosts with 3.46 GB each; the same plays are those of tests/integration/test_site.py"
    ),
    "make demo-down": Checked(
        "one line, `bed.py down demo`; tests/integration/test_testbed.py looks what `down` leaves"
    ),
    "make venv": By(".ci/run", ("make test",)),
    "make test": By(".ci/run", ("make test",)),
    "make help": Here("test_make_help_lists_what_the_pages_name"),
    "make test-unit": Checked("it runs this file"),
    "make faults": By(
        f"{INTEGRATION}/test_faults.py::test_the_subset_of_the_fault_cells", ("tests/faults/run.py",)
    ),
    "make bench": LONG,
    "make bench BENCH=distribution": LONG,
    "make docs": By("Makefile", ("tools/variables.py --check",)),
    "make release VERSION=0.2.0": By(
        "tests/unit/test_release_tool.py::test_a_version_is_cut_and_the_next_one_goes_above_it",
        ('"cut", "0.2.0"',),
    ),
    "make lock-vllm VERSION=…": Checked(
        "asks the index for everything; `make lock-check`, which CI runs, checks its result"
    ),
    "make lock-vllm VERSION=… UNTIL=…": Checked("as above"),
    "make lock-check": By("Makefile", ("test: lint lock-check",)),
    "python3 bench/collect.py": By("tests/unit/test_bench.py", ("bench/collect.py",)),
    "second_run.py --profile": LONG,
    ". .venv/bin/activate": TYPED,
    "ssh ops@gpu1.example.org sudo -n true": TYPED,
    "uvx --from huggingface-hub hf download z-lab/Qwen3.6-27B-DFlash --local-dir /root/models/Qwen3.6-27B-DFlash": TYPED,
    "git stash": TYPED,
    "git stash pop": TYPED,
    "git fetch --tags": TYPED,
    "git checkout v0.2.0": By("tests/unit/test_release_tool.py", ('"v0.2.0"',)),
    "python3 -m venv": Checked("said of how the code works"),
    # -- plays ------------------------------------------------------------------------------------------------------
    "ansible-playbook site.yml": By(f"{INTEGRATION}/test_site.py::test_one_command_takes_both_hosts_over"),
    "ansible-playbook site.yml --check --diff": By(
        f"{INTEGRATION}/test_site.py::test_check_mode_shows_a_fresh_host_what_would_be_written"
    ),
    "ansible-playbook site.yml --limit gpu1.example.org --check --diff": By(
        f"{INTEGRATION}/test_site.py::test_check_mode_shows_a_fresh_host_what_would_be_written"
    ),
    "ansible-playbook site.yml --limit gpu1.example.org": By(
        f"{INTEGRATION}/test_pool.py::test_one_host_by_its_name_and_then_the_rest", ('"--limit"',)
    ),
    "ansible-playbook site.yml --limit qwen3_8b_dflash -e switchover_acceptance=enforce": By(
        f"{INTEGRATION}/test_acceptance.py::test_without_a_server_before_there_is_no_way_back"
    ),
    "ansible-playbook playbooks/preflight.yml": By(
        f"{INTEGRATION}/test_refusals.py::test_a_published_config_of_another_family_beside_the_drafter"
    ),
    "ansible-playbook playbooks/preflight.yml --limit gpu1.example.org": By(
        f"{INTEGRATION}/test_refusals.py::test_a_published_config_of_another_family_beside_the_drafter"
    ),
    "ansible-playbook playbooks/preflight.yml --limit qwen3_8b_dflash": By(
        f"{INTEGRATION}/test_refusals.py::test_a_published_config_of_another_family_beside_the_drafter"
    ),
    "ansible-playbook playbooks/status.yml": By(
        f"{INTEGRATION}/test_pool.py::test_status_shows_how_each_does_and_no_drift"
    ),
    "ansible-playbook playbooks/rollback.yml": By(
        f"{INTEGRATION}/test_site.py::test_rollback_brings_sglang_back_host_by_host"
    ),
    "ansible-playbook playbooks/rollback.yml --limit gpu1.example.org": By(
        f"{INTEGRATION}/test_site.py::test_rollback_brings_sglang_back_host_by_host"
    ),
    "ansible-playbook playbooks/wheelhouse.yml": By(
        f"{INTEGRATION}/test_install.py::test_without_a_way_out_and_interrupted"
    ),
    "ansible-playbook playbooks/wheelhouse.yml -e vllm_wheelhouse_kind=cp311-manylinux_2_36_x86_64": By(
        f"{INTEGRATION}/test_install.py::test_without_a_way_out_and_interrupted", ("vllm_wheelhouse_kind=",)
    ),
    "ansible-playbook playbooks/calibrate.yml -e host=gpu3": By(
        f"{INTEGRATION}/test_calibrate.py::test_the_best_is_found_kept_and_written_down"
    ),
    "-e rollout_skip_unfit=true": By(
        f"{INTEGRATION}/test_refusals.py::test_the_others_go_on_without_a_host_that_was_refused",
        ("rollout_skip_unfit=True",),
    ),
    "-e rollout_serial=2": Checked("an option; tests/modules/test_rollout_callback.py has batches"),
    "-e status_json=/tmp/status.json": By(
        f"{INTEGRATION}/test_pool.py::test_status_shows_how_each_does_and_no_drift", ("status_json=",)
    ),
    "--limit gpu2": By(
        f"{INTEGRATION}/test_pool.py::test_one_host_by_its_name_and_then_the_rest", ('"--limit"',)
    ),
    "--limit 'gpu_hosts:!gpu7'": Checked("Ansible's own pattern; what it selects is checked"),
    # -- on a host --------------------------------------------------------------------------------------------------
    "python3 -m dflash_rollout.drafter_cli inspect /root/models/Qwen3.6-27B-DFlash": Here(
        "test_the_drafter_is_shown"
    ),
    "python3 -m dflash_rollout.drafter_cli render /root/models/Qwen3.6-27B-DFlash --target /root/models/Qwen3.6-27B": By(
        "tests/unit/test_drafter_cli.py::test_the_published_config_beside_the_weights_is_a_source",
        ('"render"', '"--target"'),
    ),
    "python3 -m dflash_rollout.drafter_cli inspect /root/models/Qwen3-8B-DFlash": By(
        "tests/unit/test_docs_pairs.py::test_the_commands_say_what_the_page_says", ("main(inspect)",)
    ),
    "python3 -m dflash_rollout.drafter_cli render /root/models/Qwen3-8B-DFlash --target /root/models/Qwen3-8B": By(
        "tests/unit/test_docs_pairs.py::test_the_commands_say_what_the_page_says", ("main(render)",)
    ),
    "python3 -IB /opt/vllm-dflash/program inspect FILE": By(
        "tests/unit/test_program.py::test_inspect", ('"inspect"',)
    ),
    "python3 -IB /opt/vllm-dflash/program [--state DIR] [--run DIR] VERB": PROGRAM,
    "python3 -IB /opt/vllm-dflash/program status | tail -n 2": PROGRAM,
    "python3 -IB /opt/vllm-dflash/program prove": PROGRAM,
    "python3 -IB /opt/vllm-dflash/program prove --server "
    '\'{"name": "sglang", "unit": "sglang.service", "port": 30000}\'': PROGRAM,
    "python3 -IB /opt/vllm-dflash/program may-start sglang.service": PROGRAM,
    "python3 -IB /opt/vllm-dflash/program rollback": PROGRAM,
    'python3 -c \'import json; r = json.load(open("/var/lib/vllm-dflash/switch/record.json")); '
    'print(r["state"], r["cause"], r["remedy"], sep="\\n")\'': Here(
        "test_the_record_is_read_by_the_line_of_the_runbook"
    ),
    "journalctl -u llm-switchover.service -n 50 --no-pager": HOST,
    "journalctl -u llm-switchover.service -f": HOST,
    "journalctl -u sglang.service -n 50 --no-pager": HOST,
    "journalctl -u 'vllm-dflash@*' -n 50 --no-pager": HOST,
    "journalctl -u 'vllm-dflash@*'": HOST,
    "journalctl -u llm-probe": By(
        f"{INTEGRATION}/test_probe.py::test_a_dead_engine_behind_a_health_page_is_seen",
        ("journalctl -u llm-probe",),
    ),
    "journalctl -u": HOST,
    "nvidia-smi": HOST,
    "ss -ltnp 'sport = :30000'": HOST,
    "systemctl restart sglang.service": HOST,
    "systemctl start llm-switchover.service": HOST,
    "systemctl status llm-switchover.service --no-pager": HOST,
    "systemctl status llm-probe.timer llm-probe.service": HOST,
    "systemctl is-active sglang.service": HOST,
    "systemctl reboot": By(
        f"{INTEGRATION}/test_site.py::test_the_new_server_comes_back_at_boot_and_sglang_does_not",
        ("systemctl reboot",),
    ),
    "systemctl start": HOST,
    "systemctl restart": HOST,
    "docker ps --all": DOCKER,
    "docker logs --tail 50 NAME": DOCKER,
    "docker restart NAME": DOCKER,
    "docker update --restart=POLICY NAME": DOCKER,
    # -- test bed and GPU -------------------------------------------------------------------------------------------
    "bed.py can-boot": By(f"{INTEGRATION}/conftest.py", ('"can-boot"',)),
    "bed.py prepare": By(f"{INTEGRATION}/conftest.py", ('bed("prepare")',)),
    "bed.py layer [--command CMD]": By("tests/molecule.sh", ('"${bed[@]}" layer',)),
    "bed.py up BED --hosts N [--layer] [--no-sglang] [--no-outside] [--rate 200mbit]": BED,
    "bed.py up --rate 50mbit": By("bench/distribution.py", ("--rate",)),
    "bed.py ssh BED gpu1 [command…]": By("tests/integration/test_testbed.py", ('bed("ssh"',)),
    "bed.py power-cut BED gpu1": By("tests/integration/test_testbed.py", ('"power-cut"',)),
    "bed.py power-on BED gpu1": By("tests/integration/test_testbed.py", ('"power-on"',)),
    "bed.py rate BED gpu1 20mbit": By("tests/integration/test_testbed.py", ('bed("rate"',)),
    "bed.py control BED command…": By("tests/integration/test_testbed.py", ('"control", name',)),
    "bed.py control": By("tests/integration/test_testbed.py", ('"control", name',)),
    "bed.py status": By("tests/integration/test_testbed.py", ('bed("status")',)),
    "bed.py down BED | --all": By("tests/integration/test_testbed.py", ('bed("down"',)),
    "tests/gpu/proof.py pack --pair DIR": GPU,
    "tests/gpu/proof.py receive .cache/gpu/pieces/1": GPU,
    "tests/gpu/proof.py prepare": GPU,
    "tests/gpu/proof.py run --out OUT --until 900 rollout back kill_warmup kill_engine again gate variants canonical": GPU,
    "tests/gpu/train.py PAIR": GPU,
    "GPU_PROOF_LAYERS=SIMULATIONS:LAYER/tree:BASE/tree GPU_PROOF_PYTHON=/usr/bin/python3 "
    "GPU_PROOF_SETENV=PYTHONPATH=/opt/simulated-engine tests/gpu/proof.py run --out OUT rollout variants": GPU,
}

COMMANDS = doc_commands.all_commands()
# The hosts and groups of the pages.
INVENTORY = {
    "gpu_hosts": {
        "children": {
            "qwen3_6_27b_dflash": {
                "hosts": dict.fromkeys(["gpu1.example.org", *(f"gpu{n}" for n in range(1, 8))])
            },
            "qwen3_8b_dflash": {"hosts": {"gpu8": None}},
        }
    }
}


@functools.cache
def variables() -> set[str]:
    """Every variable of a role, and those that a playbook says it takes by `-e`."""
    known = set()
    for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"):
        for spec in yaml.safe_load(path.read_text())["argument_specs"].values():
            known |= set(spec.get("options") or {})
    for path in (ROOT / "playbooks").glob("*.yml"):
        known |= set(re.findall(r"-e (\w+)=", path.read_text()))
    return known


def ran(argv: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT, **options)


@functools.cache
def helped(*argv: str) -> str:
    done = ran([sys.executable, *argv, "--help"])
    return done.stdout if done.returncode == 0 else ""


def play_problem(said: list[str], inventory: Path) -> str:
    """Why ansible-playbook would refuse these words, if it would."""
    for name in re.findall(r"-e (\w+)=", " ".join(said)):
        if name not in variables():
            return f"no role or playbook has a variable {name}"
    if said[0] != "ansible-playbook":
        said = ["ansible-playbook", "site.yml", *said]
    done = ran([*said, "--syntax-check", "-i", str(inventory)])
    if "--tags" in said and said[said.index("--tags") + 1] not in ran([*said, "--list-tags"]).stdout:
        return "no task has this tag"
    return "" if done.returncode == 0 else (done.stderr + done.stdout).strip()


def make_problem(said: list[str], inventory: Path) -> str:
    text = (ROOT / "Makefile").read_text()
    for name in (word.partition("=")[0] for word in said if "=" in word):
        if f"$({name})" not in text:
            return f"the Makefile knows no {name}"
    done = ran(["make", "-n", *said[1:]])
    return "" if done.returncode == 0 else done.stderr.strip()


def script_problem(said: list[str], inventory: Path) -> str:
    """Does the script exist, and does its --help know the verb and the options."""
    found = sorted({*ROOT.glob(f"*/{said[0]}"), *ROOT.glob(f"tests/*/{said[0]}"), *ROOT.glob(said[0])})
    if len(found) != 1:
        return f"{len(found)} scripts are called {said[0]}"
    rest = [word.strip("[]") for word in said[1:]]
    if found[0].name in ("train.py", "collect.py"):
        return ""  # torch is on the GPU machine only; the other takes nothing
    text = helped(str(found[0]))
    verbs = re.search(r"\{([\w,-]+)\}", text)
    if verbs and not found[0].name.startswith("second"):
        if rest[0] not in verbs[1].split(","):
            return f"{found[0].name} has no verb {rest[0]}"
        text = helped(str(found[0]), rest[0])
    missing = [word for word in rest if word.startswith("--") and word.partition("=")[0] not in text]
    return f"{found[0].name} has no option {', '.join(missing)}" if missing else ""


def python_problem(said: list[str], inventory: Path) -> str:
    if said[1] == "-c":
        compile(said[2], "a page", "exec")
        return ""
    if said[1] == "-m":
        there = (ROOT / "module_utils" / f"{said[2].replace('.', '/')}.py").exists() or said[2] == "venv"
        return "" if there else f"no module {said[2]}"
    if said[1] == "-IB":
        from dflash_rollout import program

        verb = next((word for word in said[3:] if not word.startswith("[") and not word.endswith("]")), "")
        known = {line.split()[0] for line in program.__doc__.splitlines()[2:] if line} | {"VERB"}
        rooted = said[2] == "/opt/vllm-dflash/program"
        return "" if rooted and verb in known else f"the program at {said[2]} has no verb {verb}"
    return script_problem(said[1:], inventory)


def unit_problem(said: list[str], inventory: Path) -> str:
    units = {path.name.removesuffix(".j2") for path in (ROOT / "roles").glob("*/templates/*.service.j2")}
    units |= {path.name.removesuffix(".j2") for path in (ROOT / "roles").glob("*/templates/*.timer.j2")}
    units |= {"sglang.service", "vllm-dflash@*"}
    named = [word for word in said if re.search(r"\.(service|timer)$|@|^llm-|^sglang", word)]
    gone = [word for word in named if word not in units and f"{word}.service" not in units]
    return f"no role has a unit {', '.join(gone)}" if gone else ""


def nothing_to_check(said: list[str], inventory: Path) -> str:
    return ""


PROBLEMS = {
    **dict.fromkeys(("ansible-playbook", "-e", "--limit", "--tags"), play_problem),
    "make": make_problem,
    "python3": python_problem,
    **dict.fromkeys(("systemctl", "journalctl"), unit_problem),
    **dict.fromkeys((".", "ssh", "uvx", "git", "docker", "nvidia-smi", "ss", "tail"), nothing_to_check),
}


def problem(text: str, inventory: Path) -> str:
    """What is wrong with a command of a page, or nothing."""
    pieces = [text.split()] if text.startswith("bed.py") else doc_commands.simple_commands(text)
    for said in pieces:
        check = PROBLEMS.get(said[0]) or (script_problem if said[0].endswith(".py") else None)
        if check is None:
            return f"nothing here knows how to check {said[0]}: add it to PROBLEMS"
        found = check(said, inventory)
        if found:
            return found
    return ""


def unaccounted(found: dict) -> list[str]:
    return [
        f"{places[0].where}: `{text}` is in no row of ACCOUNTED in tests/unit/test_docs_commands.py. Add one: "
        "By(…) the test that runs it, Here(…) a test of that file, or Checked(…) with the reason why no test can."
        for text, places in found.items()
        if text not in ACCOUNTED
    ]


def source_of(where: str) -> str:
    """The source of a file, or of one test function in it; empty where there is none."""
    path, _, name = where.partition("::")
    text = (ROOT / path).read_text() if (ROOT / path).exists() else ""
    if not name:
        return text
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return ast.get_source_segment(text, node)
    return ""


def plays(source: str) -> list[tuple[str, set[str]]]:
    """(playbook, options and variables) of each call of a fleet's `play` in a test; without words it plays site.yml."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "play":
            given = [one.value for one in node.args if isinstance(one, ast.Constant)]
            found.append(
                (given[0] if given else "site.yml", {*given[1:], *(one.arg for one in node.keywords)})
            )
    return found


def proof_problem(text: str, by: By) -> str:
    """Why the source does not show that it runs the command, or nothing."""
    source = source_of(by.source)
    if not source:
        return f"{by.source} is not there"
    missing = [word for word in by.words if word not in source]
    if missing:
        return f"{by.source} does not have {missing}"
    said = doc_commands.words(text)
    if said[0] == "ansible-playbook":
        # What --limit selects Ansible itself has said in `problem`.
        wanted = {word for word in said if word in ("--check", "--diff")} | set(
            re.findall(r"-e (\w+)=", text)
        )
        if not any(book == said[1] and wanted <= given for book, given in plays(source)):
            return f"{by.source} plays no {said[1]} with {sorted(wanted)}"
    elif not by.words:
        return f"say which words of {by.source} run it"
    return ""


@pytest.fixture(scope="module")
def inventory(tmp_path_factory):
    path = tmp_path_factory.mktemp("inventory") / "hosts.yml"
    path.write_text(yaml.safe_dump(INVENTORY))
    return path


def test_every_command_is_accounted_for():
    assert unaccounted(COMMANDS) == []
    assert [text for text in ACCOUNTED if text not in COMMANDS] == [], "on no page any more: take them out"


@pytest.mark.parametrize("text", COMMANDS)
def test_what_a_command_names_is_there(text, inventory):
    assert problem(text, inventory) == "", COMMANDS[text][0].where


@pytest.mark.parametrize("text", [text for text, entry in ACCOUNTED.items() if isinstance(entry, By)])
def test_the_test_that_is_named_runs_it(text):
    assert proof_problem(text, ACCOUNTED[text]) == ""


def test_the_tests_of_this_file_are_there():
    named = {entry.test for entry in ACCOUNTED.values() if isinstance(entry, Here)}
    assert {name for name in named if not callable(globals().get(name))} == set()


@pytest.mark.parametrize("path", doc_commands.pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_says_what_it_is(path):
    for block in doc_commands.blocks(path.read_text()):
        assert block.kind in doc_commands.KINDS, f"{path}:{block.line}: one of {sorted(doc_commands.KINDS)}"
        if block.kind == "yaml":
            known = variables() | {"gpu_hosts", "pool_haproxy", "pool_backend"}
            assert set(yaml.safe_load("\n".join(block.lines))) <= known, f"{path}:{block.line}"


# -- run here -----------------------------------------------------------------------------------------------------------


def test_make_help_lists_what_the_pages_name():
    printed = ran(["make", "help"]).stdout
    targets = {text.split()[1] for text in COMMANDS if text.startswith("make ")}
    assert {name for name in targets if f"make {name} " not in printed} == set()


@pytest.mark.parametrize(
    "verb", [text for text, entry in ACCOUNTED.items() if entry is PROGRAM and "VERB" not in text]
)
def test_the_program_takes_the_verb(verb, tmp_path):
    folder = tmp_path / "program"
    shutil.copytree(ROOT / "module_utils/dflash_rollout", folder / "dflash_rollout")
    shutil.copy(ROOT / "roles/switchover/files/__main__.py", folder)
    words = doc_commands.simple_commands(verb)[0][3:]
    place = ["--state", str(tmp_path / "state"), "--run", str(tmp_path / "run")]
    done = ran([sys.executable, "-IB", str(folder), *place, *words])
    # Nothing serves here, and none of it is a misuse (2) or a crash.
    assert done.returncode in (0, 1, 10), done.stderr
    assert "Traceback" not in done.stderr
    assert "[--state DIR]" not in done.stderr
    assert done.stdout + done.stderr


def test_the_drafter_is_shown(tmp_path):
    write_sparse(tmp_path / "model.safetensors", drafter_shapes())
    (text,) = (one for one in COMMANDS if one.endswith("inspect /root/models/Qwen3.6-27B-DFlash"))
    argv = [str(tmp_path) if word.startswith("/root") else word for word in doc_commands.words(text)]
    place = ROOT / COMMANDS[text][0].folder
    done = subprocess.run([sys.executable, *argv[1:]], cwd=place, capture_output=True, text=True, check=True)
    assert "58 of bfloat16" in done.stdout


def test_the_record_is_read_by_the_line_of_the_runbook(tmp_path):
    (text,) = (one for one in COMMANDS if one.startswith("python3 -c"))
    from dflash_rollout.store import Store

    record = tmp_path / "switch/record.json"
    record.parent.mkdir()
    record.write_text(json.dumps({"state": "STRANDED", "cause": "why", "remedy": "what to do"}))
    assert Store(str(tmp_path), str(tmp_path / "run")).record()["state"] == "STRANDED"
    code = doc_commands.words(text)[2].replace("/var/lib/vllm-dflash/", f"{tmp_path}/")
    assert ran([sys.executable, "-c", code]).stdout == "STRANDED\nwhy\nwhat to do\n"


def test_the_picture_needs_nothing_else():
    text = (ROOT / "docs/states.svg").read_text()
    assert "](docs/states.svg)" in (ROOT / "README.md").read_text()
    assert not re.search(r"<script|href=|@import|url\((?!#)", text)
    for state in ("CONFIRMED", "REFUSED", "ROLLED_BACK", "STRANDED"):
        assert state in text


# -- these checks can fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("make demoo", "No rule to make target"),
        ("make bench BENCHES=distribution", "no BENCHES"),
        ("ansible-playbook playbooks/rolback.yml", "could not be found"),
        ("ansible-playbook site.yml --chek", "unrecognized"),
        ("ansible-playbook site.yml --limit gpu99", "no hosts"),
        ("ansible-playbook site.yml --tags no_such_tag", "no task has this tag"),
        ("ansible-playbook playbooks/calibrate.yml -e hots=gpu3", "variable hots"),
        ("-e rollout_seriall=2", "variable rollout_seriall"),
        ("python3 -IB /opt/vllm-dflash/program statuss", "no verb statuss"),
        ("python3 -m dflash_rollout.drafter_clu inspect FILE", "no module"),
        ("bed.py boot BED", "no verb boot"),
        ("bed.py up BED --gpus 2", "no option --gpus"),
        ("python3 bench/collects.py", "0 scripts"),
        ("journalctl -u llm-switch.service", "no role has a unit"),
        ("apt install x", "add it to PROBLEMS"),
    ],
)
def test_a_wrong_command_is_found(text, words, inventory):
    assert words in problem(text, inventory)


def test_a_new_command_without_a_row_says_what_to_add():
    page = "Do `make nonsense` first.\n\n1. Then:\n   ```sh\n   cd bench\n   ansible-playbook \\\n     new.yml   # why\n   ```\n"
    found = {one.text: [one] for one in doc_commands.commands(page, "docs/new.md")}
    assert list(found) == ["ansible-playbook new.yml", "make nonsense"]
    assert (found["ansible-playbook new.yml"][0].folder, found["ansible-playbook new.yml"][0].line) == (
        "bench",
        7,
    )
    messages = unaccounted(found)
    assert len(messages) == 2
    assert "docs/new.md:1: `make nonsense`" in " ".join(messages)
    assert "Add one: By(" in messages[0]


@pytest.mark.parametrize(
    ("text", "by", "words"),
    [
        ("ansible-playbook site.yml", By("tests/integration/test_gone.py::test_x"), "is not there"),
        ("ansible-playbook site.yml", By("tests/integration/test_site.py::test_gone"), "is not there"),
        (
            "ansible-playbook playbooks/status.yml",
            By("tests/integration/test_site.py::test_rollback_brings_sglang_back_host_by_host"),
            "plays no playbooks/status.yml",
        ),
        (
            "ansible-playbook site.yml --check",
            By("tests/integration/test_site.py::test_one_command_takes_both_hosts_over"),
            "plays no site.yml with ['--check']",
        ),
        ("make test", By(".ci/run", ("make tests",)), "does not have"),
        ("make test", By(".ci/run"), "say which words"),
    ],
)
def test_a_proof_that_proves_nothing_is_found(text, by, words):
    assert words in proof_problem(text, by)
