#!/usr/bin/env bash
# How long it takes from a clean clone to the first message, by the shortest path there is from source: README's "Start".
#
#   scripts/first-message.sh
#
# Clones this repository into a directory of its own, builds as it says there, starts `--dev` on ports that are free, and has one
# device read over TLS what another one published. Crates that cargo has already are not fetched again; CARGO_HOME=DIR of an empty
# directory counts that, too. Needs mosquitto-clients.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

work=$(mktemp -d)
gateway=
finish() {
  if [ -n "$gateway" ]; then kill "$gateway" 2>/dev/null && wait "$gateway" || true; fi
  rm -rf "$work"
}
trap finish EXIT
began=$(date +%s)
told() { printf '%4d s: %s\n' "$(($(date +%s) - began))" "$1"; }
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

git clone --quiet "$root" "$work/clone"
cd "$work/clone"
told "cloned"
unset CARGO_TARGET_DIR
cargo build --locked --quiet --no-default-features
told "built"
mqtt=$(free_port)
target/debug/mqtt-server --dev --addr "127.0.0.1:$mqtt" --grpc-addr "127.0.0.1:$(free_port)" --http-addr "127.0.0.1:$(free_port)" \
  >gateway.log 2>&1 &
gateway=$!
publish=(mosquitto_pub -h localhost -p "$mqtt" --cafile certs/ca.crt -i kitchen -q 1 -r -t sensors/kitchen/temperature -m 21.5)
until "${publish[@]}" 2>/dev/null; do
  kill -0 "$gateway" || { cat gateway.log >&2; exit 1; }
  sleep 0.1
done
mosquitto_sub -h localhost -p "$mqtt" --cafile certs/ca.crt -t 'sensors/+/temperature' -v -C 1 -W 30
told "the first message has arrived"
