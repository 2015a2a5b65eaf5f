#!/usr/bin/env bash
# Counts the instructions of decode, encode, match, fan-out and rules under callgrind and compares them with
# benches/instructions.txt: a guard against slowdowns that no noise of the machine hides.
#
#   scripts/instructions.sh            compares; fails where a case costs more than the tolerance allows
#   scripts/instructions.sh --update   writes the file anew (say in the commit why the figures moved)
#
# TOLERANCE=3 is the allowed growth in percent. Needs valgrind (apt-get install valgrind); without it, or on another
# architecture than that of the file, nothing is checked, and that is said.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

baseline=benches/instructions.txt
tolerance=${TOLERANCE:-3}
few=1000
many=11000

nothing() {
  skip "instruction counts" "$1"
  exit 0
}

command -v valgrind >/dev/null || nothing "valgrind is missing (apt-get install valgrind)"
machine=$(uname -m)
if [ "${1:-}" != --update ]; then
  grep -qs "^# $machine\$" "$baseline" || nothing "$baseline was not made on $machine"
fi

say "building benches/instructions.rs"
bench=$(cargo bench --locked --bench instructions --no-run 2>&1 | tee /dev/stderr |
  sed -n 's/.*(\(.*instructions-[0-9a-f]*\)).*/\1/p' | tail -n 1)
[ -x "$bench" ] || { echo "cargo named no program for benches/instructions.rs" >&2; exit 1; }

# count CASE REPEATS: instructions of the whole run.
count() {
  valgrind --tool=callgrind --callgrind-out-file=/dev/null "$bench" "$1" "$2" 2>&1 |
    sed -n 's/.*Collected : \([0-9]*\).*/\1/p'
}

measure() {
  local name
  for name in $("$bench"); do
    echo "$name $((($(count "$name" $many) - $(count "$name" $few)) / (many - few)))"
  done
}

say "counting: instructions for one message of 256 B"
measured=$(measure)
if [ "${1:-}" = --update ]; then
  { echo "# Instructions for one message, from scripts/instructions.sh --update."
    echo "# $machine"
    echo "$measured"; } >"$baseline"
  echo "$measured"
  exit 0
fi

failed=0
while read -r name now; do
  before=$(sed -n "s/^$name //p" "$baseline")
  if [ -z "$before" ]; then
    verdict="not in $baseline: run with --update"
    failed=1
  elif [ $((now * 100)) -gt $((before * (100 + tolerance))) ]; then
    verdict="more than $tolerance % above $before"
    failed=1
  elif [ $((now * 100)) -lt $((before * (100 - tolerance))) ]; then
    verdict="below $before: run with --update to keep the gain"
  else
    verdict="as before ($before)"
  fi
  printf '%-20s %8d  %s\n' "$name" "$now" "$verdict"
done <<<"$measured"
exit $failed
