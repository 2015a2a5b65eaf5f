#!/usr/bin/env bash
# Are two builds of this commit the same bytes? Builds what a release has here and in a checkout elsewhere, and compares.
#
#   scripts/reproduce.sh TARGET
#
# TARGET, PROFILE and what is needed are those of scripts/release.sh. ELSEWHERE is the other directory, of another length than
# this one; it is made, and stays, so that a second run is quick. Two times the build: it takes long.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

target=${1:?a target, such as x86_64-unknown-linux-musl}
elsewhere=${ELSEWHERE:-$(dirname "$root")/$(basename "$root")-built-a-second-time}
if [ -n "$(git status --porcelain)" ]; then
  echo "scripts/reproduce.sh: there is what is not committed, which the other checkout does not have" >&2
  exit 2
fi
if [ -d "$elsewhere" ]; then
  git -C "$elsewhere" checkout --quiet --detach "$(git rev-parse HEAD)"
else
  git worktree add --quiet --detach "$elsewhere" HEAD
fi
for directory in "$root" "$elsewhere"; do
  say "in $directory"
  (cd "$directory" && scripts/release.sh "$target")
done
cd "$root/target/release-files"
code=0
for file in *"$target"*.tar.gz *.deb; do
  if cmp "$file" "$elsewhere/target/release-files/$file"; then
    echo "the same: $(sha256sum "$file")"
  else
    code=1
  fi
done
exit "$code"
