#!/usr/bin/env bash
# The test command: installs what the tests need, checks the code, runs every test.
#
#   scripts/test.sh              everything
#   scripts/test.sh FILTER...    everything, but only the tests that match (arguments of `cargo test`)
#   scripts/test.sh --quick [FILTER...]
#                                while you work: formatting and the unit tests; installs nothing, starts nothing, and says
#                                what it leaves out
#
# What cannot be installed is said loudly. Its tests then fail, unless MQTT_SERVER_TEST_SKIP_MISSING=1. Tests with a real
# Cassandra are skipped, and counted, where Java 17 or Maven is missing or the jars cannot be had; where it could be
# started and does not answer, the run fails. MQTT_SERVER_TEST_CASSANDRA is one to be used instead, or `none`.
# So are the tests with a real PostgreSQL; MQTT_SERVER_TEST_POSTGRES is one to be used instead (as scripts/postgres.sh prints it), or
# `none`.
# So are the tests with a real Kafka; MQTT_SERVER_TEST_KAFKA=none skips them. Without a C++ compiler, make, pkg-config and the headers of
# OpenSSL there are no bridges to Kafka in what is tested, which is said, too.
# MQTT_SERVER_TEST_FAULT_SECONDS (5) is how long Cassandra stands still in them.
# Runs may go on beside each other, from checkouts of their own.
# Tests mostly wait, for a database, for a process, for a time to pass: three parts of them run at once, and what each has
# said is shown on its own. The build finds what lints deny: clippy compiles the workspace, in rustc's place. The tests of the documentation
# and the dependencies are checked beside the others. The summary of the test runner is the last thing printed.
# What needs a second build of all dependencies is left to scripts/check.sh: rustdoc, benches, other sets of features.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

# One profile throughout, and one set of features (choose_features), so that nothing is built twice.
export CARGO_TERM_COLOR=${CARGO_TERM_COLOR:-auto}
export PIP_DISABLE_PIP_VERSION_CHECK=1

if [ "${1:-}" = --quick ]; then
  shift
  step fmt cargo fmt --all --check
  export MQTT_SERVER_TEST_CASSANDRA=none MQTT_SERVER_TEST_POSTGRES=none
  say "left out: lints, protos, documentation, dependencies (scripts/check.sh has these), and all that starts a gateway or a database: tests/"
  # The features of the whole run, so that one uses what the other has built.
  choose_features
  say "unit tests: cargo test ${features[*]} --workspace --lib --bins $*"
  exec cargo test --locked "${features[@]}" --workspace --lib --bins "$@"
fi

# A first build gains nothing from what makes a second one short.
export CARGO_INCREMENTAL=${CARGO_INCREMENTAL:-0}

# Clippy by itself has every dependency compiled once more. Its driver does what rustc does, and lints.
lint_in_build() {
  local driver
  driver=$(rustup which clippy-driver 2>/dev/null) || driver=$(rustc --print sysroot)/bin/clippy-driver
  [ -x "$driver" ] || { skip "clippy" "this toolchain has none (rustup component add clippy)"; return; }
  # As cargo-clippy passes "-D warnings" on.
  export RUSTC_WORKSPACE_WRAPPER=$driver CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
}

cassandra_log=$(mktemp)
kafka_log=$(mktemp)
postgres_log=$(mktemp)
parts=$(mktemp -d)
cassandra_start='' cassandra_port='' kafka_fetch='' postgres_start='' postgres_port=''
# By the name of a part of the tests: the process that runs it.
declare -A running=()
trap finish EXIT

have() { command -v "$1" >/dev/null; }

# Debian packages. None of them starts anything.
install_packages() {
  local missing=()
  have mosquitto_pub && have mosquitto_sub || missing+=(mosquitto-clients)
  have openssl || missing+=(openssl)
  have python3 || missing+=(python3)
  python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
  have npm || missing+=(nodejs npm)
  have pkill || missing+=(procps)
  # Completion is tried in each shell that there is one for.
  have zsh || missing+=(zsh)
  have fish || missing+=(fish)
  # For librdkafka, of the bridges to Kafka.
  have c++ || missing+=(g++)
  have make || missing+=(make)
  have pkg-config || missing+=(pkg-config)
  pkg-config --exists openssl 2>/dev/null || missing+=(libssl-dev)
  apt_install "${missing[@]}"
  # The web page is tested in a real browser. By itself, as not every distribution has it under these names.
  have chromium && have chromedriver || apt_install chromium chromium-driver
}

apt_install() { # PACKAGE...
  [ $# -eq 0 ] && return
  have apt-get || { skip "installing $*" "there is no apt-get here"; return; }
  say "installing $*"
  as_root env DEBIAN_FRONTEND=noninteractive sh -c \
    'apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"' sh "$@" >/dev/null ||
    skip "installing $*" "apt-get failed or there is neither root nor sudo"
}

# Prometheus, for the rules and the board in deploy/: its Debian package, unpacked and not installed, so that nothing is started.
install_prometheus() {
  local tools=target/tools
  if have promtool && have prometheus || [ -x $tools/prometheus/usr/bin/promtool ]; then return; fi
  have apt-get || { skip "rules and board in Prometheus" "there is no apt-get here"; return; }
  say "fetching Prometheus into $tools"
  unpack_package prometheus || skip "rules and board in Prometheus" "the package could not be fetched"
}

install_python() {
  have python3 || { skip "Python suites (paho-mqtt, grpcio)" "python3 is missing"; return; }
  local wanted
  wanted=$(cat tests/interop/requirements*.txt)
  if [ -x .venv/bin/python ] && [ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ]; then return; fi
  say "installing the Python packages of tests/interop into .venv"
  { python3 -m venv .venv &&
      .venv/bin/python -m pip install -q -r tests/interop/requirements.txt &&
      .venv/bin/python -m pip install -q --no-deps -r tests/interop/requirements-no-deps.txt &&
      printf '%s\n' "$wanted" >.venv/installed; } ||
    skip "Python suites (paho-mqtt, grpcio, the client library)" "the packages could not be installed"
}

install_node() {
  have npm || { skip "MQTT.js suites, buf" "npm is missing"; return; }
  if cmp -s tests/interop/package-lock.json tests/interop/node_modules/.installed; then return; fi
  say "installing MQTT.js and buf into tests/interop/node_modules"
  (cd tests/interop && npm ci --no-audit --no-fund --loglevel=error &&
    cp package-lock.json node_modules/.installed) ||
    skip "MQTT.js suites, buf" "npm ci failed"
}

install_typescript() {
  have npm || { skip "the client library for TypeScript" "npm is missing"; return; }
  if cmp -s clients/typescript/package-lock.json clients/typescript/node_modules/.installed; then return; fi
  say "installing what the client library for TypeScript needs into clients/typescript/node_modules"
  (cd clients/typescript && npm ci --no-audit --no-fund --loglevel=error &&
    cp package-lock.json node_modules/.installed) ||
    skip "the client library for TypeScript" "npm ci failed"
}

# Go itself is not installed here: Debian's is too old for the library.
fetch_go_modules() {
  have go || { skip "the client library for Go" "Go is missing"; return; }
  (cd clients/go && timeout 300 go mod download) || skip "the client library for Go" "its modules could not be fetched"
}

# Building it takes as long as half of the tests' own build.
check_dependencies() {
  if have cargo-deny || [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo-deny" ]; then
    step deny deny_check
  else
    skip "cargo deny" "cargo-deny is not installed (cargo install --locked cargo-deny)"
  fi
}

# For all tests that want a Cassandra: one, and one that checks logins and speaks TLS. Their jars are fetched, and they
# start, beside the builds. They are this run's own: one that runs already is neither used nor stopped.
plain_cassandra() { CASSANDRA_PORT=$cassandra_port scripts/cassandra.sh "$1"; }

secure_cassandra() {
  CASSANDRA_PORT=$((cassandra_port + 10)) CASSANDRA_AUTH=1 CASSANDRA_TLS=1 scripts/cassandra.sh "$1"
}

# The first of the ports that both take, and those that tests/database starts itself: CASSANDRA_PORT, or one that depends
# on the process id, so that runs beside each other differ, and is below those that systems give to clients.
choose_cassandra_port() {
  local offset
  cassandra_port=${CASSANDRA_PORT:-$((20000 + $$ % 200 * 50))}
  for offset in 0 1 10 11 15 16 30 31 40 41; do
    if (exec 3<>"/dev/tcp/127.0.0.1/$((cassandra_port + offset))") 2>/dev/null; then
      echo "scripts/test.sh: port $((cassandra_port + offset)) is in use; set CASSANDRA_PORT, which is taken with the 41 after it" >&2
      exit 1
    fi
  done
  export CASSANDRA_PORT=$cassandra_port
}

start_cassandra() {
  [ -z "${MQTT_SERVER_TEST_CASSANDRA:-}" ] || return 0
  choose_cassandra_port
  say "starting Cassandra in the background, on ports $cassandra_port and $((cassandra_port + 10))"
  # A process group of its own, so that an interrupted run can end all of it.
  set -m
  { plain_cassandra start && secure_cassandra start; } >"$cassandra_log" 2>&1 </dev/null &
  cassandra_start=$!
  set +m
}

# For the tests that want a PostgreSQL and leave it alone; others start their own. It is unpacked first, as apt has one lock.
start_postgres() {
  local code=0
  [ -z "${MQTT_SERVER_TEST_POSTGRES:-}" ] || return 0
  scripts/postgres.sh fetch >"$postgres_log" 2>&1 || code=$?
  if [ "$code" != 0 ]; then
    [ "$code" = 3 ] || { tail -n 20 "$postgres_log" >&2; exit 1; }
    export MQTT_SERVER_TEST_POSTGRES=none
    return
  fi
  postgres_port=${POSTGRES_PORT:-$((20045 + $$ % 200 * 50))}
  say "starting PostgreSQL in the background, on ports $postgres_port and $((postgres_port + 1))"
  set -m
  POSTGRES_PORT=$postgres_port scripts/postgres.sh start --standby >"$postgres_log" 2>&1 </dev/null &
  postgres_start=$!
  set +m
}

wait_for_postgres() {
  local code=0
  if [ -n "$postgres_start" ]; then
    wait "$postgres_start" || code=$?
    postgres_start=
    if [ "$code" != 0 ]; then
      tail -n 20 "$postgres_log" >&2
      echo "scripts/test.sh: PostgreSQL did not start (above); MQTT_SERVER_TEST_POSTGRES=none skips its tests" >&2
      exit 1
    fi
    MQTT_SERVER_TEST_POSTGRES=$(grep '^127' "$postgres_log")
    export MQTT_SERVER_TEST_POSTGRES
  elif [ "$MQTT_SERVER_TEST_POSTGRES" = none ]; then
    skip "$(grep -c 'else { return };' crates/postgres/src/tests.rs) tests with a real PostgreSQL" \
      "$(tail -n 1 "$postgres_log" | grep . || echo "MQTT_SERVER_TEST_POSTGRES is none")"
  fi
}

# Tests start Kafkas of their own: only the jars are fetched, beside the builds.
start_kafka_fetch() {
  [ -n "$with_kafka" ] && [ "${MQTT_SERVER_TEST_KAFKA:-}" != none ] || return 0
  say "fetching Kafka in the background"
  set -m
  scripts/kafka.sh fetch >"$kafka_log" 2>&1 </dev/null &
  kafka_fetch=$!
  set +m
}

wait_for_kafka() {
  local code=0 count
  [ -n "$with_kafka" ] || return 0
  if [ -n "$kafka_fetch" ]; then
    wait "$kafka_fetch" || code=$?
    kafka_fetch=
    [ "$code" != 0 ] || return 0
    tail -n 20 "$kafka_log" >&2
    [ "$code" = 3 ] || { echo "scripts/test.sh: scripts/kafka.sh fetch failed (above); MQTT_SERVER_TEST_KAFKA=none skips its tests" >&2; exit 1; }
    export MQTT_SERVER_TEST_KAFKA=none
  fi
  count=$(grep -l 'Kafka::start' tests/gateway/bridges/kafka*.rs | xargs cat | grep -c '^#\[test\]')
  skip "$count tests with a real Kafka" "$(tail -n 1 "$kafka_log" | grep . || echo "MQTT_SERVER_TEST_KAFKA is none")"
}

# The tour runs examples as programs, which `cargo test` with targets named does not build. Same profile and features as the tests, so
# they share everything.
start_build() {
  say "building the examples in the background: cargo build --locked ${features[*]} --examples"
  set -m
  cargo build --locked "${features[@]}" --examples >"$parts/build" 2>&1 </dev/null &
  running[build]=$!
  set +m
}

wait_for_build() {
  local code=0
  wait "${running[build]}" || code=$?
  unset 'running[build]'
  cat "$parts/build"
  return "$code"
}

# beside NAME ARGUMENT...: starts a part of the tests, `cargo test ARGUMENT...`, in a process group of its own. What it says
# is kept for `show`.
beside() {
  local name=$1
  shift
  say "tests, $name, in the background: cargo test $*"
  set -m
  cargo test --locked "${features[@]}" --no-fail-fast "$@" >"$parts/$name" 2>&1 </dev/null &
  running[$name]=$!
  set +m
  # Until then it may wait for the lock of another cargo, which would take it for as long as a build.
  until grep -q Running "$parts/$name" || ! kill -0 "${running[$name]}" 2>/dev/null; do sleep 0.5; done
}

# show NAME: waits for that part and shows what it said.
show() {
  say "tests, $1"
  wait "${running[$1]}" || code=$?
  unset "running[$1]"
  cat "$parts/$1"
}

wait_for_cassandra() {
  local code=0 count addresses
  if [ -n "$cassandra_start" ]; then
    say "waiting for Cassandra"
    wait "$cassandra_start" || code=$?
    cassandra_start=
    if [ "$code" = 0 ]; then
      mapfile -t addresses < <(grep '^127' "$cassandra_log")
      export MQTT_SERVER_TEST_CASSANDRA=${addresses[0]} MQTT_SERVER_TEST_CASSANDRA_SECURE=${addresses[1]}
      export MQTT_SERVER_TEST_CASSANDRA_CA=$root/target/cassandra-${addresses[1]##*:}/ca.pem
      return
    fi
    tail -n 20 "$cassandra_log" >&2
    if [ "$code" != 3 ]; then
      echo "scripts/test.sh: Cassandra did not start (above); MQTT_SERVER_TEST_CASSANDRA=none skips its tests" >&2
      exit 1
    fi
    export MQTT_SERVER_TEST_CASSANDRA=none
  fi
  if [ "$MQTT_SERVER_TEST_CASSANDRA" = none ]; then
    # But for those that are ignored.
    count=$(($(cat tests/database/*.rs | grep -c '^#\[test\]') - $(cat tests/database/*.rs | grep -c '^#\[ignore')))
    count=$((count + $(grep -c '= options("' crates/cassandra/src/tests.rs) + 1))
    skip "$count tests with a real Cassandra" "$(tail -n 1 "$cassandra_log" | grep . || echo "MQTT_SERVER_TEST_CASSANDRA is none")"
  fi
}

# What this run has started and may still run, however it ends.
finish() {
  if [ -n "$kafka_fetch" ]; then kill -- "-$kafka_fetch" 2>/dev/null || true; fi
  if [ -n "$postgres_start" ]; then
    kill -- "-$postgres_start" 2>/dev/null || true
    wait "$postgres_start" 2>/dev/null || true
  fi
  if [ -n "$postgres_port" ]; then POSTGRES_PORT=$postgres_port scripts/postgres.sh stop >/dev/null 2>&1 || true; fi
  local part
  for part in "${!running[@]}"; do kill -- "-${running[$part]}" 2>/dev/null || true; done
  if [ -n "$cassandra_start" ]; then
    kill -- "-$cassandra_start" 2>/dev/null || true
    wait "$cassandra_start" 2>/dev/null || true
  fi
  if [ -n "$cassandra_port" ]; then
    plain_cassandra stop || true
    secure_cassandra stop || true
  fi >/dev/null 2>&1
  rm -rf "$cassandra_log" "$kafka_log" "$postgres_log" "$parts"
}

step packages install_packages
choose_features
lint_in_build
start_cassandra
start_kafka_fetch
step prometheus install_prometheus
step mosquitto fetch_mosquitto
step postgres start_postgres
step fmt cargo fmt --all --check
start_build
step python install_python
step node install_node
step typescript install_typescript
step go fetch_go_modules
step protos proto_check
step "waiting for the examples" wait_for_build
# With the load generators: of the whole workspace they share every dependency, by themselves they would have 90 built again.
step "building the tests" cargo test --locked "${features[@]}" --workspace --lib --bins --tests --no-run

# Without documentation tests, which run by themselves and would come last with a summary of their own.
# Those of the gateway mostly wait for clients and for times to pass, so more of them than there are cores run at once; those
# of the database wait for it, and for each other. Both leave room for the rest.
threads=$(($(getconf _NPROCESSORS_ONLN) * 2))
code=0
wait_for_kafka
RUST_TEST_THREADS=${RUST_TEST_THREADS:-$threads} beside gateway --test gateway "$@"

wait_for_postgres
wait_for_cassandra
export MQTT_SERVER_TEST_FAULT_SECONDS=${MQTT_SERVER_TEST_FAULT_SECONDS:-5}
RUST_TEST_THREADS=${RUST_TEST_THREADS:-4} beside database --test database "$@"

rest=(--lib --bins --test otel)
for main in tests/*/main.rs; do
  name=$(basename "$(dirname "$main")")
  case $name in database | gateway) ;; *) rest+=(--test "$name") ;; esac
done
# Many of these wait, too: for a database above all.
RUST_TEST_THREADS=${RUST_TEST_THREADS:-4} beside others --workspace "${rest[@]}" "$@"

step "documentation tests" nice cargo test --locked "${features[@]}" --doc
check_dependencies

show others
show database
report_skipped
if [ "$code" != 0 ]; then say "tests have failed, see above"; fi
show gateway
exit "$code"
