"""The batches of a roll-out, and its last line, by real plays over hosts that are this machine and a made-up switch."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

REPOSITORY = Path(__file__).parents[2]
MADE_UP_SWITCH = """\
from ansible.plugins.action import ActionBase
class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        outcome = self._task.args["outcome"]
        return {"outcome": outcome, "failed": outcome not in ("CONFIRMED", "UNCHANGED"), "msg": "made up"}
"""


@pytest.fixture(scope="module")
def callback():
    spec = importlib.util.spec_from_file_location(
        "rollout_callback", REPOSITORY / "callback_plugins/rollout.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("outcomes", "failed", "unreachable", "end"),
    [
        ([], False, False, "untouched"),
        ([], True, False, "failed before its switch"),
        (["CONFIRMED"], False, False, "done"),
        (["UNCHANGED"], False, False, "done"),
        (["ROLLED_BACK"], True, False, "rolled back"),
        (["REFUSED"], True, False, "refused"),
        (["CONFIRMED", "STRANDED"], True, False, "STRANDED"),
        # not accepted, and brought back by a second switch
        (["CONFIRMED", "CONFIRMED"], True, False, "rolled back"),
        (["CONFIRMED"], True, False, "failed after its switch"),
        (["CONFIRMED"], False, True, "unreachable"),
        ([], False, True, "unreachable"),
    ],
)
def test_how_it_ended_for_a_host(callback, outcomes, failed, unreachable, end):
    assert callback.end_of(outcomes, failed, unreachable) == end


def test_the_last_line_names_who_is_not_done(callback):
    ends = {"a": "done", "b": "done", "c": "rolled back", "d": "untouched", "e": "untouched"}
    assert callback.last_line(ends) == "2 done, 1 rolled back (c), 2 untouched (d, e)"
    assert callback.last_line({"a": "refused"}) == "0 done, 1 refused (a)"
    many = {f"h{number}": "untouched" for number in range(10)}
    assert callback.last_line(many) == "0 done, 10 untouched (h0, h1, h2, h3, h4, h5, h6, h7, …)"


def play(folder: Path, serial: object, ends: dict[str, str], *options: str) -> subprocess.CompletedProcess:
    """The keywords of playbooks/switch.yml over seven hosts that end as told, one that isn't CONFIRMED."""
    real = yaml.safe_load((REPOSITORY / "playbooks/switch.yml").read_text())[0]
    keywords = {name: real[name] for name in ("hosts", "gather_facts", "serial", "max_fail_percentage")}
    hosts = [f"h{number}" for number in range(1, 8)]
    tasks = [
        {
            "name": "Switch",
            "block": [{"switchover": {"outcome": "{{ ends[inventory_hostname] | default('CONFIRMED') }}"}}],
            "rescue": [{"ansible.builtin.set_fact": {"switchover_failed": "see above"}}],
        },
        {
            "name": "End",
            "ansible.builtin.fail": {"msg": "{{ switchover_failed }}"},
            "when": "switchover_failed is defined",
        },
    ]
    first = {"hosts": "gpu_hosts", "gather_facts": False, "tasks": [{"ansible.builtin.meta": "noop"}]}
    (folder / "play.yml").write_text(yaml.safe_dump([first, {**keywords, "tasks": tasks}], sort_keys=False))
    variables = {"rollout_serial": serial, "ends": ends, "ansible_connection": "local"}
    variables["ansible_python_interpreter"] = "{{ ansible_playbook_python }}"
    inventory = {
        "all": {"children": {"gpu_hosts": {"hosts": {host: {} for host in hosts}, "vars": variables}}}
    }
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    # In the place of the module: it runs in the play's own process, and seven hosts take no time.
    (folder / "action").mkdir(exist_ok=True)
    (folder / "action/switchover.py").write_text(MADE_UP_SWITCH)
    return subprocess.run(
        ["ansible-playbook", "-i", folder / "hosts.yml", folder / "play.yml", *options],
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_ACTION_PLUGINS": str(folder / "action"),
            "ANSIBLE_LIBRARY": str(REPOSITORY / "library"),
            "ANSIBLE_STDOUT_CALLBACK": "rollout",
            "ANSIBLE_CALLBACK_PLUGINS": str(REPOSITORY / "callback_plugins"),
            "ANSIBLE_NOCOLOR": "1",
            "ANSIBLE_FORKS": "7",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("serial", "failing", "batches", "line"),
    [
        (2, {}, 4, "7 done."),
        ("40%", {}, 4, "7 done."),
        ([1, "50%"], {}, 3, "7 done."),
        (1, {"h2": "ROLLED_BACK"}, 2, "1 done, 1 rolled back (h2), 5 untouched (h3, h4, h5, h6, h7). Mend"),
        # who shares the batch of a failure ends what it has begun
        ([1, 3, "100%"], {"h2": "STRANDED"}, 2, "3 done, 1 STRANDED (h2), 3 untouched (h5, h6, h7). Mend"),
    ],
    ids=["number", "percent", "canary and then halves", "stops at the second", "stops after its batch"],
)
def test_batches(tmp_path, serial, failing, batches, line):
    done = play(tmp_path, serial, failing)
    assert done.stdout.count("TASK [switchover]") == batches, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith(line), done.stdout
    assert (done.returncode == 0) == (not failing)


def test_a_limit_narrows_who_is_counted(tmp_path):
    done = play(tmp_path, [1], {"h5": "REFUSED"}, "--limit", "h4,h5,h6")
    assert done.stdout.splitlines()[-1].startswith("1 done, 1 refused (h5), 1 untouched (h6)."), done.stdout


REAL_SHAPE = """\
import sys
sys.path[:0] = [{tests!r}, {utils!r}]
from report_records import fleet
from ansible.plugins.action import ActionBase
class ActionModule(ActionBase):
    def run(self, tmp=None, task_vars=None):
        record = dict(fleet()[{{"ROLLED_BACK": "gpu2.example.net", "CONFIRMED": "gpu1.example.net"}}[task_vars["end"]]])
        failed = record["state"] != "CONFIRMED"
        return {{"outcome": record["state"], "failed": failed, "msg": "made up", "record": record, "states": []}}
"""


def roll_out(
    folder: Path, unfit: list[str], *options: str, lost: tuple[str, ...] = (), **variables: object
) -> tuple[subprocess.CompletedProcess, list[Path]]:
    """Two hosts that are this machine: preflight with the real gate, a made-up switch, and the report's real page.

    The switch is rolled back, unless `end` says otherwise; hosts in `unproved` fail in the report.
    """
    look = {"ansible.builtin.fail": {"msg": "{{ reasons }}"}}
    gate = {"ansible.builtin.import_role": {"name": "rollout", "tasks_from": "gate"}}
    switch = {
        "block": [{"switchover": {}, "register": "switched"}],
        "rescue": [{"ansible.builtin.set_fact": {"switchover_failed": "“switchover” failed"}}],
    }
    end = yaml.safe_load((REPOSITORY / "roles/switchover/tasks/end.yml").read_text())[-1]
    site = yaml.safe_load((REPOSITORY / "site.yml").read_text())
    keep = {
        "path": "{{ rollout_records }}/{{ inventory_hostname }}.json",
        "content": "{{ switched.record | combine({'advice': 'the host said this'}) | to_json }}",
    }
    common = {"hosts": "gpu_hosts", "gather_facts": False}
    plays = [
        {
            **common,
            "vars": {"rollout_phase": "preflight"},
            "tasks": [{"ansible.builtin.raw": "true"}, {**look, "when": "inventory_hostname in unfit"}, gate],
        },
        {
            **common,
            "vars": {"rollout_phase": "switch"},
            "serial": 1,
            "max_fail_percentage": 0,
            "tasks": [switch, end],
        },
        {
            **common,
            "vars": next(play.get("vars", {}) for play in site if play["name"] == "Report"),
            "tasks": [
                {**look, "when": "inventory_hostname in unproved"},
                {"control_file": keep},
                {"ansible.builtin.import_role": {"name": "rollout", "tasks_from": "report_page"}},
            ],
        },
    ]
    (folder / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False))
    shared = {
        "ansible_connection": "local",
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
        "unfit": unfit,
        "reasons": ["Driver. Found: 570 <b>. Expected: 580. What to do: upgrade.", "port 30000: found held"],
        "rollout_records": "{{ playbook_dir }}/records",
        "rollout_skip_unfit": False,
        "unproved": [],
        "end": "ROLLED_BACK",
        **variables,
    }
    nowhere = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    hosts = {"hosts": {host: nowhere if host in lost else {} for host in ("h1", "h2")}, "vars": shared}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"children": {"gpu_hosts": hosts}}}))
    (folder / "action").mkdir(exist_ok=True)
    made_up = REAL_SHAPE.format(
        tests=str(REPOSITORY / "tests"),
        utils=str(REPOSITORY / "module_utils"),
    )
    (folder / "action/switchover.py").write_text(made_up)
    done = subprocess.run(
        ["ansible-playbook", "-i", folder / "hosts.yml", folder / "play.yml", *options],
        cwd=folder,
        env={
            **os.environ,
            "ANSIBLE_ACTION_PLUGINS": f"{folder / 'action'}:{REPOSITORY / 'action_plugins'}",
            "ANSIBLE_LIBRARY": str(REPOSITORY / "library"),
            "ANSIBLE_ROLES_PATH": str(REPOSITORY / "roles"),
            "ANSIBLE_STDOUT_CALLBACK": "rollout",
            "ANSIBLE_CALLBACK_PLUGINS": str(REPOSITORY / "callback_plugins"),
            "ANSIBLE_NOCOLOR": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    failing = unfit or lost or shared["unproved"] or shared["end"] != "CONFIRMED"
    assert done.returncode != 0 or not failing or "--check" in options, done.stdout
    pages = list((folder / "records").glob("*.html"))
    if pages and done.returncode:
        assert str(pages[0]) in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert done.stdout.count("for a browser or a ticket") == len(pages), done.stdout
    return done, pages


@pytest.mark.parametrize(
    ("unfit", "line"),
    [
        (["h1"], "0 done, 1 did not pass preflight (h1), 1 untouched (h2)."),
        (["h1", "h2"], "0 done, 2 did not pass preflight (h1, h2)."),
    ],
    ids=["one, and the gate stops the other", "all, so that no host is left for a task"],
)
def test_a_refusal_is_on_a_page(tmp_path, unfit, line):
    done, pages = roll_out(tmp_path, unfit)
    assert line in done.stdout, done.stdout + done.stderr
    (page,) = pages
    text = page.read_text()
    assert line in text
    assert text.count("<strong>Found:</strong> 570 &lt;b&gt;.") == len(unfit)
    assert text.count("<strong>What to do:</strong> upgrade.") == len(unfit)
    assert text.count("<p>port 30000: found held</p>") == len(unfit)
    assert ("No server was stopped on any host." in text) == (len(unfit) == 1)


def test_a_switch_that_was_rolled_back_is_on_a_page_with_its_record(tmp_path):
    done, pages = roll_out(tmp_path, [])
    assert "0 done, 1 rolled back (h1), 1 untouched (h2)." in done.stdout, done.stdout + done.stderr
    (page,) = pages
    text = page.read_text()
    assert "outage 78.4 s" in text
    assert "RuntimeError: no memory" in text
    assert "“switchover” failed" not in text, "the record says why"
    assert json.loads((tmp_path / "records/h1.json").read_text())["state"] == "ROLLED_BACK"
    assert not (tmp_path / "records/h2.json").exists()


@pytest.mark.parametrize("skip", [["h1"], ["h2"]], ids=["the canary", "the last"])
def test_a_roll_out_that_went_on_without_a_host_has_one_page(tmp_path, skip):
    """Its report is of the other hosts, and has no reasons: it leaves the page to the end of the run."""
    done, pages = roll_out(tmp_path, skip, rollout_skip_unfit=True, end="CONFIRMED")
    (other,) = {"h1", "h2"} - set(skip)
    line = f"1 done, 1 did not pass preflight ({skip[0]})."
    assert line in done.stdout, done.stdout + done.stderr
    (page,) = pages
    text = page.read_text()
    assert line in text
    assert "<strong>What to do:</strong> upgrade." in text
    assert "CONFIRMED" in text
    assert "the host said this" in text
    kept = json.loads((tmp_path / f"records/{other}.json").read_text())
    assert kept["advice"] == "the host said this", "what the report asked the host for is not overwritten"


def test_a_host_that_fails_in_the_report_is_on_the_one_page(tmp_path):
    done, pages = roll_out(tmp_path, [], end="CONFIRMED", unproved=["h1"])
    (page,) = pages
    line = "1 done, 1 failed after its switch (h1)."
    assert line in done.stdout, done.stdout + done.stderr
    assert line in page.read_text()
    assert json.loads((tmp_path / "records/h1.json").read_text())["state"] == "CONFIRMED"


def test_a_roll_out_that_ended_well_has_the_page_of_its_report(tmp_path):
    done, pages = roll_out(tmp_path, [], end="CONFIRMED")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 done."
    (page,) = pages
    assert "How this roll-out ended" not in page.read_text()


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
@pytest.mark.parametrize("lost", [("h1",), ("h1", "h2")], ids=["one", "all"])
def test_of_a_host_that_is_not_reached_the_page_says_so(tmp_path, lost):
    done, pages = roll_out(tmp_path, [], lost=lost)
    (page,) = pages
    text = page.read_text()
    assert f"0 done, {len(lost)} unreachable ({', '.join(lost)})" in text, done.stdout
    assert text.count("Connection refused") == len(lost)
    assert text.count("no switch is recorded here") == 2


def test_a_host_that_is_lost_in_its_switch_is_shown_as_it_was_seen_last(callback, monkeypatch):
    """An attempt that follows the switch returns the record so far; then the host doesn't answer any more."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tests"))
    from report_records import fleet

    so_far = fleet()["gpu1.example.net"]
    so_far = {**so_far, "state": "NEW_STARTED", "states": so_far["states"][:4]}
    host = SimpleNamespace(get_name=lambda: "h1")
    task = SimpleNamespace(action="switchover", vars={}, run_once=False, get_name=lambda: "Switch")
    plugin = callback.CallbackModule()
    plugin._phase = "switch"
    plugin._keep(SimpleNamespace(host=host, task=task, result={"record": so_far, "finished": False}))
    plugin._why(
        SimpleNamespace(host=host, task=task, result={"unreachable": True, "msg": "No route to host"})
    )
    assert plugin._records["h1"]["state"] == "NEW_STARTED"
    assert plugin._reasons["h1"] == [{"phase": "switch", "task": "Switch", "text": "No route to host"}]
    shown = callback.page(
        plugin._records,
        {"at": so_far["states"][-1]["at"], "line": "0 done, 1 unreachable (h1).", "reasons": [], "hosts": {}},
    )
    assert shown["hosts"][0]["meaning"] == "the switch had not ended when this was recorded"


def test_check_mode_writes_no_page(tmp_path):
    _, pages = roll_out(tmp_path, ["h1"], "--check")
    assert pages == []
    assert not (tmp_path / "records").exists()


def test_a_page_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "records").write_text("a file in its place")
    done, pages = roll_out(tmp_path, ["h1"])
    assert pages == []
    assert "The page of this roll-out can't be written. Found:" in " ".join(done.stderr.split())
