#!/usr/bin/env bash
# Do memory and disk stay flat? Persistent load of all kinds on loopback for a while.
#
#   scripts/soak.sh              30 minutes
#   scripts/soak.sh MINUTES      at least 1
#
# Load by mqload: pairs with persistent sessions at QoS 1 and 2, a shared group, retained messages, and sessions that
# are made, filled while their clients are away, drained and deleted, over and over. Every 10 s the memory (RSS) of the
# server and the size of its data directory are noted (target/soak.csv). At the end the last third is compared with the
# first, of which the first tenth of the run is left out as warming up: a median that has grown by more than 10 % and
# 8 MiB is growth. Exit 1: growth, or a load that failed.
# Environment: PROFILE=release (or debug), SKIP_BUILD=1, CRASH_BINARY=PATH, RATE=2000 (messages per second of each of the four loads).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

minutes=${1:-30}
case $minutes in '' | *[!0-9]* | 0) echo "usage: scripts/soak.sh [MINUTES]" >&2; exit 2 ;; esac
profile=${PROFILE:-release} rate=${RATE:-2000} seconds=$((minutes * 60))
release=()
[ "$profile" = release ] && release=(--release)
if [ "${SKIP_BUILD:-}" != 1 ]; then
  step "building the server" cargo build --locked "${release[@]}" --bin mqtt-server
  step "building mqload" cargo build --locked --release -p mqload
fi
binary=${CRASH_BINARY:-$root/target/$profile/mqtt-server} mqload=$root/target/release/mqload
work=$(mktemp -d) csv=$root/target/soak.csv server='' loads=()
finish() {
  # mqload is a child of the loop that repeats it.
  for pid in "${loads[@]}"; do
    for child in $(ps -o pid= --ppid "$pid" 2>/dev/null); do kill "$child" 2>/dev/null || true; done
    kill "$pid" 2>/dev/null || true
  done
  if [ -n "$server" ]; then
    kill -9 "$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap finish EXIT

read -r port http grpc < <(python3 -c 'import socket
held = [socket.socket() for _ in range(3)]
for s in held: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in held))')
cat >"$work/config.toml" <<TOML
insecure_grpc = true
[grpc]
tls = false
[limits]
offline_messages = 1000000
mailbox_messages = 1000000
TOML
"$binary" --config "$work/config.toml" --non-tls --addr "127.0.0.1:$port" --http-addr "127.0.0.1:$http" \
  --grpc-addr "127.0.0.1:$grpc" --data-dir "$work/data" </dev/null >"$work/log" 2>&1 &
server=$!
for _ in $(seq 300); do
  (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
  sleep 0.1
done

# load NAME OPTION...: one load in the background; a failure ends up in $work/failed.
load() {
  local name=$1
  shift
  ("$mqload" "$@" -p "$port" --pid "$server" --quiet >"$work/$name.json" 2>"$work/$name.err" ||
    echo "$name ended with $?: $(tail -n 3 "$work/$name.err")" >>"$work/failed") &
  loads+=($!)
}

steady=(--clean false --rate "$rate" -d "$seconds" --drain-timeout 60)
load qos1 pubsub --qos 1 -P 20 "${steady[@]}"
load qos2 pubsub --qos 2 --v5 -P 20 "${steady[@]}"
load shared pubsub -t share --qos 1 --v5 -P 10 -S 5 "${steady[@]}"
load retained pubsub --qos 1 -P 20 --retain "${steady[@]}"
end=$((SECONDS + seconds))
(
  round=0
  while [ $SECONDS -lt $end ]; do
    round=$((round + 1))
    "$mqload" offline -p "$port" --pid "$server" --quiet -P 2 -S 20 -n 2000 --qos $((round % 2 + 1)) --drain-timeout 60 \
      >"$work/offline.json" 2>"$work/offline.err" ||
      echo "offline round $round ended with $?: $(tail -n 3 "$work/offline.err")" >>"$work/failed"
    sleep 2
  done
) &
loads+=($!)

echo "seconds,rss_kib,disk_kib" >"$csv"
start=$SECONDS
while [ $SECONDS -lt $end ]; do
  sleep 10
  rss=$(awk '/^VmRSS:/ { print $2 }' "/proc/$server/status" 2>/dev/null || true)
  if [ -z "$rss" ]; then
    echo "the server is gone" >&2
    tail -n 30 "$work/log" >&2
    exit 1
  fi
  disk=$(du -sk "$work/data" | cut -f1)
  echo "$((SECONDS - start)),$rss,$disk" >>"$csv"
  # One line that says how far it is.
  printf '%4d of %d s: RSS %d MiB, disk %d MiB\n' $((SECONDS - start)) "$seconds" $((rss / 1024)) $((disk / 1024))
done
wait "${loads[@]}" || true
loads=()

result=0
if [ -s "$work/failed" ]; then
  echo "loads that failed:" >&2
  cat "$work/failed" >&2
  result=1
fi
python3 - "$csv" <<'PY' || result=1
import csv, statistics, sys
rows = list(csv.DictReader(open(sys.argv[1])))
third = max(1, len(rows) // 3)
first, last = rows[len(rows) // 10:third] or rows[:third], rows[-third:]
grown = False
for key, name in (("rss_kib", "memory"), ("disk_kib", "disk")):
    a, b = (statistics.median(int(r[key]) for r in part) for part in (first, last))
    grows = b > a * 1.1 and b - a > 8 * 1024
    grown |= grows
    print(f"{name}: first third {a / 1024:.1f} MiB, last third {b / 1024:.1f} MiB: {'GROWS' if grows else 'flat'}")
sys.exit(grown)
PY
exit $result
