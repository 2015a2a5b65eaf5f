"""Links of the documentation as a site.

    links.py prepare ROOT DOCS URL    in DOCS, a copy of ROOT/docs: links to files beside docs/ lead to the repository at URL, or are
                                      plain text without one
    links.py check SITE               every link of the pages in SITE leads to a file, and to an anchor that is there
"""

import os
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def rewritten(text, page, root, url):
    """The page without links out of the book; `page` is where it is below ROOT/docs."""
    folder = os.path.dirname(os.path.join("docs", page))

    def link(found):
        label, target = found.groups()
        file, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:") or not file:
            return found.group(0)
        path = os.path.normpath(os.path.join(folder, file))
        if path.startswith("docs/"):
            # mdBook makes index.html of a README.md, but leads links to README.html.
            return found.group(0) if page == "SUMMARY.md" else found.group(0).replace("README.md", "index.md")
        if not url:
            return label
        kind = "tree" if (root / path).is_dir() else "blob"
        return f"[{label}]({url}/{kind}/HEAD/{path}{'#' + anchor if anchor else ''})"

    # What is in blocks of code is no link.
    parts = re.split(r"(^ *```.*?^ *```[^\n]*$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else LINK.sub(link, part) for number, part in enumerate(parts))


def prepare(root, docs, url):
    for path in docs.rglob("*.md"):
        text = path.read_text()
        path.write_text(rewritten(text, path.relative_to(docs).as_posix(), root, url.rstrip("/")))


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.names = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.names.add(value)


def check(site):
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    wrong, count = [], 0
    for path, page in pages.items():
        # Its links begin at the root of wherever it is served.
        if path.name == "404.html":
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            if not target.exists() or parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].names:
                wrong.append(f"{path.relative_to(site.resolve())}: {link}")
    drawn = sum('class="mermaid"' in path.read_text() for path in pages)
    print(f"{len(pages)} pages, {count} links within, {drawn} pages with drawings")
    if wrong or not drawn:
        sys.exit("links that lead nowhere:\n" + "\n".join(wrong) if wrong else "no page has a drawing")


if sys.argv[1:2] == ["prepare"] and len(sys.argv) == 5:
    prepare(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
elif sys.argv[1:2] == ["check"] and len(sys.argv) == 3:
    check(Path(sys.argv[2]))
else:
    sys.exit(__doc__)
