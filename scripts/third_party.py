#!/usr/bin/env python3
"""Writes the licences of the crates that a binary contains, for images and wheels.

    scripts/third_party.py [--features cuda] [--package expertd ...] [--offline] OUT

It walks the normal dependencies of the packages for this platform, as `cargo metadata` gives them, without macros and build scripts,
which no binary contains. Each text stands once, under the crates that have it. Ends with 1 if a crate names no licence.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXTS = re.compile(r"(licen[cs]e|copying|copyright|notice|unlicense)([-._].*)?", re.I)


def metadata(features, offline):
    host = re.search(r"^host: (\S+)", subprocess.run(["rustc", "-vV"], check=True, capture_output=True, text=True).stdout, re.M)[1]
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", host]
    command += ["--features", features] if features else []
    command += ["--offline"] if offline else []
    return json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)


def contained(found, names):
    """The packages of others that the named ones link, by name and version."""
    packages = {package["id"]: package for package in found["packages"]}
    nodes = {node["id"]: node for node in found["resolve"]["nodes"]}
    is_macro = {i: any("proc-macro" in target["kind"] for target in package["targets"]) for i, package in packages.items()}
    waiting = [i for i, package in packages.items() if package["name"] in names and package["source"] is None]
    if len(waiting) != len(names):
        sys.exit(f"expected the packages {', '.join(names)} in this workspace, found {len(waiting)} of them")
    seen = set(waiting)
    while waiting:
        for dependency in nodes[waiting.pop()]["deps"]:
            is_normal = any(kind["kind"] is None for kind in dependency["dep_kinds"])
            if is_normal and dependency["pkg"] not in seen and not is_macro[dependency["pkg"]]:
                seen.add(dependency["pkg"])
                waiting.append(dependency["pkg"])
    others = [packages[i] for i in seen if packages[i]["source"] is not None]
    return sorted(others, key=lambda package: (package["name"], package["version"]))


def texts(package):
    """Contents of the files with licences and notices in a crate."""
    folder = Path(package["manifest_path"]).parent
    is_used = lambda path: not {"tests", "examples", "benches"} & set(path.relative_to(folder).parts)
    # Some crates hold the sources of another library in a folder of its own.
    files = {path for path in folder.rglob("*") if TEXTS.fullmatch(path.name) and path.suffix != ".rs" and is_used(path)}
    if package["license_file"]:
        files.add(folder / package["license_file"])
    return [path.read_text(errors="replace").strip() for path in sorted(files) if path.is_file()]


def page(crates):
    lines = ["# Licences of third parties", "", "This program contains the following crates, and Rust's standard library (MIT OR Apache-2.0).", ""]
    lines += ["| crate | version | licence | source |", "|---|---|---|---|"]
    by_text = {}
    for crate in crates:
        licence = crate["license"] or crate["license_file"]
        source = crate["repository"] or f"https://crates.io/crates/{crate['name']}"
        lines.append(f"| {crate['name']} | {crate['version']} | {licence} | {source} |")
        for text in texts(crate):
            # Copies differ in how their lines are broken.
            by_text.setdefault(" ".join(text.split()), (text, []))[1].append(f"{crate['name']} {crate['version']}")
    for text, holders in by_text.values():
        fence = "`" * (max(map(len, re.findall(r"`+", text)), default=0) + 3)
        lines += ["", f"## {', '.join(holders)}", "", f"{fence}text", text, fence]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--features", default="", help="features of the binary")
    parser.add_argument("--package", nargs="+", default=["expertd"], help="packages of this workspace")
    parser.add_argument("--offline", action="store_true", help="use crates that are here only")
    args = parser.parse_args()
    crates = contained(metadata(args.features, args.offline), args.package)
    unnamed = [crate["name"] for crate in crates if not (crate["license"] or crate["license_file"])]
    if unnamed or len(crates) < 20:
        sys.exit(f"{len(crates)} crates were found; without a licence: {', '.join(unnamed) or 'none'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(crates))
    print(f"{args.out}: {len(crates)} crates")


if __name__ == "__main__":
    main()
