"""What a transfer's unit is allowed, and what people read of it; under a real systemd: tests/integration/test_transfer_job.py."""

from __future__ import annotations

import json

import pytest
from dflash_rollout import transfer_job as jobs
from dflash_rollout.errors import RolloutError

PATH = "/opt/vllm-dflash/drafters/0a/model.safetensors.incoming"


def job(**changes) -> jobs.Job:
    return jobs.Job(
        **{
            "name": "a",
            "argv": ["/bin/x"],
            "user": "carrier",
            "limit_s": 60,
            "write_paths": [PATH],
            **changes,
        }
    )


def test_it_may_write_its_files_and_talk_to_its_peers():
    properties = jobs.unit_properties(job(allow_addresses=["10.0.0.1", "fd00::1", "10.1.0.0/16"]))
    assert {"User=carrier", "RuntimeMaxSec=60", "ProtectHome=yes", "CapabilityBoundingSet="} <= set(
        properties
    )
    assert [value for value in properties if value.startswith("ReadWritePaths=")] == [
        f"ReadWritePaths={PATH}"
    ]
    assert properties[-4:] == [
        "IPAddressDeny=any", "IPAddressAllow=10.0.0.1/32", "IPAddressAllow=fd00::1/128", "IPAddressAllow=10.1.0.0/16",
    ]  # fmt: skip


def test_without_addresses_all_may_be_talked_to():
    assert not any(value.startswith("IPAddress") for value in jobs.unit_properties(job()))


def test_below_a_home_folder_it_can_be_read():
    assert "ProtectHome=read-only" in jobs.unit_properties(job(write_paths=["/home/me/model.incoming"]))


def test_a_secret_is_in_no_property_and_in_no_representation():
    secret = job(config={"token": "a-secret-token"})
    assert "a-secret-token" not in str(jobs.unit_properties(secret)) + repr(secret)


@pytest.mark.parametrize(
    "change", [{"config": {"a": 1}}, {"limit_s": 61}, {"user": "b"}, {"allow_addresses": ["::1"]}]
)
def test_another_order_is_another_job(change):
    assert job().digest() == job().digest() != job(**change).digest()


@pytest.mark.parametrize("name", ["", "a/b", "-a", "a b", "a@b", "x" * 101])
def test_a_name_that_systemd_would_escape(name):
    with pytest.raises(RolloutError, match="can't have this name"):
        jobs.unit_name(name)


def test_an_address_that_is_none():
    with pytest.raises(RolloutError, match=r"Found: 'gpu1'\. Expected: an IP address"):
        jobs.unit_properties(job(allow_addresses=["gpu1"]))


@pytest.mark.parametrize(
    ("progress", "rate", "text"),
    [
        ({}, 0, "starting"),
        ({"state": "checking", "bytes_done": 1_730_000_000}, 0, "looking at what an earlier run left, 50 % of 3.46 GB is good"),
        ({"state": "running", "bytes_done": 2_110_600_000}, 212e6, "61 % of 3.46 GB, 212 MB/s, 6 s left"),
        ({"state": "running", "bytes_done": 3_459_999_999}, 0, "99 % of 3.46 GB, nothing arrived lately"),
        ({"state": "complete", "bytes_done": 3_460_000_000, "seconds": 16.34}, 9, "3.46 GB in 16.3 s"),
    ],
)  # fmt: skip
def test_one_line(progress, rate, text):
    assert jobs.line({**jobs.PROGRESS, "bytes_total": 3_460_000_000, **progress}, rate) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (67108864, "67.1 MB")]
)
def test_sizes(count, text):
    assert jobs.size_text(count) == text


def test_progress_is_read_with_what_is_missing_filled_in():
    progress = jobs.parse_progress('{"state": "running", "bytes_done": 7, "more": 1}')
    assert progress == {**jobs.PROGRESS, "state": "running", "bytes_done": 7}
    assert "without a reason" in jobs.parse_progress('{"state": "failed"}')["error"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"state": "odd"}', '{"bytes_done": "x"}', '{"bytes_done": null}']
)
def test_progress_that_no_program_writes(text):
    with pytest.raises(RolloutError, match="can't be read"):
        jobs.parse_progress(text)


def test_another_users_link_is_not_followed(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "RUN_DIR", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "other").write_text(json.dumps({"state": "complete"}))
    assert jobs.read_progress("a") == jobs.PROGRESS
    (tmp_path / "a/progress.json").symlink_to(tmp_path / "other")
    with pytest.raises((OSError, RolloutError)):
        jobs.read_progress("a")


@pytest.mark.parametrize(
    ("ended", "text"),
    [
        ("timeout killed TERM", "not done within its limit of 60 s"),
        ("oom-kill killed KILL", "more memory than 1G"),
        ("success exited 0", "before the file was complete. Found: last line"),
        ("exit-code exited 1", "broke off (exit-code, exited 1). Found: last line"),
        ("", "broke off (killed, or the host was restarted)"),
    ],
)
def test_why_it_ended(ended, text):
    message = jobs.ending_text(ended + "\n", 60, ["last line"])
    assert text in message
    assert "What to do: run again" in message


def test_a_file_with_a_second_name_is_not_given_away(tmp_path):
    path = tmp_path / "a"
    path.touch()
    (tmp_path / "b").hardlink_to(path)
    account = jobs.pwd.getpwuid(jobs.os.getuid())
    with pytest.raises(RolloutError, match="a file with one name"):
        jobs._own(str(path), account)
    (tmp_path / "c").symlink_to(path)
    with pytest.raises(RolloutError, match="can't be given"):
        jobs._own(str(tmp_path / "c"), account)


def test_not_as_root():
    with pytest.raises(RolloutError, match="does not run as root"):
        jobs._account("root")
    with pytest.raises(RolloutError, match="There is no user no-such"):
        jobs._account("no-such")
