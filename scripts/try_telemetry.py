#!/usr/bin/env python3
"""Lets a real Prometheus scrape two services under load, and asks it for every panel of the dashboard and every recording rule.

Usage: scripts/try_telemetry.py [--seconds N] [--picture FILE.svg] [BIN]
       scripts/try_telemetry.py --record FILE.tar.xz [--seconds N] [--model DIR] [--device cuda] [--tokens LIST] [BIN]

BIN is a folder with expertd and expertd-loadtest (default target/release). One service runs here: a mixed group of two CPU ranks with
slots. The other
one is the recording of a service on two GPUs (tests/fixtures/telemetry): a listener says again, second by second, what that
service said while it was under the same load and the same fault. So panels of GPUs are filled where there is none.

Fails if a panel or a rule has no data of the recorded service, panels of mixed groups apart; if one has none of the service on CPUs,
panels of GPUs apart; or if these have data of it. --picture draws the dashboard from the recorded service's data. Needs prometheus (Debian's
package of that name). Takes about N + 15 seconds (default 30).

The second form makes such a recording, where a GPU is or elsewhere, and needs no Prometheus.
"""

import argparse
import contextlib
import html
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request

import addresses
import recorded_checkpoints
from recorded_service import Recorder, Recording

ROOT = pathlib.Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy/grafana/expertd.json"
RULES = ROOT / "deploy/prometheus/rules.yaml"
RECORDING = ROOT / "tests/fixtures/telemetry/two-gpus.tar.xz"
LISTEN, METRICS, PROMETHEUS, RECORDED = addresses.free(4)
TOKEN = "engine-token-0123456789abcdef"
# Metrics that only ranks on GPUs have.
OF_GPUS = "expertd_gpu_"
# Metrics that only mixed groups have.
OF_TIERS = re.compile("expertd_tier_|expertd_rank_copied_bytes_")
RATE_INTERVAL = "10s"


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def until(what: str, ready, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError, urllib.error.URLError):
            if ready():
                return
        if time.monotonic() > end:
            sys.exit(f"did not happen within {seconds:.0f} s: {what}")
        time.sleep(0.2)


def ask(path: str, **parameters: object) -> list[dict]:
    text = fetch(f"http://{PROMETHEUS}/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
    return json.loads(text)["data"]["result"]


def filled(expression: str, instance: str) -> str:
    """An expression with Grafana's variables set: one instance, all models and ranks."""
    expression = expression.replace("$__rate_interval", RATE_INTERVAL).replace("$instance", instance)
    for name in ("model", "rank"):
        expression = expression.replace(f"${name}", ".*")
    if "$" in expression:
        sys.exit(f"an unknown variable is left in {expression}")
    return expression


def panels() -> list[dict]:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel.get("targets")]


class Processes:
    """Processes that end with the stack."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stack = stack

    def start(self, *command: object, environment: dict[str, str] | None = None) -> subprocess.Popen:
        process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                   env=os.environ | (environment or {}))
        self.stack.callback(lambda: (process.kill(), process.wait()))
        return process


def serve(given: argparse.Namespace, folder: pathlib.Path, processes: Processes) -> subprocess.Popen:
    (folder / "tokens").write_text(f"engine {TOKEN}\n")
    (folder / "token").write_text(TOKEN + "\n")
    ranks = ["--device", given.device, "--ranks", "2"]
    if not given.record:
        ranks = ["--device", "cpu,cpu", "--ranks", "1,1", "--slot-memory", "200K"]
    service = processes.start(
        given.binaries / "expertd", "--log", "error", "serve", "--model", given.model, *ranks,
        "--listen", LISTEN, "--metrics-listen", METRICS, "--token-file", folder / "tokens",
        "--admin-listen", f"unix:{folder}/admin.sock", "--session-listen", f"unix:{folder}/session.sock",
        # Nothing listens there, so that spans are dropped.
        "--otlp-endpoint", "http://127.0.0.1:9",
        environment={"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.01"})
    until("the service is ready", lambda: fetch(f"http://{METRICS}/readyz"))
    return service


def watch(folder: pathlib.Path, processes: Processes) -> None:
    """Starts Prometheus."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "2s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "expertd", "static_configs": [{"targets": [METRICS, RECORDED]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    processes.start("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address={PROMETHEUS}", "--log.level=error")
    until("Prometheus is ready", lambda: fetch(f"http://{PROMETHEUS}/-/ready"))


def load(given: argparse.Namespace, service: subprocess.Popen, folder: pathlib.Path, processes: Processes) -> None:
    """A client with a token, one with a session, and a fault in the middle: rank 1 is killed."""
    begun = time.monotonic()
    # They are ended with the other processes, later than asked for.
    command = [given.binaries / "expertd-loadtest", "--quiet", "--no-echo", "--connections", "1", "--duration", given.seconds + 600]
    loads = [processes.start(*command, "--address", LISTEN, "--token-file", folder / "token", "--outstanding", "3",
                             "--tokens", given.tokens),
             processes.start(*command, "--address", f"unix:{folder}/session.sock", "--session", "host", "--outstanding", "1",
                             "--tokens", "4")]
    time.sleep(given.seconds / 2)
    tasks = pathlib.Path(f"/proc/{service.pid}/task").glob("*/children")
    children = " ".join(task.read_text() for task in tasks).split()
    ranks = [pid for pid in children if b"\0rank\0" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
    if not ranks:
        sys.exit("the service has no rank processes")
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", ranks[-1]], check=True)
    time.sleep(max(0, begun + given.seconds - 2 - time.monotonic()))
    if any(process.poll() is not None for process in loads):
        sys.exit("a load ended early")


def returns(expression: str, instance: str, times: list[float]) -> bool:
    """Whether an expression has data at one of these times."""
    samples = (sample for now in times for sample in ask("query", query=filled(expression, instance), time=now))
    return any(math.isfinite(float(sample["value"][1])) for sample in samples)


def check(ended: float) -> list[str]:
    # A busy machine may leave out scrapes at any one of these times.
    wrong, now = [], [ended - seconds for seconds in (0, 3, 6, 9)]
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            if returns(expression, RECORDED, now) == bool(OF_TIERS.search(expression)):
                has = "data of mixed groups" if OF_TIERS.search(expression) else "no data"
                wrong.append(f"panel {panel['title']!r} has {has} of the recorded service: {expression}")
            if returns(expression, METRICS, now) == (OF_GPUS in expression):
                has = "data of GPUs" if OF_GPUS in expression else "no data"
                wrong.append(f"panel {panel['title']!r} has {has} of the service on CPUs: {expression}")
    for record in re.findall(r"record: (\S+)", RULES.read_text()):
        for instance in (RECORDED, METRICS):
            if not any(ask("query", query=f'{record}{{instance="{instance}"}}', time=at) for at in now):
                wrong.append(f"recording rule {record} has no data of {instance}")
    return wrong


COLORS = ["#2563c9", "#c2570c", "#0b7f86", "#6b3fb0", "#1a7f4b", "#b02470", "#7a6a00", "#5c6673"]
UNITS = {"s": (" s", 1), "bytes": (" MiB", 1 / 2**20), "reqps": (" /s", 1), "percentunit": (" %", 100)}


def number(value: float, unit: str) -> str:
    suffix, scale = UNITS.get(unit, ("", 1))
    if unit == "s":
        suffix, scale = (" s", 1) if value >= 1 else (" ms", 1e3) if value >= 1e-3 else (" µs", 1e6)
    if unit == "bytes" and value >= 2**30:
        suffix, scale = " GiB", 1 / 2**30
    value *= scale
    return f"{value:.3g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"


def draw_panel(panel: dict, x: int, y: int, width: int, height: int, begun: float, ended: float) -> list[str]:
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    series = []
    for target in panel["targets"]:
        found = ask("query_range", query=filled(target["expr"], RECORDED), start=begun, end=ended, step=1)
        for one in found:
            name = re.sub(r"{{(\w+)}}", lambda match: one["metric"].get(match[1], ""), target["legendFormat"]).replace(RECORDED, "").strip()
            points = [(float(at), float(value)) for at, value in one["values"] if math.isfinite(float(value))]
            if points:
                series.append((name, points))
    series.sort(key=lambda one: -max(value for _, value in one[1]))
    series = [one for one in series if max(value for _, value in one[1]) > 0][:6] or series[:3]
    most = max((value for _, points in series for _, value in points), default=0) or 1
    left, top, right, bottom = x + 62, y + 30, x + width - 12, y + height - 30
    parts = [f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="#fff" stroke="#d9dde3"/>',
             f'<text x="{x + 10}" y="{y + 19}" font-weight="600">{html.escape(panel["title"])}</text>']
    for part in (0, 0.5, 1):
        at = bottom - part * (bottom - top)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#e5e8ec"/>'
                     f'<text x="{left - 5}" y="{at + 4:.1f}" text-anchor="end" class="q">{number(most * part, unit)}</text>')
    place, names = left, []
    for index, (name, points) in enumerate(series):
        color = COLORS[index % len(COLORS)]
        line = " ".join(f"{left + (at - begun) / (ended - begun) * (right - left):.1f},{bottom - value / most * (bottom - top):.1f}"
                        for at, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        name = (name or "all")[:34]
        if place + 16 + 6.2 * len(name) < right + 12:
            names.append(f'<rect x="{place}" y="{bottom + 13}" width="9" height="9" fill="{color}"/>'
                         f'<text x="{place + 13}" y="{bottom + 22}" class="q">{html.escape(name)}</text>')
            place += 24 + 6.2 * len(name)
    return parts + names


def draw(file: pathlib.Path, begun: float, ended: float) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    wide, high = 44, 22
    parts, bottom = [], 0
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        x, y, width, height = (place["x"] * wide, place["y"] * high, place["w"] * wide - 8, place["h"] * high - 8)
        bottom = max(bottom, y + height)
        if panel["type"] == "row":
            parts.append(f'<text x="{x + 4}" y="{y + 15}" font-size="14" font-weight="700">{html.escape(panel["title"])}</text>')
        else:
            parts += draw_panel(panel, x, y, width, height, begun, ended)
    style = "text{font:12px system-ui,sans-serif;fill:#1b2129}.q{font-size:11px;fill:#5c6673}"
    file.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-8 -8 {24 * wide + 8} {bottom + 16}" role="img" '
                    f'aria-label="The Grafana dashboard, drawn from a run"><style>{style}</style>'
                    f'<rect x="-8" y="-8" width="{24 * wide + 8}" height="{bottom + 16}" fill="#f5f6f8"/>{"".join(parts)}</svg>\n')


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("binaries", nargs="?", type=pathlib.Path, default=ROOT / "target/release", metavar="BIN")
    options.add_argument("--seconds", type=float, default=30)
    options.add_argument("--picture", type=pathlib.Path)
    options.add_argument("--record", type=pathlib.Path)
    options.add_argument("--model", type=pathlib.Path, help="default: a recorded checkpoint")
    options.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options.add_argument("--tokens", default="uniform:1-48")
    given = options.parse_args()
    given.model = given.model or recorded_checkpoints.folder("golden/qwen3_next")
    if not given.record and not shutil.which("prometheus"):
        sys.exit("prometheus was not found (Debian: prometheus)")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        processes = Processes(stack)
        service = serve(given, folder, processes)
        if given.record:
            recorder = Recorder(METRICS)
            load(given, service, folder, processes)
            print(f"{recorder.save(given.record)} scrapes are in {given.record}")
            return
        recording = Recording(RECORDING, RECORDED)
        watch(folder, processes)
        begun = time.time()
        recording.play()
        load(given, service, folder, processes)
        ended = time.time()
        wrong = check(ended)
        if given.picture:
            draw(given.picture, begun, ended)
    for text in wrong:
        print(text)
    expressions = [target["expr"] for panel in panels() for target in panel["targets"]]
    of_gpus = sum(OF_GPUS in expression for expression in expressions)
    print(f"{len(expressions)} queries of {len(panels())} panels, {of_gpus} of them about GPUs: {len(wrong)} of the answers are wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
