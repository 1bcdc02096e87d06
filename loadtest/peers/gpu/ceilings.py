#!/usr/bin/env python3
"""Measures ceilings of this machine's GPUs: device memory, matrix products, copies to peers. Prints one line of JSON.

One process for all GPUs; run it while nothing else uses them.
"""

import json
import statistics
import time

import torch


def timed(work, devices, repeats=9):
    """Median seconds of `work()` on all devices at once, measured on the host."""
    times = []
    for _ in range(repeats + 2):
        for device in devices:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        for device in devices:
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def memory(device):
    """Bytes per second of a sum over 8 GiB, which only reads, as a step reads weights."""
    values = torch.randn(1 << 31, device=device).mul_(1).view(-1)
    seconds = timed(lambda: torch.linalg.vector_norm(values, ord=1), [device])
    copy = torch.empty_like(values)
    copied = timed(lambda: copy.copy_(values), [device])
    return values.nbytes / seconds, 2 * values.nbytes / copied


def products(device):
    """FLOP/s of products of 8192^3 in bf16 on random data: in a burst, and sustained for a third of a second."""
    n = 8192
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    burst = timed(lambda: torch.mm(a, b, out=out), [device], repeats=5)
    sustained = timed(lambda: [torch.mm(a, b, out=out) for _ in range(200)], [device], repeats=1) / 200
    return 2 * n**3 / burst, 2 * n**3 / sustained


def links(devices):
    """Bytes per second that each GPU sends to the next one while all send."""
    if len(devices) < 2:
        return None
    size = 1 << 28
    sources = [torch.randint(0, 255, (size,), device=d, dtype=torch.uint8) for d in devices]
    targets = [torch.empty(size, device=d, dtype=torch.uint8) for d in devices]
    streams = [torch.cuda.Stream(d) for d in devices]

    def ring():
        for at, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                for _ in range(8):
                    targets[(at + 1) % len(devices)].copy_(sources[at], non_blocking=True)

    return 8 * size / timed(ring, devices)


def main():
    devices = [torch.device("cuda", at) for at in range(torch.cuda.device_count())]
    read, copy = memory(devices[0])
    torch.cuda.empty_cache()
    burst, sustained = products(devices[0])
    link = links(devices)
    print(
        json.dumps(
            {
                "gpu": torch.cuda.get_device_name(0),
                "gpus": len(devices),
                "memory_read_bytes_per_second": read,
                "memory_copy_bytes_per_second": copy,
                "tensor_burst_flops": burst,
                "tensor_sustained_flops": sustained,
                "link_bytes_per_second": link,
            }
        )
    )


if __name__ == "__main__":
    main()
