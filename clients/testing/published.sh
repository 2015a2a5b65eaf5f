#!/usr/bin/env bash
# A client library as it would be published: packed, installed into a fresh environment, and an example of it run there (compiled, for Rust).
#
#   published.sh python|typescript|go|rust WORK       WORK: a directory that is made
#   published.sh pack python|typescript|rust OUT      only packs it: what a release has of it, in OUT. A Go module is not packed: it is
#                                                     the repository at a tag
#
# Tests call it. PYTHON is one with what building needs (tests/interop/requirements.txt); GATEWAY_ADDRESS and GATEWAY_CA lead the
# example to a gateway. What the libraries themselves need is taken from where this checkout has it, or from the caches of npm, Go and
# cargo; nothing else of the checkout is seen by what is installed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)

pack_python() { # OUT
  # Built from a copy: what is generated belongs to the copy. First the source archive, then the wheel out of it, as an index has them.
  mkdir -p copy/clients
  cp -r "$root/clients/python" copy/clients/
  rm -rf copy/clients/python/src/mqtt_gateway/v1
  cp -r "$root/proto" copy/
  (cd copy/clients/python && "$PYTHON" -m hatchling build -t sdist -d "$1")
  tar -xzf "$1"/mqtt_gateway_client-*.tar.gz
  (cd mqtt_gateway_client-* && "$PYTHON" -m hatchling build -t wheel -d "$1")
}

python() {
  pack_python "$work/built"
  "$PYTHON" -m venv fresh
  fresh/bin/python -m pip install --quiet --no-index --no-deps built/*.whl
  # Its dependencies are where they are installed already; pip says whether they are those that the wheel asks for.
  "$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$(fresh/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/needs.pth"
  if fresh/bin/python -m pip check | grep '^mqtt-gateway-client '; then exit 1; fi
  fresh/bin/python -I "$root/clients/python/examples/publish.py"
}

pack_typescript() { # OUT
  # Built from a copy, as other tests build in its folder.
  mkdir -p copy/clients/typescript
  cp -r "$root/proto" copy/
  (cd "$root/clients/typescript" && cp -r LICENSE README.md examples generate.mjs package.json package-lock.json proto src tsconfig.json "$work/copy/clients/typescript/")
  ln -s "$root/clients/typescript/node_modules" copy/clients/typescript/node_modules
  (cd copy/clients/typescript && npm pack --silent --pack-destination "$1" >/dev/null)
}

typescript() {
  pack_typescript "$work"
  mkdir fresh
  cd fresh
  npm init -y >/dev/null
  npm pkg set type=module >/dev/null
  npm install --prefer-offline --no-audit --no-fund --loglevel=error ../mqtt-gateway-client-*.tgz
  cp "$root/clients/typescript/examples/tour.mjs" .
  node tour.mjs
}

# The module has a path that leads nowhere yet: it is given another, as whoever publishes it does.
go_module() {
  local path=gateway.invalid/mqtt-server/clients/go version=v0.1.0-t$$ cache old
  old=$(sed -n 's/^module //p' "$root/clients/go/go.mod")
  mkdir -p copy/clients copy/scripts/groups copy/target
  cp -r "$root/clients/go" copy/clients/
  cp -r "$root/proto" copy/
  cp -r "$root/scripts/groups/gomember" copy/scripts/groups/
  ln -s "$root/.venv" copy/.venv
  copy/clients/go/rename.sh "$path"
  if grep -rF "$old" copy/clients/go copy/scripts/groups/gomember; then
    echo "published.sh: $old is left (above)" >&2
    exit 1
  fi
  (cd copy/clients/go && go vet ./...)
  # What a proxy of modules serves.
  mkdir -p "proxy/$path/@v"
  cp copy/clients/go/go.mod "proxy/$path/@v/$version.mod"
  printf '{"Version": "%s", "Time": "2026-01-01T00:00:00Z"}\n' "$version" >"proxy/$path/@v/$version.info"
  "$PYTHON" - "$path@$version" "proxy/$path/@v/$version.zip" <<'ZIP'
import os, sys, zipfile
prefix, name = sys.argv[1:]
with zipfile.ZipFile(name, "w", zipfile.ZIP_DEFLATED) as module:
    for folder, _, files in os.walk("copy/clients/go"):
        for file in sorted(files):
            path = os.path.join(folder, file)
            module.write(path, prefix + "/" + os.path.relpath(path, "copy/clients/go"))
ZIP
  cache=$(go env GOMODCACHE)
  # shellcheck disable=SC2064
  trap "chmod -R u+w '$cache/gateway.invalid' && rm -rf '$cache/gateway.invalid' '$cache/cache/download/gateway.invalid'" EXIT
  mkdir fresh
  export GOSUMDB=off GOFLAGS=-mod=mod GOBIN=$work/fresh
  GOPROXY="file://$work/proxy,file://$cache/cache/download,$(go env GOPROXY)"
  export GOPROXY
  (cd fresh && go mod init fresh && go get "$path@$version" && go install "$path/examples/tour")
  fresh/tour
}

# Two crates, the client and what is generated for it. Not compiled here from what cargo packs: `rust` does that.
pack_rust() { # OUT
  (cd "$root" && cargo package --locked --quiet --allow-dirty --no-verify -p mqtt-gateway-api -p mqtt-gateway-client --target-dir "$work/packed")
  cp "$work"/packed/package/*.crate "$1/"
}

rust() {
  mkdir built registry
  pack_rust "$work/built"
  for crate in built/*.crate; do tar -xzf "$crate" -C registry; done
  cargo new --quiet --vcs none --name fresh fresh
  cp "$root/clients/rust/examples/publish.rs" fresh/src/main.rs
  # The versions that the checkout is tested with, and no others.
  cp "$root/Cargo.lock" fresh/
  cat >>fresh/Cargo.toml <<TOML
mqtt-gateway-client = "*"
tokio = { version = "1", features = ["macros", "rt"] }
[patch.crates-io]
mqtt-gateway-api = { path = "$(echo "$work"/registry/mqtt-gateway-api-*)" }
mqtt-gateway-client = { path = "$(echo "$work"/registry/mqtt-gateway-client-*)" }
TOML
  # Where the checkout is built, of which it takes what is the same; not linked and run. The examples of the checkout are run.
  CARGO_TARGET_DIR=$root/target CARGO_PROFILE_DEV_DEBUG=line-tables-only cargo check --quiet --offline --manifest-path fresh/Cargo.toml
}

usage() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# In WORK, with its whole path.
begin() {
  mkdir -p "$1"
  work=$(cd "$1" && pwd)
  cd "$work"
}

case ${1:-} in
  pack)
    mkdir -p "${3:?a directory}"
    out=$(cd "$3" && pwd)
    begin "$(mktemp -d)"
    trap 'rm -rf "$work"' EXIT
    case $2 in python | typescript | rust) "pack_$2" "$out" ;; *) usage ;; esac
    ;;
  python | typescript | rust) begin "${2:?a directory}" && "$1" ;;
  go) begin "${2:?a directory}" && go_module ;;
  *) usage ;;
esac
