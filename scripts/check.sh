#!/usr/bin/env bash
# The quick checks before a commit: formatting, lints, protos, documentation, dependencies. Installs nothing.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

choose_features
step fmt cargo fmt --all --check
step clippy cargo clippy --locked "${features[@]}" --all-targets -- -D warnings
step tools cargo clippy --locked -p mqload -p grpcload --all-targets -- -D warnings
# The README's first command.
step "without default features" cargo check --locked --no-default-features
step "OTLP export, and neither QUIC nor Kafka" cargo clippy --locked --no-default-features --features otel --lib -- -D warnings
step protos proto_check
RUSTDOCFLAGS="-D warnings" step doc cargo doc --locked "${features[@]}" --no-deps
if command -v cargo-deny >/dev/null; then
  step deny deny_check
else
  skip "cargo deny" "cargo-deny is not installed (cargo install --locked cargo-deny)"
fi
report_skipped
