#!/usr/bin/env bash
# Is anything acknowledged ever lost? The long form of tests/crash, and mqload's own count beside it.
#
#   scripts/crash.sh             50 rounds
#   scripts/crash.sh ROUNDS      so many kills and so many power cuts in tests/crash, and so many runs of
#                                `mqload offline --crash-at` against one data directory
#   scripts/crash.sh ROUNDS mqload | tests     one of the two
#   scripts/crash.sh ROUNDS groups             so many kills of the gateway, of members of a consumer group, or of both, while
#                                              devices publish (scripts/groups); only when asked for. Members are of Python, Go and
#                                              Rust by the API, and of all client libraries. Needs what scripts/test.sh installs;
#                                              without Go, or npm, the others do
#
#   scripts/crash.sh ROUNDS commands           so many kills of the gateway while backends start and cancel commands and devices
#                                              answer them (scripts/commands); only when asked for. Needs .venv, too
#
#   scripts/crash.sh ROUNDS bridges            so many kills of the gateway, of the other side, and of both, in turn, while devices
#                                              publish and a bridge carries it (scripts/bridges): for each kind of bridge; only when
#                                              asked for. Builds the feature kafka, and needs what scripts/kafka.sh says
#
#   scripts/crash.sh ROUNDS cluster [PART]     two gateways with a ledger in PostgreSQL, and on three nodes of Cassandra; only when asked
#                                              for. Needs what scripts/postgres.sh and scripts/cassandra.sh say. PART, or all of them:
#       many           ROUNDS faults under QoS 1 and 2, a consumer group, commands and shadows; half of them kill the gateway that serves
#                      and delete its directory
#       outages        the database stands still, dies, is promoted, for CRASH_OUTAGE (60) seconds
#       starts         ROUNDS double starts on fresh directories
#       directories    directories of another time, of another cluster, damaged, ahead of the ledger, of a newer version
#       clocks         two gateways whose clocks are two hours apart
#       churn          size of the ledger while CRASH_LIVE_MB (48) are changed again and again for CRASH_MINUTES (60)
#       times          time of a takeover with 10 MB and with CRASH_MB (2000)
#                                              PART_on_postgresql and PART_on_cassandra of `many`, and words of a test's name, choose less
#
# LEDGER=postgres://… or cassandra://… (with LEDGER_PASSWORD) runs the others on a ledger: the gateway's directory is gone at every
# start, and all that it has comes from there (scripts/ledger-gateway.sh).
#
# Environment: PROFILE=release (or debug), SKIP_BUILD=1 (take the binaries that are there), SEED (repeats the choices,
# as far as timing allows), CRASH_BINARY=PATH (another build of the server).
# Exit 1: something was lost, duplicated at QoS 2, or did not run.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

rounds=${1:-50} part=${2:-all} chosen=${3:-}
profile=${PROFILE:-release}
seed=${SEED:-$(date +%s)}
case $rounds in '' | *[!0-9]*) echo "usage: scripts/crash.sh [ROUNDS] [mqload|tests|groups|commands|bridges|cluster]" >&2; exit 2 ;; esac
case $part in all | mqload | tests | groups | commands | bridges | cluster) ;; *) echo "usage: scripts/crash.sh [ROUNDS] [mqload|tests|groups|commands|bridges|cluster]" >&2; exit 2 ;; esac

features=()
[ "$part" = bridges ] && features=(--features kafka)
release=()
[ "$profile" = release ] && release=(--release)
if [ "${SKIP_BUILD:-}" != 1 ]; then
  step "building the server" cargo build --locked "${release[@]}" "${features[@]}" --bin mqtt-server
  [ "$part" = bridges ] || step "building the load generators" cargo build --locked --release -p mqload -p grpcload
fi
binary=${CRASH_BINARY:-$root/target/$profile/mqtt-server}
mqload=$root/target/release/mqload
echo "SEED=$seed"

work=$(mktemp -d)
pid_file=$work/pid
kill_server() {
  if [ -s "$pid_file" ]; then kill -9 "$(cat "$pid_file")" 2>/dev/null || true; fi
}
trap 'kill_server; rm -rf "$work"' EXIT

free_ports() {
  python3 -c 'import socket
held = [socket.socket() for _ in range(3)]
for s in held: s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in held))'
}

# On a ledger: the worlds start it without these variables.
if [ -n "${LEDGER:-}" ]; then
  {
    echo '#!/bin/sh'
    printf 'export LEDGER=%q LEDGER_PASSWORD=%q LEDGER_BINARY=%q\n' "$LEDGER" "${LEDGER_PASSWORD:-}" "$binary"
    printf 'exec %q "$@"\n' "$root/scripts/ledger-gateway.sh"
  } >"$work/gateway"
  chmod +x "$work/gateway"
  binary=$work/gateway
fi

run_mqload() {
  local port http grpc lost=0 duplicates=0 acknowledged=0 delivered=0 bad=0
  read -r port http grpc < <(free_ports)
  # No cap is reached: what is dropped at a cap is not lost by a crash.
  cat >"$work/config.toml" <<TOML
insecure_grpc = true
[grpc]
tls = false
[latest]
enabled = false
[sys]
enabled = false
[limits]
offline_messages = 1000000
offline_bytes = "1 GiB"
mailbox_messages = 1000000
mailbox_bytes = "1 GiB"
TOML
  cat >"$work/start" <<SH
#!/bin/sh
"$binary" --config "$work/config.toml" --non-tls --addr 127.0.0.1:$port --http-addr 127.0.0.1:$http \\
  --grpc-addr 127.0.0.1:$grpc --data-dir "$work/data" </dev/null >>"$work/log" 2>&1 &
echo \$! >"$pid_file"
SH
  # All threads of the old process are gone before the new one opens the data; whoever adopted it may leave a zombie.
  cat >"$work/crash" <<SH
#!/bin/sh
pid=\$(cat "$pid_file")
kill -9 \$pid
while [ -d /proc/\$pid/task ]; do
  if grep -q '^State:.Z' /proc/\$pid/status && [ "\$(ls /proc/\$pid/task | wc -l)" -le 1 ]; then break; fi
  sleep 0.01
done 2>/dev/null
"$work/start"
SH
  chmod +x "$work/start" "$work/crash"
  "$work/start"
  RANDOM=$((seed % 32768))
  local round qos count at version code
  for round in $(seq "$rounds"); do
    qos=$((RANDOM % 2 + 1)) count=$((RANDOM % 9000 + 1000))
    at=$(((RANDOM * 32768 + RANDOM) % (count * 2 * 9 / 10) + 1))
    version=()
    [ $((RANDOM % 2)) = 0 ] && version=(--v5)
    for _ in $(seq 100); do
      (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && break
      sleep 0.1
    done
    code=0
    "$mqload" offline -p "$port" -P 2 -S 3 -n "$count" --qos "$qos" "${version[@]}" --crash-at "$at" \
      --pid-file "$pid_file" --pause-cmd "$work/crash" --quiet >"$work/report" 2>"$work/errors" || code=$?
    # Lost connections are what a crash is; only losses and duplicates count.
    if ! read -r l d a g < <(python3 - "$work/report" <<'PY'
import json, sys
r = json.load(open(sys.argv[1]))
assert r["pause_cmd_exit"] == 0, "the server was not killed and started"
print(r["lost"], r["duplicated"] if r["qos"] == 2 else 0, r["acked"], r["delivered"])
PY
    ); then
      echo "round $round: mqload ended with $code and no usable report" >&2
      cat "$work/errors" >&2
      bad=$((bad + 1))
      continue
    fi
    lost=$((lost + l)) duplicates=$((duplicates + d))
    acknowledged=$((acknowledged + a)) delivered=$((delivered + g))
    echo "round $round: QoS $qos, killed at $at of $((count * 2)): $a acknowledged, $g delivered, $l lost, $d QoS 2 duplicates"
  done
  echo "mqload, $rounds rounds: $acknowledged acknowledged, $delivered delivered, lost $lost, QoS 2 duplicates $duplicates, not run $bad"
  [ "$lost" = 0 ] && [ "$duplicates" = 0 ] && [ "$bad" = 0 ] || { tail -n 20 "$work/log" >&2; return 1; }
}

run_tests() {
  CRASH_ROUNDS=$rounds CRASH_IMAGES=$rounds CRASH_SEED=$seed CRASH_BINARY=$binary \
    cargo test --locked --test crash -- --nocapture --test-threads 1
}

# The Go member, into $work/member. Its generated code is that of clients/go; its modules come from the Go registry.
build_go_member() {
  command -v go >/dev/null || return 1
  (cd scripts/groups/gomember && go build -o "$work/member" .) >"$work/go.log" 2>&1 ||
    { tail -n 5 "$work/go.log" >&2; return 1; }
}

# The clients of the API in Python, and an empty folder for a world.
build_python() {
  .venv/bin/python -c 'import grpc_tools' 2>/dev/null || { echo ".venv has no grpcio-tools: run scripts/test.sh first" >&2; return 1; }
  mkdir -p "$work/python" "$work/world"
  .venv/bin/python -m grpc_tools.protoc -Iproto --python_out="$work/python" --grpc_python_out="$work/python" \
    proto/gateway/v1/*.proto
}

run_commands() {
  build_python || return 1
  PYTHONPATH=$work/python:scripts .venv/bin/python scripts/commands/world.py "$binary" "$work/world" "$rounds" "$seed" ||
    { tail -n 20 "$work"/world/*.log >&2; return 1; }
}

run_groups() {
  build_python || return 1
  local python=$root/.venv/bin/python rust=$root/target/release/grpcload
  local members=("python=$python $root/scripts/groups/member.py" "rust=$rust member"
    "python-library=$python $root/scripts/groups/library.py" "rust-library=$rust library")
  (cd clients/python && "$python" generate.py)
  if build_go_member; then
    members+=("go=$work/member" "go-library=$work/member library")
  else
    skip "the members in Go" "Go, or its packages, could not be had"
  fi
  if (cd clients/typescript && npm run --silent build) >"$work/npm.log" 2>&1; then
    members+=("typescript-library=node $root/scripts/groups/library.mjs")
  else
    skip "the member in TypeScript" "npm, or what it installs, could not be had"
  fi
  PYTHONPATH=$work/python:scripts .venv/bin/python scripts/groups/world.py "$binary" "$work/world" "$rounds" "$seed" \
    "${members[@]}" || { tail -n 20 "$work"/world/*.log >&2; return 1; }
}

run_bridges() {
  local kind code failed=0
  for kind in mqtt webhook kafka; do
    code=0
    mkdir -p "$work/$kind"
    PYTHONPATH=scripts python3 scripts/bridges/world.py "$binary" "$work/$kind" "$rounds" "$seed" "$kind" || code=$?
    case $code in
      0) ;;
      3) skip "the bridge to Kafka" "Java, Maven or Kafka's jars could not be had" ;;
      *) tail -n 20 "$work/$kind"/*.log >&2; failed=1 ;;
    esac
  done
  return $failed
}

run_cluster() {
  CRASH_ROUNDS=$rounds CRASH_SEED=$seed CRASH_BINARY=$binary \
    cargo test --locked --test crash "cluster::$chosen" -- --ignored --nocapture --test-threads 1
}

result=0
if [ "$part" = cluster ]; then
  say "two gateways: ${chosen:-everything}, $rounds rounds"
  run_cluster || result=1
  exit $result
fi
if [ "$part" = bridges ]; then
  say "bridges: $rounds kills"
  run_bridges || result=1
  report_skipped
  exit $result
fi
if [ "$part" = groups ]; then
  say "consumer groups: $rounds kills"
  run_groups || result=1
  report_skipped
  exit $result
fi
if [ "$part" = commands ]; then
  say "commands: $rounds kills"
  run_commands || result=1
  exit $result
fi
if [ "$part" != mqload ]; then
  say "tests/crash: $rounds kills, $rounds power cuts"
  run_tests || result=1
fi
if [ "$part" != tests ]; then
  say "mqload offline --crash-at: $rounds runs"
  run_mqload || result=1
fi
exit $result
