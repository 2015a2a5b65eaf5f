#!/usr/bin/env bash
# Reads what is given to Kubernetes and to Compose as those do, without either: the chart in several settings, the manifests of the
# guide, docker-compose.yml with its profiles, and deploy/compose. A field that does not exist, or a volume that nobody declares, fails.
#
#   scripts/manifests.sh
#
# Needs Go, which fetches the types of Kubernetes and the library that `docker compose` is built on. Without helm
# (go install helm.sh/helm/v3/cmd/helm@latest) the chart is left out, and said.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

PATH=$PATH:$(go env GOPATH)/bin
reader=$root/target/manifests
(cd scripts/manifests && go build -o "$reader" .)

say "Compose"
for profile in '' cassandra monitoring; do
  printf '%s: ' "${profile:-no profile}"
  "$reader" compose docker-compose.yml "$profile" | xargs
done

printf 'two gateways: '
"$reader" compose deploy/compose/two-gateways.yml '' | xargs

say "the guide for Kubernetes"
awk '/^```yaml/ { inside = 1; next } /^```/ { inside = 0 } inside' docs/guides/kubernetes.md | "$reader" kubernetes -

chart=deploy/helm/mqtt-server
if ! command -v helm >/dev/null; then
  skip "the chart" "helm is missing (go install helm.sh/helm/v3/cmd/helm@latest)"
  report_skipped
  exit
fi
# chart NAME ARGUMENT...: what it becomes with these values.
becomes() {
  say "the chart, $1"
  shift
  helm lint --quiet "$chart" "$@"
  helm template gateway "$chart" "$@" | "$reader" kubernetes -
}
becomes "the least that it takes" --set tls.secret=tls,auth.allowAnonymous=true
becomes "backends, and Prometheus" --set tls.secret=tls,auth.passwordsSecret=passwords,backends.tokensSecret=tokens \
  --set prometheus.serviceMonitor=true,prometheus.tokenSecret=metrics
becomes "two gateways" --set tls.secret=tls,auth.passwordsSecret=passwords,backends.tokensSecret=tokens \
  --set 'cluster.enabled=true,cluster.ledger=postgres://gateway@db1\,db2/gateway,cluster.passwordSecret=ledger'
becomes "every other value" --set tls.secret=tls,auth.allowAnonymous=true,persistence.storageClass=fast \
  --set service.type=LoadBalancer,service.externalTrafficPolicy=Local --set-json \
  'service.annotations={"a":"b"},podAnnotations={"a":"b"},nodeSelector={"a":"b"},affinity={"nodeAffinity":{}},imagePullSecrets=[{"name":"a"}],tolerations=[{"key":"a","operator":"Exists"}]'
for missing in auth.allowAnonymous=true tls.secret=tls tls.secret=tls,auth.allowAnonymous=true,cluster.enabled=true; do
  if helm template gateway "$chart" --set "$missing" >/dev/null 2>&1; then
    echo "scripts/manifests.sh: the chart is satisfied with $missing alone" >&2
    exit 1
  fi
done
report_skipped
