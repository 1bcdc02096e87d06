#!/usr/bin/env python3
"""Prints import circles between modules of each crate in server/, client/ and proto/; exits with 1 if there is one.

A module with everything below it is one node among its siblings. An edge a -> b says that code of a names, by
`crate::…`, `super::…` or `self::…`, something that b defines; names that a module imports or re-exports are followed to
their definition. A child may use what its parent defines, and a parent its children. Code for tests is not read.

    scripts/import_circles.py [FOLDER...]
"""

import re
import sys
from pathlib import Path

from lines import ROOT, product_files, tracked

FOLDERS = ("server", "client", "proto")
# Comments, strings and characters, in the order in which they must be tried.
NOISE = re.compile(
    r'//[^\n]*|/\*.*?\*/|b?r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"|b?\'(?:\\[^\n]{1,8}?|[^\\\'\n])\'', re.DOTALL
)
FOR_TESTS = re.compile(
    r"#\[cfg\((?:all\()?test\b[^\]]*\]\s*(?:#\[[^\]]*\]\s*)*(?:pub(?:\([^)]*\))?\s+)?(?:mod|use|fn|impl|struct)\b"
)
TOKEN = re.compile(
    r"\bmod\s+(?P<mod>\w+)\s*(?P<open>[{;])|\buse\s+(?P<use>[^;]+);"
    r"|(?P<path>\b(?:crate|self|super)(?:\s*::\s*\w+)+)|(?P<brace>[{}])|(?P<word>\b[A-Za-z_]\w*)"
)


class Module:
    def __init__(self, path: tuple[str, ...]):
        self.path = path
        self.children: set[str] = set()
        self.imports: dict[str, tuple[str, ...]] = {}
        self.globs: list[tuple[str, ...]] = []
        self.words: set[str] = set()
        self.references: list[tuple[tuple[str, ...], str]] = []


def blank(text: str) -> str:
    """Spaces of the same lines, so that line numbers stay."""
    return re.sub(r"[^\n]", " ", text)


def without_tests(text: str) -> str:
    while found := FOR_TESTS.search(text):
        end = min((text.find(c, found.end()) for c in ";{" if text.find(c, found.end()) >= 0), default=len(text) - 1)
        if text[end] == "{":
            depth = 1
            while depth and end + 1 < len(text):
                end += 1
                depth += {"{": 1, "}": -1}.get(text[end], 0)
        text = text[: found.start()] + blank(text[found.start() : end + 1]) + text[end + 1 :]
    return text


def leaves(tree: str, prefix: tuple[str, ...] = ()):
    """Paths of a use tree with the names they get."""
    tree = tree.strip()
    head, brace, rest = tree.partition("{")
    names = tuple(part.strip() for part in head.split("::") if part.strip())
    if not brace:
        path, _, alias = tree.partition(" as ")
        names = prefix + tuple(part.strip() for part in path.split("::") if part.strip())
        if names and names[-1] == "self" and len(names) > 1:
            names = names[:-1]
        if names:
            yield names, alias.strip() or names[-1]
        return
    depth, start, body = 0, 0, rest.rstrip()[:-1]
    for at, char in enumerate(body + ","):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == "," and depth == 0:
            yield from leaves(body[start:at], prefix + names)
            start = at + 1


def absolute(names: tuple[str, ...], module: Module) -> tuple[str, ...] | None:
    """`names` from the crate's root; None for another crate's."""
    if names[0] == "crate":
        return names[1:]
    base = module.path
    if names[0] in ("self", "super"):
        for at, name in enumerate(names):
            if name == "super":
                base = base[:-1]
            elif name != "self":
                return base + names[at:]
        return base
    return base + names if names[0] in module.children else None


def read_crate(folder: Path) -> dict[tuple[str, ...], Module]:
    modules: dict[tuple[str, ...], Module] = {}
    waiting = []
    for path in product_files(f"{folder}/src/*.rs"):
        parts = path.relative_to(folder / "src").with_suffix("").parts
        parts = parts[:-1] if parts[-1] in ("mod", "lib", "main") else parts
        text = NOISE.sub(lambda found: blank(found.group()), (ROOT / path).read_text())
        text = re.sub(r"\bpub\s*\([^)]*\)", lambda found: blank(found.group()), without_tests(text))
        stack = [(modules.setdefault(parts, Module(parts)), 0)]
        depth = 0
        for token in TOKEN.finditer(text):
            module = stack[-1][0]
            place = f"{path}:{text.count(chr(10), 0, token.start()) + 1}"
            if name := token["mod"]:
                module.children.add(name)
                if token["open"] == "{":
                    depth += 1
                    inner = module.path + (name,)
                    stack.append((modules.setdefault(inner, Module(inner)), depth))
            elif token["brace"] == "{":
                depth += 1
            elif token["brace"] == "}":
                if len(stack) > 1 and stack[-1][1] == depth:
                    stack.pop()
                depth -= 1
            elif token["use"]:
                waiting += [(module, *leaf, place) for leaf in leaves(re.sub(r"\s+", " ", token["use"]))]
            elif token["path"]:
                waiting.append((module, tuple(re.split(r"\s*::\s*", token["path"])), None, place))
            else:
                module.words.add(token["word"])
    for module, names, alias, place in waiting:
        if (path := absolute(names, module)) is None:
            continue
        if alias == "*":
            module.globs.append(path[:-1])
            path = path[:-1]
        elif alias:
            module.imports[alias] = path
        module.references.append((path, place))
    return modules


def definition(path: tuple[str, ...], modules, seen=frozenset()) -> tuple[str, ...]:
    """The module that defines what `path` names."""
    at: tuple[str, ...] = ()
    for index, name in enumerate(path):
        if at + (name,) in modules:
            at += (name,)
            continue
        if name in modules[at].imports:
            target = modules[at].imports[name] + path[index + 1 :]
            if target not in seen:
                return definition(target, modules, seen | {path})
        break
    return at


def edges(modules):
    """Per parent: (child, child) -> a place of each."""
    found: dict[tuple[str, ...], dict[tuple[str, str], str]] = {}
    for module in modules.values():
        references = list(module.references)
        for glob in module.globs:
            names = modules[glob].imports if glob in modules else {}
            place = f"{'::'.join(module.path)} by a glob"
            references += [(target, place) for name, target in names.items() if name in module.words]
        for path, place in references:
            target = definition(path, modules)
            common = 0
            while common < min(len(target), len(module.path)) and target[common] == module.path[common]:
                common += 1
            if common < len(target) and common < len(module.path):
                pair = (module.path[common], target[common])
                found.setdefault(target[:common], {}).setdefault(pair, place)
    return found


def circles(pairs) -> list[set[str]]:
    """Groups of nodes that reach each other."""
    reach = {node: {target for source, target in pairs if source == node} for pair in pairs for node in pair}
    changed = True
    while changed:
        changed = False
        for node, known in reach.items():
            more = known.union(*(reach[target] for target in known))
            changed |= more != known
            reach[node] = more
    groups = {frozenset(other for other in reach[node] if node in reach[other]) for node in reach}
    return sorted((set(group) for group in groups if group), key=sorted)


def main() -> int:
    count = 0
    for top in sys.argv[1:] or FOLDERS:
        for manifest in tracked(f"{top}/*Cargo.toml"):
            crate = manifest.parent
            modules = read_crate(crate)
            for parent, pairs in sorted(edges(modules).items()):
                for group in circles(pairs):
                    count += 1
                    print(f"{crate}: {'::'.join(('crate',) + parent)} has a circle of {', '.join(sorted(group))}")
                    for (source, target), place in sorted(pairs.items()):
                        if source in group and target in group:
                            print(f"    {source} -> {target}   {place}")
    print(f"{count} import circles")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
