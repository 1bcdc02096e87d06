"""Arguments, services and engines of a comparison, and its results: JSON lines and tables."""

import argparse
import collections
import contextlib
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import checkpoint
import expertd
import tokens
from processes import FAULTS, Children, Service, mps, note

HERE = pathlib.Path(__file__).resolve().parent
MODES = ["stock", "apart", "shared"]
# Steps that a run has beyond those that are timed.
SPARE = 6
# Left free on a GPU beside weights and cache: graphs, activations, the service's buffers.
RESERVE = 8 << 30
# Tokens of a block of the cache.
BLOCK = 16


def option(text):
    """NAME=VALUE, whose value is JSON or text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def parser(about):
    """The arguments that both engines have."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--checkpoint", type=pathlib.Path, required=True, help="folder; a checkpoint is made if it has none, and kept")
    made.add_argument("--shape", choices=checkpoint.SHAPES, default="qwen3-30b-a3b")
    made.add_argument("--layers", type=int, default=24)
    modes = "stock: no service; apart: it has a GPU of its own; shared: it has the engine's GPU. One after the other"
    made.add_argument("--mode", choices=MODES, nargs="+", default=["stock", "shared"], help=modes)
    made.add_argument("--gate", choices=["engine", "service"], nargs="+", default=["engine"], help="whose gate chooses experts")
    made.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64, 256], help="requests that decode together")
    made.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    made.add_argument("--tokens", type=int, default=64, help="decode steps of a repetition, and greedy tokens that are compared")
    made.add_argument("--repeat", type=int, default=5, help="repetitions of each cell; each has new prompts")
    made.add_argument("--rounds", type=int, default=1, help="turns of all modes, each with a new service and a new engine")
    made.add_argument("--prefill", type=int, default=64, help="prompts of the prefill; 0: none")
    made.add_argument("--compare", type=int, default=8, help="sequences whose greedy tokens are compared with stock's; 0: none")
    made.add_argument("--tie", type=float, default=tokens.TIE, help="difference of two log-probabilities that counts as a tie [default: 2^-5]")
    struck = "at last, while --compare sequences are generated, a rank is killed, is stopped for ever, or the weights are loaded again"
    made.add_argument("--fault", choices=FAULTS, nargs="*", default=[], help=struck)
    made.add_argument("--dtype", default="bfloat16", help="of the engine's tensors")
    made.add_argument("--session", choices=["cuda", "host"], help="[default: cuda; host with --device cpu]")
    made.add_argument("--engine-gpu", type=int, default=0)
    made.add_argument("--service-gpu", type=int, default=1, help="the service's in mode apart")
    made.add_argument("--cache-gib", type=float, help="the engine's cache, in all modes [default: what cells need and the GPU has room for]")
    made.add_argument("--most-rows", type=int, default=8192, help="rows that the engine computes in a step at most")
    made.add_argument("--serve", default="", metavar="FLAGS", help="more flags of `expertd serve`, as one word")
    of_engine = dict(type=option, action="append", default=[], dest="options", metavar="NAME=VALUE")
    made.add_argument("--set", **of_engine, help="an option of the engine, as JSON or text")
    made.add_argument("--limit", type=float, default=300.0, help="seconds of a cell; one that takes longer is cut off, and a new engine takes the next ones")
    made.add_argument("--start-limit", type=float, default=900.0, help="seconds for the checkpoint, for a service, for an engine to start")
    made.add_argument("--seed", type=int, default=5, help="of the prompts")
    made.add_argument("--logs", type=pathlib.Path, required=True, help="folder for logs, tokens and cells.jsonl")
    return made


def longest(args):
    """Tokens of the longest sequence."""
    most = max([*args.batch, 1])
    return args.prompt + args.tokens + math.ceil(most * args.prompt / args.most_rows) + 2 * SPARE


def planned(args, remote):
    """The cells of an engine, in their order; one that a fault may spoil comes last."""
    found = [{"kind": "decode", "batch": batch} for batch in args.batch]
    if args.prefill:
        found.append({"kind": "prefill", "batch": args.prefill})
    if args.compare:
        found.append({"kind": "tokens", "batch": args.compare})
    if remote:
        found += [{"kind": fault, "batch": args.compare or 8} for fault in args.fault]
    return [{"id": f"{cell['kind']}-{cell['batch']}", **cell} for cell in found]


def token_bytes(args, config):
    """Memory of a token in the engine's cache."""
    element = 4 if args.dtype == "float32" else 2
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * element


def cache_bytes_of(cell, args, config):
    """Memory that a cell's sequences need in the engine's cache."""
    length = 1 if cell["kind"] == "prefill" else longest(args) - args.prompt
    return cell["batch"] * (math.ceil((args.prompt + length) / BLOCK) + 1) * BLOCK * token_bytes(args, config)


def gpu_memory(number):
    """Bytes of a GPU's memory, or None if nvidia-smi does not say."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
    name = visible[number] if number < len(visible) else str(number)
    command = ["nvidia-smi", "-i", name, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout) << 20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def cache_bytes(args, config, cells):
    """The size of the engine's cache, the same in all modes."""
    if args.cache_gib:
        return int(args.cache_gib * 2**30)
    needed = max(cache_bytes_of(cell, args, config) for cell in cells)
    memory = gpu_memory(args.engine_gpu) if args.device == "cuda" else None
    # A GPU holds all weights once, in stock and if the service shares it.
    room = memory - sum(checkpoint.sizes(config)) - RESERVE if memory else needed
    return max(min(needed, room), 1 << 30)


class Comparison:
    """A run of all modes."""

    def __init__(self, args, engine, script, flags, variables, children):
        self.args, self.engine, self.children = args, engine, children
        self.script, self.flags, self.variables = script, flags, variables
        self.config = checkpoint.config_of(args.shape, args.layers, 8192 if longest(args) <= 8192 else longest(args))
        self.lines = []
        self.cache = cache_bytes(args, self.config, planned(args, True))
        # Tokens can be compared if these are the same.
        self.about = {name: getattr(args, name) for name in ("shape", "layers", "prompt", "tokens", "compare", "dtype", "seed")}
        self.about["engine"] = engine

    def identify(self):
        """Notes the fingerprint of the checkpoint, without which tokens cannot be compared."""
        text = self.children.run("inspect", [expertd.command(), "inspect", "--json", self.args.checkpoint], self.args.start_limit)
        # The text is the end of a long description.
        found = re.search(r'"weight_fingerprint": "([^"]+)"', text)
        if found is None:
            raise SystemExit(f"`expertd inspect` names no fingerprint: {text}")
        self.about["weights"] = found[1]

    def say(self, line):
        """Prints a line of results and keeps it."""
        self.lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        with open(self.args.logs / "cells.jsonl", "a") as out:
            out.write(text + "\n")

    def make_checkpoint(self):
        args = self.args
        if checkpoint.whole(args.checkpoint, self.config):
            return
        needed, parent = sum(checkpoint.sizes(self.config)), args.checkpoint.absolute()
        while not parent.exists():
            parent = parent.parent
        if (free := shutil.disk_usage(parent).free) < needed:
            found = f"the checkpoint needs {needed / 2**30:.0f} GiB, and {parent} has {free / 2**30:.0f} GiB free"
            raise SystemExit(f"{found}; name another --checkpoint")
        note(f"writing a checkpoint of {needed / 2**30:.1f} GiB to {args.checkpoint}")
        positions = self.config["max_position_embeddings"]
        command = [sys.executable, HERE / "checkpoint.py", args.checkpoint, "--shape", args.shape, "--layers", args.layers, "--positions", positions]
        gpu = {"CUDA_VISIBLE_DEVICES": self.visible()} if args.device == "cuda" else {}
        self.children.run("checkpoint", [*command, "--device", args.device], args.start_limit, **gpu)

    def visible(self):
        """The engine's GPU as CUDA_VISIBLE_DEVICES names it."""
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        if visible and self.args.engine_gpu >= len(visible):
            raise SystemExit(f"--engine-gpu is {self.args.engine_gpu}, and CUDA_VISIBLE_DEVICES names {len(visible)} GPUs")
        return visible[self.args.engine_gpu] if visible else str(self.args.engine_gpu)

    def mode(self, mode, round_number):
        """All cells of a mode, with one start of its service."""
        args, service = self.args, None
        gates = ["engine"] if mode == "stock" else args.gate
        with tempfile.TemporaryDirectory(prefix="expertd-", ignore_cleanup_errors=True) as sockets:
            if mode != "stock":
                gpu = None if args.device == "cpu" else args.service_gpu if mode == "apart" else args.engine_gpu
                begin = time.monotonic()
                name = f"serve-{mode}-{round_number}"
                try:
                    service = Service(self.children, name, args.checkpoint, sockets, gpu, shlex.split(args.serve), args.start_limit)
                except RuntimeError as error:
                    for gate in gates:
                        for cell in planned(args, True):
                            self.result(mode, gate, round_number, cell, {"error": str(error)})
                    return
                note(f"{mode}: the service is ready after {time.monotonic() - begin:.0f} s")
            for gate in gates:
                self.variant(mode, gate, round_number, service)
            if service:
                service.end()

    def variant(self, mode, gate, round_number, service):
        """All cells of a mode and a gate. A cell that fails or is cut off ends the engine, and the next ones get a new one."""
        cells, todo = planned(self.args, service is not None), []
        for cell in cells:
            if (needed := cache_bytes_of(cell, self.args, self.config)) > self.cache:
                text = f"needs {needed / 2**30:.1f} GiB of cache, and the engine has {self.cache / 2**30:.1f} GiB (--cache-gib)"
                self.result(mode, gate, round_number, cell, {"skipped": text})
            else:
                todo.append(cell)
        attempt = 0
        while todo:
            name = f"{mode}-{gate}-{round_number}-{attempt}"
            child, out = self.start(name, mode, gate, todo, service)
            todo, is_done = self.follow(child, out, mode, gate, round_number, todo)
            if is_done:
                # The end of a process with work on a GPU can disturb others under MPS.
                child.wait(20)
            self.children.end(child)
            attempt += 1

    def start(self, name, mode, gate, todo, service):
        """Starts an engine for these cells. Returns the process, and the file to which it writes."""
        args = self.args
        out = args.logs / f"{name}.jsonl"
        out.write_text("")
        about = {**self.about, "mode": mode, "gate": gate}
        cells = [{"file": str(args.logs / f"tokens-{mode}-{gate}.json"), **cell, "about": about} for cell in todo]
        names = ("tokens", "repeat", "prompt", "dtype", "device", "seed")
        job = {one: getattr(args, one) for one in names} | {
            "out": str(out),
            "mode": mode,
            "cells": cells,
            "checkpoint": str(args.checkpoint.absolute()),
            "options": dict(args.options),
            "vocabulary": self.config["vocab_size"],
            "longest": longest(args),
            "most_sequences": max([256, args.prefill, args.compare, *args.batch]),
            "most_rows": args.most_rows,
            "cache_bytes": self.cache,
            "cache_tokens": self.cache // token_bytes(args, self.config),
            "service_pid": service.pid if service else None,
            "admin_address": service.admin_address if service else None,
            "metrics_url": service.metrics_url if service else None,
        }
        (args.logs / f"{name}.json").write_text(json.dumps(job))
        variables = self.variables(job)
        if args.device == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = self.visible()
        if service:
            variables |= {"EXPERTD_ADDRESS": service.session_address, "EXPERTD_SESSION": args.session, "EXPERTD_GATE": gate}
        return self.children.start(name, [sys.executable, self.script, "--job", args.logs / f"{name}.json", *self.flags], **variables), out

    def follow(self, child, out, mode, gate, round_number, todo):
        """Reports the cells of an engine until it ends or takes too long. Returns those that are left for another one, and whether all were done."""
        left, read, running, is_ready = list(todo), 0, None, False
        until = time.monotonic() + self.args.start_limit
        while left:
            has_ended, now = child.has_ended(), time.monotonic()
            whole = out.read_text()
            end = whole.rfind("\n") + 1
            found = [json.loads(text) for text in whole[read:end].splitlines()]
            read = end
            for line in found:
                if line.get("ready"):
                    is_ready = True
                    self.say({"engine": self.engine, "mode": mode, "gate": gate, "round": round_number, **line})
                    until = now + self.args.limit
                elif "begins" in line:
                    running, until = line["begins"], now + self.args.limit
                elif line.get("ends"):
                    cell = left.pop(0)
                    self.result(mode, gate, round_number, cell, line)
                    running = None
                    if "error" in line:
                        return left, False
            if found:
                continue
            late = now > until
            if has_ended or late:
                limit = self.args.limit if is_ready else self.args.start_limit
                why = f"no end within {limit:.0f} s" if late else f"the engine ended with status {child.status()}"
                errors = [json.loads(text).get("error") for text in whole[:end].splitlines()]
                said = next((error for error in errors if error), f"{why}; the end of {child.log}:\n{child.text(1500)}")
                if not is_ready:
                    for cell in left:
                        self.result(mode, gate, round_number, cell, {"error": f"the engine does not start: {said}"})
                    return [], False
                self.result(mode, gate, round_number, left[0], {"error": f"{said}", "cut_off": late, "began": running is not None})
                return left[1:], False
            time.sleep(0.1)
        return left, True

    def result(self, mode, gate, round_number, cell, line):
        """Prints a cell's line."""
        kept = {name: value for name, value in line.items() if name != "ends"}
        if cell["kind"] == "tokens" and "error" not in kept and "skipped" not in kept:
            kept |= self.compared(mode, gate)
        first = {"engine": self.engine, "mode": mode, "gate": gate, "round": round_number, "cell": cell["id"]}
        self.say({**first, "kind": cell["kind"], "batch": cell["batch"], **kept})

    def compared(self, mode, gate):
        """An engine's tokens beside those of stock, of this call or of an earlier one with the same --logs."""
        try:
            sides = [json.loads((self.args.logs / f"tokens-{name}.json").read_text()) for name in ("stock-engine", f"{mode}-{gate}")]
        except OSError:
            return {"stock": "there are no tokens of stock; run --mode stock with the same --logs"}
        stock, other = sides
        for name, value in self.about.items():
            if stock["about"].get(name) != value:
                return {"stock": f"the tokens of stock are of another run, with {name} {stock['about'].get(name)}"}
        return {} if mode == "stock" else {"stock": "compared", **tokens.compare(stock, other, self.args.tie)}


def about(args, engine, daemon):
    """The machine and the builds."""
    version = subprocess.run([expertd.command(), "--version"], capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    gpus = None
    if args.device == "cuda":
        try:
            gpus = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.strip().splitlines()
        except (OSError, subprocess.SubprocessError) as error:
            gpus = f"nvidia-smi: {error}"
    return {"about": engine, "expertd": version, "python_package": expertd.__version__, "gpus": gpus, "mps": daemon, "command": shlex.join(sys.argv)}


def table(lines, modes, batches):
    """The tables of a run, in Markdown. Repetitions of all rounds count alike."""
    times, failed, others = collections.defaultdict(list), collections.defaultdict(list), []
    for line in lines:
        if "cell" not in line:
            continue
        key = (line["mode"], line["gate"])
        if line.get("times_ms"):
            times[key, line["cell"]] += line["times_ms"]
        if line.get("error") or line.get("skipped"):
            failed[key, line.get("error") or f"skipped, {line['skipped']}"].append(line["cell"])
        elif line["kind"] == "tokens" and line.get("stock") == "compared":
            counts = f"{line['equal']} of {line['sequences']} sequences as stock's; of the first differences {line['ties']} are ties"
            others.append(f"{key[0]}, gate {key[1]}: {counts}; largest difference of a log-probability {line['largest_error']}")
            for here in line["differences"]:
                others.append(f"    sequence {here['sequence']} from step {here['step']}: stock's two best differ by {here.get('stock_gap')}")
        elif line["kind"] == "tokens":
            counts = f"{line['equal_to_itself']} of {line['batch']} sequences equal in a second run"
            others.append(f"{key[0]}, gate {key[1]}: {counts}{'; ' + line['stock'] if 'stock' in line else ''}")
        elif line["kind"] in FAULTS:
            counts = f"{line['equal']} of {line['sequences']} sequences as without it; {line['service_generation']} new generation(s)"
            pause = f"pause {line['pause_ms']} ms, without it {line['usual_pause_ms']}"
            others.append(f"{key[0]}, gate {key[1]}, fault {line['kind']}: {pause}, {counts}")
    variants = sorted({key for key, _ in times}, key=lambda key: (modes.index(key[0]), key[1]))
    kinds = sorted({cell for _, cell in times if cell.startswith("prefill")})
    columns = [(f"decode, batch {batch}", f"decode-{batch}") for batch in batches]
    columns += [(f"{kind.replace('-', ' of ')} prompts", kind) for kind in kinds]
    made = ["| ms: median (smallest to largest) | " + " | ".join(title for title, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    label = {key: "stock" if key[0] == "stock" else f"{key[0]}, gate {key[1]}" for key in variants}
    for key in variants:
        cells = []
        for _, cell in columns:
            found = times.get((key, cell))
            cells.append(f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "-")
        made.append(f"| {label[key]} | " + " | ".join(cells) + " |")
    rates = [f"| {label[key]} | " + " | ".join(rate(times.get((key, f"decode-{batch}")), batch) for batch in batches) + " |" for key in variants]
    made += ["", "| tokens/s | " + " | ".join(map(str, batches)) + " |", "|---" * (len(batches) + 1) + "|", *rates]
    others += [f"{key[0]}, gate {key[1]}, {', '.join(cells)}: {why}" for (key, why), cells in failed.items()]
    return "\n".join(made + ["", *others])


def rate(times, batch):
    return f"{1e3 * batch / statistics.median(times):,.0f}" if times else "-"


def daemon_of(args, folder):
    """An MPS daemon for engines and services on GPUs; yields how there is one."""
    return mps(pathlib.Path(folder)) if args.device == "cuda" else contextlib.nullcontext()


def main(args, engine, script, variables, flags=()):
    """Runs all cells. Ends with status 1 if one of them has failed. `variables(job)` and `flags` are those of the engine's process."""
    if args.rounds < 1 or args.repeat < 1 or args.tokens < 2 or args.prompt < 1:
        raise SystemExit("--rounds, --repeat and --prompt must be at least 1, --tokens at least 2")
    if not planned(args, True):
        raise SystemExit("there is nothing to run: --batch, --prefill and --compare leave all cells out")
    if args.device == "cuda" and "apart" in args.mode and args.service_gpu == args.engine_gpu:
        raise SystemExit(f"--service-gpu and --engine-gpu are both {args.engine_gpu}; mode apart needs two GPUs, mode shared has one")
    args.session = args.session or ("cuda" if args.device == "cuda" else "host")
    args.logs.mkdir(parents=True, exist_ok=True)
    comparison = None
    try:
        with tempfile.TemporaryDirectory(prefix="expertd-mps-", ignore_cleanup_errors=True) as folder, Children(args.logs) as children:
            comparison = Comparison(args, engine, script, flags, variables, children)
            comparison.make_checkpoint()
            comparison.identify()
            # All modes run under the daemon, so that stock differs in nothing else.
            with daemon_of(args, folder) as daemon:
                try:
                    comparison.say({**about(args, engine, daemon), "cache_gib": round(comparison.cache / 2**30, 2), **comparison.about})
                    for number in range(args.rounds):
                        for mode in args.mode:
                            comparison.mode(mode, number)
                finally:
                    # Before the daemon that they use.
                    children.end_all()
    finally:
        if comparison and comparison.lines:
            print(f"\n{table(comparison.lines, args.mode, args.batch)}", flush=True)
    raise SystemExit(1 if any("error" in line for line in comparison.lines) else 0)
