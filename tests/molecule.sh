#!/usr/bin/env bash
# One bed of booted hosts for all scenarios: `default` creates and destroys it, the others converge and verify on it.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! reason=$(python3 tests/testbed/bed.py can-boot); then
  if [ "${CI:-}" = true ]; then echo "molecule: this machine can't boot hosts, which CI has to: $reason" >&2; exit 1; fi
  echo "molecule: skipped, this machine can't boot hosts: $reason" >&2
  exit 0
fi
python3 tests/testbed/bed.py prepare
python3 tests/testbed/bed.py layer
molecule test --all
