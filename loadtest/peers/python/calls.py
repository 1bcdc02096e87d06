#!/usr/bin/env python3
"""Time that a call costs besides its step: sessions, gRPC through this package, and grpcio in turn.

Makes a random checkpoint with tiny experts, so that transport is most of a call, and serves it on CPU ranks. Needs numpy, and
for grpcio the generated modules of the protocol (examples/python/README.md).
"""

import argparse
import json
import pathlib
import subprocess
import tempfile
import threading
import time

import numpy as np

import expertd

HIDDEN = 2048


def make_checkpoint(folder, experts, top_k, width):
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", str(folder), "--hidden", str(HIDDEN), "--layers", "1"]
    subprocess.run([*synth, "--experts", str(experts), "--top-k", str(top_k), "--width", str(width)], check=True)


class Package:
    """A client of this package."""

    def __init__(self, service, session):
        self.client = service.client(session=session)
        self.layer = self.client.model().moe_layers[0].layer

    def call(self, rows):
        return self.client.forward(self.layer, rows, dtype="bf16")

    def read(self, answer):
        """The output rows, and the time in queue and step in seconds."""
        return np.asarray(answer.rows.view("u16")), answer.receipt.queue_seconds, answer.receipt.step_seconds


class Grpcio:
    """A client of grpcio, as short as it can be."""

    def __init__(self, service):
        import grpc
        from expertd.v1 import moe_pb2, moe_pb2_grpc

        self.messages = moe_pb2
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        # Some versions send the path of a Unix-domain socket as the host's name.
        options.append(("grpc.default_authority", "localhost"))
        self.stub = moe_pb2_grpc.MoeStub(grpc.insecure_channel(service.address, options=options))
        self.layer = self.stub.GetModel(moe_pb2.GetModelRequest()).moe_layers[0].layer

    def call(self, rows):
        request = self.messages.ForwardRequest(
            layer=self.layer, tokens=len(rows), dtype=self.messages.DTYPE_BF16, inline=rows.tobytes()
        )
        return self.stub.Forward(request)

    def read(self, answer):
        queue, step = answer.receipt.queue_time, answer.receipt.step_time
        rows = np.frombuffer(answer.rows, np.uint16).reshape(-1, HIDDEN)
        return rows, queue.ToNanoseconds() * 1e-9, step.ToNanoseconds() * 1e-9


def random_rows(tokens):
    """bf16 rows as 16-bit integers."""
    rows = np.random.default_rng().standard_normal((tokens, HIDDEN)).astype(np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


def widened(rows):
    return (rows.astype(np.uint32) << 16).view(np.float32)


def expect_close(found, expected):
    """The first and the last row must be those of the same call made alone, up to the rounding of a step with other rows."""
    assert found.shape == expected.shape
    found, expected = widened(found[[0, -1]]), widened(expected[[0, -1]])
    assert np.linalg.norm(found - expected) <= 2e-2 * np.linalg.norm(expected)


def measure(caller, tokens, seconds, threads):
    """Closed loop of `threads` callers. Percentiles 10, 50 and 99 in µs of whole calls, of calls without their steps, and of what
    is neither queue nor step; and MiB/s of rows in each direction."""
    batches = [random_rows(tokens) for _ in range(8)]
    expected = [caller.read(caller.call(rows))[0] for rows in batches]
    times = []
    end = time.perf_counter() + seconds

    def loop(number):
        at = number
        while (start := time.perf_counter()) < end:
            answer = caller.call(batches[at % 8])
            whole = time.perf_counter() - start
            rows, queue, step = caller.read(answer)
            expect_close(rows, expected[at % 8])
            times.append((whole, whole - step, whole - step - queue))
            at += 1

    start = time.perf_counter()
    callers = [threading.Thread(target=loop, args=(number,)) for number in range(threads)]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    passed = time.perf_counter() - start
    whole, over_step, rest = np.percentile(np.array(times), [10, 50, 99], axis=0).T * 1e6
    return {
        "calls": len(times),
        "call_us": whole.round(1).tolist(),
        "over_step_us": over_step.round(1).tolist(),
        "rest_us": rest.round(1).tolist(),
        "mib_per_second": round(len(times) * tokens * HIDDEN * 2 / passed / 2**20, 1),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=1)
    parser.add_argument("--width", type=int, default=32, help="of an expert; few and narrow experts make the step short")
    parser.add_argument("--cores", help="cores of the service, such as 0-7 (default: all)")
    parser.add_argument("--generated", type=pathlib.Path, help="folder with the protocol's generated modules, to measure grpcio")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--out", type=pathlib.Path, help="file for the results, one JSON object per line")
    args = parser.parse_args()
    cores = {"cores": args.cores} if args.cores else {}
    if args.generated:
        # The generated package is called expertd.v1.
        expertd.__path__.append(str(args.generated / "expertd"))
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent) / "checkpoint"
        make_checkpoint(folder, args.experts, args.top_k, args.width)
        with expertd.serve(folder, ranks=args.ranks, device="cpu", **cores) as service:
            callers = {"session": Package(service, "host"), "grpc": Package(service, None)}
            if args.generated:
                callers["grpcio"] = Grpcio(service)
            for tokens in args.tokens:
                for threads in args.threads:
                    for _ in range(args.rounds):
                        for name, caller in callers.items():
                            found = measure(caller, tokens, args.seconds, threads)
                            line = json.dumps({"client": name, "tokens": tokens, "threads": threads, **found})
                            print(line, flush=True)
                            if args.out:
                                with args.out.open("a") as out:
                                    out.write(line + "\n")


if __name__ == "__main__":
    main()
