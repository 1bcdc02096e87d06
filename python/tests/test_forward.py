"""Rows against what transformers computed, in every way that rows can be passed."""

import ml_dtypes
import numpy as np
import pytest
import seed
from conftest import worst_row

import expertd


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_rows_are_those_of_transformers(golden, family):
    it = golden(family)
    for layer in it.layers:
        answer = it.client.forward(layer, it.of(layer, "input"), return_routing=True)
        assert worst_row(answer.rows, it.of(layer, "output")) < 1e-5
        if f"layers.{layer}.topk_ids" in it.tensors:
            ids = np.sort(np.asarray(answer.receipt.topk_ids), axis=1)
            assert (ids == np.sort(it.of(layer, "topk_ids"), axis=1)).all()


def test_layers_that_route_by_token_id_take_token_ids(golden):
    it = golden("deepseek_v4")
    by_id = [layer.layer for layer in it.model.moe_layers if layer.routes_by_token_id]
    assert by_id
    for ids in (it.token_ids().astype(np.int32), it.token_ids().astype(np.int64)):
        answer = it.client.forward(by_id[0], it.of(by_id[0], "input"), token_ids=ids)
        assert worst_row(answer.rows, it.of(by_id[0], "output")) < 1e-5
    for wrong in ({}, {"token_ids": ids[1:]}, {"token_ids": np.append(ids, 0)}):
        with pytest.raises(expertd.InvalidRequestError, match="token_ids"):
            it.client.forward(by_id[0], it.of(by_id[0], "input"), **wrong)


def test_given_routing_is_applied_whatever_its_integer_and_float_types(golden, rows):
    it = golden("qwen3_moe")
    first = it.client.forward(it.layers[0], rows, return_routing=True)
    ids, weights = np.asarray(first.receipt.topk_ids), np.asarray(first.receipt.topk_weights)
    for given in (ids, ids.astype(np.int64)):
        again = it.client.forward(it.layers[0], rows, topk_ids=given, topk_weights=weights)
        assert np.array_equal(np.asarray(again.rows), np.asarray(first.rows))
    double = it.client.forward(it.layers[0], rows, topk_ids=ids, topk_weights=weights.astype(np.float64) * 2)
    assert worst_row(double.rows, 2 * np.asarray(first.rows)) < 1e-5
    for narrow in (np.float16, ml_dtypes.bfloat16):
        rounded = weights.astype(narrow)
        one = it.client.forward(it.layers[0], rows, topk_ids=ids, topk_weights=rounded)
        other = it.client.forward(it.layers[0], rows, topk_ids=ids, topk_weights=rounded.astype(np.float32))
        assert np.array_equal(np.asarray(one.rows), np.asarray(other.rows))


def test_experts_that_are_not_asked_for_add_nothing(golden, rows):
    it = golden("qwen3_moe")
    layer = it.model.moe_layers[0]
    whole = it.client.forward(layer.layer, rows, return_routing=True)
    ids, weights = np.asarray(whole.receipt.topk_ids), np.asarray(whole.receipt.topk_weights)
    mine = seed.rng().random(ids.shape) < 0.5
    mine[0], mine[1] = False, True
    parts = []
    for chosen in (mine, ~mine):
        given = np.where(chosen, ids, -1).astype(np.int32), np.where(chosen, weights, np.nan).astype(np.float32)
        answer = it.client.forward(layer.layer, rows, topk_ids=given[0], topk_weights=given[1], return_routing=True)
        assert np.array_equal(np.asarray(answer.receipt.topk_ids), given[0])
        assert np.array_equal(np.asarray(answer.receipt.topk_weights), given[1], equal_nan=True)
        parts.append(np.asarray(answer.rows))
    assert (parts[0][0] == 0).all() and (parts[1][1] == 0).all()
    assert worst_row(parts[0] + parts[1], whole.rows) < 1e-5


def test_shared_experts_can_be_left_out(golden):
    it = golden("qwen2_moe")
    layer = it.layers[0]
    given = it.of(layer, "input")
    routing = {"topk_ids": it.of(layer, "topk_ids"), "topk_weights": it.of(layer, "topk_weights")}
    whole = np.asarray(it.client.forward(layer, given, **routing).rows)
    routed = np.asarray(it.client.forward(layer, given, shared_experts="exclude", **routing).rows)
    silent = {**routing, "topk_weights": np.zeros_like(routing["topk_weights"])}
    shared = np.asarray(it.client.forward(layer, given, **silent).rows)
    assert worst_row(routed + shared, whole) < 1e-5
    assert worst_row(routed, whole) > 1e-3


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_narrow_rows_come_back_in_their_dtype(golden, rows, dtype):
    it = golden("qwen3_moe")
    # The same values in float32: rounding them could change the gate's choice.
    exact = np.asarray(it.client.forward(it.layers[0], rows.astype(dtype).astype(np.float32)).rows)
    narrow = it.client.forward(it.layers[0], rows.astype(dtype))
    assert np.asarray(narrow.rows).dtype == dtype and narrow.rows.numpy().dtype == dtype
    assert worst_row(np.asarray(narrow.rows).astype(np.float32), exact) < 5e-3
    bits = it.client.forward(it.layers[0], rows.astype(dtype).view(np.uint16), dtype=narrow.rows.dtype)
    assert np.array_equal(np.asarray(bits.rows.view("u16")), np.asarray(narrow.rows.view("u16")))


class OnlyDLPack:
    """What torch tensors are: DLPack, and no buffer protocol."""

    def __init__(self, array):
        self.array = array
        self.calls = 0

    def __dlpack__(self):
        self.calls += 1
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("tokens", [3, 700])
def test_rows_may_come_through_dlpack_or_any_buffer(golden, tokens):
    it = golden("qwen3_moe")
    hidden = it.model.hidden
    rows = seed.rng().standard_normal((tokens, hidden)).astype(np.float32)
    expected = np.asarray(it.client.forward(it.layers[0], rows).rows)
    through = OnlyDLPack(rows)
    assert np.array_equal(np.asarray(it.client.forward(it.layers[0], through).rows), expected)
    assert through.calls == 1
    view = memoryview(rows.tobytes()).cast("f", [tokens, hidden])
    assert np.array_equal(np.asarray(it.client.forward(it.layers[0], view).rows), expected)
    shifted = np.zeros(rows.nbytes + 1, np.uint8)
    shifted[1:] = rows.reshape(-1).view(np.uint8)
    unaligned = shifted[1:].view(np.float32).reshape(tokens, hidden)
    assert np.array_equal(np.asarray(it.client.forward(it.layers[0], unaligned).rows), expected)


def test_answers_are_shared_without_a_copy(golden, rows):
    it = golden("qwen3_moe")
    answer = it.client.forward(it.layers[0], rows)
    first, second = np.asarray(answer.rows), np.from_dlpack(answer.rows)
    pointer = first.__array_interface__["data"][0]
    assert pointer == second.__array_interface__["data"][0] and pointer % 4 == 0
    first[0, 0] = 42.0
    assert memoryview(answer.rows)[0, 0] == 42.0 and second[0, 0] == 42.0
    del answer, first
    assert second[0, 0] == 42.0


def test_a_batch_may_have_more_rows_than_a_step(golden):
    it = golden("qwen3_moe")
    many = it.model.limits.max_tokens_per_step + 1
    rows = seed.rng().standard_normal((many, it.model.hidden)).astype(np.float32)
    split = it.client.forward(it.layers[0], rows, return_timings=True, return_routing=True)
    assert len(split.receipt.steps) > 1
    # The receipt of a session has the sum over the steps.
    assert len(split.receipt.timings) == (1 if it.session else len(split.receipt.steps))
    assert sum(split.receipt.tokens_per_rank) == many
    assert split.receipt.topk_ids.shape == (many, it.model.moe_layers[0].top_k)
    assert worst_row(np.asarray(split.rows)[-3:], it.client.forward(it.layers[0], rows[-3:]).rows) < 1e-5


def test_no_tokens(golden):
    it = golden("qwen3_moe")
    nothing = np.zeros((0, it.model.hidden), np.float32)
    if it.session:
        with pytest.raises(expertd.InvalidRequestError, match="tokens"):
            it.client.forward(it.layers[0], nothing)
    else:
        empty = it.client.forward(it.layers[0], nothing)
        assert np.asarray(empty.rows).shape == nothing.shape and empty.receipt.steps == ()


def test_the_model_describes_itself(golden):
    it = golden("qwen3_moe")
    (summary,) = it.client.models()
    assert (summary.name, summary.family) == (it.model.name, "qwen3_moe")
    assert summary.weight_version == it.model.weight_version == it.client.forward(
        it.layers[0], it.of(it.layers[0], "input"), expected_weight_version=it.model.weight_version
    ).receipt.weight_version
    layer = it.model.moe_layers[0]
    owned = [range(first, first + count) for rank in it.model.placement for (n, first, count) in rank.experts if n == layer.layer]
    assert sorted(expert for part in owned for expert in part) == list(range(layer.num_experts))
    assert it.model.dtypes == ("bf16", "f16", "f32")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_out_receives_the_rows(golden, rows, dtype):
    it = golden("qwen3_moe")
    layer = it.layers[0]
    batch = rows if dtype == "f32" else (rows.view(np.uint32) >> 16).astype(np.uint16)
    options = {} if dtype == "f32" else {"dtype": "bf16"}

    def read(answer):
        return np.asarray(answer.rows if dtype == "f32" else answer.rows.view("u16"))

    expected = read(it.client.forward(layer, batch, **options))
    out = np.zeros_like(batch)
    assert it.client.forward(layer, batch, out=out, **options).rows is out
    assert np.array_equal(out, expected)
    same = batch.copy()
    it.client.forward(layer, same, out=same, **options)
    assert np.array_equal(same, expected)
    frozen = np.zeros_like(batch)
    frozen.flags.writeable = False
    for wrong, kind, words in (
        (out[:4], ValueError, "expected"),
        (np.zeros(batch.shape, np.float16), ValueError, "expected"),
        (np.zeros((*batch.shape[:1], 2 * batch.shape[1]), batch.dtype)[:, ::2], BufferError, "contiguous"),
        (frozen, BufferError, "written"),
    ):
        with pytest.raises(kind, match=words):
            it.client.forward(layer, batch, out=wrong, **options)
