#!/usr/bin/env bash
# A real Apache Cassandra on loopback, for tests: jars from Maven Central, run with Java 17.
#
#   scripts/cassandra.sh start [N]    starts what does not run, or node N; prints the addresses when they answer CQL
#   scripts/cassandra.sh kill [N]     kill -9; the data stays, and `start` goes on with it
#   scripts/cassandra.sh pause [N]    SIGSTOP: connections stay open and nothing is answered
#   scripts/cassandra.sh resume [N]   SIGCONT
#   scripts/cassandra.sh fill [N]     takes what is left of its disk but for CASSANDRA_LEFT_MIB (0)
#   scripts/cassandra.sh free [N]     gives it back
#   scripts/cassandra.sh stop         ends all nodes and drops their data
#   scripts/cassandra.sh status       exit code 0 if all nodes answer
#
# CASSANDRA_PORT (9142) tells instances apart: each has its own nodes and data. What an instance is, is said at its
# first `start` and kept until `stop`:
#   CASSANDRA_NODES=3   three nodes, on 127.0.0.1, 127.0.0.2 and 127.0.0.3
#   CASSANDRA_AUTH=1    logins and rights are checked: user and password are "cassandra"
#   CASSANDRA_TLS=1     clients must use TLS; the certificate to trust is target/cassandra-PORT/ca.pem
#   CASSANDRA_DISK_MIB=N   the data of each node are on a disk of their own of N MiB (a tmpfs in a mount namespace), which
#                          `fill` can fill
#   CASSANDRA_DISK_GUARD=N a guardrail refuses writes when the disk is full to N %
#   CASSANDRA_YAML='KEY: VALUE'  more lines of cassandra.yaml, such as paxos_variant: v2
#   CASSANDRA_JIT=full     Java's second compiler too: starts later, costs less under lasting load. For measuring
#
# CASSANDRA_HEAP (MB for each node; 512, or 320 with three), CASSANDRA_VERSION, CASSANDRA_JARS (where the jars are kept;
# with them there no network is needed) and CASSANDRA_WAIT (300, seconds that a start may take) change it further.
# Exit code 3: Java 17 or Maven is missing, the jars cannot be had, or the disk cannot be mounted. Exit code 1: anything else.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=${CASSANDRA_VERSION:-5.0.9}
port=${CASSANDRA_PORT:-9142}
storage_port=$((port + 1))
jars=${CASSANDRA_JARS:-${XDG_CACHE_HOME:-$HOME/.cache}/mqtt-server/cassandra-$version}
home=$root/target/cassandra-$port

# What an instance is, as its first start kept it.
kept_version=$version kept_nodes=1 kept_auth='' kept_tls='' kept_disk='' kept_guard='' kept_yaml='' kept_jit=''
# shellcheck source=/dev/null
[ -f "$home/settings" ] && . "$home/settings"
nodes=${CASSANDRA_NODES:-$kept_nodes}
auth=${CASSANDRA_AUTH-$kept_auth}
tls=${CASSANDRA_TLS-$kept_tls}
disk=${CASSANDRA_DISK_MIB-$kept_disk}
guard=${CASSANDRA_DISK_GUARD-$kept_guard}
yaml=${CASSANDRA_YAML-$kept_yaml}
jit=${CASSANDRA_JIT-$kept_jit}
# Only a start says what it is: with fewer nodes than there are a stop would leave some running.
if [ "${1:-}" != start ] && [ -f "$home/settings" ]; then
  nodes=$kept_nodes auth=$kept_auth tls=$kept_tls disk=$kept_disk guard=$kept_guard yaml=$kept_yaml jit=$kept_jit
fi
heap=${CASSANDRA_HEAP:-$([ "$nodes" = 1 ] && echo 512 || echo 320)}

say() { printf 'cassandra.sh: %s\n' "$*" >&2; }
fail() { say "$2"; exit "$1"; }

# The process of node $1 that this script started, or that keeps its disk ($2 is "disk"), if it lives. A number that the
# system gave to another process since is not it: nothing else has this argument.
running() {
  local pid argument="@$home/$1/conf/java.args"
  [ "${2:-pid}" = pid ] || argument=$home/$1/mounted
  pid=$(cat "$home/$1/${2:-pid}" 2>/dev/null) || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -Fx -- "$argument" >/dev/null || return 1
  printf '%s' "$pid"
}

# OPTIONS of CQL v4 is answered with SUPPORTED (0x06) before any login. Behind TLS: whether node $1 listens, as it does
# once it serves.
answers() {
  local reply
  reply=$(
    exec 2>/dev/null 3<>"/dev/tcp/127.0.0.$1/$port" || exit 1
    [ -n "$tls" ] && { echo tls; exit 0; }
    printf '\x04\x00\x00\x00\x05\x00\x00\x00\x00' >&3
    timeout 5 head -c 5 <&3 | od -An -tx1 | tr -d ' \n'
  ) || return 1
  [[ $reply == tls || $reply == 84*06 ]]
}

# The addresses of the nodes $@.
addresses() {
  local node list=()
  for node in "$@"; do list+=("127.0.0.$node:$port"); done
  (IFS=,; echo "${list[*]}")
}

find_java() {
  local candidate
  for candidate in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(command -v java || true)" /usr/lib/jvm/*17*/bin/java; do
    [ -x "$candidate" ] || continue
    if "$candidate" -version 2>&1 | head -n 1 | grep '"17[.".]' >/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  return 1
}

fetch_jars() {
  [ -f "$jars/complete" ] && return
  command -v mvn >/dev/null || fail 3 "Maven is missing (Debian: apt-get install maven)"
  mkdir -p "$jars"
  # One at a time: Maven takes the half of a jar that another has written for the whole.
  { flock 9; [ -f "$jars/complete" ] || run_maven; } 9>"$jars/lock"
}

run_maven() {
  say "fetching Cassandra $version with Maven into $jars"
  cat >"$jars/pom.xml" <<POM
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>test</groupId><artifactId>cassandra</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.cassandra</groupId><artifactId>cassandra-all</artifactId><version>$version</version>
    </dependency>
  </dependencies>
</project>
POM
  mvn -B -q -f "$jars/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$jars/lib" >"$jars/maven.log" 2>&1 </dev/null ||
    fail 3 "Maven could not fetch Cassandra $version: see $jars/maven.log"
  touch "$jars/complete"
}

write_configuration() {
  local at=$home/$1 node=$1 seeds
  seeds=$(for ((n = 1; n <= nodes; n++)); do printf '%s127.0.0.%s:%s' "$([ "$n" = 1 ] || echo ,)" "$n" "$storage_port"; done)
  mkdir -p "$at/conf/triggers" "$at/data" "$at/tmp"
  cat >"$at/conf/cassandra.yaml" <<YAML
cluster_name: mqtt-server-test
num_tokens: 1
initial_token: '${tokens[$((node - 1))]}'
auto_bootstrap: false
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{seeds: "$seeds"}]
listen_address: 127.0.0.$node
rpc_address: 127.0.0.$node
storage_port: $storage_port
native_transport_port: $port
data_file_directories: ["$at/data/data"]
commitlog_directory: $at/data/commitlog
saved_caches_directory: $at/data/saved_caches
hints_directory: $at/data/hints
cdc_raw_directory: $at/data/cdc_raw
disk_failure_policy: stop
commit_failure_policy: stop
commitlog_sync: periodic
commitlog_sync_period: 10s
commitlog_segment_size: 16MiB
commitlog_total_space: 128MiB
memtable_heap_space: $((heap / 8))MiB
memtable_offheap_space: 64MiB
networking_cache_size: 32MiB
key_cache_size: 8MiB
concurrent_compactors: 1
auto_snapshot: false
read_request_timeout: 10s
range_request_timeout: 20s
write_request_timeout: 10s
request_timeout: 20s
YAML
  if [ -n "$auth" ]; then
    printf 'authenticator: PasswordAuthenticator\nauthorizer: CassandraAuthorizer\n' >>"$at/conf/cassandra.yaml"
  fi
  [ -z "$yaml" ] || printf '%s\n' "$yaml" >>"$at/conf/cassandra.yaml"
  if [ -n "$guard" ]; then
    printf 'data_disk_usage_percentage_fail_threshold: %s\n' "$guard" >>"$at/conf/cassandra.yaml"
  fi
  if [ -n "$tls" ]; then
    cat >>"$at/conf/cassandra.yaml" <<YAML
client_encryption_options:
  enabled: true
  optional: false
  keystore: $home/keystore.p12
  keystore_password: cassandra
YAML
  fi
  cat >"$at/conf/logback.xml" <<'XML'
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level %date{ISO8601} %logger{0} %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="OUT"/></root>
</configuration>
XML
}

# A certificate for the nodes, with the keytool beside java $1.
write_certificate() {
  local keytool
  keytool=$(dirname "$1")/keytool
  [ -x "$keytool" ] || fail 3 "keytool is missing beside $1"
  "$keytool" -genkeypair -alias node -keyalg EC -groupname secp256r1 -validity 3650 -dname CN=cassandra-test \
    -ext san=ip:127.0.0.1,ip:127.0.0.2,ip:127.0.0.3,dns:localhost -storetype PKCS12 \
    -keystore "$home/keystore.p12" -storepass cassandra >&2
  "$keytool" -exportcert -rfc -alias node -keystore "$home/keystore.p12" -storepass cassandra 2>/dev/null \
    >"$home/ca.pem"
}

# What Cassandra 5 needs of Java 17's inner packages, and what makes one small node start soon.
write_arguments() {
  local at=$home/$1 agent package
  agent=$(compgen -G "$jars/lib/jamm-*.jar" | head -n 1) || fail 3 "no jamm in $jars/lib: remove it and try again"
  {
    printf '%s\n' "-Xms$((heap / 2))M" "-Xmx${heap}M" -XX:+UseSerialGC "-XX:TieredStopAtLevel=$([ "$jit" = full ] && echo 4 || echo 1)" \
      -XX:+ExitOnOutOfMemoryError "-XX:ErrorFile=$at/crash" -XX:MaxDirectMemorySize=256M "-javaagent:$agent" "-Djava.io.tmpdir=$at/tmp" \
      -Djdk.attach.allowAttachSelf=true -Dio.netty.tryReflectionSetAccessible=true \
      "-Dcassandra.config=file://$at/conf/cassandra.yaml" "-Dcassandra.triggers_dir=$at/conf/triggers" \
      "-Dcassandra.storagedir=$at/data" "-Dcassandra.logdir=$at" "-Dlogback.configurationFile=$at/conf/logback.xml" \
      -Dcassandra.skip_wait_for_gossip_to_settle=0 "-Dcassandra.ring_delay_ms=$([ "$nodes" = 1 ] && echo 1000 || echo 5000)" \
      -Dcassandra.superuser_setup_delay_ms=0 -Dcassandra.disk_usage.monitor_interval_ms=1000 -Dcassandra-foreground=yes
    # A full disk may tear the commit log, at which a node refuses to start unless it is told so.
    [ -z "$disk" ] || echo -Dcassandra.commitlog.ignorereplayerrors=true
    for package in java.base/jdk.internal.misc java.management.rmi/com.sun.jmx.remote.internal.rmi \
      java.rmi/sun.rmi.registry java.rmi/sun.rmi.server java.sql/java.sql java.base/java.lang.ref \
      jdk.unsupported/sun.misc; do
      printf -- '--add-exports\n%s=ALL-UNNAMED\n' "$package"
    done
    for package in java.base/java.io java.base/java.lang java.base/java.lang.module java.base/java.lang.reflect \
      java.base/java.util java.base/jdk.internal.loader java.base/jdk.internal.math java.base/jdk.internal.module \
      java.base/jdk.internal.ref java.base/jdk.internal.reflect java.base/jdk.internal.util.jar \
      java.base/sun.nio.ch jdk.management/com.sun.management.internal; do
      printf -- '--add-opens\n%s=ALL-UNNAMED\n' "$package"
    done
  } >"$at/conf/java.args"
}

# Mounts a disk for node $1 where only its nodes see it. It lasts as long as the process that keeps it.
make_disk() {
  local at=$home/$1 user=()
  [ "$(id -u)" = 0 ] || user=(--user --map-root-user)
  # shellcheck disable=SC2016
  setsid unshare ${user[@]+"${user[@]}"} --mount sh -c \
    'mount -t tmpfs -o size="$1m" tmpfs "$2" && : >"$3" && exec tail -f "$3"' sh "$disk" "$at/data" "$at/mounted" \
    >>"$at/log" 2>&1 </dev/null &
  echo $! >"$at/disk"
  while [ -d "/proc/$!" ]; do
    [ ! -f "$at/mounted" ] || return 0
    sleep 0.1
  done
  tail -n 3 "$at/log" >&2
  stop "$1"
  fail 3 "a disk of $disk MiB cannot be mounted here: that takes root, or user namespaces"
}

# Sets `inside`: what begins a command that sees the disk of node $1.
look_inside() {
  local keeper
  inside=()
  [ -n "$disk" ] || return 0
  keeper=$(running "$1" disk) || fail 1 "node $1 has lost its disk: stop the instance"
  inside=(nsenter --mount --target "$keeper")
  [ "$(id -u)" = 0 ] || inside+=(--user --preserve-credentials)
}

# Leaves no byte of the disks of the nodes $@.
fill() {
  local node
  [ -n "$disk" ] || fail 1 "only a disk of CASSANDRA_DISK_MIB is filled"
  for node in "$@"; do
    look_inside "$node"
    # shellcheck disable=SC2016
    "${inside[@]}" sh -c 'left=$(($(df --output=avail --block-size=1 "$1" | tail -n 1) - ($2 << 20)))
      [ "$left" -le 0 ] || head -c "$left" /dev/zero >>"$1/ballast" 2>/dev/null || true' \
      sh "$home/$node/data/data" "${CASSANDRA_LEFT_MIB:-0}"
  done
}

free() {
  local node
  for node in "$@"; do
    look_inside "$node"
    ${inside[@]+"${inside[@]}"} rm -f "$home/$node/data/data/ballast"
  done
}

# Starts node $1 with java $2 unless it runs; does not wait for it.
launch() {
  local at=$home/$1 unprivileged=() inside
  running "$1" >/dev/null && return
  ! answers "$1" || fail 1 "something else answers on 127.0.0.$1:$port; set CASSANDRA_PORT"
  # As root it would lock its whole heap in memory.
  [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null && unprivileged=(setpriv --bounding-set=-ipc_lock)
  look_inside "$1"
  setsid ${inside[@]+"${inside[@]}"} ${unprivileged[@]+"${unprivileged[@]}"} "$2" "@$at/conf/java.args" -cp "$at/conf:$jars/lib/*" \
    org.apache.cassandra.service.CassandraDaemon >>"$at/log" 2>&1 </dev/null &
  # nsenter, setpriv and java replace setsid, which does not fork when it leads no process group.
  echo $! >"$at/pid"
}

# Until node $1 answers, and knows its user if logins are checked.
await() {
  local second
  for ((second = 0; second < ${CASSANDRA_WAIT:-300}; second++)); do
    if answers "$1" && { [ -z "$auth" ] || grep -q "Created default superuser" "$home"/*/log; }; then return; fi
    [ -f "$home/$1/pid" ] || fail 1 "it was stopped meanwhile"
    [ -d "/proc/$(cat "$home/$1/pid")" ] || { tail -n 20 "$home/$1/log" | cut -c -300 >&2; fail 1 "Cassandra ended: see $home/$1/log"; }
    sleep 1
  done
  tail -n 20 "$home/$1/log" | cut -c -300 >&2
  fail 1 "Cassandra does not answer on 127.0.0.$1:$port"
}

# Starts the nodes $@.
start() {
  local java node
  java=$(find_java) || fail 3 "Java 17 is missing (Debian: apt-get install openjdk-17-jre-headless)"
  fetch_jars
  [[ $nodes == [13] ]] || fail 1 "CASSANDRA_NODES is 1 or 3"
  if [ ! -f "$home/settings" ]; then
    rm -rf "$home"
    mkdir -p "$home"
    [ -z "$tls" ] || write_certificate "$java"
    local tokens=(0)
    [ "$nodes" = 1 ] || tokens=(-9223372036854775808 -3074457345618258603 3074457345618258602)
    for ((node = 1; node <= nodes; node++)); do
      write_configuration "$node"
      write_arguments "$node"
      [ -z "$disk" ] || make_disk "$node"
    done
    printf 'kept_version=%q kept_nodes=%q kept_auth=%q kept_tls=%q kept_disk=%q kept_guard=%q kept_yaml=%q kept_jit=%q\n' \
      "$version" "$nodes" "$auth" "$tls" "$disk" "$guard" "$yaml" "$jit" >"$home/settings"
    # The others join the first.
    launch 1 "$java"
    await 1
  elif [ "$version $nodes $auth $tls $disk $guard $yaml $jit" != \
    "$kept_version $kept_nodes $kept_auth $kept_tls $kept_disk $kept_guard $kept_yaml $kept_jit" ]; then
    fail 1 "an instance with other settings is kept on port $port; stop it or set CASSANDRA_PORT"
  fi
  for node in "$@"; do launch "$node" "$java"; done
  for node in "$@"; do await "$node"; done
  addresses "$@"
}

# Sends signal $1 to the nodes $2...
send() {
  local signal=$1 node pid
  shift
  for node in "$@"; do
    if pid=$(running "$node"); then kill "-$signal" "$pid"; fi
  done
}

kill_nodes() {
  local node
  send KILL "$@"
  for node in "$@"; do
    while running "$node" >/dev/null; do sleep 0.1; done
  done
}

# Their data goes anyway.
stop() {
  local node keeper
  kill_nodes "$@"
  for node in "$@"; do
    if keeper=$(running "$node" disk); then kill "$keeper"; fi
  done
  rm -rf "$home"
}

status() {
  local node
  for node in "$@"; do answers "$node" || return 1; done
}

all=()
for ((node = 1; node <= nodes; node++)); do all+=("$node"); done
which=("${all[@]}")
if [ -n "${2:-}" ]; then
  [[ " ${all[*]} " == *" $2 "* ]] || fail 1 "there is no node $2"
  which=("$2")
fi

case ${1:-} in
  start) start "${which[@]}" ;;
  kill) kill_nodes "${which[@]}" ;;
  pause) send STOP "${which[@]}" ;;
  resume) send CONT "${which[@]}" ;;
  fill) fill "${which[@]}" ;;
  free) free "${which[@]}" ;;
  stop) stop "${all[@]}" ;;
  status) status "${which[@]}" ;;
  *) fail 1 "usage: scripts/cassandra.sh start|kill|pause|resume|fill|free [N], or stop|status" ;;
esac
