#!/usr/bin/env python3
"""Sends traces of calls over gRPC and through a session to a real OpenTelemetry collector, and counts what arrives there.

Usage: scripts/try_traces.py [--seconds N] [BIN]     BIN is a folder with expertd and expertd-loadtest (default target/release)

The collector is Rotel (pip install rotel). Fails if the collector received another number of spans than the service says
that it sent, if one was dropped, or if a span lacks what docs/operations.md promises.
"""

import argparse
import collections
import contextlib
import importlib.util
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

import addresses
import recorded_checkpoints
from try_telemetry import fetch, until

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = recorded_checkpoints.folder("golden/qwen3_next")
LISTEN, METRICS, OTLP_GRPC, OTLP_HTTP = addresses.free(4)
# Attributes that each span of the name must have.
PROMISED = {
    "expertd.v1.Moe/Forward": {"rpc.system", "rpc.method", "rpc.grpc.status_code", "expertd.layer", "expertd.tokens",
                               "expertd.dtype", "expertd.steps", "expertd.tokens_per_rank", "expertd.weight_fingerprint"},
    "expertd session call": {"expertd.session", "expertd.session_kind", "rpc.grpc.status_code", "expertd.layer",
                             "expertd.tokens", "expertd.steps", "expertd.tokens_per_rank"},
    "queue": set(),
    "step": {"expertd.step", "expertd.step_tokens", "expertd.phase.experts_seconds", "expertd.phase.dispatch_seconds"},
}


def collector() -> str:
    found = importlib.util.find_spec("rotel")
    binary = pathlib.Path(found.origin).parent / "rotel-agent" if found and found.origin else None
    if not binary or not binary.exists():
        sys.exit("the collector was not found: pip install rotel")
    return str(binary)


def sample(name: str) -> float:
    """The sum of a metric's samples."""
    text = fetch(f"http://{METRICS}/metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(name + r"[ {]", line))


def received(log: pathlib.Path) -> list[tuple[str, str, str, set[str]]]:
    """Name, id, id of the parent and attributes' names of each span in the collector's log."""
    spans = []
    for block in re.split(r"\n(?=Span #\d+)", log.read_text(errors="replace")):
        if not block.startswith("Span #"):
            continue
        field = lambda name: (re.search(rf"^\s*{name}\s*: ?(.*)$", block, re.M) or [None, ""])[1].strip()
        attributes = set(re.findall(r"-> ([\w.]+):", block))
        spans.append((field("Name"), field("ID"), field("Parent ID"), attributes))
    return spans


def check(spans: list[tuple[str, str, str, set[str]]], sent: int, dropped: int) -> list[str]:
    errors = []
    if len(spans) != sent or dropped:
        errors.append(f"the service says that it sent {sent} spans and dropped {dropped}; the collector has {len(spans)}")
    names = collections.Counter(name for name, *_ in spans)
    by_id = {span[1]: span for span in spans}
    for name, wanted in PROMISED.items():
        of_name = [span for span in spans if span[0] == name]
        if not of_name:
            errors.append(f"no span is named {name!r}")
        lacking = [sorted(wanted - span[3]) for span in of_name if wanted - span[3]]
        if lacking:
            errors.append(f"{len(lacking)} spans {name!r} lack attributes, the first {lacking[0]}")
        orphans = [span for span in of_name if name in ("queue", "step") and span[2] not in by_id]
        if orphans:
            errors.append(f"{len(orphans)} spans {name!r} have no parent in the collector")
    unknown = set(names) - set(PROMISED)
    if unknown:
        errors.append(f"unexpected spans: {sorted(unknown)}")
    print(f"the collector has {len(spans)} spans: {dict(names)}")
    return errors


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("binaries", nargs="?", type=pathlib.Path, default=ROOT / "target/release", metavar="BIN")
    options.add_argument("--seconds", type=float, default=5)
    given = options.parse_args()
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))

        def start(*command: object, environment: dict[str, str] | None = None, output=subprocess.DEVNULL) -> subprocess.Popen:
            process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=output,
                                       env=os.environ | (environment or {}))
            stack.callback(lambda: (process.kill(), process.wait()))
            return process

        log = folder / "collector.log"
        start(collector(), "start", "--otlp-grpc-endpoint", OTLP_GRPC, "--otlp-http-endpoint", OTLP_HTTP, "--exporter", "blackhole",
              "--debug-log", "traces", "--debug-log-verbosity", "detailed", "--pid-file", folder / "pid",
              output=stack.enter_context(log.open("wb")))
        service = start(given.binaries / "expertd", "--log", "error", "serve", "--model", MODEL, "--device", "cpu", "--ranks", "2",
                        "--listen", LISTEN, "--metrics-listen", METRICS, "--admin-listen", f"unix:{folder}/admin.sock",
                        "--session-listen", f"unix:{folder}/session.sock", "--otlp-endpoint", f"http://{OTLP_GRPC}",
                        environment={"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.05",
                                     # Batches leave more often than counts are compared below.
                                     "OTEL_BSP_SCHEDULE_DELAY": "500",
                                     # A collector that has no processor time for a while loses none.
                                     "OTEL_BSP_MAX_QUEUE_SIZE": "100000", "OTEL_EXPORTER_OTLP_TIMEOUT": "60000"})
        host, port = OTLP_GRPC.rsplit(":", 1)
        until("the collector listens", lambda: socket.create_connection((host, int(port)), timeout=2).close() is None)
        until("the service is ready", lambda: fetch(f"http://{METRICS}/readyz"))
        load = [given.binaries / "expertd-loadtest", "--quiet", "--no-echo", "--connections", "1", "--duration", given.seconds]
        loads = [start(*load, "--address", LISTEN, "--outstanding", "3", "--tokens", "uniform:1-48"),
                 start(*load, "--address", f"unix:{folder}/session.sock", "--session", "host", "--outstanding", "1", "--tokens", "4")]
        for process in loads:
            if process.wait(given.seconds + 300):
                sys.exit("a load failed")
        counts = []

        def quiet() -> bool:
            counts.append((sample("expertd_trace_spans_sent_total"), sample("expertd_trace_spans_dropped_total")))
            time.sleep(2)
            # Several times in a row: the machine may have paused between two of them.
            return len(counts) > 3 and counts[-1][0] > 0 and len(set(counts[-4:])) == 1

        until("all spans are sent", quiet)
        sent, dropped = (int(count) for count in counts[-1])
        requests = sample("expertd_requests_total")
        time.sleep(1)
        service.send_signal(signal.SIGTERM)
        if service.wait(180):
            sys.exit("the service did not drain")
        print(f"{requests:.0f} requests, of which 5 % are sampled; {sent} spans sent, {dropped} dropped")
        # The collector may write later than it answers. What is lacking after the time is told below.
        end = time.monotonic() + 60
        while len(received(log)) < sent and time.monotonic() < end:
            time.sleep(1)
        errors = check(received(log), sent, dropped)
    for error in errors:
        print(error)
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
