#!/usr/bin/env bash
# A gateway that loses its disk at every start: it is in a cluster of its own, and all that it has comes from the ledger.
#
#   LEDGER=postgres://… scripts/crash.sh 20 groups       any world that kills and starts one gateway, on a ledger
#
# Environment: LEDGER_BINARY, the server; LEDGER, what `cluster.ledger` says but for the keyspace of Cassandra, which is added;
# LEDGER_PASSWORD. The data directory is the argument of --data-dir, MQTT_SERVER_DATA_DIR, or `data`; it is removed. Its name makes that of the
# cluster, which is created at the first start.
set -euo pipefail

arguments=("$@")
data=${MQTT_SERVER_DATA_DIR:-data}
while [ $# -gt 0 ]; do
  case $1 in
    --data-dir) data=$2; shift ;;
    --data-dir=*) data=${1#*=} ;;
  esac
  shift
done
binary=${LEDGER_BINARY:?the server}
# A tool.
case ${arguments[0]:-} in -* | '') ;; *) exec "$binary" "${arguments[@]}" ;; esac

data=$(realpath -m "$data")
name=gateway_$(printf '%s' "$data" | md5sum | cut -c -12)
export MQTT_SERVER_CLUSTER__NAME=$name MQTT_SERVER_CLUSTER__LEDGER=${LEDGER:?cluster.ledger} MQTT_SERVER_DATABASE__REPLICATION=3
export MQTT_SERVER_CLUSTER__PASSWORD=${LEDGER_PASSWORD:-} MQTT_SERVER_CLUSTER__NODE=node-$$
case $LEDGER in cassandra*) MQTT_SERVER_CLUSTER__LEDGER=$LEDGER/$name MQTT_SERVER_LATEST__ENABLED=false ;; esac
rm -rf "$data"
if [ ! -e "$data.made" ]; then
  MQTT_SERVER_INSECURE_GRPC=true MQTT_SERVER_DATA_DIR=$data "$binary" cluster create >&2
  : >"$data.made"
fi
exec "$binary" "${arguments[@]}"
