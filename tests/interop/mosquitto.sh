#!/usr/bin/env bash
# mosquitto_pub and mosquitto_sub against the gateway over TLS: mosquitto.sh SCENARIO
# Addresses come from the environment (GW_*). Waits are for output, never for time.
set -euo pipefail
scenario=${1:?which scenario}
work=$(mktemp -d)
pids=()
cleanup() {
  for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap cleanup EXIT

tls=(-h "$GW_HOST" -p "$GW_TLS" --cafile "$GW_CA")
topic="mosq/$scenario/$$"

fail() { echo "FAIL $scenario: $*" >&2; exit 1; }
same() { [ "$1" = "$2" ] || fail "got '$1', not '$2'"; }
pub() { timeout 120 mosquitto_pub "${tls[@]}" "$@"; }
sub() { timeout 120 mosquitto_sub "${tls[@]}" "$@"; }

# background_sub NAME ARGUMENTS...: starts a subscriber and returns once the broker has its subscription.
background_sub() {
  local name=$1
  shift
  # -d prints "Subscribed" with the SUBACK; line buffering comes from stdbuf.
  timeout 120 stdbuf -oL mosquitto_sub "${tls[@]}" -d "$@" >"$work/$name" 2>&1 &
  pids+=($!)
  eval "${name}_pid=$!"
  wait_for "$work/$name" '^Subscribed'
}

wait_for() {
  for _ in $(seq 1200); do
    grep -q -- "$2" "$1" 2>/dev/null && return
    sleep 0.05
  done
  fail "no line '$2' in: $(cat "$1")"
}

roundtrip() {
  background_sub reader "$@" -t "$topic" -q 2 -C 3 -F 'got %t %p %q'
  for qos in 0 1 2; do pub "$@" -t "$topic" -q "$qos" -m "hello $qos"; done
  wait "$reader_pid" || fail "subscriber ended with $?"
  # Each comes from a publisher of its own, and one at QoS 0 leaves without an answer: no order is promised.
  same "$(grep '^got' "$work/reader" | sort)" "got $topic hello 0 0
got $topic hello 1 1
got $topic hello 2 2"
}

case $scenario in
  roundtrip_v31) roundtrip -V mqttv31 ;;
  roundtrip_v311) roundtrip -V mqttv311 ;;
  roundtrip_v5) roundtrip -V 5 ;;

  retained)
    pub -t "$topic" -m kept -r -q 1
    same "$(sub -t "$topic" -C 1 -F '%r %p')" "1 kept"
    pub -t "$topic" -n -r -q 1
    background_sub reader -t "$topic" -q 1 -C 1 -F 'got %r %p'
    pub -t "$topic" -m later -q 1
    wait "$reader_pid" || fail "subscriber ended with $?"
    same "$(grep '^got' "$work/reader")" "got 0 later"
    ;;

  will)
    background_sub reader -V 5 -t "$topic/#" -q 1 -C 1 -F 'got %t %p'
    background_sub dying -V 5 -t "$topic-unused" --will-topic "$topic/will" --will-payload gone --will-qos 1
    # The child of timeout is the client; SIGKILL leaves no DISCONNECT.
    pkill -KILL -P "$dying_pid" || fail "the dying client is not there"
    wait "$reader_pid" || fail "subscriber ended with $?"
    same "$(grep '^got' "$work/reader")" "got $topic/will gone"
    ;;

  sys)
    version=$(sub -t '$SYS/broker/version' -C 1)
    [[ $version == mqtt-server* ]] || fail "version is '$version'"
    ;;

  shared)
    background_sub one -t "\$share/g/$topic" -q 1 -C 5 -F 'got %p'
    background_sub two -t "\$share/g/$topic" -q 1 -C 5 -F 'got %p'
    seq 10 | pub -t "$topic" -q 1 -l
    wait "$one_pid" && wait "$two_pid" || fail "a subscriber did not get its share"
    same "$(grep -h '^got' "$work/one" "$work/two" | sort -t' ' -k2n | tr '\n' ' ')" \
      "$(seq 10 | sed 's/^/got /' | tr '\n' ' ')"
    ;;

  session)
    # -C 0 is not possible: subscribe, leave (-E), publish, come back.
    sub -i "mosq$$" -c -t "$topic" -q 1 -E
    for n in 1 2 3; do pub -t "$topic" -q 1 -m "$n"; done
    same "$(sub -i "mosq$$" -c -t "$topic" -q 1 -C 3 | tr '\n' ' ')" "1 2 3 "
    ;;

  properties)
    background_sub reader -V 5 -t "$topic" -q 1 -C 1 -F 'got %p %C %R %P'
    pub -V 5 -t "$topic" -q 1 -m x -D publish content-type text/plain -D publish response-topic back/here \
      -D publish user-property color red -D publish user-property size 5
    wait "$reader_pid" || fail "subscriber ended with $?"
    same "$(grep '^got' "$work/reader")" "got x text/plain back/here color:red size:5"
    ;;

  request_response)
    command -v mosquitto_rr >/dev/null || fail "mosquitto_rr is missing"
    background_sub reader -V 5 -t "$topic" -q 1 -C 1 -F 'got %p %R'
    timeout 120 mosquitto_rr "${tls[@]}" -V 5 -t "$topic" -e "$topic/back" -m question >"$work/answer" &
    rr=$!
    pids+=("$rr")
    wait "$reader_pid" || fail "no request came"
    same "$(grep '^got' "$work/reader")" "got question $topic/back"
    pub -V 5 -t "$topic/back" -m answer -q 1
    wait "$rr" || fail "mosquitto_rr ended with $?"
    same "$(cat "$work/answer")" answer
    ;;

  wrong_ca)
    # A client that trusts another authority must not get through, and must not hurt others.
    openssl req -x509 -newkey rsa:2048 -nodes -keyout "$work/k" -out "$work/other.crt" -subj /CN=other -days 2 2>/dev/null
    if timeout 120 mosquitto_pub -h "$GW_HOST" -p "$GW_TLS" --cafile "$work/other.crt" -t "$topic" -m x 2>/dev/null; then
      fail "the handshake should have failed"
    fi
    roundtrip -V 5
    ;;

  *) fail "unknown scenario" ;;
esac
echo "ok $scenario"
