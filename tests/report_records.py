"""Simulated records of a roll-out over five hosts, in the shape that playbooks/report.yml keeps them."""

from __future__ import annotations

import datetime

from dflash_rollout.switch_state import advance, new_record

BEGIN = datetime.datetime(2026, 12, 2, 9, 35, 59, tzinfo=datetime.timezone.utc)
SGLANG = {"name": "sglang", "unit": "sglang.service", "model_id": "Qwen3.6-27B", "release": None}
VLLM = {
    "name": "vllm-dflash",
    "unit": "vllm-dflash@fa811a23ecc03c79.service",
    "model_id": "Qwen3.6-27B",
    "release": "fa811a23ecc03c79",
}
RATES = {
    "short": [0.83, 0.66, 0.52, 0.41, 0.31, 0.23, 0.17, 0.12, 0.09, 0.07, 0.05, 0.03, 0.02, 0.01, 0.01],
    "long": [0.79, 0.6, 0.45, 0.34, 0.26, 0.19, 0.14, 0.1, 0.07, 0.05, 0.04, 0.02, 0.02, 0.01, 0.0],
}
DRAFTER = {
    "release": "fa811a23ecc03c79",
    "vllm": "0.20.1",
    "drafter_sha256": "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "provenance": {
        "hidden_size": "fc.weight",
        "num_hidden_layers": "names of the tensors",
        "block_size": "drafter_profile",
        "dflash_config.mask_token_id": "known drafter z-lab/Qwen3.6-27B-DFlash",
        "dflash_config.target_layer_ids": "drafter_profile",
        "eagle_aux_hidden_state_layer_ids": "target_layer_ids + 1 (drafter_profile)",
    },
    "config": {
        "hidden_size": 5120,
        "num_hidden_layers": 5,
        "block_size": 16,
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
        "eagle_aux_hidden_state_layer_ids": [2, 17, 32, 47, 62],
    },
}


def switch(
    number: int, steps: list[tuple[str, float]], old: dict | None = SGLANG, new: dict = VLLM, **facts
) -> dict:
    """A record that went through `steps`: (state, seconds since the switch began), on a host up for 400 s."""
    record = new_record(
        {"id": f"20261202T0935{number:02}Z-c0ffee", "old": old, "new": new, "requested_by": "ops"}, "boot"
    )
    begin = BEGIN + datetime.timedelta(minutes=4 * number)
    for state, seconds in steps:
        at = (begin + datetime.timedelta(seconds=seconds)).isoformat(timespec="seconds")
        record = advance(record, state, at=at, boot_s=400 + seconds)
    return {**record, "acceptance": None, "drafter": DRAFTER, "advice": "", **facts}


def measured(verdict: str = "passed") -> dict:
    """What the gate keeps of a release (acceptance.gate)."""
    sets = {
        name: {
            "length": round(1 + sum(rates), 4),
            "per_position": rates,
            "tokens": 768 if name == "short" else 256,
            "tokens_per_s": 71.3,
        }
        for name, rates in RATES.items()
    }
    return {
        "verdict": verdict,
        "text": "short prompts: acceptance length 4.53, at least 3.78 expected (90% of 4.20); "
        "long prompts: acceptance length 4.08, at least 3.60 expected (90% of 4.00)",
        "mode": "observe",
        "reference": {"short": 4.2, "long": 4.0},
        "reference_from": "canary",
        "measured_at": "2026-12-02T09:38:20+00:00",
        "sets": sets,
    }


def fleet() -> dict[str, dict | None]:
    """Host → record: every end that a switch can have, and a host that was not reached."""
    forward = [("PREPARED", 0.0), ("OLD_STOPPED", 0.3), ("GPU_FREE", 2.6)]
    return {
        "gpu1.example.net": switch(
            0,
            [*forward, ("NEW_STARTED", 2.65), ("PROVED", 68.4), ("CONFIRMED", 68.41)],
            outage_s=68.25,
            outage_begin_s=400.001,
            acceptance=measured(),
        ),
        "gpu2.example.net": switch(
            1,
            [
                *forward,
                ("NEW_STARTED", 2.65),
                ("ROLLING_BACK", 41.0),
                ("NEW_GONE", 46.2),
                ("ROLLED_BACK", 78.9),
            ],
            outage_s=78.4,
            outage_begin_s=400.2,
            cause="In NEW_STARTED: vllm-dflash@fa811a23ecc03c79.service ended: exit status 1 (after 38 s).",
            advice="The last switch ended ROLLED_BACK: Mend that and switch again.",
            log_tail=["ERROR 12-02 09:40:37 Engine core initialization failed.", "RuntimeError: no memory"],
            killed=[{"pid": 4143, "signal": "SIGKILL", "user": "vllm-dflash", "command": "VLLM::EngineCore"}],
        ),
        "gpu3.example.net": switch(
            2, [("REFUSED", 0.0)], cause="Port 30000 is held by another.", remedy="End it."
        ),
        "gpu4.example.net": switch(
            3,
            [*forward, ("ROLLING_BACK", 12.0), ("NEW_GONE", 12.4), ("STRANDED", 212.4)],
            cause="In GPU_FREE: no start. Then, on the way back: sglang.service was not ready in 200 s.",
            remedy="systemctl start sglang.service, and look at its log",
            drafter=None,
        ),
        "gpu5.example.net": None,
    }
