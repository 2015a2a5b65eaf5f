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

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif sudo -n true 2>/dev/null; then sudo "$@"; else return 1; fi
}

# unpack_package PACKAGE: a Debian package into target/tools/PACKAGE. It is not installed, so that nothing of it is started.
unpack_package() {
  local package=$1 tools=target/tools deb
  mkdir -p $tools/packages
  (cd $tools/packages && { apt-get download -qq "$package" 2>/dev/null ||
    { as_root apt-get update -qq && apt-get download -qq "$package"; }; }) || return
  deb=$(find $tools/packages -name "${package}_*.deb" | sort | tail -n 1)
  rm -rf "${tools:?}/$package" "${tools:?}/$package.new"
  dpkg-deb -x "$deb" "$tools/$package.new" && mv -T "$tools/$package.new" "$tools/$package"
}

# The broker for comparisons, which tests look for on PATH. Its Debian package starts a broker on port 1883, so it is only unpacked;
# libraries that it lacks are installed, as they start nothing.
fetch_mosquitto() {
  local tools=$PWD/target/tools/mosquitto deb code=0
  PATH=$tools/usr/sbin:$tools/usr/bin:$PATH:/usr/sbin
  if command -v mosquitto >/dev/null && command -v mosquitto_passwd >/dev/null; then return; fi
  command -v apt-get >/dev/null || { skip "Mosquitto" "it is not installed and there is no apt-get"; return; }
  say "fetching Mosquitto into target/tools"
  unpack_package mosquitto || { skip "Mosquitto" "its package could not be fetched"; return; }
  mosquitto -h >/dev/null 2>&1 || code=$?
  # 126 and 127: a library is missing.
  if [ "$code" -ge 126 ]; then
    deb=$(find target/tools/packages -name 'mosquitto_*.deb' | sort | tail -n 1)
    as_root env DEBIAN_FRONTEND=noninteractive apt-get satisfy -y -qq --no-install-recommends \
      "$(dpkg-deb -f "$deb" Depends)" >/dev/null ||
      skip "Mosquitto" "its libraries could not be installed: there is neither root nor sudo, or apt-get failed"
  fi
}

# What is tested is what is shipped, and OTLP export: with bridges to Kafka, wherever librdkafka can be compiled. `features` are the
# arguments for cargo; `with_kafka` is empty without.
choose_features() {
  local tool missing=()
  with_kafka='' features=(--features otel)
  for tool in cc c++ make pkg-config; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  pkg-config --exists openssl 2>/dev/null || missing+=("the headers of OpenSSL")
  if [ ${#missing[@]} -eq 0 ]; then
    with_kafka=1 features=(--features "kafka otel")
  else
    skip "bridges to Kafka" "librdkafka cannot be compiled without $(printf '%s, ' "${missing[@]}" | sed 's/, $//') (Debian: apt-get install g++ make pkg-config libssl-dev)"
  fi
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
