#!/usr/bin/env python3
"""Checks the Markdown files of the repository: relative links, anchors, paths in backticks, and reasons of errors must exist, and lines
outside of tables and code have at most 120 characters.

Prints each one that does not, and exits with 1 if there are any. Python's standard library and git are all it needs.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
TOP = "server|kernels|proto|client|loadtest|tests|scripts|docs|examples|deploy|python"


def anchor(heading):
    """The anchor that GitHub gives to a heading."""
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", text.replace("`", "")).replace(" ", "-")


def reasons(api):
    """Reasons of errors that the source has and docs/api.md lacks, or the other way round."""
    source = "".join(path.read_text() for path in ROOT.glob("server/*/src/**/failure.rs"))
    body = re.search(r"fn code_and_reason\(.*?\n    }\n", source, re.S)
    found = set(re.findall(r'"([A-Z_]+)"', body[0] if body else ""))
    table = api.partition("## Statuses")[2].partition("\n## ")[0]
    listed = {word for row in re.findall(r"^\|.*$", table, re.M)[2:] for word in re.findall(r"`([A-Z_]+)`", row)}
    page = ROOT / "docs/api.md"
    wrong = [(page, f"lacks the reason {name}") for name in sorted(found - listed)]
    wrong += [(page, f"lists the reason {name}, which the source does not have") for name in sorted(listed - found)]
    return wrong if found else [(page, "has reasons, but no failure.rs with `fn code_and_reason` was found")]


def main():
    names = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, text=True, capture_output=True, check=True).stdout
    pages = {ROOT / name: (ROOT / name).read_text() for name in names.split()}
    prose = {page: re.sub(r"^ *```.*?^ *```", "", text, flags=re.S | re.M) for page, text in pages.items()}
    anchors = {page: {anchor(h) for h in re.findall(r"^#+ (.*)$", text, re.M)} for page, text in prose.items()}
    wrong = []
    for page, text in prose.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, name = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                wrong.append((page, f"links to {link}, which does not exist"))
            elif name and name not in anchors.get(target, set()):
                wrong.append((page, f"links to {link}, but {target.name} has no such heading"))
        for path in re.findall(rf"`((?:{TOP})/[\w./-]+)`", text):
            if not (ROOT / path).exists():
                wrong.append((page, f"names `{path}`, which does not exist"))
        long = [line for line in text.splitlines() if len(line) > WIDTH and not line.lstrip().startswith("|")]
        wrong += [(page, f"has a line of {len(line)} characters: {line[:60]}…") for line in long]
    wrong += reasons(pages[ROOT / "docs/api.md"])
    for page, text in wrong:
        print(f"{page.relative_to(ROOT)}: {text}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
