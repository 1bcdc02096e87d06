#!/usr/bin/env python3
"""Two vLLM engines on one GPU at once: both with their own experts, or both with one service's, on the same GPU under MPS.

    loadtest/peers/engines/vllm_pair.py --checkpoint /dev/shm/qwen --logs pair --batch 8 64

Prints a JSON line for each batch of a mode and a table: tokens per second of one engine alone and of both together, while both decode with all
their requests, and how many sequences have the tokens that their engine has alone.
"""

import json
import pathlib
import shlex
import statistics
import tempfile
import time

import cells
import vllm_compare
from processes import Children, Service, note


class Engine:
    """An engine whose cells begin when their files are there."""

    def __init__(self, comparison, mode, number, todo, service):
        args = comparison.args
        self.name, self.limit = f"{mode}-{number}", args.limit
        todo = [{**cell, "file": str(args.logs / f"alone-{self.name}-{cell['batch']}.json")} for cell in todo]
        # Each engine has prompts of its own.
        args.seed += number
        self.child, self.out = comparison.start(self.name, mode, args.gate[0], todo, service)
        args.seed -= number
        self.read = 0

    def line(self, limit, wanted):
        """The next line that has `wanted`. RuntimeError if the engine fails or takes longer than `limit` seconds."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            has_ended, text = self.child.has_ended(), self.out.read_text()
            while (end := text.find("\n", self.read) + 1) > 0:
                line, self.read = json.loads(text[self.read : end]), end
                if "error" in line:
                    raise RuntimeError(f"{self.name}: {line['error']}")
                if wanted in line:
                    return line
            if has_ended:
                raise RuntimeError(f"{self.name} ended with status {self.child.status()}:\n{self.child.text(1500)}")
            time.sleep(0.02)
        raise RuntimeError(f"{self.name}: no end within {limit:.0f} s")


def rate(lines, batch):
    """Tokens per second of all engines, from when the last one of them has all its requests to when the first one ends."""
    full = [[at for at, count in line["outputs"] if count == batch] for line in lines]
    begin, end = max(times[2] for times in full), min(times[-1] for times in full)
    if begin >= end:
        raise RuntimeError(f"the engines did not decode {batch} requests each at the same time; --tokens is too small")
    return sum(count for line in lines for at, count in line["outputs"] if begin < at <= end) / (end - begin)


def mode(comparison, name, children):
    """All batches of a mode."""
    args = comparison.args
    with tempfile.TemporaryDirectory(prefix="expertd-", ignore_cleanup_errors=True) as folder:
        gpu = args.engine_gpu if args.device == "cuda" else None
        service = None
        if name == "shared":
            service = Service(children, "serve", args.checkpoint, folder, gpu, shlex.split(args.serve), args.start_limit)
        # The first repetition warms up.
        cases = ["alone-0", "alone-1", *(f"both-{number}" for number in range(args.repeat + 1))]
        plans = [[{"kind": "at-once", "batch": batch, "id": f"{case}-{batch}", "go": f"{folder}/{case}-{batch}"} for batch in args.batch for case in cases]]
        plans = [[cell for cell in plans[0] if not cell["id"].startswith(f"alone-{1 - number}")] for number in range(2)]
        pair = [Engine(comparison, name, number, plan, service) for number, plan in enumerate(plans)]
        for engine in pair:
            about = engine.line(args.start_limit, "ready")
            if service and about.get("expert_bytes"):
                raise RuntimeError(f"{engine.name} holds {about['expert_bytes']} bytes of experts; is the plugin installed?")

        def case(engines, label):
            pathlib.Path(f"{folder}/{label}").touch()
            return [engine.line(args.limit, "ends") for engine in engines]

        for batch in args.batch:
            alone = [rate(case([engine], f"alone-{number}-{batch}"), batch) for number, engine in enumerate(pair)]
            runs = [case(pair, f"both-{number}-{batch}") for number in range(args.repeat + 1)]
            rates = [round(rate(lines, batch), 1) for lines in runs[1:]]
            equal = [sum(lines[number]["equal"] for lines in runs) for number in range(2)]
            found = {"alone": [round(one, 1) for one in alone], "both": statistics.median(rates), "rates": rates}
            comparison.say({"mode": name, "cell": f"pair-{batch}", "batch": batch, **found, "equal": equal, "sequences": batch * len(runs)})
        for engine in pair:
            engine.child.wait(20)
            children.end(engine.child)
        if service:
            service.end()


def main():
    parser = vllm_compare.parser(__doc__)
    parser.set_defaults(mode=["stock", "shared"], batch=[8, 64], prefill=0, compare=0, fault=[])
    args = parser.parse_args()
    if "apart" in args.mode:
        parser.error("--mode: two engines and their service share a GPU here; stock and shared")
    args.session = args.session or ("cuda" if args.device == "cuda" else "host")
    args.logs.mkdir(parents=True, exist_ok=True)
    for old in args.logs.glob("alone-*.json"):
        old.unlink()
    with tempfile.TemporaryDirectory(prefix="expertd-mps-", ignore_cleanup_errors=True) as folder, Children(args.logs) as children:
        variables = lambda job: vllm_compare.variables(job, args.own_process)  # noqa: E731
        comparison = cells.Comparison(args, "vLLM", vllm_compare.__file__, [], variables, children)
        comparison.make_checkpoint()
        with cells.daemon_of(args, folder) as daemon:
            try:
                comparison.say({**cells.about(args, "vLLM", daemon), "cache_gib": round(comparison.cache / 2**30, 2), **comparison.about})
                for name in args.mode:
                    note(name)
                    mode(comparison, name, children)
            finally:
                children.end_all()
    print("\n| batch of each | mode | tokens/s: one alone | both |\n|---|---|---|---|")
    for line in comparison.lines:
        if "cell" in line:
            print(f"| {line['batch']} | {line['mode']} | {line['alone'][0]:,.0f} | {line['both']:,.0f} |")


if __name__ == "__main__":
    main()
