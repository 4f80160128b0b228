#!/usr/bin/env bash
# The whole roll-out on two booted local hosts. The GPUs, SGLang and the engine behind vLLM's command line are simulated;
# systemd, ssh, uv, the vLLM wheel with its parser and engine config, the drafter's 3.46 GB and the switch are real.
set -euo pipefail
cd "$(dirname "$0")/../.."
started=$SECONDS
step() { printf '\n== %s (%d s)\n' "$*" $((SECONDS - started)); }
cache=${XDG_CACHE_HOME:-$HOME/.cache}/vllm-dflash-testbed
drafter=$cache/drafter/model.safetensors
bed=(python3 tests/testbed/bed.py)

if [ "$(id -u)" != 0 ]; then echo "The demo boots local hosts and needs root: sudo make demo" >&2; exit 1; fi
mkdir -p "$cache/drafter"
free_gb=$(($(df --output=avail -k "$cache" | tail -n 1) / 1024 / 1024))
wanted_gb=30
# What an earlier run left in the cache needn't fit again.
have_gb=$(($(du -sk "$cache" | cut -f 1) / 1024 / 1024))
if [ $((free_gb + have_gb)) -lt $wanted_gb ]; then
  echo "The demo needs $wanted_gb GB on the filesystem of $cache, and $((free_gb + have_gb)) are to be had. Set XDG_CACHE_HOME to a larger one." >&2
  exit 1
fi

step "System packages and base image"
"${bed[@]}" prepare
step "A drafter of the published shape: 58 tensors, 3.46 GB of random weights"
[ -f "$drafter" ] || python3 tests/testbed/make_drafter.py "$drafter" --full-size
step "The real vLLM wheel from the lock, once, as a layer that the hosts share"
"${bed[@]}" layer
step "Two booted hosts, serving with a simulated SGLang"
"${bed[@]}" up demo --hosts 2 --layer
inventory=/run/vllm-dflash-testbed/demo/inventory.yml
step "ansible-playbook site.yml, watched from outside"
probes=/run/vllm-dflash-testbed/demo/probes.jsonl
rm -f "$probes"
python3 tests/demo/outage.py watch "$probes" "$inventory" &
watcher=$!
trap 'kill $watcher 2>/dev/null || true' EXIT
until [ -f "$probes" ]; do
  kill -0 $watcher 2>/dev/null || { echo "The watcher has ended, see above; nothing was rolled out." >&2; exit 1; }
  sleep 0.2
done
ansible-playbook -i "$inventory" site.yml -e "drafter_source=$drafter"
kill $watcher && wait $watcher
step "What clients saw"
python3 tests/demo/outage.py report "$probes" "$inventory"
step "Done"
address=$(ansible-inventory -i "$inventory" --host demo-gpu1 | python3 -c 'import json, sys; print(json.load(sys.stdin)["ansible_host"])')
cat <<TEXT
Try it (the engine's answers are simulated, everything before them is vLLM's own):
  curl -s http://$address:30000/v1/models
  curl -s http://$address:30000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"model": "Qwen3.6-27B", "prompt": "Hello", "max_tokens": 16}'
Again, and nothing changes:
  .venv/bin/ansible-playbook -i $inventory site.yml -e drafter_source=$drafter
Back to SGLang:
  .venv/bin/ansible-playbook -i $inventory playbooks/rollback.yml
Away with it:
  make demo-down
TEXT
