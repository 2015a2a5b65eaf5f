#!/usr/bin/env bash
# A real PostgreSQL on loopback, for tests: Debian's package, unpacked and not installed, as an installed one starts a server.
#
#   scripts/postgres.sh fetch                looks for PostgreSQL, and unpacks it into target/tools if it is not installed
#   scripts/postgres.sh start [--standby]    starts what does not run; with a synchronous standby beside it. Prints the addresses when
#                                            they answer, the primary's first
#   scripts/postgres.sh kill [SERVER]        kill -9 of a server and its processes; the data stay, and `start` goes on with them
#   scripts/postgres.sh pause [SERVER]       SIGSTOP of all of its processes: connections stay open and nothing is answered
#   scripts/postgres.sh resume [SERVER]      SIGCONT
#   scripts/postgres.sh promote              makes the standby a primary of its own; the other goes on if it lives
#   scripts/postgres.sh sql SERVER STATEMENT...
#                                            carries out statements as the superuser
#   scripts/postgres.sh addresses            prints the addresses
#   scripts/postgres.sh status               exit code 0 if all servers answer
#   scripts/postgres.sh stop                 ends all servers and drops their data
#
# SERVER is primary or standby, as they were at the start; primary if it is not said.
#
# POSTGRES_PORT (9542) tells instances apart; the standby has the next one. User, password and database are "ledger"; TLS is
# possible, and the certificate to trust is target/postgres-PORT/ca.pem. POSTGRES_BIN is a folder with the programs of a server,
# POSTGRES_WAIT (60) how many seconds a start may take.
# Exit code 3: PostgreSQL is missing and cannot be unpacked. Exit code 1: anything else.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

port=${POSTGRES_PORT:-9542}
home=$root/target/postgres-$port

say() { printf 'postgres.sh: %s\n' "$*" >&2; }
fail() { say "$2"; exit "$1"; }

# Of all users.
export PGPASSWORD=ledger

# The server refuses root. What belongs to root stays readable to it, wherever the checkout is.
unprivileged=()
if [ "$(id -u)" = 0 ]; then
  unprivileged=(setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=+dac_override --ambient-caps=+dac_override)
fi
as_server() { (cd / && exec "${unprivileged[@]}" "$@"); }

port_of() { case $1 in primary) echo "$port";; standby) echo $((port + 1));; *) fail 1 "there is no server $1";; esac; }
servers() { echo primary; [ ! -d "$home/standby" ] || echo standby; }

# The process of server $1, if it lives: nothing else has this argument.
running() {
  local pid
  pid=$(head -n 1 "$home/$1/postmaster.pid" 2>/dev/null) || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -Fx -- "$home/$1" >/dev/null || return 1
  printf '%s' "$pid"
}

# Process $1 and its children.
family() { echo "$1"; awk -v parent="$1" '{ sub(/^.*\) /, ""); if ($2 == parent) { split(FILENAME, path, "/"); print path[3] } }' /proc/[0-9]*/stat 2>/dev/null || true; }

# Sets `server_bin` and `client_bin`: where initdb and postgres are, and where psql and pg_basebackup are.
find_programs() {
  local folder
  for folder in ${POSTGRES_BIN:+"$POSTGRES_BIN"} /usr/lib/postgresql/*/bin /usr/bin /usr/local/bin /usr/pgsql-*/bin; do
    if [ -x "$folder/initdb" ] && [ -x "$folder/pg_basebackup" ]; then
      server_bin=$folder client_bin=$folder
      return
    fi
  done
  for folder in "$root"/target/tools/postgresql-[0-9]*/usr/lib/postgresql/*/bin; do
    client_bin=${folder/tools\/postgresql-/tools\/postgresql-client-}
    if [ -x "$folder/initdb" ] && [ -x "$client_bin/pg_basebackup" ]; then
      server_bin=$folder
      return
    fi
  done
  return 1
}

fetch() {
  find_programs && return
  command -v apt-get >/dev/null || fail 3 "PostgreSQL is not installed and there is no apt-get; POSTGRES_BIN names a folder with initdb and pg_basebackup"
  mkdir -p target/tools
  { flock 9; find_programs || unpack; } 9>target/tools/postgres.lock
  find_programs || fail 3 "PostgreSQL was unpacked into target/tools, and has no initdb"
}

# The newest version that apt has, and the libraries that it lacks, which start nothing.
unpack() {
  local version package missing=()
  newest() { apt-cache pkgnames postgresql- 2>/dev/null | sed -n 's/^postgresql-\([0-9]*\)$/\1/p' | sort -n | tail -n 1; }
  version=$(newest)
  [ -n "$version" ] || { as_root apt-get update -qq >&2 || true; version=$(newest); }
  [ -n "$version" ] || fail 3 "apt has no package postgresql-N"
  say "unpacking PostgreSQL $version into target/tools"
  for package in "postgresql-client-$version" "postgresql-$version"; do
    unpack_package "$package" >&2 || fail 3 "the package $package could not be fetched"
    mapfile -t -O ${#missing[@]} missing < <(dpkg-deb -f "$(find target/tools/packages -name "${package}_*.deb" | sort | tail -n 1)" Depends |
      tr ',' '\n' | sed 's/^ *//' | grep '^lib')
  done
  if ! "$root/target/tools/postgresql-$version/usr/lib/postgresql/$version/bin/postgres" --version >/dev/null 2>&1 ||
    ! "$root/target/tools/postgresql-client-$version/usr/lib/postgresql/$version/bin/pg_basebackup" --version >/dev/null 2>&1; then
    as_root env DEBIAN_FRONTEND=noninteractive apt-get satisfy -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
      fail 3 "the libraries of PostgreSQL could not be installed: there is neither root nor sudo, or apt-get failed"
  fi
}

sql() {
  local server=$1 statement arguments=()
  shift
  for statement; do arguments+=(-c "$statement"); done
  "$client_bin/psql" -X -q -A -t -v ON_ERROR_STOP=1 -h 127.0.0.1 -p "$(port_of "$server")" -U postgres -d ledger "${arguments[@]}"
}

answers() { "$client_bin/psql" -X -q -h 127.0.0.1 -p "$(port_of "$1")" -U postgres -d postgres -c 'select 1' >/dev/null 2>&1; }

addresses() {
  local server list=()
  for server in $(servers); do list+=("127.0.0.1:$(port_of "$server")"); done
  (IFS=,; echo "${list[*]}")
}

# A CA that signs the servers' certificate.
write_certificate() {
  local to=$home/tls
  mkdir -p "$to"
  {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 3650 -subj /CN=postgres-test-ca \
      -keyout "$to/ca.key" -out "$home/ca.pem"
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=postgres-test -keyout "$to/server.key" -out "$to/server.csr"
    openssl x509 -req -in "$to/server.csr" -CA "$home/ca.pem" -CAkey "$to/ca.key" -CAcreateserial -days 3650 -out "$to/server.pem" \
      -extfile <(printf 'subjectAltName=IP:127.0.0.1,DNS:localhost\nbasicConstraints=critical,CA:FALSE\n')
  } >>"$home/log" 2>&1
  rm "$to/ca.key"
}

make_primary() {
  rm -rf "$home"
  mkdir -p "$home"
  command -v openssl >/dev/null || fail 1 "openssl is missing (Debian: apt-get install openssl)"
  write_certificate
  printf '%s\n' "$PGPASSWORD" >"$home/tls/password"
  if [ "$(id -u)" = 0 ]; then chown -R 65534:65534 "$home"; fi
  as_server "$server_bin/initdb" -D "$home/primary" -A scram-sha-256 --pwfile="$home/tls/password" -U postgres -E UTF8 --locale=C --no-sync >>"$home/log" 2>&1 ||
    { tail -n 5 "$home/log" >&2; fail 1 "initdb failed: see $home/log"; }
  cat >>"$home/primary/postgresql.conf" <<CONF
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
shared_buffers = 64MB
max_connections = 200
max_wal_size = 256MB
ssl = on
ssl_cert_file = '$home/tls/server.pem'
ssl_key_file = '$home/tls/server.key'
CONF
  printf 'host all,replication all 127.0.0.1/32 scram-sha-256\n' >"$home/primary/pg_hba.conf"
  launch primary
  await primary
  "$client_bin/psql" -X -q -h 127.0.0.1 -p "$port" -U postgres -d postgres -c "create role ledger login password 'ledger'" \
    -c 'create database ledger owner ledger'
}

make_standby() {
  as_server "$client_bin/pg_basebackup" -D "$home/standby" -h 127.0.0.1 -p "$port" -U postgres -R -X stream -c fast --no-sync >>"$home/log" 2>&1 ||
    { rm -rf "$home/standby"; tail -n 5 "$home/log" >&2; fail 1 "pg_basebackup failed: see $home/log"; }
  cat >>"$home/standby/postgresql.auto.conf" <<CONF
primary_conninfo = 'host=127.0.0.1 port=$port user=postgres password=$PGPASSWORD application_name=standby'
CONF
  launch standby
  await standby
  sql primary "alter system set synchronous_standby_names = 'standby'" 'select pg_reload_conf()' >/dev/null
  wait_until "the standby does not follow" is_synchronous
}

is_synchronous() { [ "$(sql primary 'select count(*) from pg_stat_replication where sync_state = '"'sync'")" = 1 ]; }

wait_until() { # COMPLAINT COMMAND...
  local complaint=$1 tenth
  shift
  for ((tenth = 0; tenth < ${POSTGRES_WAIT:-60} * 10; tenth++)); do
    "$@" && return
    sleep 0.1
  done
  tail -n 20 "$home/log" | cut -c -300 >&2
  fail 1 "$complaint: see $home/log"
}

# Starts server $1 unless it runs; does not wait for it.
launch() {
  running "$1" >/dev/null && return
  ! (exec 3<>"/dev/tcp/127.0.0.1/$(port_of "$1")") 2>/dev/null || fail 1 "something else answers on port $(port_of "$1"); set POSTGRES_PORT"
  rm -f "$home/$1/postmaster.pid"
  (cd / && exec setsid "${unprivileged[@]}" "$server_bin/postgres" -D "$home/$1" -p "$(port_of "$1")" >>"$home/log" 2>&1 </dev/null) &
}

await() {
  wait_until "the $1 does not answer on port $(port_of "$1")" answers "$1"
}

start() {
  local server
  fetch
  [ -f "$home/made" ] || { make_primary; : >"$home/made"; }
  for server in $(servers); do launch "$server"; done
  for server in $(servers); do await "$server"; done
  [ "${1:-}" != --standby ] || [ -d "$home/standby" ] || make_standby
  addresses
}

# Sends signal $2 to server $1 and its processes.
signal() {
  local pid members
  pid=$(running "$1") || fail 1 "the $1 does not run"
  # Stopped, it starts no others meanwhile; dead, it would have none.
  kill -STOP "$pid"
  mapfile -t members < <(family "$pid")
  kill "-$2" "${members[@]}" 2>/dev/null || true
  [ "$2" = KILL ] || return 0
  for pid in "${members[@]}"; do
    while [ -d "/proc/$pid" ] && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null; do sleep 0.02; done
  done
}

stop() {
  local server
  for server in $(servers); do
    if running "$server" >/dev/null; then signal "$server" KILL; fi
  done
  rm -rf "$home"
}

promote() {
  sql standby 'select pg_promote(true, 30)' >/dev/null
}

status() {
  local server
  for server in $(servers); do answers "$server" || return 1; done
}

command=${1:-}
case $command in promote | sql | status) fetch ;; esac
case $command in
  fetch) fetch ;;
  start) start "${2:-}" ;;
  kill) signal "${2:-primary}" KILL ;;
  pause) signal "${2:-primary}" STOP ;;
  resume) signal "${2:-primary}" CONT ;;
  promote) promote ;;
  sql) sql "${@:2}" ;;
  addresses) addresses ;;
  status) status ;;
  stop) stop ;;
  *) fail 1 "usage: scripts/postgres.sh fetch|start [--standby]|kill|pause|resume [primary|standby]|promote|sql|addresses|status|stop" ;;
esac
