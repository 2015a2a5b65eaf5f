#!/usr/bin/env bash
# Measures the gateway beside Mosquitto: scripts/bench.sh [SCENARIO...] [--peer NAME=COMMAND] [--no-docs] [--mix NAME]
#
#   scripts/bench.sh               the agreed rows
#   scripts/bench.sh pair0 conn    these
#   scripts/bench.sh all           every scenario there is; --help lists them
#   scripts/bench.sh hostile       attackers of many kinds, and what becomes of those beside them; --mix NAME for one
#   scripts/bench.sh memory        attacks on memory, against the configured budget; --mix NAME for one
#
# Builds the gateway as it is shipped and the load generators, gets Mosquitto from the system's package manager, and lets
# the brokers take turns. Results go to target/bench/ and into docs/benchmarks/results.md. Exit 1: a bound was missed.
# Environment: ROUNDS (3), SECONDS_PER_RUN (5), BROKER_CPU (0), LOAD_CPU (1), SCALE (1; fewer connections and
# subscriptions for a trial), SKIP_BUILD=1 (take the binaries that are there).
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

for tool in python3 taskset; do
  command -v "$tool" >/dev/null || { echo "scripts/bench.sh needs $tool" >&2; exit 1; }
done
case " $* " in *" --help "* | *" -h "* | *" --only-docs "*) exec python3 scripts/bench/main.py "$@" ;; esac
fetch_mosquitto
if [ "${SKIP_BUILD:-}" != 1 ]; then
  cargo build --profile dist --locked --bin mqtt-server
  cargo build --release --locked -p mqload -p grpcload
fi
report_skipped
exec python3 scripts/bench/main.py "$@"
