# shellcheck shell=bash
# Shared by the scripts: sourced, not run. Says what is done, what is missing and what that costs.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit

skipped=()

say() { printf '\n==> %s\n' "$*"; }

# skip WHAT REASON: notes a check that could not run, loudly.
skip() {
  skipped+=("$1: $2")
  printf '\n!!! SKIPPED: %s\n!!! because: %s\n' "$1" "$2" >&2
}

report_skipped() {
  [ ${#skipped[@]} -eq 0 ] && return
  printf '\n!!! These checks were SKIPPED:\n' >&2
  printf '!!!   %s\n' "${skipped[@]}" >&2
}

# step NAME COMMAND...: runs it with its time.
step() {
  local name=$1 start=$SECONDS
  shift
  say "$name: $*"
  "$@"
  echo "    $name took $((SECONDS - start)) s"
}

# The advisory database may be out of reach: then the other checks of cargo deny still run.
deny_check() {
  if timeout 120 cargo deny --locked fetch db >/dev/null 2>&1; then
    cargo deny --locked check --hide-inclusion-graph
  else
    skip "cargo deny: advisories" "the advisory database cannot be fetched from here"
    cargo deny --locked check --hide-inclusion-graph licenses bans sources
  fi
}
