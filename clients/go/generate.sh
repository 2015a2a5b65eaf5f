#!/usr/bin/env bash
# Makes gatewayv1 and hooksv1, the messages and stubs of proto/gateway: clients/go/generate.sh [DIRECTORY]
#
# They are checked in, as `go get` builds nothing. A test makes them again elsewhere and compares, so that they are never older than the
# protos. Needs grpcio-tools (.venv), which has protoc, and fetches its plugins as `go install` does.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${1:-$here}
module=$(sed -n 's/^module //p' "$here/go.mod")
export GOBIN=$root/target/go-plugins
go install google.golang.org/protobuf/cmd/protoc-gen-go@v1.36.6
go install google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.5.1

cd "$root/proto"
# The import paths of this module, whatever go_package says in the protos.
options=()
for file in gateway/v1/*.proto gateway/hooks/v1/*.proto; do
  case $file in gateway/hooks/*) package=hooksv1 ;; *) package=gatewayv1 ;; esac
  options+=("--go_opt=M$file=$module/$package" "--go-grpc_opt=M$file=$module/$package")
done
PATH=$GOBIN:$PATH "$root/.venv/bin/python" -m grpc_tools.protoc -I. "${options[@]}" \
  --go_out="$target" --go_opt="module=$module" --go-grpc_out="$target" --go-grpc_opt="module=$module" \
  gateway/v1/*.proto gateway/hooks/v1/*.proto
