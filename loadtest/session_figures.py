#!/usr/bin/env python3
"""Measures what a call costs through gRPC and sessions, and prints tables as in docs/measurements.

    loadtest/session_figures.py [--part walk calls many] [--ranks N] [--client-gpu N] [--nixl FOLDER] [--rows N...] [--json FILE]

Synthesises a checkpoint of Qwen3-30B-A3B's shape, serves it, and runs `expertd-loadtest`, whose answers are checked:

* walk:  one batch of sequences walks through all layers in order, as an engine decodes; model steps per second. With --peers, PyTorch and
         Triton walk through as many layers in one process afterwards, in a CUDA graph, when the service has ended.
* calls: one call at a time; latency, the part from gate to combine, what is beyond it, and the processor time of each process in a call. With
         --nixl network sessions over TCP on loopback as well, and the bare transport (client/network/examples/bare.rs).
* many:  2048 rows per rank through sessions, one call at a time and three in flight.

`--device cpu` measures CPU ranks with the same parts; use it with smaller sizes. A way that fails is reported and left out.
"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
PARTS = ["walk", "calls", "many"]
WAYS = ["grpc", "host", "cuda", "network"]
MANY = 2048


def quiet(command, patience, log=None, watch=None, **options):
    """Runs a command; returns its output, or None if it fails, which is reported. `log` is a list for what it writes to stderr, `watch` is
    called with the running program."""
    command = [str(word) for word in command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as program:
        if watch:
            watch(program)
        try:
            out, err = program.communicate(timeout=patience)
        except subprocess.TimeoutExpired:
            program.kill()
            print(f"{' '.join(command)}: no end within {patience} s", file=sys.stderr)
            return None
    if program.returncode:
        print(f"{' '.join(command)} failed with {program.returncode}:\n{(out + err)[-2000:]}", file=sys.stderr)
        return None
    if log is not None:
        log.append(err)
    return out


def environment(args):
    """Variables of all programs; UCX says which transports it uses."""
    found = dict(os.environ)
    if args.nixl:
        found.update(EXPERTD_NIXL=str(args.nixl), UCX_LOG_LEVEL="info", UCX_LOG_FILE="stderr")
    return found


def on(cores):
    """What a new process does to run on these cores, such as 0-9."""
    first, _, last = (cores or "").partition("-")
    return (lambda: os.sched_setaffinity(0, range(int(first), int(last or first) + 1))) if cores else None


def check_transports(log):
    """Prints the transports of each kind of operation in UCX's log, and fails unless all of them are TCP on loopback."""
    found = sorted(set(re.findall(r"\b\w+\(\w+/\w+\)", log)))
    print(f"transports: {' '.join(found)}", file=sys.stderr)
    used = {name for one in found for name in re.findall(r"(\w+/\w+)", one)}
    if used != {"tcp/lo"}:
        sys.exit(f"expected tcp/lo and nothing else, found {used or 'no transport in the log'}:\n{log[-3000:]}")


class Service:
    """A running `expertd serve` and the addresses of its ways in."""

    def __init__(self, args, model, folder):
        self.args = args
        self.log = folder / "serve.log"
        self.socket = f"unix:{folder}/sessions.sock"
        command = [args.programs / "expertd", "serve", "--model", model, "--device", args.device, "--ranks", args.ranks]
        command += ["--session-listen", self.socket, "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
        command += ["--admin-listen", f"unix:{folder}/admin.sock"]
        if args.max_tokens_per_step:
            command += ["--max-tokens-per-step", args.max_tokens_per_step]
        if args.service_cores:
            command += ["--cores", args.service_cores]
        if args.nixl:
            command += ["--network-listen", "127.0.0.1"]
        self.environment = environment(args)
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, env=self.environment)
        begin = time.monotonic()
        while (ready := re.search(r"^ready: listening on ([^\s,]+)", self.text(), re.M)) is None:
            if self.process.poll() is not None or time.monotonic() - begin > args.patience:
                self.end()
                sys.exit(f"the service does not become ready:\n{self.text()[-3000:]}")
            time.sleep(0.1)
        self.address = ready[1]
        print(f"ready after {time.monotonic() - begin:.1f} s", file=sys.stderr)

    def text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def load(self, way, rows, *options):
        """The report of `expertd-loadtest`, or None if it fails or an answer is wrong."""
        args = self.args
        reach = ["--address", self.address, "--no-echo", "--watch-memory", self.process.pid]
        if way != "grpc":
            reach += ["--session", way]
        if way in ("host", "cuda"):
            reach += ["--address", self.socket]
        if way == "cuda":
            reach += ["--session-device", args.client_gpu]
        command = [args.programs / "expertd-loadtest", *reach, "--tokens", rows, "--quiet", "--json", "-"]
        command += ["--warm-up", args.warm_up, "--duration", args.seconds, *options]
        log, busy = [], []
        watch = lambda program: busy.append(Busy(program, self.process.pid))
        patience = 60 + args.warm_up + args.seconds
        out = quiet(command, patience, log, watch, env=self.environment, preexec_fn=on(args.client_cores))
        if way == "network" and out:
            check_transports(self.text() + log[0])
        return json.loads(out) | {"busy_cores": busy[0].cores(0.9 * args.seconds)} if out else None

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Busy(threading.Thread):
    """Samples the processor time of a program and of a service's processes, by their role, while the program runs."""

    PERIOD = 0.05

    def __init__(self, program, service):
        super().__init__(daemon=True)
        self.program, self.service = program, service
        self.samples, self.roles = [], {}
        self.start()

    def run(self):
        while self.program.poll() is None:
            children = pathlib.Path(f"/proc/{self.service}/task").glob("*/children")
            pids = [self.service, *(int(pid) for one in children for pid in one.read_text().split())]
            times = {("client", self.program.pid): seconds_of(self.program.pid)}
            times |= {(self.roles.setdefault(pid, role_of(pid)), pid): seconds_of(pid) for pid in pids}
            self.samples.append((time.monotonic(), times))
            time.sleep(self.PERIOD)

    def cores(self, seconds):
        """How many cores each role keeps busy in the last `seconds`, in which the program measures: before that it opens its sessions."""
        end = max((at for at, _ in self.samples), default=0)
        of_process = {}
        for at, times in self.samples:
            for process, busy in times.items():
                if busy is not None and at >= end - seconds:
                    of_process.setdefault(process, []).append((at, busy))
        found = {}
        for (role, _), [(begin, first), *_, (end, last)] in ((one, all) for one, all in of_process.items() if len(all) > 1):
            found[role] = found.get(role, 0) + (last - first) / (end - begin)
        return found


def role_of(pid):
    try:
        words = pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        words = []
    role = next((word for word in words[1:] if not word.startswith("-")), "other")
    return {"serve": "router", "network-agent": "agent"}.get(role, role)


def seconds_of(pid):
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def micros(seconds):
    return f"{seconds * 1e6:.0f}" if seconds is not None else "-"


def table(title, head, rows):
    print(f"\n{title}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for cells in rows:
        print("| " + " | ".join(str(cell) for cell in cells) + " |")
    sys.stdout.flush()


def walk(args, service, found):
    rows_of_table = []
    for rows in args.rows:
        for way in args.ways:
            report = service.load(way, rows, "--mode", "decode")
            if report is None:
                continue
            decode = report["decode"]
            layer = decode["model_step"]["p50_seconds"] / args.layers
            found.append(dict(part="walk", way=way, rows=rows, report=report))
            rows_of_table.append([rows, way, f"{decode['model_steps_per_second']:.1f}", micros(layer), micros(report["step"]["p50_seconds"])])
    head = ["rows", "way", "model steps/s", "µs a layer (p50 of model steps)", "of it the step (p50)"]
    table(f"A walk through {args.layers} layers", head, rows_of_table)


def inside(report):
    """Seconds from gate to combine: the sum of the medians of phases without copies."""
    return sum(phase["p50_seconds"] for name, phase in report["phases"].items() if not name.startswith("copy"))


def calls(args, service, found):
    rows_of_table = []
    for rows in args.rows:
        for way in args.ways:
            report = service.load(way, rows, "--timings")
            if report is None:
                continue
            latency, gate_to_combine = report["latency"]["p50_seconds"], inside(report)
            found.append(dict(part="calls", way=way, rows=rows, report=report))
            beyond = [latency - gate_to_combine, latency - report["step"]["p50_seconds"]]
            busy = {role: cores / report["requests_per_second"] for role, cores in report["busy_cores"].items()}
            cells = [latency, report["latency"]["p99_seconds"], gate_to_combine, *beyond]
            processes = ", ".join(f"{role} {micros(seconds)}" for role, seconds in sorted(busy.items()))
            rows_of_table.append([rows, way, *map(micros, cells), processes, f"{report['tokens_per_second']:.0f}"])
    if args.nixl:
        rows_of_table += bare(args, found)
        rows_of_table.sort(key=lambda row: row[0])
    head = ["rows", "way", "latency p50", "p99", "gate to combine", "latency beyond it", "latency beyond the step", "processor time", "rows/s"]
    table("One call at a time, µs", head, rows_of_table)


def bare(args, found):
    """Round trips of two processes that write as many bytes to each other, which is all of a call but the call."""
    rows_of_table = []
    log = []
    out = quiet([args.programs / "examples/bare", args.seconds], 60 + 5 * args.seconds, log, env=environment(args), preexec_fn=on(args.client_cores))
    if out is None:
        return []
    check_transports(log[0])
    for one in map(json.loads, out.splitlines()):
        found.append(dict(part="bare", **one))
        times = [one["p50_seconds"], one["p99_seconds"]]
        rows_of_table.append([one["rows"], "bare", *map(micros, times), "-", "-", micros(times[0]), "-", "-"])
    return [row for row in rows_of_table if row[0] in args.rows]


def many(args, service, found):
    rows_of_table = []
    rows = args.many_rows * args.ranks
    for way in [way for way in args.ways if way != "grpc"]:
        for outstanding in [1, 3]:
            report = service.load(way, rows, "--outstanding", outstanding)
            if report is None:
                continue
            found.append(dict(part="many", way=way, rows=rows, outstanding=outstanding, report=report))
            speed = f"{report['tokens_per_second'] / 1e6:.2f}"
            rows_of_table.append([way, outstanding, micros(report["latency"]["p50_seconds"]), micros(report["step"]["p50_seconds"]), speed])
    table(f"{rows} rows in a call", ["way", "in flight", "latency p50, µs", "step p50, µs", "million rows/s"], rows_of_table)


def peers(args, folder, found):
    rows_of_table = []
    for name in args.peers:
        report = folder / f"{name}.json"
        command = [args.python, HERE / "peers/gpu" / f"{name}_layer.py", "--layers", args.layers, "--steps", args.layers]
        if quiet([*command, "--tokens", *args.rows, "--json", report], args.patience) is None or not report.exists():
            continue
        for size in json.loads(report.read_text())["sizes"]:
            found.append(dict(part="walk", peer=name, **size))
            layer = size["median_us"]
            cells = ["wrong", "wrong"] if size.get("wrong") else [f"{1e6 / (layer * args.layers):.1f}", f"{layer:.0f}"]
            rows_of_table.append([size["tokens_per_rank"], name, *cells])
    table("The same layers in one process, in a CUDA graph", ["rows", "peer", "model steps/s", "µs a layer"], rows_of_table)


def synthesise(args, folder):
    model = pathlib.Path(args.model) if args.model else folder / "model"
    if not (model / "config.json").exists():
        sizes = dict(hidden=args.hidden, experts=args.experts, width=args.width, layers=args.layers, dtype=args.dtype)
        sizes["top-k"] = args.top_k
        words = [word for name, value in sizes.items() for word in (f"--{name}", value)]
        if quiet([args.programs / "expertd", "synth", "--family", "qwen3_moe", "--out", model, *words], args.patience) is None:
            sys.exit("no checkpoint")
    return model


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=PARTS)
    parser.add_argument("--ways", choices=WAYS, nargs="+", help="[default: all that --device and --nixl allow]")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="device of the ranks")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--service-cores", help="cores of the ranks, such as 0-9 [default: all]")
    parser.add_argument("--client-cores", help="cores of the clients, and of the bare transport [default: all]")
    parser.add_argument("--client-gpu", type=int, default=0, help="the GPU of CUDA sessions' clients [default: 0, beside rank 0]")
    parser.add_argument("--nixl", type=pathlib.Path, help="folder of NIXL, for network sessions")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--many-rows", type=int, default=MANY, help="rows per rank of the part `many`")
    parser.add_argument("--max-tokens-per-step", type=int, help="[default: rows of `many` times ranks if that part runs, else the service's]")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each measurement")
    parser.add_argument("--warm-up", type=float, default=0.5)
    parser.add_argument("--peers", choices=["torch", "triton"], nargs="*", default=[], help="peers that walk through the layers")
    parser.add_argument("--model", help="a checkpoint to measure, or where to write it [default: a temporary folder]")
    for name, size in dict(hidden=2048, experts=128, width=768, layers=48).items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", help="format of the weights")
    parser.add_argument("--programs", type=pathlib.Path, default=HERE.parent / "target/release", help="folder of expertd and expertd-loadtest")
    parser.add_argument("--python", default=sys.executable, help="an interpreter with torch and triton, for --peers")
    parser.add_argument("--patience", type=float, default=300, help="time limit of the synthesis, of loading and of each peer in seconds")
    parser.add_argument("--folder", default=os.environ.get("TMPDIR"), help="where temporary files go; the checkpoint takes 54 GiB")
    parser.add_argument("--json", type=pathlib.Path, help="write the reports of all measurements to this file")
    args = parser.parse_args()
    args.programs = args.programs.resolve()
    missing = {"cuda": args.device != "cuda", "network": args.nixl is None}
    args.ways = args.ways or [way for way in WAYS if not missing.get(way)]
    if "many" in args.part and not args.max_tokens_per_step:
        args.max_tokens_per_step = args.many_rows * args.ranks
    return args


def main():
    args = arguments()
    found = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        folder = pathlib.Path(folder)
        model = synthesise(args, folder)
        service = Service(args, model, folder)
        try:
            for part in args.part:
                {"walk": walk, "calls": calls, "many": many}[part](args, service, found)
        finally:
            service.end()
        if args.peers:
            peers(args, folder, found)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    expected = len(args.ways) * len(args.rows) * sum(part in args.part for part in ("walk", "calls"))
    done = sum("way" in one and one["part"] != "many" for one in found)
    sys.exit(0 if done == expected else "some measurements failed, see above")


if __name__ == "__main__":
    main()
