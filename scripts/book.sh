#!/usr/bin/env bash
# The documentation as a site, in target/book.
#
#   scripts/book.sh [URL]           URL: where the repository can be read, such as https://github.com/OWNER/mqtt-server
#   scripts/book.sh prepare [URL]   only what mdBook is given, in target/book-source
#   scripts/book.sh install         mdBook and mdbook-mermaid, into target/book-tools
#
# Pages also lead to files that are not in docs/: here these links lead to the repository, or, without a URL, are plain text. The
# pictures in text form (Mermaid) are drawn by the reader's browser, by the script that mdbook-mermaid brings. In the end every
# link of the site is held against its files.
set -euo pipefail
# shellcheck source=scripts/lib.sh
. "$(dirname "$0")/lib.sh"

tools=$root/target/book-tools
source=$root/target/book-source
export PATH=$tools/bin:$PATH

if [ "${1:-}" = install ]; then
  cargo install --locked --quiet --root "$tools" mdbook@0.5.4 mdbook-mermaid@0.17.1
  exit
fi

only=
if [ "${1:-}" = prepare ]; then only=$1; shift; fi
rm -rf "$source"
mkdir -p "$source"
cp -r docs book.toml "$source/"
python3 scripts/book/links.py prepare "$root" "$source/docs" "${1:-}"
if [ -n "$only" ]; then exit; fi

for tool in mdbook mdbook-mermaid; do
  command -v $tool >/dev/null || { echo "scripts/book.sh: $tool is missing (scripts/book.sh install)" >&2; exit 1; }
done
# Its script, and the lines of the configuration that say so.
mdbook-mermaid install "$source"
mdbook build "$source" --dest-dir "$root/target/book"
python3 scripts/book/links.py check "$root/target/book"
say "target/book/index.html"
