#!/usr/bin/env bash
# A real Apache Cassandra of one node on loopback, for tests: jars from Maven Central, run with Java 17.
#
#   scripts/cassandra.sh start     starts it, or finds it running; prints its address when it answers CQL
#   scripts/cassandra.sh stop      ends it and drops its data
#   scripts/cassandra.sh status    exit code 0 if it answers
#
# CASSANDRA_PORT (9142), CASSANDRA_HEAP (512, in MB), CASSANDRA_VERSION, CASSANDRA_JARS (where the jars are kept;
# with them there no network is needed) and CASSANDRA_WAIT (300, seconds that a start may take) change it.
# Exit code 3: Java 17 or Maven is missing, or the jars cannot be had. Exit code 1: anything else.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=${CASSANDRA_VERSION:-5.0.9}
port=${CASSANDRA_PORT:-9142}
storage_port=$((port + 1))
heap=${CASSANDRA_HEAP:-512}
jars=${CASSANDRA_JARS:-${XDG_CACHE_HOME:-$HOME/.cache}/mqtt-server/cassandra-$version}
home=$root/target/cassandra-$port

say() { printf 'cassandra.sh: %s\n' "$*" >&2; }
fail() { say "$2"; exit "$1"; }

# The process that this script started, if it lives. A number that the system gave to another process since is not it.
running() {
  local pid
  pid=$(cat "$home/pid" 2>/dev/null) || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -F "$home/" >/dev/null || return 1
  printf '%s' "$pid"
}

# OPTIONS of CQL v4 is answered with SUPPORTED (0x06) before any login.
answers() {
  local reply
  reply=$(
    exec 2>/dev/null 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
    printf '\x04\x00\x00\x00\x05\x00\x00\x00\x00' >&3
    timeout 5 head -c 5 <&3 | od -An -tx1 | tr -d ' \n'
  ) || return 1
  [[ $reply == 84*06 ]]
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
  say "fetching Cassandra $version with Maven into $jars"
  mkdir -p "$jars"
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
  mkdir -p "$home/conf/triggers" "$home/data" "$home/tmp"
  cat >"$home/conf/cassandra.yaml" <<YAML
cluster_name: mqtt-server-test
num_tokens: 1
initial_token: '0'
auto_bootstrap: false
partitioner: org.apache.cassandra.dht.Murmur3Partitioner
endpoint_snitch: SimpleSnitch
seed_provider:
  - class_name: org.apache.cassandra.locator.SimpleSeedProvider
    parameters: [{seeds: "127.0.0.1:$storage_port"}]
listen_address: 127.0.0.1
rpc_address: 127.0.0.1
storage_port: $storage_port
native_transport_port: $port
data_file_directories: ["$home/data/data"]
commitlog_directory: $home/data/commitlog
saved_caches_directory: $home/data/saved_caches
hints_directory: $home/data/hints
cdc_raw_directory: $home/data/cdc_raw
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
  cat >"$home/conf/logback.xml" <<'XML'
<configuration>
  <appender name="OUT" class="ch.qos.logback.core.ConsoleAppender">
    <encoder><pattern>%-5level %date{ISO8601} %logger{0} %msg%n</pattern></encoder>
  </appender>
  <root level="INFO"><appender-ref ref="OUT"/></root>
</configuration>
XML
}

# What Cassandra 5 needs of Java 17's inner packages, and what makes one small node start soon.
write_arguments() {
  local agent package
  agent=$(compgen -G "$jars/lib/jamm-*.jar" | head -n 1) || fail 3 "no jamm in $jars/lib: remove it and try again"
  {
    printf '%s\n' "-Xms$((heap / 2))M" "-Xmx${heap}M" -XX:+UseSerialGC -XX:TieredStopAtLevel=1 \
      -XX:+ExitOnOutOfMemoryError -XX:MaxDirectMemorySize=256M "-javaagent:$agent" "-Djava.io.tmpdir=$home/tmp" \
      -Djdk.attach.allowAttachSelf=true -Dio.netty.tryReflectionSetAccessible=true \
      "-Dcassandra.config=file://$home/conf/cassandra.yaml" "-Dcassandra.triggers_dir=$home/conf/triggers" \
      "-Dcassandra.storagedir=$home/data" "-Dcassandra.logdir=$home" "-Dlogback.configurationFile=$home/conf/logback.xml" \
      -Dcassandra.skip_wait_for_gossip_to_settle=0 -Dcassandra.ring_delay_ms=1000 \
      -Dcassandra.superuser_setup_delay_ms=0 -Dcassandra-foreground=yes
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
  } >"$home/conf/java.args"
}

start() {
  if running >/dev/null && answers; then
    echo "127.0.0.1:$port"
    return
  fi
  running >/dev/null || ! answers || fail 1 "something else answers on port $port; set CASSANDRA_PORT"
  local java pid unprivileged=()
  java=$(find_java) || fail 3 "Java 17 is missing (Debian: apt-get install openjdk-17-jre-headless)"
  fetch_jars
  if ! running >/dev/null; then
    rm -rf "$home"
    write_configuration
    write_arguments
    # As root it would lock its whole heap in memory.
    [ "$(id -u)" = 0 ] && command -v setpriv >/dev/null && unprivileged=(setpriv --bounding-set=-ipc_lock)
    setsid ${unprivileged[@]+"${unprivileged[@]}"} "$java" "@$home/conf/java.args" -cp "$home/conf:$jars/lib/*" \
      org.apache.cassandra.service.CassandraDaemon >"$home/log" 2>&1 </dev/null &
    # setpriv and java replace setsid, which does not fork when it leads no process group.
    echo $! >"$home/pid"
  fi
  pid=$(cat "$home/pid")
  for ((second = 0; second < ${CASSANDRA_WAIT:-300}; second++)); do
    if answers; then
      echo "127.0.0.1:$port"
      return
    fi
    [ -d "/proc/$pid" ] || { tail -n 20 "$home/log" >&2; fail 1 "Cassandra ended: see $home/log"; }
    sleep 1
  done
  tail -n 20 "$home/log" >&2
  stop
  fail 1 "Cassandra does not answer on port $port"
}

stop() {
  local pid
  if pid=$(running); then
    # Its data goes anyway.
    kill -KILL "$pid"
    while running >/dev/null; do sleep 0.1; done
  fi
  rm -rf "$home"
}

case ${1:-} in
  start) start ;;
  stop) stop ;;
  status) answers ;;
  *) fail 1 "usage: scripts/cassandra.sh start|stop|status" ;;
esac
