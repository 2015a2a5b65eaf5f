#!/usr/bin/env bash
# What stored commands, shadows and looks at groups cost, measured: scripts/stored.sh [ITEM...]
#
#   scripts/stored.sh                    all of commands, shadows, info: about four minutes
#   scripts/stored.sh commands           this one; scripts/stored/measure.py says what each is
#
# Builds the gateway and the load generators in release mode; needs what scripts/test.sh installs into .venv. Nothing else should
# run on the machine. Environment: SCALE (1; fewer for a trial), SKIP_BUILD=1 (take the binaries that are there). Exit 1: a bound
# was missed.
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
PYTHONPATH=$work/python:scripts .venv/bin/python scripts/stored/measure.py \
  target/release/mqtt-server target/release/mqload target/release/grpcload "$work/measure" "$@"
