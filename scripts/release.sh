#!/usr/bin/env bash
# Builds what a release has for one target: a static program as an archive, a Debian package of it, and checksums.
#
#   scripts/release.sh TARGET [TAG]       TARGET: x86_64-unknown-linux-musl or aarch64-unknown-linux-musl
#   scripts/release.sh version TAG        only: is TAG the version that the sources say, everywhere?
#   scripts/release.sh notes TAG          only: what CHANGELOG.md has below `## X.Y.Z`, for a release
#
# Needs the target (rustup target add TARGET), musl-gcc (musl-tools) and, for the package, cargo-deb. What comes out lies in
# target/release-files. Two builds of a commit by the same compiler are the same bytes, whatever directory they are in: paths are
# mapped, times are those of the commit. PROFILE (dist) is for trying it with a faster one.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)

check_version() { # TAG
  if [ "$1" != "v$version" ]; then
    echo "scripts/release.sh: the tag $1 is not v$version, which Cargo.toml says" >&2
    exit 1
  fi
  local file
  for file in 'Cargo.toml:path = "crates/api", version = "' 'Cargo.toml:path = "clients/rust", version = "' \
    'clients/python/pyproject.toml:version = "' 'clients/typescript/package.json:"version": "' \
    'deploy/helm/mqtt-server/Chart.yaml:appVersion: "'; do
    if ! grep -qF "${file#*:}$version\"" "${file%%:*}"; then
      echo "scripts/release.sh: ${file%%:*} is not of $version" >&2
      exit 1
    fi
  done
}

case ${1:-} in
  version)
    check_version "${2:?a tag}"
    say "the sources are of $2"
    exit
    ;;
  notes)
    check_version "${2:?a tag}"
    notes=$(awk -v version="$version" '/^## / { inside = $2 == version; next } inside' CHANGELOG.md)
    if [ -z "${notes//[[:space:]]/}" ]; then
      echo "scripts/release.sh: CHANGELOG.md has nothing below '## $version'" >&2
      exit 1
    fi
    printf '%s\n' "$notes"
    exit
    ;;
esac

target=${1:?a target, such as x86_64-unknown-linux-musl}
profile=${PROFILE:-dist}
features=${FEATURES-shipped kafka-static}
if [ -n "${2:-}" ]; then check_version "$2"; fi
out=$root/target/release-files
name=mqtt-server-$version-$target

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
# For --version.
GIT_COMMIT=$(git rev-parse --short=12 HEAD)
cargo_home=${CARGO_HOME:-$HOME/.cargo}
sysroot=$(rustc --print sysroot)
mapped=("$root=/src" "$cargo_home=/cargo" "$sysroot=/rust")
RUSTFLAGS=$(printf -- '--remap-path-prefix=%s ' "${mapped[@]}")
RUSTFLAGS+="-C target-feature=+crt-static"

# The C compiler by one name in every directory, as OpenSSL keeps how it was called; its directories for modules are below the
# one that it is built in, and come as definitions.
case $target in
  x86_64-*) machine=x86_64 wrapped=${MUSL_CC:-musl-gcc} ;;
  aarch64-*)
    machine=aarch64 wrapped=${MUSL_CC:-musl-gcc}
    # The largest pages that a kernel for ARM64 has: jemalloc ends a program that meets larger ones than it was built for.
    export JEMALLOC_SYS_WITH_LG_PAGE=16
    ;;
  *) echo "scripts/release.sh: no target of a release: $target" >&2; exit 1 ;;
esac
tools=$root/target/release-tools
mkdir -p "$tools"
cat >"$tools/musl-cc-$machine" <<COMPILER
#!/usr/bin/env bash
arguments=()
for argument; do
  case \$argument in -D*) argument=\${argument//'$root'//src} ;; esac
  arguments+=("\$argument")
done
exec $wrapped $(printf -- "-ffile-prefix-map='%s' " "${mapped[@]}")"\${arguments[@]}"
COMPILER
chmod +x "$tools/musl-cc-$machine"
export PATH=$tools:$PATH CC=musl-cc-$machine HOST_CC=${HOST_CC:-cc} SOURCE_DATE_EPOCH GIT_COMMIT RUSTFLAGS

for tool in "$wrapped" "$HOST_CC" c++ make perl readelf "${STRIP:-strip}"; do
  if ! command -v "$tool" >/dev/null; then
    echo "scripts/release.sh: $tool is missing; on Debian: apt install musl-tools g++ make perl binutils" >&2
    exit 1
  fi
done
say "building $name ($profile)"
cargo build --locked --profile "$profile" --target "$target" --features "$features" --bin mqtt-server
built=$root/target/$target/$([ "$profile" = dev ] && echo debug || echo "$profile")/mqtt-server
if readelf -lW "$built" | grep INTERP; then
  echo "scripts/release.sh: $built is not static" >&2
  exit 1
fi

rm -rf "${out:?}/$name"
mkdir -p "$out/$name"
cp LICENSE README.md CHANGELOG.md "$out/$name/"
cp deploy/deb/mqtt-server.service docs/mqtt-server.toml "$out/$name/"
"${STRIP:-strip}" -o "$out/$name/mqtt-server" "$built"
if command -v cargo-deb >/dev/null; then
  scripts/deb.sh "$profile" "$target" --output "$out/" >/dev/null
else
  skip "the package for Debian" "cargo-deb is missing (cargo install --locked cargo-deb)"
  scripts/deb.sh made "$profile" "$target"
fi
cp -r target/package/man target/package/completions "$out/$name/"
tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$out" -cf - "$name" |
  gzip -n9 >"$out/$name.tar.gz"
rm -rf "${out:?}/$name"

(cd "$out" && find . -maxdepth 1 -type f ! -name 'SHA256SUMS*' -printf '%f\n' | sort | xargs sha256sum >"SHA256SUMS-$target")
cat "$out/SHA256SUMS-$target"
report_skipped
