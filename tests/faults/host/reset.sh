#!/bin/sh
# Bring a host back to what it was before any switch: nothing of an earlier cell is left, the old server serves.
# $1: faults.json from the start of the old server on.
set -u
rm -rf /run/faults; mkdir /run/faults
for unit in faults-watchdog.service llm-switchover.service sglang.service 'vllm-dflash@*.service' 'faults-foreign*.service'; do
    systemctl kill --signal=SIGKILL "$unit" 2>/dev/null
    systemctl stop "$unit" 2>/dev/null
done
for hold in /run/simulated-gpu/holds/*; do
    pid=${hold##*/}
    [ "$pid" = '*' ] || { kill -9 "$pid" 2>/dev/null; rm -f "$hold"; }
done
rm -f /run/simulated-gpu/unseen /var/log/faults-signals.jsonl
while umount -l /var/lib/vllm-dflash 2>/dev/null; do :; done
rm -rf /var/lib/vllm-dflash/serving.json /var/lib/vllm-dflash/switch /run/vllm-dflash
mkdir -p /var/lib/vllm-dflash/switch
test ! -e /opt/faults/sglang.service.away || mv -f /opt/faults/sglang.service.away /etc/systemd/system/sglang.service
rm -f /etc/systemd/system/*.d/95-faults-cell.conf
printf '%s' "$1" > /etc/simulated-gpu/faults.json
systemctl daemon-reload
systemctl reset-failed
: > /var/log/faults-observer.jsonl
systemctl start sglang.service
tries=0
until curl -sf -m 2 http://127.0.0.1:30000/v1/models >/dev/null; do
    tries=$((tries + 1)); [ $tries -lt 300 ] || { systemctl status sglang.service; exit 1; }
    sleep 0.1
done
journalctl -q --no-pager -n 0 --show-cursor | sed -n 's/^-- cursor: //p'
