#!/usr/bin/env python3
"""Checks that rules, dashboard and documents name only metrics that exist, that the runbook has every alert and every exit
code, and runs the tests of the rules.

docs/metrics.md lists all metrics; a test of expertd-telemetry keeps it equal to the source. Needs promtool for the rules.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RULES = ROOT / "deploy/prometheus/rules.yaml"
DASHBOARD = ROOT / "deploy/grafana/expertd.json"
# Where people find the runbook from a pager.
REPOSITORY = re.search(r'^repository = "(.*)"', (ROOT / "Cargo.toml").read_text(), re.M)[1]
RUNBOOK = f"{REPOSITORY}/blob/main/docs/operations.md"
EXIT = ROOT / "server/cli/src/exit.rs"
# Names in code and commands that look like metrics.
NOT_METRICS = re.compile(r"expertd_(proto|cli|router|client)$")


def metrics() -> set[str]:
    """All names that a scrape can contain, with the series of histograms."""
    names = set()
    for name, kind in re.findall(r"^\| `(expertd_\w+)` \| (\w+) \|", (ROOT / "docs/metrics.md").read_text(), re.M):
        names.add(name)
        if kind == "histogram":
            names.update(f"{name}_{part}" for part in ("bucket", "sum", "count"))
    return names


def used(text: str) -> set[str]:
    return {name for name in re.findall(r"\bexpertd_[a-z0-9_]+[a-z0-9]\b", text) if not NOT_METRICS.match(name)}


def main() -> None:
    known, errors = metrics(), []
    if len(known) < 20:
        sys.exit(f"docs/metrics.md lists only {len(known)} metrics; its table was not understood")
    rules = RULES.read_text()
    texts = {RULES: rules, RULES.with_name("rules.test.yaml"): RULES.with_name("rules.test.yaml").read_text()}
    for page in [ROOT / "docs/operations.md", ROOT / "docs/metrics.md"]:
        texts[page] = page.read_text()
    for path in (ROOT / "deploy/kubernetes").rglob("*.yaml"):
        texts[path] = path.read_text()
    dashboard = json.loads(DASHBOARD.read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", [])]
    if not expressions:
        errors.append(f"{DASHBOARD}: no panel has an expression")
    texts[DASHBOARD] = "\n".join(expressions + [v["query"] for v in dashboard["templating"]["list"]])
    for path, text in texts.items():
        for name in sorted(used(text) - known):
            errors.append(f"{path.relative_to(ROOT)}: there is no metric {name}")
    records = set(re.findall(r"record: (\S+)", rules))
    for path, text in texts.items():
        for name in set(re.findall(r"\bexpertd:\w+:\w+", text)) - records:
            errors.append(f"{path.relative_to(ROOT)}: there is no recording rule {name}")
    # Every alert has a test, and a section of the runbook.
    tests, runbook = texts[RULES.with_name("rules.test.yaml")], texts[ROOT / "docs/operations.md"]
    for alert in re.findall(r"alert: (\S+)", rules):
        if f"alertname: {alert}" not in tests:
            errors.append(f"rules.test.yaml has no test of {alert}")
        if f"### {alert}\n" not in runbook:
            errors.append(f"docs/operations.md has no section {alert}")
        if f'runbook_url: "{RUNBOOK}#{alert.lower()}"' not in rules:
            errors.append(f"rules.yaml: {alert} has no runbook_url of its section of the runbook")
    # Every exit code of `serve` has a line in the runbook's table, and the other way round; 0 and clap's 2 have no constant.
    codes = {"0", "2"} | set(re.findall(r"pub const \w+: u8 = (\d+);", EXIT.read_text()))
    table = re.search(r"## Exit codes of `serve`\n(.*?)\n## ", runbook, re.S)
    listed = set(re.findall(r"^\| (\d+) \|", table[1] if table else "", re.M))
    if codes != listed or len(codes) < 5:
        errors.append(f"exit codes: the source has {sorted(codes)}, docs/operations.md lists {sorted(listed)}")
    for error in errors:
        print(error)
    if not shutil.which("promtool"):
        sys.exit("promtool was not found (Debian: prometheus); the rules were not tested")
    tested = subprocess.run(["promtool", "test", "rules", str(RULES.with_name("rules.test.yaml"))])
    checked = subprocess.run(["promtool", "check", "rules", str(RULES)])
    sys.exit(1 if errors or tested.returncode or checked.returncode else 0)


if __name__ == "__main__":
    main()
