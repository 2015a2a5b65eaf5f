#!/usr/bin/env bash
# What consumer groups promise, measured against the bounds: scripts/groups.sh [ITEM...]
#
#   scripts/groups.sh                    all of restart, stalled, poisoned, fetch, quiet, puback: about eight minutes
#   scripts/groups.sh restart fetch      these; scripts/groups/measure.py says what each is
#
# Builds the gateway and the load generators in release mode; needs what scripts/test.sh installs into .venv. Nothing else should
# run on the machine. Environment: ROUNDS (5), SCALE (1; fewer messages for a trial), SKIP_BUILD=1 (take the binaries that are
# there). Exit 1: a bound was missed.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

.venv/bin/python -c 'import grpc_tools' 2>/dev/null || { echo ".venv has no grpcio-tools: run scripts/test.sh first" >&2; exit 1; }
if [ "${SKIP_BUILD:-}" != 1 ]; then
  cargo build --release --locked --bin mqtt-server -p mqtt-server -p mqload -p grpcload
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/python" "$work/measure"
.venv/bin/python -m grpc_tools.protoc -Iproto --python_out="$work/python" --grpc_python_out="$work/python" proto/gateway/v1/*.proto
PYTHONPATH=$work/python:scripts .venv/bin/python scripts/groups/measure.py \
  target/release/mqtt-server target/release/mqload target/release/grpcload "$work/measure" "$@"
