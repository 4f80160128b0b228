"""A release is complete under its name or not there, and what is there is never changed."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from dflash_rollout import release
from dflash_rollout.errors import RolloutError
from dflash_rollout.release import Content, as_text, make, point, read_content

FILES = {
    "vllm.yaml": "speculative-config: {model: @release@/drafter}\nport: 30000\n",
    "environment": "HF_HUB_OFFLINE=1\n",
    "drafter/config.json": '{"ü": "é"}\n',
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "releases"
    path.mkdir()
    return path


@pytest.fixture
def links(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "venv").mkdir()
    return {"drafter/model.safetensors": str(tmp_path / "model.safetensors"), "venv": str(tmp_path / "venv")}


def tree(folder: Path) -> dict[str, tuple]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_ino, path.lstat().st_ctime_ns)
        for path in folder.rglob("*")
    }


def test_the_digest_is_of_the_inputs_as_written():
    """Written out, so that a change of the canonical form, which renames every release, is seen."""
    assert read_content({"a": "1", "b": "@release@"}, {"c": "/x"}).digest == "13a7e6b0171a4ac8"
    assert read_content({"b": "@release@", "a": "1"}, {"c": "/x"}).digest == "13a7e6b0171a4ac8"
    assert read_content({"a": "1", "b": "@release@"}, {"c": "/x"}, {"a": "0644"}).digest == "13a7e6b0171a4ac8"
    others = [
        read_content({"a": "2", "b": "@release@"}, {"c": "/x"}),
        read_content({"a": "1", "b": "@release@"}, {"c": "/y"}),
        read_content({"a": "1", "b": "@release@"}, {"c": "/x"}, {"a": "0600"}),
        read_content({"a": "1", "b": "@release@", "c": "/x"}, {}),
    ]
    assert len({"13a7e6b0171a4ac8", *(other.digest for other in others)}) == 5


def test_make(root, links):
    content = read_content(FILES, links, {"environment": "0640"})
    made = make(str(root), content)
    path = root / content.digest
    assert (made.digest, made.path, made.changed) == (content.digest, str(path), True)
    assert [entry.name for entry in root.iterdir()] == [content.digest]
    assert (path / "vllm.yaml").read_text() == f"speculative-config: {{model: {path}/drafter}}\nport: 30000\n"
    assert (path / "drafter/config.json").read_bytes() == '{"ü": "é"}\n'.encode()
    assert os.readlink(path / "venv") == links["venv"]
    assert (path / "drafter/model.safetensors").read_bytes() == b"weights"
    assert {
        str(entry.relative_to(root)): stat.S_IMODE(entry.lstat().st_mode)
        for entry in [path, *path.rglob("*")]
        if not entry.is_symlink()
    } == {
        content.digest: 0o755,
        f"{content.digest}/drafter": 0o755,
        f"{content.digest}/vllm.yaml": 0o644,
        f"{content.digest}/environment": 0o640,
        f"{content.digest}/drafter/config.json": 0o644,
    }


def test_modes_do_not_depend_on_the_umask(root):
    before = os.umask(0o077)
    try:
        made = make(str(root), read_content(FILES, {}))
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(made.path).st_mode) == 0o755
    assert stat.S_IMODE(os.stat(f"{made.path}/drafter").st_mode) == 0o755
    assert stat.S_IMODE(os.stat(f"{made.path}/vllm.yaml").st_mode) == 0o644


def test_the_second_time_nothing_is_touched(root, links):
    content = read_content(FILES, links)
    make(str(root), content)
    before = tree(root)
    for check in (False, True):
        assert make(str(root), content, check=check).changed is False
    assert tree(root) == before


def test_another_content_leaves_the_first_release_alone(root):
    first = make(str(root), read_content(FILES, {}))
    before = tree(Path(first.path))
    second = make(str(root), read_content({**FILES, "environment": ""}, {}))
    assert second.changed
    assert second.path != first.path
    assert tree(Path(first.path)) == before


def edit(path: Path) -> None:
    (path / "vllm.yaml").write_text("port: 30001\n")


def edit_with_other_bytes(path: Path) -> None:
    (path / "vllm.yaml").write_bytes(b"\xff")


def remove(path: Path) -> None:
    (path / "drafter/config.json").unlink()


def remove_folder(path: Path) -> None:
    shutil.rmtree(path / "drafter")


def add(path: Path) -> None:
    (path / "drafter/extra.py").write_text("")


def add_folder(path: Path) -> None:
    (path / "__pycache__").mkdir()


def point_elsewhere(path: Path) -> None:
    (path / "venv").unlink()
    (path / "venv").symlink_to("/")


def link_made_a_folder(path: Path) -> None:
    (path / "venv").unlink()
    (path / "venv").mkdir()


def file_made_a_link(path: Path) -> None:
    (path / "environment").rename(path.parent / "elsewhere")
    (path / "environment").symlink_to(path.parent / "elsewhere")


def make_writable(path: Path) -> None:
    (path / "environment").chmod(0o666)


def folder_made_writable(path: Path) -> None:
    (path / "drafter").chmod(0o777)


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        (edit, "vllm.yaml has another content"),
        (edit_with_other_bytes, "vllm.yaml has another content"),
        (remove, "drafter/config.json is missing"),
        (remove_folder, "drafter is missing; drafter/config.json is missing"),
        (add, "drafter/extra.py was added"),
        (add_folder, "__pycache__ was added"),
        (point_elsewhere, "venv leads to /"),
        (link_made_a_folder, "venv is no link"),
        (file_made_a_link, "environment is of another kind"),
        (make_writable, "environment has mode 0666 instead of 0644"),
        (folder_made_writable, "drafter has mode 0777 instead of 0755"),
    ],
)
@pytest.mark.parametrize("check", [False, True])
def test_a_tampered_release_is_refused_and_left_alone(root, links, tamper, named, check):
    content = read_content(FILES, links)
    path = Path(make(str(root), content).path)
    tamper(path)
    before = tree(root)
    with pytest.raises(RolloutError, match="isn't what it was") as caught:
        make(str(root), content, check=check)
    assert named in caught.value.found
    assert tree(root) == before


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file to somebody else")
def test_a_file_of_somebody_else_is_refused(root):
    content = read_content(FILES, {})
    os.chown(f"{make(str(root), content).path}/environment", 65534, 65534)
    with pytest.raises(RolloutError) as caught:
        make(str(root), content)
    assert caught.value.found == "environment belongs to uid 65534"


def test_a_file_in_the_place_of_the_release(root):
    content = read_content({"a": ""}, {})
    (root / content.digest).write_text("")
    with pytest.raises(RolloutError, match="isn't what it was"):
        make(str(root), content)


def test_check_mode_makes_nothing_and_needs_nothing(tmp_path):
    content = read_content(FILES, {"venv": "/nowhere/yet"})
    planned = make(str(tmp_path / "no" / "releases"), content, check=True)
    assert planned.changed
    assert planned.digest == content.digest
    assert list(tmp_path.iterdir()) == []


def test_check_mode_leaves_leftovers(root):
    (root / ".0123456789abcdef.partial").mkdir()
    make(str(root), read_content(FILES, {}), check=True)
    assert [entry.name for entry in root.iterdir()] == [".0123456789abcdef.partial"]


def test_a_link_to_nothing_is_named(root):
    with pytest.raises(RolloutError, match="Link venv of the release would lead nowhere") as caught:
        make(str(root), read_content(FILES, {"venv": "/nowhere/venv"}))
    assert "/nowhere/venv" in caught.value.found
    assert list(root.iterdir()) == []


def test_a_target_that_went_away_later_is_named(root, links):
    content = read_content(FILES, links)
    make(str(root), content)
    os.unlink(links["drafter/model.safetensors"])
    with pytest.raises(RolloutError, match=r"drafter/model.safetensors .* would lead nowhere"):
        make(str(root), content)


def test_the_root_is_made(tmp_path):
    made = make(str(tmp_path / "a" / "no"), read_content(FILES, {}))
    assert made.changed
    assert (tmp_path / "a" / "no").stat().st_mode & 0o777 == 0o755


def test_no_room_for_a_root(tmp_path):
    (tmp_path / "no").touch()
    with pytest.raises(RolloutError, match="can't be made") as caught:
        make(str(tmp_path / "no"), read_content(FILES, {}))
    assert f"a folder at {tmp_path}/no" in caught.value.expected
    assert (tmp_path / "no").is_file()


def test_a_link_leads_to_the_release_that_was_made_last(root, tmp_path):
    link = tmp_path / "current"
    first, second = (make(str(root), read_content({"a": text}, {})) for text in "xy")
    assert point(str(link), first, check=True)
    assert not link.is_symlink()
    assert point(str(link), first)
    assert not point(str(link), first)
    (tmp_path / f"current.{second.digest}.partial").symlink_to("/of/a/killed/run")
    assert point(str(link), second)
    assert (os.readlink(link), sorted(path.name for path in tmp_path.iterdir() if path != root)) == (
        second.path,
        ["current"],
    )


def test_a_folder_is_never_taken_for_the_link(root, tmp_path):
    (tmp_path / "current").mkdir()
    made = make(str(root), read_content(FILES, {}))
    with pytest.raises(RolloutError, match="is no link"):
        point(str(tmp_path / "current"), made)


def test_leftovers_of_crashed_runs_are_removed_and_nothing_else(root):
    content = read_content(FILES, {})
    for name in (f".{content.digest}.partial", ".0123456789abcdef.partial", ".mine.partial", "other"):
        (root / name / "drafter").mkdir(parents=True)
        (root / name / "drafter" / "config.json").write_text("cut sho")
    make(str(root), content)
    assert {entry.name for entry in root.iterdir()} == {content.digest, ".mine.partial", "other"}


@pytest.mark.parametrize("call", ["fsync", "rename", "symlink"])
def test_a_failure_leaves_nothing_under_the_final_name(root, links, call, monkeypatch):
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(release.os, call, fail)
    with pytest.raises(RolloutError, match="can't be made") as caught:
        make(str(root), read_content(FILES, links))
    assert "No space left on device" in caught.value.found
    assert list(root.iterdir()) == []


KILLED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from dflash_rollout import release
real, left = os.fsync, int(sys.argv[3])
def fsync(descriptor):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), 9)
    real(descriptor)
os.fsync = fsync
content = release.read_content({"a": "1", "b/c": "2", "b/d": "3"}, {})
release.make(sys.argv[2], content)
"""


@pytest.mark.parametrize("step", range(7))
def test_killed_at_any_step_the_next_run_ends_with_a_whole_release(root, step):
    package = str(Path(__file__).parents[2] / "module_utils")
    content = read_content({"a": "1", "b/c": "2", "b/d": "3"}, {})
    process = subprocess.run([sys.executable, "-c", KILLED, package, str(root), str(step)], check=False)
    # 3 files, 1 folder, the release and its root: the last is after the rename
    assert process.returncode == (-9 if step < 6 else 0)
    assert (root / content.digest).exists() == (step >= 5)
    assert make(str(root), content).changed == (step < 5)
    assert make(str(root), content).changed is False
    assert [entry.name for entry in root.iterdir()] == [content.digest]


def test_two_at_once_make_one(root):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from dflash_rollout import release\n"
        "files = {f'{n}': 'x' for n in range(50)}\n"
        "print(release.make(sys.argv[2], release.read_content(files, {})).changed)"
    )
    package = str(Path(__file__).parents[2] / "module_utils")
    both = [
        subprocess.Popen([sys.executable, "-c", code, package, str(root)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert sorted(process.communicate(timeout=60)[0].strip() for process in both) == ["False", "True"]
    assert len(list(root.iterdir())) == 1


@pytest.mark.parametrize(
    ("files", "links", "modes", "message"),
    [
        ({"/etc/passwd": ""}, {}, {}, "no path inside"),
        ({"../x": ""}, {}, {}, "no path inside"),
        ({"..": ""}, {}, {}, "no path inside"),
        ({"": ""}, {}, {}, "no path inside"),
        ({}, {"../x": "/y"}, {}, "no path inside"),
        ({"a/../../x": ""}, {}, {}, "no p"),
        ({"a//b": ""}, {}, {}, "no plain path"),
        ({"./a": ""}, {}, {}, "no plain path"),
        ({".": ""}, {}, {}, "no plain path"),
        ({"a": ""}, {"a": "/x"}, {}, "a is in the release twice"),
        ({"a": "", "a/b": ""}, {}, {}, "a is in the release twice"),
        ({"a/b": ""}, {"a": "/x"}, {}, "a is in the release twice"),
        ({"a": None}, {}, {}, "neither text nor a mapping"),
        ({"a": {"b c": 1}}, {}, {}, "'b c' can't go into an environment file"),
        ({"a": {"B": "two\nlines"}}, {}, {}, "'B' can't go into an environment file"),
        ({}, {"a": "x/y"}, {}, "no absolute target"),
        ({}, {"a": None}, {}, "no absolute target"),
        ({"a": ""}, {}, {"b": "0644"}, "mode is given for b"),
        ({"a": ""}, {}, {"a": 420}, "mode of a isn't one"),
        ({"a": ""}, {}, {"a": "0888"}, "mode of a isn't one"),
        ({"a": ""}, {}, {"a": "4755"}, "mode of a isn't one"),
    ],
)
def test_inputs_that_are_refused(files, links, modes, message):
    with pytest.raises(RolloutError, match=message):
        read_content(files, links, modes)


def test_difference_of_a_first_release(root):
    content = read_content({"a": "@release@\n"}, {"venv": "/x"})
    planned = make(str(root), content, check=True)
    assert release.difference(planned, content) == [
        {
            "before": "",
            "after": f"{planned.path}\n",
            "before_header": "a (absent)",
            "after_header": f"{planned.path}/a",
        },
        {
            "before": "",
            "after": "link to /x\n",
            "before_header": "venv (absent)",
            "after_header": f"{planned.path}/venv",
        },
    ]


def test_difference_of_the_next_release(root, links):
    now = make(str(root), read_content({"same": "s", "port": "1\n", "gone": "g\n"}, links))
    content = Content({"same": "s", "port": "2\n"}, {"venv": "/"}, {})
    planned = make(str(root), content, check=True)
    entries = release.difference(planned, content, now.path)
    assert [(entry["before"], entry["after"]) for entry in entries] == [
        (f"link to {links['drafter/model.safetensors']}\n", ""),
        ("g\n", ""),
        ("1\n", "2\n"),
        (f"link to {links['venv']}\n", "link to /\n"),
    ]
    assert entries[1]["after_header"] == "gone (absent)"


def test_difference_of_the_release_that_serves_is_nothing(root, links):
    content = read_content(FILES, links)
    now = make(str(root), content)
    assert release.difference(make(str(root), content, check=True), content, now.path) == []


def test_a_mapping_becomes_what_reads_the_file_wants():
    value = {"b": 'say "hi" for $5', "a": 1}
    assert as_text("environment", value) == 'a=1\nb="say \\"hi\\" for \\$5"\n'
    assert as_text("drafter/config.json", value) == '{\n "b": "say \\"hi\\" for $5",\n "a": 1\n}\n'
    assert as_text("vllm.yaml", {"port": 1, "model": "/m"}).splitlines()[-2:] == ['model: "/m"', "port: 1"]


def test_an_inventory_in_another_order_is_no_other_release():
    one = {"vllm.yaml": {"port": 1, "speculative-config": {"method": "dflash", "model": "/m"}}}
    other = {"vllm.yaml": {"speculative-config": {"model": "/m", "method": "dflash"}, "port": 1}}
    assert read_content(one, {}).digest == read_content(other, {}).digest
