#!/usr/bin/env bash
# Clients of others over takeovers: two gateways with a ledger in PostgreSQL behind HAProxy, by the configurations of
# docs/guides/two-gateways.md. mosquitto_pub and mosquitto_sub (QoS 1, plain), paho-mqtt (QoS 2, TLS) and MQTT.js (QoS 1, TLS) publish and
# subscribe and connect again by themselves, while the gateway that serves is stopped in order, killed with its directory deleted, and
# paused for 15 s and resumed.
#
#   scripts/failover.sh          prints what was acknowledged, what of it arrived, and the longest gaps. About a minute
#
# KEEP=1 keeps the logs of everything, with each packet of paho-mqtt, and says where.
#
# Needs a server that is built (BINARY, or target/release/mqtt-server, or target/debug/mqtt-server), and what scripts/test.sh installs; a
# client that is missing is left out, and said. HAProxy is Debian's package, unpacked and not installed. Where it may, each gateway has a
# process namespace of its own, so that neither sees on this host that the other has ended: takeovers are as of two machines.
# Exit code 1: something acknowledged is missing, a message of QoS 2 came twice, or a takeover did not come. 3: nothing could be tried.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# Seconds for all of it, once everything is installed.
limit=120
# Seconds of a pause.
pause=15

fail() { echo "scripts/failover.sh: $*" >&2; exit 1; }
give_up() { skip "$1" "$2"; report_skipped; exit 3; }

binary=${BINARY:-}
for built in target/release/mqtt-server target/debug/mqtt-server; do
  [ -n "$binary" ] || [ ! -x $built ] || binary=$root/$built
done
[ -x "$binary" ] || give_up "takeovers" "there is no server (cargo build --release, or BINARY)"
binary=$(realpath "$binary")
command -v python3 >/dev/null || give_up "takeovers" "python3 is missing"
command -v openssl >/dev/null || give_up "takeovers" "openssl is missing"

# Sets `haproxy`. Its libraries start nothing, and are installed where they are missing.
fetch_haproxy() {
  haproxy=$(command -v haproxy || echo "$root/target/tools/haproxy/usr/sbin/haproxy")
  if "$haproxy" -v >/dev/null 2>&1; then return; fi
  command -v apt-get >/dev/null || give_up "takeovers" "HAProxy is not installed and there is no apt-get"
  unpack_package haproxy || give_up "takeovers" "HAProxy's package could not be fetched"
  if "$haproxy" -v >/dev/null 2>&1; then return; fi
  local missing
  missing=$(dpkg-deb -f "$(find target/tools/packages -name 'haproxy_*.deb' | sort | tail -n 1)" Depends |
    tr ',' '\n' | sed 's/^ *//' | grep '^lib' | paste -sd,)
  as_root env DEBIAN_FRONTEND=noninteractive apt-get satisfy -y -qq --no-install-recommends "$missing" >/dev/null ||
    give_up "takeovers" "HAProxy's libraries could not be installed: there is neither root nor sudo, or apt-get failed"
}

say "looking for PostgreSQL and HAProxy"
code=0
scripts/postgres.sh fetch || code=$?
[ $code = 0 ] || give_up "takeovers" "there is no PostgreSQL (above)"
fetch_haproxy

clients=()
if command -v mosquitto_pub >/dev/null && command -v mosquitto_sub >/dev/null; then clients+=(mosquitto); else
  skip "mosquitto_pub, mosquitto_sub" "mosquitto-clients is not installed"
fi
if .venv/bin/python -c 'import paho.mqtt' 2>/dev/null; then clients+=(paho); else
  skip "paho-mqtt" ".venv does not have it (scripts/test.sh makes it)"
fi
if command -v node >/dev/null && [ -d tests/interop/node_modules/mqtt ]; then clients+=(mqttjs); else
  skip "MQTT.js" "tests/interop/node_modules does not have it (cd tests/interop && npm ci)"
fi
[ ${#clients[@]} -gt 0 ] || give_up "takeovers" "there is no client"

SECONDS=0
work=$(mktemp -d)
# Processes of this run by name.
declare -A pids=()

finish() {
  local name
  : >"$work/end"
  for name in "${!pids[@]}"; do
    # A process that stands still ends only once it goes on.
    kill "${pids[$name]}" 2>/dev/null && kill -CONT "${pids[$name]}" 2>/dev/null || true
  done
  for name in a b; do kill -KILL "${pids[$name]:-}" 2>/dev/null || true; done
  wait
  POSTGRES_PORT=$postgres scripts/postgres.sh stop >/dev/null 2>&1 || true
  if [ -n "${KEEP:-}" ]; then echo "kept: $work"; else rm -rf "$work"; fi
}
read -r mqtts mqtt grpc http postgres _ < <(python3 -c \
  'import sys; sys.path.insert(0, "scripts"); from gateway_process import free_ports; print(*free_ports(6))')
trap finish EXIT

# await COMPLAINT COMMAND...
await() {
  local complaint=$1
  shift
  until "$@"; do
    [ $SECONDS -lt $limit ] || { tail -n 5 "$work"/*.log "$work"/*.errors >&2; fail "$complaint within $limit s"; }
    sleep 0.1
  done
}

declare -A host=([a]=127.0.0.2 [b]=127.0.0.3)

write_config() { # NODE
  cat >"$work/$1.toml" <<CONF
addr = ""
grpc_addr = "${host[$1]}:$grpc"
http_addr = "${host[$1]}:$http"
cert = "$work/certs/server.crt"
key = "$work/certs/server.key"
data_dir = "$work/data-$1"
[[listeners]]
name = "tls"
kind = "tls"
address = "${host[$1]}:$mqtts"
[[listeners]]
name = "plain"
kind = "tcp"
address = "${host[$1]}:$mqtt"
[cluster]
name = "failover"
node = "$1"
ledger = "postgres://ledger@127.0.0.1:$postgres,127.0.0.1:$((postgres + 1))/ledger"
password_file = "$work/password"
address = "${host[$1]}:$grpc"
CONF
}

# The guide's, with these addresses, and its part for devices once more for the plain listener.
write_haproxy() {
  awk '/^```text/ { inside = 1; next } /^```/ { inside = 0 } inside' docs/guides/two-gateways.md >"$work/guide"
  grep -q '^backend gateways' "$work/guide" || fail "docs/guides/two-gateways.md has no configuration of HAProxy"
  awk '/^(defaults|frontend|backend)/ { inside = $2 == "mqtt" || $2 == "gateways" } inside' "$work/guide" |
    sed "s/ mqtt$/ plain/; s/ gateways$/ plain-gateways/; s/:8883/:$mqtt/" >"$work/plain"
  sed "s/:8883/:$mqtts/" "$work/guide" | cat - "$work/plain" | sed -E "s/10\.0\.0\.1:/${host[a]}:/; s/10\.0\.0\.2:/${host[b]}:/
    s/bind :/bind 127.0.0.1:/; s/:10000/:$grpc/; s/port 9090/port $http/" >"$work/haproxy.cfg"
}

# The process of the gateway, and not of what starts it.
if unshare --pid --fork --kill-child --mount-proc true 2>/dev/null; then apart=(unshare --pid --fork --kill-child --mount-proc); else
  apart=()
  echo "!!! No process namespaces here: a gateway sees that the other has ended, and takes over at once." >&2
fi
start_gateway() { # NODE
  local starter
  NO_COLOR=1 timeout $limit "${apart[@]}" "$binary" --config "$work/$1.toml" >>"$work/gateway-$1.log" 2>&1 </dev/null &
  starter=$!
  await "gateway $1 does not start" find_gateway "$1" "$starter"
}

# Follows the children of `timeout` and `unshare`.
find_gateway() {
  local pid=$2
  kill -0 "$pid" 2>/dev/null || { tail -n 5 "$work/gateway-$1.log" >&2; fail "gateway $1 has ended"; }
  while [ "$(readlink "/proc/$pid/exe")" != "$binary" ]; do
    pid=$(cat "/proc/$pid/task/$pid/children") pid=${pid%% *}
    [ -n "$pid" ] || return 1
  done
  pids[$1]=$pid
}

# ready NODE [QUERY]: the answer of /readyz.
ready() {
  { exec 3<>"/dev/tcp/${host[$1]}/$http" && printf 'GET /readyz%s HTTP/1.0\r\n\r\n' "${2:-}" >&3 && timeout 2 cat <&3; } 2>/dev/null
}
serves() { ready "$1" | head -n 1 | grep -q ' 200 '; }
stands_by_warm() { ready "$1" | grep -q 'standby: . serves, the copy is warm'; }
listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
has_ended() { ! kill -0 "${pids[$1]}" 2>/dev/null; }

# start_client NAME COMMAND...: with its log.
start_client() {
  local name=$1
  shift
  "$@" >"$work/$name.log" 2>"$work/$name.errors" </dev/null &
  pids[$name]=$!
}

mosquitto_publish() {
  local n=0
  while [ ! -e "$work/end" ] && [ $SECONDS -lt $limit ]; do
    n=$((n + 1))
    # By whoever writes a script: again until it is acknowledged.
    until timeout 5 mosquitto_pub -h 127.0.0.1 -p "$mqtt" -V 5 -q 1 -t failover/mosquitto -m $n; do
      [ $SECONDS -lt $limit ] || return 0
      sleep 0.1
    done
    echo "$EPOCHREALTIME acknowledged $n"
    sleep 0.05
  done
}

subscribe() {
  case $1 in
    mosquitto) start_client mosquitto-sub timeout $limit stdbuf -oL mosquitto_sub -d -h 127.0.0.1 -p "$mqtt" -V 5 -c -x 3600 -k 10 \
      -i failover-mosquitto -q 1 -t failover/mosquitto -F '%U arrived %p' ;;
    paho) start_client paho-sub timeout $limit .venv/bin/python scripts/failover/paho_client.py sub "$mqtts" "$work" ;;
    mqttjs) start_client mqttjs-sub timeout $limit node scripts/failover/mqttjs_client.mjs sub "$mqtts" "$work" ;;
  esac
  await "$1 does not subscribe" grep -qsi 'subscribed' "$work/$1-sub.log"
}

publish() {
  case $1 in
    mosquitto) start_client mosquitto-pub mosquitto_publish ;;
    paho) start_client paho-pub timeout $limit .venv/bin/python scripts/failover/paho_client.py pub "$mqtts" "$work" ;;
    mqttjs) start_client mqttjs-pub timeout $limit node scripts/failover/mqttjs_client.mjs pub "$mqtts" "$work" ;;
  esac
}

# event NAME: what comes from here on is of this one.
event() { say "$1"; echo "$EPOCHREALTIME $1" >>"$work/events"; }

say "PostgreSQL with a synchronous standby, two gateways, HAProxy"
POSTGRES_PORT=$postgres scripts/postgres.sh start --standby >/dev/null
scripts/certs.sh "$work/certs" >/dev/null
echo ledger >"$work/password"
write_config a
write_config b
write_haproxy
"$haproxy" -c -q -f "$work/haproxy.cfg"
"$binary" cluster create --config "$work/a.toml"
start_gateway a
await "a does not serve" serves a
start_gateway b
await "b does not stand by" stands_by_warm b
timeout $limit "$haproxy" -db -f "$work/haproxy.cfg" >"$work/haproxy.log" 2>&1 &
pids[haproxy]=$!
await "HAProxy does not listen" listens $mqtt
for client in "${clients[@]}"; do subscribe "$client"; done
for client in "${clients[@]}"; do publish "$client"; done

event "nothing happens"
sleep 3

event "stopped in order"
kill -TERM "${pids[a]}"
await "b does not take over" serves b
await "a does not end" has_ended a
start_gateway a
await "a does not stand by" stands_by_warm a
sleep 3

event "killed, its directory deleted"
kill -KILL "${pids[b]}"
await "b does not end" has_ended b
rm -r "$work/data-b"
await "a does not take over" serves a
start_gateway b
await "b does not stand by" stands_by_warm b
sleep 3

event "paused for $pause s"
kill -STOP "${pids[a]}"
sleep $pause
serves b || fail "b does not serve while a is paused"
event "resumed"
kill -CONT "${pids[a]}"
await "a does not stand by" stands_by_warm a
sleep 3

: >"$work/end"
for client in "${clients[@]}"; do
  wait "${pids[$client-pub]}" || { tail -n 20 "$work/$client-pub.errors" >&2; fail "the publisher $client has failed"; }
  unset "pids[$client-pub]"
done
# Until everything is there, or for 10 s; and a moment for what comes twice.
for ((tenth = 0; tenth < 100; tenth++)); do
  if python3 scripts/failover/count.py "$work" "${clients[@]}" >/dev/null; then break; fi
  sleep 0.1
done
sleep 1

say "what became of it, after $SECONDS s"
"$binary" cluster status --config "$work/a.toml"
python3 scripts/failover/count.py "$work" "${clients[@]}" || code=1
report_skipped
exit $code
