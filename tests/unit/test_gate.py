"""Which unit may start, from the gate of a running switch and from serving.json."""

from __future__ import annotations

import json

import pytest
from dflash_rollout import program

OLD, NEW, THIRD = "sglang.service", "vllm-dflash@a.service", "vllm-dflash@b.service"


@pytest.fixture
def answers(tmp_path, capsys):
    """answers(serving=…, gate=…) -> which of the three may start; a string is written as it is."""

    def ask(serving=None, gate=None):
        for name, value in (("serving.json", serving), ("gate.json", gate)):
            if value is not None:
                (tmp_path / name).write_text(value if isinstance(value, str) else json.dumps(value))
        arguments = ["--state", str(tmp_path), "--run", str(tmp_path), "may-start"]
        return [unit for unit in (OLD, NEW, THIRD) if program.main([*arguments, unit]) == 0]

    return ask


@pytest.mark.parametrize(
    ("serving", "gate", "allowed"),
    [
        (None, None, [OLD]),
        ({"serving": {"unit": NEW}, "previous": {"unit": OLD}}, None, [NEW]),
        ({"serving": {"unit": OLD}, "previous": {"unit": NEW}}, None, [OLD]),
        # A running switch goes before what was decided earlier.
        ({"serving": {"unit": OLD}, "previous": None}, {"may_start": NEW}, [NEW]),
        ({"serving": {"unit": NEW}, "previous": None}, {"may_start": OLD}, [OLD]),
        ({"serving": {"unit": OLD}, "previous": None}, {"may_start": None}, []),
        (None, {"may_start": None}, []),
        # Whatever is broken: the server that was there before us comes up, ours don't.
        ("{ not JSON", None, [OLD]),
        ({"serving": None}, None, [OLD]),
        ({"serving": {"unit": NEW}}, "", [OLD]),
        ("[]", None, [OLD]),
    ],
)
def test_who_may_start(answers, serving, gate, allowed):
    assert answers(serving, gate) == allowed


def test_a_state_that_may_not_be_read(answers, tmp_path):
    (tmp_path / "serving.json").mkdir()
    assert answers() == [OLD]


def test_the_reason_is_said(answers, capsys):
    answers({"serving": {"unit": NEW}, "previous": None})
    assert f"{OLD} may not start: the last confirmed switch chose {NEW}" in capsys.readouterr().out
