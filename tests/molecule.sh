#!/usr/bin/env bash
# One booted host for all scenarios: `default` makes it and takes it away, the others converge and verify on it.
set -euo pipefail
cd "$(dirname "$0")/.."
bed=(python3 tests/testbed/bed.py)
if ! reason=$("${bed[@]}" can-boot); then
  if [ "${CI:-}" = true ]; then echo "molecule: this machine can't boot hosts, which CI has to: $reason" >&2; exit 1; fi
  echo "molecule: skipped, this machine can't boot hosts: $reason" >&2
  exit 0
fi
# Whatever happens, nothing stays: not the host, not molecule's belief that there is one.
MOLECULE_EPHEMERAL_DIRECTORY=$(mktemp -d)
export MOLECULE_EPHEMERAL_DIRECTORY
trap '"${bed[@]}" down mol; rm -r "$MOLECULE_EPHEMERAL_DIRECTORY"' EXIT
"${bed[@]}" down mol
"${bed[@]}" prepare
"${bed[@]}" layer
molecule test --all --no-command-borders
