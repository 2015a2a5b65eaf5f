# shellcheck shell=bash
# Shared by the scripts: sourced, not run. Says what is done, what is missing and what that costs.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit

skipped=()

say() { printf '\n==> %s\n' "$*"; }

# skip WHAT REASON: notes a check that could not run, loudly.
skip() {
  skipped+=("$1: $2")
  printf '\n!!! SKIPPED: %s\n!!! because: %s\n' "$1" "$2" >&2
}

report_skipped() {
  [ ${#skipped[@]} -eq 0 ] && return
  printf '\n!!! These checks were SKIPPED:\n' >&2
  printf '!!!   %s\n' "${skipped[@]}" >&2
}

# step NAME COMMAND...: runs it with its time, and that of the processors: what waits could wait beside something else.
step() {
  local name=$1 TIMEFORMAT
  shift
  say "$name: $*"
  TIMEFORMAT="    $name took %0R s, %0U s of a processor and %0S s of its system calls"
  time "$@"
}

# What is tested is what is shipped: with bridges to Kafka, wherever librdkafka can be compiled. `features` are the arguments for cargo.
choose_features() {
  local tool missing=()
  features=()
  for tool in cc c++ make pkg-config; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  pkg-config --exists openssl 2>/dev/null || missing+=("the headers of OpenSSL")
  if [ ${#missing[@]} -eq 0 ]; then
    features=(--features kafka)
  else
    skip "bridges to Kafka" "librdkafka cannot be compiled without $(printf '%s, ' "${missing[@]}" | sed 's/, $//') (Debian: apt-get install g++ make pkg-config libssl-dev)"
  fi
}

# The backends of the store are features, which the other checks have all switched on.
store_features_check() {
  local features
  for features in '' lmdb scylla; do
    cargo clippy --locked -p store --no-default-features --features "$features" --all-targets -- -D warnings || return
  done
}

# The protos: their style, and whether they still serve the clients of the last release. buf comes with the packages of
# tests/interop.
proto_check() {
  local buf=tests/interop/node_modules/.bin/buf last before code=0
  if [ ! -x "$buf" ]; then
    skip "buf lint, buf breaking" "tests/interop/node_modules has no buf (cd tests/interop && npm ci)"
    return
  fi
  "$buf" lint proto
  if ! last=$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null); then
    skip "buf breaking" "there is no release (a tag v*) to compare the protos with"
    return
  fi
  before=$(mktemp -d)
  git archive "$last" proto | tar -x -C "$before"
  "$buf" breaking proto --against "$before/proto" || code=$?
  rm -rf "$before"
  return "$code"
}

# The advisory database may be out of reach: then the other checks of cargo deny still run.
deny_check() {
  if timeout 120 cargo deny --locked fetch db >/dev/null 2>&1; then
    cargo deny --locked check --hide-inclusion-graph
  else
    skip "cargo deny: advisories" "the advisory database cannot be fetched from here"
    cargo deny --locked check --hide-inclusion-graph licenses bans sources
  fi
}
