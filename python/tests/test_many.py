"""Many calls in flight: streams, threads, asyncio; and ranks that die meanwhile."""

import asyncio
import concurrent.futures
import os
import signal

import numpy as np
import processes
import pytest
import seed
from conftest import recorded, stopped, worst_row

import expertd


def batches(it, count):
    random = seed.rng()
    return [random.standard_normal((1 + i % 7, it.model.hidden)).astype(np.float32) for i in range(count)]


def test_a_stream_answers_each_call_and_a_bad_one_disturbs_no_other(golden):
    it = golden("qwen3_moe")
    given = batches(it, 300)
    with it.client.stream() as stream:
        pending = [stream.submit(it.layers[0], rows) for rows in given]
        bad = stream.submit(99, given[0])
        with pytest.raises(expertd.NotFoundError):
            bad.result()
        for rows, one in zip(given, pending, strict=True):
            assert worst_row(one.result().rows, it.client.forward(it.layers[0], rows).rows) < 1e-5
            assert one.done()
        with pytest.raises(RuntimeError, match="already taken"):
            one.result()
        late = [stream.submit(it.layers[0], rows) for rows in given]
    for rows, one in zip(given, late, strict=True):
        assert one.result().rows.shape == rows.shape
    with pytest.raises(ValueError, match="closed"):
        stream.submit(it.layers[0], given[0])


def test_threads_share_a_client(golden):
    it = golden("qwen3_moe")
    given = batches(it, 64)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda rows: np.asarray(it.client.forward(it.layers[0], rows).rows), given))
    for rows, answer in zip(given, found, strict=True):
        assert worst_row(answer, it.client.forward(it.layers[0], rows).rows) < 1e-5


def test_asyncio_calls_streams_errors_and_cancellation(golden):
    it = golden("qwen3_moe")
    given = batches(it, 100)
    layer = it.layers[0]

    async def run():
        async with expertd.AsyncClient(**it.arguments) as client:
            assert (await client.model()).name == it.model.name and len(await client.models()) == 1
            unary = await asyncio.gather(*(client.forward(layer, rows) for rows in given))
            async with client.stream() as stream:
                streamed = await asyncio.gather(*(stream.forward(layer, rows) for rows in given))
                with pytest.raises(expertd.NotFoundError):
                    await stream.forward(99, given[0])
            for one, other in zip(unary, streamed, strict=True):
                assert worst_row(one.rows, other.rows) < 1e-5
            with stopped(it.service), pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(client.forward(layer, given[0]), 0.2)
            assert (await client.forward(layer, given[0])).rows.shape == given[0].shape
        nowhere = {"address": "unix:/nowhere/socket", "session": it.session}
        with pytest.raises(expertd.ConnectError):
            await expertd.AsyncClient(**nowhere).connect()

    asyncio.run(run())


@pytest.mark.parametrize("session", [None, "host"])
def test_callers_do_not_see_that_a_rank_died(session):
    # No generation ends because the machine is busy.
    settings = {"ranks": 2, "liveness_timeout_ms": 30_000}
    with expertd.serve(recorded("qwen3_moe"), **settings) as service, service.client(session=session) as client:
        model = client.model()
        layer = model.moe_layers[0].layer
        rows = seed.rng().standard_normal((8, model.hidden)).astype(np.float32)
        expected = np.asarray(client.forward(layer, rows).rows)
        with client.stream() as stream:
            for victim in (0, 1):
                pending = [stream.submit(layer, rows) for _ in range(20)]
                os.kill(processes.rank_of(service.process.pid, victim), signal.SIGKILL)
                pending += [stream.submit(layer, rows) for _ in range(20)]
                answers = [one.result() for one in pending] + [client.forward(layer, rows)]
                for answer in answers:
                    assert worst_row(answer.rows, expected) < 1e-5
        assert client.model().generation == 3


@pytest.mark.parametrize("session", [None, "host"])
def test_without_retries_a_dead_service_is_unavailable(session):
    with expertd.serve(recorded("mixtral"), ranks=1) as service:
        client = service.client(session=session, retry=None)
        model = client.model()
        rows = np.zeros((1, model.hidden), np.float32)
        service.process.kill()
        service.process.wait()
        with pytest.raises(expertd.UnavailableError):
            client.forward(model.moe_layers[0].layer, rows)
