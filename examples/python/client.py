#!/usr/bin/env python3
"""A client of expertd that needs only grpcio, grpcio-status and the generated protocol code (see README.md)."""

import argparse
import array
import queue
import random
import sys
import time

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from expertd.v1 import moe_pb2, moe_pb2_grpc

# Messages hold megabytes of rows; the default limits of gRPC are too small for them.
UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# Otherwise gRPC sends the socket's path as `:authority`, which is invalid in HTTP/2, so that the service refuses the call.
UNIX_AUTHORITY = ("grpc.default_authority", "localhost")


def f32_bytes(values):
    """Packs values as little-endian float32."""
    packed = array.array("f", values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def f32_list(data):
    values = array.array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def random_request(model, layer, tokens):
    """A request with random rows; real rows are hidden states after the layer's norm and before the residual."""
    rows = [random.gauss(0.0, 1.0) for _ in range(tokens * model.hidden)]
    request = moe_pb2.ForwardRequest(
        layer=layer.layer, tokens=tokens, dtype=moe_pb2.DTYPE_F32, inline=f32_bytes(rows), return_routing=True
    )
    if layer.routes_by_token_id:
        request.token_ids = array.array("i", range(tokens)).tobytes()
    return request


def retry_delay(error):
    """Seconds after which the service can take the call again; None if it must not be retried."""
    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED):
        return None
    status = rpc_status.from_call(error)
    for detail in status.details if status else []:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return 0.5  # The connection failed: nothing came from the service.


def forward(stub, request, timeout=30.0):
    """Makes one call and retries it within the timeout. The computation is pure, so that a retry is always safe."""
    end = time.monotonic() + timeout
    while True:
        try:
            return stub.Forward(request, timeout=end - time.monotonic())
        except grpc.RpcError as error:
            delay = retry_delay(error)
            # A little more than the service asks for, each client another time, so that they do not all come back at once.
            if delay is None or (wait := delay * random.uniform(1.0, 1.5)) > end - time.monotonic():
                raise
            time.sleep(wait)


def unary(stub, model, layer, tokens):
    request = random_request(model, layer, tokens)
    answer = forward(stub, request)
    receipt = answer.receipt
    print(f"layer {layer.layer}: {tokens} rows of {model.hidden} came back in steps {list(receipt.steps)}")
    print(f"  tokens per rank {list(receipt.tokens_per_rank)}, step {receipt.step_time.ToMicroseconds()} us")

    # Send the same rows with the same routing, this time given by the caller.
    request.routing.topk_ids = receipt.topk_ids
    request.routing.topk_weights = receipt.topk_weights
    request.routing.k = len(receipt.topk_ids) // (4 * tokens)
    again = forward(stub, request)
    first, second = f32_list(answer.rows), f32_list(again.rows)
    difference = sum((a - b) ** 2 for a, b in zip(first, second)) ** 0.5
    norm = sum(a * a for a in first) ** 0.5
    print(f"  with the returned routing given: relative difference {difference / norm:.1e}")
    return len(first) == tokens * model.hidden and difference <= 1e-4 * norm


def stream(stub, model, layer):
    """Sends several token batches at once; an invalid one gets its own status and affects no other."""
    requests = queue.Queue()

    def outgoing():
        while (message := requests.get()) is not None:
            yield message

    answers = stub.ForwardStream(outgoing())
    for id in range(4):
        requests.put(moe_pb2.ForwardStreamRequest(id=id, request=random_request(model, layer, id + 1), timeout_ms=30_000))
    bad = random_request(model, layer, 2)
    bad.tokens = 3
    requests.put(moe_pb2.ForwardStreamRequest(id=99, request=bad))
    requests.put(None)
    rows, failures = {}, {}
    for answer in answers:
        if answer.WhichOneof("result") == "response":
            rows[answer.id] = len(answer.response.rows)
        else:
            failures[answer.id] = answer.status.message
    print(f"stream: bytes by id {dict(sorted(rows.items()))}; failed: {failures}")
    return rows == {id: (id + 1) * model.hidden * 4 for id in range(4)} and list(failures) == [99]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", default="127.0.0.1:50051", help="HOST:PORT or unix:PATH")
    parser.add_argument("--tokens", type=int, default=4)
    args = parser.parse_args()
    options = [*UNLIMITED, UNIX_AUTHORITY] if args.address.startswith("unix:") else UNLIMITED
    with grpc.insecure_channel(args.address, options=options) as channel:
        stub = moe_pb2_grpc.MoeStub(channel)
        model = stub.GetModel(moe_pb2.GetModelRequest())
        layers = [layer.layer for layer in model.moe_layers]
        print(f"{model.name} ({model.family}): hidden {model.hidden}, MoE layers {layers}")
        layer = model.moe_layers[0]
        good = unary(stub, model, layer, args.tokens) and stream(stub, model, layer)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
