"""The native decoder against a float64 reference, and the same bits for a row however it is computed."""

from __future__ import annotations

import numpy as np
import pytest
from tests.native.tiny_decoders import FAMILIES, Shape, Span, build_native, forward, make_decoder, reference, run_chunks

from foredraft import _native

KERNEL_SETS = _native.kernel_sets()


@pytest.fixture(scope="module")
def pool():
    return _native.ThreadPool(2)


def random_tokens(n: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 100, n).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel_set", KERNEL_SETS)
def test_logits_and_hidden_states_equal_the_reference(pool, family, kernel_set):
    model = make_decoder(FAMILIES[family])
    decoder = build_native(model, pool, kernel_set)
    tokens = random_tokens(70)
    layers = list(range(model.shape.num_layers + 1))
    logits = forward(decoder, decoder.make_cache(3, half=False), [Span([2, 0, 1], 0, tokens)], layers)
    expected_logits, expected_hidden = reference(model, tokens)
    np.testing.assert_allclose(decoder.hidden_states(), expected_hidden, atol=2e-4)
    np.testing.assert_allclose(logits, expected_logits, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_tree_equals_the_reference(pool, family):
    model = make_decoder(FAMILIES[family])
    decoder = build_native(model, pool)
    tokens, parents = random_tokens(40), list(range(-1, 29))  # 30 in a chain, then a tree
    parents += [29, 29, 30, 31, 31, 33, 35, 36, 36, -1]
    expected, _ = reference(model, tokens, parents)
    whole = forward(decoder, decoder.make_cache(2, half=False), [Span([1, 0], 0, tokens, parents)])
    np.testing.assert_allclose(whole, expected, atol=2e-4)


def test_fp16_cache_is_near_the_float_cache(pool):
    decoder = build_native(make_decoder(FAMILIES["qwen3"]), pool)
    tokens = random_tokens(40)
    half, whole = run_chunks(decoder, tokens, 40, half=True), run_chunks(decoder, tokens, 40, half=False)
    assert 0 < np.abs(half - whole).max() < 2e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type_name", ["F32", "Q8_0", "Q4_1"])
@pytest.mark.parametrize("half", [True, False])
def test_bits_do_not_depend_on_chunks_threads_tables_or_kernels(pool, family, type_name, half):
    model = make_decoder(FAMILIES[family], type_name)
    tokens = random_tokens(75)
    expected = run_chunks(build_native(model, _native.ThreadPool(1), "portable"), tokens, 1, half=half)
    assert np.isfinite(expected).all()
    for threads, kernel_set, chunk, table in [
        (1, KERNEL_SETS[0], 1, [0, 1, 2]),
        (2, KERNEL_SETS[0], 3, [2, 0, 1]),
        (3, KERNEL_SETS[0], 7, [5, 2, 4]),
        (2, "portable", 75, [1, 3, 0]),
        *((2, name, 75, [0, 2, 1]) for name in KERNEL_SETS),
    ]:
        decoder = build_native(model, _native.ThreadPool(threads), kernel_set)
        np.testing.assert_array_equal(run_chunks(decoder, tokens, chunk, half=half, table=table), expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("start", [1, 25, 64, 70])
def test_tree_nodes_have_the_bits_of_a_chain(pool, family, type_name, start):
    """start + tree crosses a block border, begins at one, or lies far past the sliding window."""
    decoder = build_native(make_decoder(FAMILIES[family], type_name), pool)
    prompt, drafts = random_tokens(start), random_tokens(12, seed=2)
    parents = [-1, 0, 0, 2, 1, 4, 2, 6, 7, 8, -1, 10]
    table = [3, 1, 0]
    cache = decoder.make_cache(4, half=True)
    forward(decoder, cache, [Span(table, 0, prompt)])
    tree = forward(decoder, cache, [Span(table, start, drafts, parents)])
    paths: list[list[int]] = []
    for row, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), row])
        chain = run_chunks(decoder, prompt + [drafts[i] for i in paths[row]], 5)
        np.testing.assert_array_equal(tree[row], chain[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_bits_do_not_depend_on_the_batch(pool, family):
    decoder = build_native(make_decoder(FAMILIES[family], "Q8_0"), pool)
    prompts = [random_tokens(n, seed=n) for n in (33, 5, 64)]
    alone = [run_chunks(decoder, prompt, len(prompt)) for prompt in prompts]
    cache = decoder.make_cache(8, half=True)
    tables = [[0, 7], [3], [5, 1, 2]]
    spans = [Span(table, 0, prompt[:-3]) for table, prompt in zip(tables, prompts, strict=True)]
    together = forward(decoder, cache, spans)
    np.testing.assert_array_equal(together, np.concatenate([logits[:-3] for logits in alone]))
    # Then unequal numbers of rows, one of them as a tree whose first path is the text.
    spans = [
        Span(tables[0], 30, prompts[0][-3:], num_logits=1),
        Span(tables[1], 2, [prompts[1][-3], 9, prompts[1][-2]], parents=[-1, 0, 0]),
        Span(tables[2], 61, prompts[2][-3:-2], num_logits=0),
    ]
    logits = forward(decoder, cache, spans)
    assert logits.shape == (4, 100)
    np.testing.assert_array_equal(logits[[0, 1, 3]], np.stack([alone[0][-1], alone[1][-3], alone[1][-2]]))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("half", [True, False])
def test_moved_slots_continue_like_a_chain(pool, family, half):
    decoder = build_native(make_decoder(FAMILIES[family], "Q4_1"), pool)
    prompt, drafts = random_tokens(29), random_tokens(7, seed=3)
    parents, table = [-1, -1, 1, 1, 3, 3, 5], [2, 0]
    cache = decoder.make_cache(3, half=half)
    forward(decoder, cache, [Span(table, 0, prompt)])
    forward(decoder, cache, [Span(table, 29, drafts, parents)])
    accepted = [1, 3, 5, 6]
    decoder.move_slots(
        cache,
        np.array(table, dtype=np.int32),
        np.array([29 + i for i in accepted], dtype=np.int32),
        np.array([29, 30, 31, 32], dtype=np.int32),
    )
    continued = forward(decoder, cache, [Span(table, 33, [11, 12])])
    chain = run_chunks(decoder, prompt + [drafts[i] for i in accepted] + [11, 12], 36, half=half)
    np.testing.assert_array_equal(continued, chain[-2:])


def test_stale_slots_do_not_reach_a_row(pool):
    """Infinities that a rejected draft left in the cache count for nothing, not even as 0 * inf."""
    shape = FAMILIES["gemma3"]
    model = make_decoder(shape)
    decoder = build_native(model, pool)
    tokens = random_tokens(40)
    cache = decoder.make_cache(2, half=True)
    forward(decoder, cache, [Span([0, 1], 0, tokens[:35])])
    poison = np.full((20, shape.hidden_size), np.inf, dtype=np.float32)
    decoder.forward(
        cache,
        np.array([[35, 20, 1, 2]], dtype=np.int32),
        np.array([0, 1], dtype=np.int32),
        np.zeros(20, dtype=np.int32),
        embedding_rows=np.arange(20, dtype=np.int32),
        embeddings=poison,
    )
    np.testing.assert_array_equal(
        forward(decoder, cache, [Span([0, 1], 35, tokens[35:])]), run_chunks(decoder, tokens, 40)[35:]
    )


def test_embeddings_stand_for_tokens(pool):
    model = make_decoder(FAMILIES["gemma3"])
    decoder = build_native(model, pool)
    tokens = random_tokens(9)
    expected = run_chunks(decoder, tokens, 9)
    replaced = [2, 5]
    rows = model.tensors["token_embd.weight"][[tokens[r] for r in replaced]] * np.float32(8.0)
    masked = np.array(tokens, dtype=np.int32)
    masked[replaced] = 0
    logits = decoder.forward(
        decoder.make_cache(1, half=True),
        np.array([[0, 9, 9, 1]], dtype=np.int32),
        np.zeros(1, dtype=np.int32),
        masked,
        embedding_rows=np.array(replaced, dtype=np.int32),
        embeddings=rows,
    )
    np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_limited_head_computes_the_same_bits(pool, family):
    decoder = build_native(make_decoder(FAMILIES[family], "Q8_0"), pool)
    tokens = random_tokens(6)
    full = run_chunks(decoder, tokens, 6)
    decoder.limit_head(np.array([0, 2, 3, 6], dtype=np.int32))
    limited = run_chunks(decoder, tokens, 6)
    kept = np.isin(np.arange(100) // 16, [0, 2, 3, 6])
    np.testing.assert_array_equal(limited[:, kept], full[:, kept])
    assert (limited[:, ~kept] == -np.inf).all()
    decoder.limit_head(None)
    np.testing.assert_array_equal(run_chunks(decoder, tokens, 6), full)


def test_views_outlive_the_pass_that_grew_the_buffer(pool):
    decoder = build_native(make_decoder(FAMILIES["llama"]), pool)
    cache = decoder.make_cache(3, half=True)
    sequences = np.array([[0, 1, 1, 3]], dtype=np.int32)
    table, token = np.arange(3, dtype=np.int32), np.zeros(1, dtype=np.int32)
    view = decoder.forward(cache, sequences, table, token)
    kept = view.copy()
    forward(decoder, cache, [Span([0, 1, 2], 0, random_tokens(80))])
    del decoder, cache
    np.testing.assert_array_equal(view, kept)


HOSTILE = {
    "negative start": {"sequences": [[-1, 2, 1, 2]]},
    "start past the table": {"sequences": [[63, 2, 1, 2]]},
    "start that overflows": {"sequences": [[2**31 - 1, 2, 1, 2]]},
    "no rows": {"sequences": [[0, 0, 0, 2]]},
    "more rows than tokens": {"sequences": [[0, 3, 1, 2]]},
    "fewer rows than tokens": {"sequences": [[0, 1, 1, 2]]},
    "negative logits": {"sequences": [[0, 2, -1, 2]]},
    "more logits than rows": {"sequences": [[0, 2, 3, 2]]},
    "longer table than given": {"sequences": [[0, 2, 1, 3]]},
    "no table": {"sequences": [[0, 2, 1, 0]]},
    "no sequence": {"sequences": np.zeros((0, 4))},
    "three numbers": {"sequences": [[0, 2, 1]]},
    "block past the cache": {"block_tables": [4, 0]},
    "negative block": {"block_tables": [-1, 0]},
    "block written twice": {"sequences": [[31, 2, 1, 2]], "block_tables": [1, 1]},
    "block of two sequences": {"sequences": [[0, 1, 1, 1], [0, 1, 1, 1]], "block_tables": [1, 1]},
    "token past the vocabulary": {"tokens": [1, 100]},
    "negative token": {"tokens": [-1, 1]},
    "parent of itself": {"parents": [-1, 1]},
    "parent below -1": {"parents": [-2, 0]},
    "too few parents": {"parents": [-1]},
    "hidden layer past the last": {"hidden_layers": [3]},
    "negative hidden layer": {"hidden_layers": [-1]},
    "embedding row past the pass": {"embedding_rows": [2], "embeddings": np.zeros((1, 64))},
    "narrow embeddings": {"embedding_rows": [0], "embeddings": np.zeros((1, 63))},
    "embeddings without rows": {"embeddings": np.zeros((1, 64))},
    "rows without embeddings": {"embedding_rows": [0]},
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_passes_are_refused(pool, case):
    decoder = build_native(make_decoder(FAMILIES["llama"]), pool)
    cache = decoder.make_cache(4, half=True)
    arguments = {"sequences": [[0, 2, 1, 2]], "block_tables": [0, 1], "tokens": [1, 2]}
    typed = {
        name: value if name == "hidden_layers" else np.array(value, np.float32 if name == "embeddings" else np.int32)
        for name, value in arguments.items()
    }
    decoder.forward(cache, **typed)
    typed |= {
        name: value if name == "hidden_layers" else np.array(value, np.float32 if name == "embeddings" else np.int32)
        for name, value in HOSTILE[case].items()
    }
    with pytest.raises(ValueError, match=r"."):
        decoder.forward(cache, **typed)


def test_a_cache_of_another_decoder_is_refused(pool):
    decoder, other = (build_native(make_decoder(FAMILIES[family]), pool) for family in ("llama", "qwen2"))
    with pytest.raises(ValueError, match="another decoder"):
        forward(decoder, other.make_cache(1, half=True), [Span([0], 0, [1])])


@pytest.mark.parametrize(
    ("source", "target"), [([5], [6]), ([64], [3]), ([5], [-1]), ([5, 6], [4]), ([6, 5], [3, 4]), ([6, 7], [4, 4])]
)
def test_hostile_moves_are_refused(pool, source, target):
    decoder = build_native(make_decoder(FAMILIES["llama"]), pool)
    table = np.array([0, 1], dtype=np.int32)
    with pytest.raises(ValueError, match=r"slots|ascend|equally"):
        decoder.move_slots(
            decoder.make_cache(2, half=True), table, np.array(source, dtype=np.int32), np.array(target, dtype=np.int32)
        )


def test_heads_blocks_must_ascend(pool):
    decoder = build_native(make_decoder(FAMILIES["llama"]), pool)
    for blocks in ([7], [-1], [1, 1], [2, 1]):
        with pytest.raises(ValueError, match="ascend"):
            decoder.limit_head(np.array(blocks, dtype=np.int32))


def test_tensors_are_checked(pool):
    decoder = build_native(make_decoder(FAMILIES["llama"]), pool)
    for name in (
        "blk.2.attn_q.weight",
        "blk.-1.attn_q.weight",
        "blk.0.attn_x.weight",
        "attn_q.weight",
        "blk.0.output.weight",
    ):
        with pytest.raises(ValueError, match="no matrix"):
            decoder.set_weight(name, "F32", 128, 64, np.zeros(128 * 64 * 4, dtype=np.uint8))
    with pytest.raises(ValueError, match=r"\[128, 64\]"):
        decoder.set_weight("blk.0.attn_q.weight", "F32", 64, 128, np.zeros(128 * 64 * 4, dtype=np.uint8))
    with pytest.raises(ValueError, match="bytes"):
        decoder.set_weight("blk.0.attn_q.weight", "F32", 128, 64, np.zeros(128 * 64 * 4 - 1, dtype=np.uint8))
    with pytest.raises(ValueError, match="values"):
        decoder.set_vector("blk.0.attn_norm.weight", np.zeros(63, dtype=np.float32))
    with pytest.raises(ValueError, match="no vector"):
        decoder.set_vector("blk.0.attn_norm.bias", np.zeros(64, dtype=np.float32))
    with pytest.raises(ValueError, match="bytes"):
        decoder.set_embedding(0, 100, 64, np.zeros(100, dtype=np.uint8))


def test_a_missing_tensor_is_named(pool):
    model = make_decoder(FAMILIES["llama"])
    complete = build_native(model, pool)
    shape = model.shape
    decoder = _native.Decoder(
        pool,
        num_layers=2,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        ffn_size=96,
        vocab_size=100,
        norm_eps=shape.norm_eps,
        attention_scale=1.0,
        rope_tables=[(np.ones(16), 1.0)],
        layer_rope=[0, 0],
        layer_window=[0, 0],
        rope_interleaved=False,
    )
    with pytest.raises(ValueError, match=r"token_embd\.weight is missing"):
        forward(decoder, complete.make_cache(1, half=True), [Span([0], 0, [1])])


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 0},
        {"hidden_size": 48},
        {"ffn_size": 40},
        {"head_dim": 24},
        {"num_kv_heads": 3},
        {"layer_rope": [0]},
        {"layer_rope": [0, 1]},
        {"layer_window": [0, -1]},
        {"rope_tables": [(np.ones(15), 1.0)]},
        {"rope_tables": []},
        {"activation": "relu"},
        {"norm_eps": float("nan")},
        {"kernel_set": "abacus"},
    ],
)
def test_descriptions_are_checked(pool, change):
    description = {
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "ffn_size": 96,
        "vocab_size": 100,
        "norm_eps": 1e-5,
        "attention_scale": 1.0,
        "rope_tables": [(np.ones(16), 1.0)],
        "layer_rope": [0, 0],
        "layer_window": [0, 0],
        "rope_interleaved": False,
    }
    _native.Decoder(pool, **description)
    with pytest.raises(ValueError, match=r"."):
        _native.Decoder(pool, **(description | change))


def test_a_window_sees_exactly_its_positions(pool):
    """A window of 5 over 40 positions equals no window over the last 5, for one layer and keys without rotation."""
    shape = Shape(num_layers=1, layer_rope=(0,), layer_window=(5,), rope_bases=(1e30,))
    model = make_decoder(shape)
    expected, _ = reference(model, random_tokens(40))
    decoder = build_native(model, pool)
    np.testing.assert_allclose(run_chunks(decoder, random_tokens(40), 9, half=False), expected, atol=2e-4)
