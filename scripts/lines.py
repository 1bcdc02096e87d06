#!/usr/bin/env python3
"""Counts the lines of product Rust per crate, comments and inline tests included, and the words of docs/.

Product Rust is what git tracks (or would add) in server, client, proto, kernels and python, without files of tests:
those in a folder `tests`, `examples` or `benches`, and modules in files of their own behind `#[cfg(test)]`.

    scripts/lines.py
"""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("server", "client", "proto", "kernels", "python")
# The crates of the router rank.
ROUTER = ("server/core", "server/grpc", "server/sessions", "server/telemetry")
TEST_FOLDERS = {"tests", "examples", "benches"}
TEST_MODULE = re.compile(r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?mod (\w+);")


def tracked(pattern: str) -> list[Path]:
    """Paths relative to the repository root, new files included, deleted ones not."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", pattern]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return [Path(path) for path in sorted(set(listed)) if (ROOT / path).exists()]


def test_modules() -> set[Path]:
    """Modules behind `#[cfg(test)]`, as paths without a suffix."""
    found = set()
    for path in tracked("*.rs"):
        folder = path.parent if path.stem in ("mod", "lib", "main") else path.with_suffix("")
        found |= {folder / name for name in TEST_MODULE.findall((ROOT / path).read_text())}
    return found


def product_files(pattern: str = "*.rs") -> list[Path]:
    """Rust files that are not of tests."""
    modules = test_modules()

    def is_test(path: Path) -> bool:
        if TEST_FOLDERS & set(path.parts[:-1]) or path.name.endswith("tests.rs"):
            return True
        return not modules.isdisjoint([path.with_suffix(""), *path.parents])

    return [path for path in tracked(pattern) if not is_test(path)]


def crate_of(path: Path) -> str:
    """The folder of the nearest Cargo.toml above `path`."""
    for folder in path.parents:
        if (ROOT / folder / "Cargo.toml").exists() and folder != Path("."):
            return str(folder)
    return "(root)"


def main() -> None:
    crates: dict[str, int] = defaultdict(int)
    files: dict[str, int] = defaultdict(int)
    for path in product_files():
        if path.parts[0] in PRODUCT:
            crates[crate_of(path)] += len((ROOT / path).read_text().splitlines())
            files[crate_of(path)] += 1

    def row(names: list[str], title: str) -> None:
        print(f"{sum(crates[name] for name in names):>7}  {sum(files[name] for name in names):>4} files  {title}")

    for crate in sorted(crates, key=lambda name: -crates[name]):
        row([crate], crate)
    router = [crate for crate in crates if crate in ROUTER]
    row(router, f"the router: {', '.join(sorted(router))}")
    row(list(crates), "all product Rust")
    pages = tracked("docs/*.md")
    words = sum(len((ROOT / page).read_text().split()) for page in pages)
    print(f"{words:>7}  {len(pages):>4} pages  words of docs/")


if __name__ == "__main__":
    main()
