#!/usr/bin/env bash
# Gives the module the path under which it is published: clients/go/rename.sh github.com/OWNER/mqtt-server/clients/go
#
# The repository has no address yet, and a module is named by its own; until then it is used by a `replace`.
set -euo pipefail
[ $# = 1 ] || { sed -n 's/^# //p' "$0" >&2; exit 2; }
cd "$(dirname "$0")"
old=$(sed -n 's/^module //p' go.mod)
grep -rlF "$old" --include=*.go --include=go.mod --include=*.md . ../../scripts/groups/gomember | xargs sed -i "s|$old|$1|g"
./generate.sh
