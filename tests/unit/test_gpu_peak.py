"""What lies in GPU memory at the peak of an allocator's trace."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))
from peak import at_peak

HERE = [{"filename": "/v/site-packages/vllm/a.py", "line": 3, "name": "run"}]


def event(action, address, size, frames=()):
    return {"action": action, "addr": address, "size": size, "frames": list(frames)}


def test_what_is_live_at_the_peak_is_summed_by_its_place():
    trace = [
        event("alloc", 1, 100, HERE),
        event("alloc", 2, 100, HERE),
        event("alloc", 3, 50),
        event("free_requested", 2, 100),
        event("free_completed", 2, 100),
        event("alloc", 2, 30, HERE),
    ]
    assert at_peak(trace) == {
        "bytes": 250,
        "parts": [
            {"bytes": 200, "count": 2, "where": "vllm/a.py:3 run"},
            {"bytes": 50, "count": 1, "where": ""},
        ],
    }


def test_what_was_there_before_counts_as_nothing():
    assert at_peak([event("free_completed", 9, 1000), event("alloc", 1, 10)])["bytes"] == 10
    assert at_peak([]) == {"bytes": 0, "parts": []}
