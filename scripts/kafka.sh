#!/usr/bin/env bash
# A real Apache Kafka on loopback (one node, KRaft), for tests: jars from Maven Central, run with Java 17 or later.
#
#   scripts/kafka.sh fetch    only looks for Java and fetches the jars
#   scripts/kafka.sh start    starts it unless it runs; prints its address when it answers
#   scripts/kafka.sh kill     kill -9; the data stays, and `start` goes on with it
#   scripts/kafka.sh pause    SIGSTOP: connections stay open and nothing is answered
#   scripts/kafka.sh resume   SIGCONT
#   scripts/kafka.sh dump TOPIC
#                             what is in all partitions of a topic: partition, offset, key and value, a line each
#   scripts/kafka.sh stop     ends it and drops its data
#   scripts/kafka.sh status   exit code 0 if it answers
#
# With KAFKA_TLS, a folder with ca.pem and server.pem (a key and its certificate), it also listens on the port behind the controller's,
# by TLS, for clients that show a certificate of that CA and log in as `bridge` with the password `secret` (SCRAM-SHA-512 or PLAIN).
#
# KAFKA_PORT (9392) tells instances apart; the next port is the controller's. KAFKA_HEAP (MB, 384), KAFKA_VERSION, KAFKA_JARS
# (where the jars are kept; with them there no network is needed) and KAFKA_WAIT (180, seconds that a start may take) change it
# further. Exit code 3: Java or Maven is missing, or the jars cannot be had. Exit code 1: anything else.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
version=${KAFKA_VERSION:-4.3.1}
port=${KAFKA_PORT:-9392}
jars=${KAFKA_JARS:-${XDG_CACHE_HOME:-$HOME/.cache}/mqtt-server/kafka-$version}
home=$root/target/kafka-$port
heap=${KAFKA_HEAP:-384}

say() { printf 'kafka.sh: %s\n' "$*" >&2; }
fail() { say "$2"; exit "$1"; }

# Its process, if it lives: nothing else has this argument.
running() {
  local pid
  pid=$(cat "$home/pid" 2>/dev/null) || return 1
  tr '\0' '\n' 2>/dev/null <"/proc/$pid/cmdline" | grep -Fx -- "$home/server.properties" >/dev/null || return 1
  printf '%s' "$pid"
}

# ApiVersions (key 18, version 0) is answered before anything else is known.
answers() {
  local reply
  reply=$(
    exec 2>/dev/null 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
    printf '\x00\x00\x00\x0b\x00\x12\x00\x00\x00\x00\x00\x07\x00\x01x' >&3
    timeout 5 head -c 8 <&3 | od -An -tx1 | tr -d ' \n'
  ) || return 1
  [[ $reply == *00000007 ]]
}

find_java() {
  local candidate major
  for candidate in "${JAVA_HOME:+$JAVA_HOME/bin/java}" "$(command -v java || true)" /usr/lib/jvm/*/bin/java; do
    [ -x "$candidate" ] || continue
    major=$("$candidate" -version 2>&1 | sed -n '1s/[^"]*"\([0-9]*\).*/\1/p')
    [ "${major:-0}" -ge 17 ] || continue
    printf '%s' "$candidate"
    return
  done
  return 1
}

fetch_jars() {
  [ -f "$jars/complete" ] && return
  command -v mvn >/dev/null || fail 3 "Maven is missing (Debian: apt-get install maven)"
  mkdir -p "$jars"
  { flock 9; [ -f "$jars/complete" ] || run_maven; } 9>"$jars/lock"
}

run_maven() {
  say "fetching Kafka $version with Maven into $jars"
  cat >"$jars/pom.xml" <<POM
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>test</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>$version</version>
    </dependency>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>$version</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId><artifactId>slf4j-simple</artifactId><version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
POM
  mvn -B -q -f "$jars/pom.xml" org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies \
    -DincludeScope=runtime -DoutputDirectory="$jars/lib" >"$jars/maven.log" 2>&1 </dev/null ||
    fail 3 "Maven could not fetch Kafka $version: see $jars/maven.log"
  touch "$jars/complete"
}

configure() {
  mkdir -p "$home/tmp"
  cat >"$home/server.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:$((port + 1))
listeners=PLAINTEXT://127.0.0.1:$port,CONTROLLER://127.0.0.1:$((port + 1))
advertised.listeners=PLAINTEXT://127.0.0.1:$port
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
log.dirs=$home/data
num.partitions=3
auto.create.topics.enable=true
default.replication.factor=1
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
log.cleaner.dedupe.buffer.size=16777216
PROPERTIES
}

# Another listener, for KAFKA_TLS.
configure_tls() {
  sed -i -e "s|^\(listeners=.*\)|\1,SASL_SSL://127.0.0.1:$((port + 2))|" \
    -e "s|^\(advertised.listeners=.*\)|\1,SASL_SSL://127.0.0.1:$((port + 2))|" \
    -e 's|^\(listener.security.protocol.map=.*\)|\1,SASL_SSL:SASL_SSL|' "$home/server.properties"
  cat >>"$home/server.properties" <<PROPERTIES
sasl.enabled.mechanisms=SCRAM-SHA-512,PLAIN
listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
listener.name.sasl_ssl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_bridge="secret";
listener.name.sasl_ssl.ssl.client.auth=required
ssl.keystore.type=PEM
ssl.keystore.location=$1/server.pem
ssl.truststore.type=PEM
ssl.truststore.location=$1/ca.pem
PROPERTIES
}

java_with() {
  "$java" "-Xmx${heap}M" -XX:+UseSerialGC -XX:TieredStopAtLevel=1 "-Djava.io.tmpdir=$home/tmp" \
    -Dorg.slf4j.simpleLogger.defaultLogLevel="${level:-warn}" -cp "$jars/lib/*" "$@"
}

fetch() {
  java=$(find_java) || fail 3 "Java 17 or later is missing (Debian: apt-get install openjdk-17-jre-headless)"
  fetch_jars
}

start() {
  local second scram
  fetch
  if ! running >/dev/null; then
    ! answers || fail 1 "something else answers on 127.0.0.1:$port; set KAFKA_PORT"
    if [ ! -f "$home/formatted" ]; then
      rm -rf "$home"
      configure
      scram=()
      if [ -n "${KAFKA_TLS:-}" ]; then
        configure_tls "$KAFKA_TLS"
        scram=(--add-scram 'SCRAM-SHA-512=[name=bridge,password=secret]')
      fi
      java_with kafka.tools.StorageTool format --cluster-id bXF0dC1zZXJ2ZXItdGVzdA \
        --config "$home/server.properties" "${scram[@]}" >>"$home/log" 2>&1 </dev/null ||
        { tail -n 5 "$home/log" >&2; fail 1 "its storage cannot be formatted: see $home/log"; }
      : >"$home/formatted"
    fi
    level=info
    setsid "$java" "-Xms$((heap / 2))M" "-Xmx${heap}M" -XX:+UseSerialGC -XX:TieredStopAtLevel=1 \
      "-Djava.io.tmpdir=$home/tmp" -Dorg.slf4j.simpleLogger.defaultLogLevel=info -cp "$jars/lib/*" \
      kafka.Kafka "$home/server.properties" >>"$home/log" 2>&1 </dev/null &
    echo $! >"$home/pid"
  fi
  for ((second = 0; second < ${KAFKA_WAIT:-180} * 5; second++)); do
    if answers; then printf '127.0.0.1:%s\n' "$port"; return; fi
    running >/dev/null || [ "$second" -lt 10 ] || { tail -n 20 "$home/log" | cut -c -300 >&2; fail 1 "Kafka ended: see $home/log"; }
    sleep 0.2
  done
  tail -n 20 "$home/log" | cut -c -300 >&2
  fail 1 "Kafka does not answer on 127.0.0.1:$port"
}

signal() {
  local pid
  pid=$(running) || fail 1 "it does not run"
  kill "-$1" "$pid"
}

gone() {
  while running >/dev/null; do sleep 0.05; done
}

dump() {
  local java level=error
  java=$(find_java) || fail 3 "Java 17 or later is missing"
  # It ends when nothing has come for so long: all that is there was read.
  java_with org.apache.kafka.tools.consumer.ConsoleConsumer --bootstrap-server "127.0.0.1:$port" --topic "$1" --from-beginning \
    --timeout-ms "${KAFKA_DUMP_MS:-10000}" --formatter-property print.partition=true --formatter-property print.offset=true \
    --formatter-property print.key=true 2>/dev/null || true
}

case ${1:-} in
  fetch) fetch;;
  start) start;;
  kill) signal KILL; gone;;
  pause) signal STOP;;
  resume) signal CONT;;
  dump) dump "${2:?a topic}";;
  stop) if running >/dev/null; then signal CONT; signal KILL; gone; fi; rm -rf "$home";;
  status) answers;;
  *) sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2;;
esac
