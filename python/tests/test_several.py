"""Several services used as one: layers that are spread, replicas, failover."""

import asyncio
import concurrent.futures
import contextlib
import subprocess

import numpy as np
import pytest
import seed
from conftest import worst_row

import expertd

LAYERS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("several") / "checkpoint"
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", str(folder), "--layers", str(LAYERS)]
    sizes = ["--hidden", "64", "--width", "32", "--experts", "8", "--top-k", "2"]
    subprocess.run([*synth, *sizes], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Rows, and each layer's answer from a service that holds all layers."""
    rows = seed.rng().standard_normal((5, 64)).astype(np.float32)
    with expertd.serve(checkpoint, ranks=1) as service, service.client() as client:
        return rows, [np.asarray(client.forward(layer, rows).rows) for layer in range(LAYERS)]


def serve_all(stack, checkpoint, ranges):
    return [stack.enter_context(expertd.serve(checkpoint, ranks=1, layers=layers)) for layers in ranges]


def test_layers_of_three_services_are_one_model(checkpoint, expected):
    rows, answers = expected
    with contextlib.ExitStack() as stack:
        services = serve_all(stack, checkpoint, ["0-1", "2-3", "4-5"])
        addresses = [service.address for service in services]
        with expertd.Client(addresses[1]) as alone:
            assert [layer.layer for layer in alone.model().moe_layers] == [2, 3]
            with pytest.raises(expertd.NotFoundError):
                alone.forward(0, rows)
        for given in (addresses, ",".join(addresses)):
            with expertd.Client(given) as client, client.stream() as stream:
                assert [layer.layer for layer in client.model().moe_layers] == list(range(LAYERS))
                assert [model.name for model in client.models()] == [client.model().name]
                pending = [stream.submit(layer, rows) for layer in range(LAYERS)]
                for layer, one in enumerate(pending):
                    assert worst_row(client.forward(layer, rows).rows, answers[layer]) < 1e-5
                    assert worst_row(one.result().rows, answers[layer]) < 1e-5
                with pytest.raises(expertd.NotFoundError, match="layer 99"):
                    client.forward(99, rows)
                with pytest.raises(expertd.NotFoundError, match="other"):
                    client.model("other")

        async def all_layers():
            async with expertd.AsyncClient(addresses) as client:
                return await asyncio.gather(*(client.forward(layer % LAYERS, rows) for layer in range(60)))

        for i, answer in enumerate(asyncio.run(all_layers())):
            assert worst_row(answer.rows, answers[i % LAYERS]) < 1e-5


def test_callers_do_not_see_that_a_replica_died(checkpoint, expected):
    rows, answers = expected
    with contextlib.ExitStack() as stack:
        services = serve_all(stack, checkpoint, ["0-3", "2-5", "0-5"])
        client = stack.enter_context(expertd.Client([service.address for service in services]))
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            calls = [pool.submit(client.forward, i % LAYERS, rows, timeout=120) for i in range(100)]
            calls[20].result()
            services[2].process.kill()
            calls += [pool.submit(client.forward, i % LAYERS, rows, timeout=120) for i in range(100)]
            for i, call in enumerate(calls):
                assert worst_row(call.result().rows, answers[i % 100 % LAYERS]) < 1e-5


def test_nothing_answers():
    retry = expertd.RetryPolicy(max_elapsed=0.5)
    with pytest.raises(expertd.ConnectError, match="nowhere"):
        expertd.Client(["unix:/nowhere/a", "unix:/nowhere/b"], retry=retry)
