#!/usr/bin/env bash
# Packs a built program for Debian and Ubuntu, with what the program itself makes: man pages and completions of shells.
#
#   scripts/deb.sh [PROFILE [TARGET [ARGUMENT...]]]     PROFILE: dist; ARGUMENT: of cargo deb
#   scripts/deb.sh made [PROFILE [TARGET]]              only what the program makes, into target/package
#
# The program must be there: cargo build --profile PROFILE [--target TARGET] --features shipped. Needs cargo-deb. RUNNER starts
# a program of another processor (qemu-aarch64-static), whose package is made here.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

only=
if [ "${1:-}" = made ]; then only=$1; shift; fi
profile=${1:-dist}
target=${2:-}
shift "$(($# < 2 ? $# : 2))"
built=$root/target/${target:+$target/}$([ "$profile" = dev ] && echo debug || echo "$profile")/mqtt-server
made=$root/target/package
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}

ask() {
  # shellcheck disable=SC2086
  ${RUNNER:-} "$built" ctl "$@"
}

rm -rf "$made"
mkdir -p "$made/man" "$made/completions"
ask man "$made/man"
ask completion bash >"$made/completions/mqtt-server"
ask completion zsh >"$made/completions/_mqtt-server"
ask completion fish >"$made/completions/mqtt-server.fish"
find "$made/man" -name '*.1' -exec gzip -9n {} +

# What changed is in CHANGELOG.md; Debian's form of it says only which version this is.
cat >"$made/changelog" <<CHANGELOG
mqtt-server ($version-1) unstable; urgency=medium

  * What changed: /usr/share/doc/mqtt-server/changelog.gz

 -- The authors of mqtt-server <mqtt-server@localhost>  $(LC_ALL=C date -u -R -d "@$SOURCE_DATE_EPOCH")
CHANGELOG
gzip -9nc CHANGELOG.md >"$made/changelog.gz"

if [ -n "$only" ]; then exit; fi
cargo deb --no-build --quiet --profile "$profile" ${target:+--target "$target"} "$@"
