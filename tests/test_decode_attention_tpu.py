"""The TPU kernels of attention. When interpreted, they compute the formula; when compiled for each
TPU, they copy no cache."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention import (
    BF16,
    F32,
    FP8,
    INT8,
    SCALES,
    Case,
    assert_lse,
    bound,
    decode,
    make,
    merge,
    oracle,
    split,
)

from common.cache import append, empty_cache
from common.cache import attend as attend_to_cache
from common.kernels import decode_attention_tpu as kernel
from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.decode_attention_tpu import (
    RingSizes,
    decode_attention_tpu,
    list_blocks,
    positions_last,
)
from common.kernels.prefill_attention import prefill_attention
from common.kernels.prefill_attention_tpu import prefill_attention_tpu
from common.latents import append_latent, attend_latent, empty_latent
from common.machines.chips import devices_of
from common.sharding import DATA, MODEL, make_mesh

CACHE = ("k_BKSH", "v_BKSH")
KERNEL = 'custom_call_target="tpu_custom_call"'
STRICT = pltpu.InterpretParams(detect_races=True)  # memory starts as NaN, copies end when awaited


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def attend(inputs, interpret=True, sizes=None, **arrays):
    """Calls the kernel itself, on inputs from `make`."""
    arrays = dict(v_BKSH=None) | inputs.arrays | arrays
    B, T = arrays["q_BTNH"].shape[:2]
    starts = jnp.asarray(arrays.pop("starts", np.zeros(B, np.int32)))
    arrays["starts_BT"] = jnp.broadcast_to(starts if starts.ndim == 2 else starts[:, None], (B, T))
    options = dict(scale=inputs.scale, v_dim=inputs.v_dim, sizes=sizes, interpret=interpret)
    run = functools.partial(decode_attention_tpu, **options)
    return jax.jit(lambda arrays: run(**arrays))(jax.tree.map(jnp.asarray, arrays))


def check(case, inputs, o, lse):
    empty_slots = np.asarray(inputs.arrays["lengths_B"]) == 0
    assert o.dtype == case.dtype and not np.asarray(o)[empty_slots].any()
    assert_close(o, inputs.o, **bound(case), what=str(case))
    assert_lse(lse, inputs.lse, str(case))


# ---- the formula, interpreted


LENGTHS = (0, 1, 3, 127, 128, 129, 300, 0, 384)
CASES = [
    Case(64, 2, 3, 1, S=384, sinks=True),
    Case(40, 3, 1, 2, S=384, starts="window"),
    Case(128, 1, 4, 8, S=384, dtype=BF16, cache=BF16, starts="window", sinks=True),
    Case(80, 2, 4, 5, S=384, cache=INT8, starts="slot"),
    Case(96, 2, 1, 3, S=384, dtype=BF16, cache=FP8, starts="window"),
    Case(256, 2, 3, 1, S=384, dtype=BF16, cache=INT8, sinks=True),
    Case(576, 1, 16, 1, S=384, dtype=BF16, cache=BF16, v_dim=512),
    Case(80, 1, 9, 2, S=384, cache=INT8, v_dim=56, starts="window"),
    Case(576, 1, 4, 2, S=384, dtype=BF16, cache=FP8, v_dim=512, starts="slot"),
    Case(64, 2, 3, 1, S=384, v_dim=64, row=128, sinks=True),
    Case(64, 2, 2, 8, S=384, v_dim=64, row=128, dtype=BF16, cache=BF16, starts="window"),
    Case(64, 1, 4, 3, S=384, v_dim=48, row=128, cache=INT8, starts="window", sinks=True),
    Case(64, 4, 3, 3, S=384, v_dim=64, row=128, cache=INT8, starts="window", sinks=True),
    Case(64, 2, 4, 1, S=384, v_dim=64, row=128, dtype=BF16, cache=INT8, sinks=True),
    Case(64, 4, 1, 1, S=384, v_dim=64, row=128, dtype=BF16, cache=FP8, starts="slot"),
    Case(64, 2, 8, 1, S=384, v_dim=64, row=128, dtype=BF16, cache=FP8, starts="slot"),
    Case(40, 2, 3, 3, S=384, v_dim=56, row=80, dtype=BF16, cache=FP8, starts="slot"),
]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_computes_the_formula_whatever_lies_past_the_lengths(case):
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, sizes=RingSizes(128, 3)))


JOINED = next(x for x in CASES if x.v_dim == 64 and x.row == 128 and x.cache == INT8)


def test_rows_of_two_heads_that_are_joined_are_those_of_each():
    """Those of values and keys, in one byte a number."""
    test_the_kernel_computes_the_formula_whatever_lies_past_the_lengths(JOINED)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_reads_no_memory_that_nothing_was_copied_to_and_waits_for_every_copy(case, capfd):
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, STRICT, RingSizes(128, 3)))
    assert "RACE" not in "".join(capfd.readouterr())


def test_neither_do_parts_of_a_cache_with_lengths_below_0_and_above_them(capfd):
    """Some parts hold only NaN. Blocks have 128 positions, so each part of 256 has two."""
    case = Case(40, 2, 2, 3, S=512, cache=INT8, v_dim=40, row=80, starts="window")
    inputs = make(case, (0, 1, 127, 128, 129, 257, 385, 511, 512))
    arrays = split(inputs.arrays, 2)
    o, lse = attend(inputs, STRICT, RingSizes(128, 3), **arrays)
    assert "RACE" not in "".join(capfd.readouterr())
    o, lse = merge(o, lse, 2)
    assert_close(o, inputs.o, **bound(case))
    assert_lse(lse, inputs.lse)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "blocks",
    [(128, 2), (128, 16), (256, 2, 2), (256, 3), (384, 2), (128, 2, 4, 3), (256, 1, 8, 9)],
    ids=str,
)
def test_the_sizes_of_blocks_and_ring_change_nothing(blocks):
    """Blocks of 256 do not divide the capacity: the last one overlaps the one before it."""
    case = Case(40, 2, 3, 5, S=384, sinks=True, cache=INT8)
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, sizes=RingSizes(*blocks)))


def test_windows_and_lengths_may_end_on_either_side_of_a_block():
    """Each slot has two queries: one sees positions from `start` on, the other from 0 on."""
    case, edges = Case(40, 1, 2, 2, S=384), (127, 128, 129)
    ends, windows = (x.ravel() for x in np.meshgrid((*edges, 255, 256, 257), (0, 1, *edges)))
    inputs, starts = make(case, tuple(ends)), np.stack([windows, 0 * windows], 1).astype(np.int32)
    for starts_BT in (starts, starts[:, ::-1]):
        q, k, v, lengths = (inputs.arrays[x] for x in ("q_BTNH", "k_BKSH", "v_BKSH", "lengths_B"))
        o, lse = oracle(q, k, v, lengths, starts_BT, scale=inputs.scale)
        got = attend(inputs, sizes=RingSizes(128, 3), starts=starts_BT)
        check(case, inputs._replace(o=o, lse=lse), *got)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("T", range(1, 9))
def test_from_one_to_eight_queries_see_what_stands_before_them(T):
    case = Case(40, 2, 2, T, S=256, starts="window")
    inputs = make(case, (T, 256, 130, 0, 1))
    check(case, inputs, *attend(inputs, sizes=RingSizes(128, 2)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 2, 3, 2, S=640, starts="slot"),
        Case(128, 2, 2, 1, S=640, dtype=BF16, cache=INT8),
        Case(80, 2, 3, 3, S=77, cache=BF16),
    ],
    ids=str,
)
def test_the_public_function_interprets_the_kernel_where_there_is_no_tpu(case):
    """It chooses the blocks itself: 512 of 640 positions, and all of 77."""
    inputs = make(case, (0, 77, 3, *((640, 520, 512) if case.S == 640 else ())))
    check(case, inputs, *decode(inputs, "tpu"))


def test_a_batch_of_empty_slots_gives_zeros():
    """Their caches are NaN throughout."""
    o, lse = attend(make(Case(40, 2, 3, 2, S=256), (0, 0)), STRICT)
    assert not np.asarray(o).any() and np.isneginf(lse).all()


def test_a_window_that_begins_before_position_0_begins_at_0():
    case = Case(40, 2, 3, 5, S=384, starts="before 0")
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, sizes=RingSizes(128, 2)))


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_the_plain_implementations_take_a_cache_in_fp8(implementation):
    case = Case(40, 2, 3, 2, cache=FP8, starts="window")
    inputs = make(case, (0, 1, 129, 150))
    check(case, inputs, *decode(inputs, implementation))


@pytest.mark.full
def test_heads_and_slots_split_over_eight_devices_give_the_same():
    case = Case(64, 4, 3, 2, S=256, cache=INT8, starts="window", sinks=True)
    inputs = make(case, (256, 33, 0, 129))
    layout = dict(q_BTNH=P(DATA, None, MODEL), lengths_B=P(DATA), starts=P(DATA), sinks_N=P(MODEL))
    specs = {x: layout.get(x, P(DATA, MODEL)) for x in inputs.arrays}
    run = jax.shard_map(
        lambda arrays: decode(inputs._replace(arrays=arrays), "tpu"),
        mesh=make_mesh(data=2, expert=2, tensor=2),
        in_specs=(specs,),
        out_specs=(P(DATA, None, MODEL),) * 2,
        check_vma=False,
    )
    check(case, inputs, *jax.jit(run)(inputs.arrays))


# ---- what it reads


def visible_blocks(lengths, starts, S, block):
    """Returns the slot and the number of each block with a position that some query sees."""
    return [
        (b, j)
        for b, (length, row) in enumerate(zip(lengths, starts, strict=True))
        for j in range(-(-S // block))
        if any(max(min(row), 0) <= s < min(length, S) for s in range(j * block, (j + 1) * block))
    ]


@given(
    st.lists(st.integers(0, 70), min_size=5, max_size=5),
    st.lists(st.tuples(st.integers(-9, 70), st.integers(-9, 70)), min_size=5, max_size=5),
    st.sampled_from([(64, 8), (64, 64), (60, 16), (64, 24)]),
)
def test_each_visible_block_is_listed_once_and_no_other(lengths, starts, sizes):
    """Includes lengths beyond the capacity, empty slots, and windows that begin past the length."""
    listed = list_blocks(jnp.array(lengths), jnp.array(starts), *sizes)
    slot, begin_B, first_B = map(np.asarray, listed)
    slots = slot[: begin_B[-1]]
    items = [(b, first_B[b] + i - begin_B[b]) for i, b in enumerate(slots)]
    assert items == visible_blocks(lengths, starts, *sizes)
    assert all((np.flatnonzero(slots == b) >= begin_B[b]).all() for b in range(len(lengths)))
    assert len(slot) == len(lengths) * -(-sizes[0] // sizes[1])


def test_the_kernel_copies_the_listed_blocks_and_each_once(monkeypatch):
    """Blocks do not divide the capacity here, so the last block begins early."""
    case, sizes, copied = Case(64, 2, 3, 2, S=384, starts="slot"), RingSizes(256, 3), []
    inputs, copy = make(case, LENGTHS), pltpu.make_async_copy

    class Watched:
        def __init__(self, source, *rest):
            self.source, self.inner = source, copy(source, *rest)
            self.wait = self.inner.wait

        def start(self):
            b, *_, positions = self.source.transforms[-1].indices
            jax.debug.callback(lambda *at: copied.append(tuple(map(int, at))), b, positions.start)
            self.inner.start()

    monkeypatch.setattr(kernel.pltpu, "make_async_copy", Watched)
    check(case, inputs, *attend(inputs, sizes=sizes))
    jax.effects_barrier()
    starts = np.broadcast_to(inputs.arrays["starts"][:, None], (len(LENGTHS), case.T))
    visible = visible_blocks(LENGTHS, starts, case.S, sizes.block)
    want = [(b, min(j * sizes.block, case.S - sizes.block)) for b, j in visible]
    assert sorted(copied) == sorted([*want, *want]) and want  # for keys, and for values


# ---- compiled


TOPOLOGIES = ("v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
WIDTHS = (64, 80, 96, 128, 256, 576)
DTYPES = (BF16, INT8, FP8)
# Every chip with every width and twice with every dtype, every width with every dtype.
COMPILED = [
    (chip, H, DTYPES[(i + j) % 3])
    for i, chip in enumerate(TOPOLOGIES)
    for j, H in enumerate(WIDTHS)
]


PACKED = [(chip, dtype, B) for chip in ("v5e:2x2", "v6e:2x2") for dtype in DTYPES for B in (8, 64)]


@functools.cache
def one_device(topology):
    return NamedSharding(Mesh(np.array(devices_of(topology)[:1]), ("x",)), P())


def shapes_of(H, dtype, sharding, B=16, S=2048, packed=False):
    """Returns shapes like a model's: 8 key/value heads with 4 query heads each, or one latent head
    with 64. If packed: 2 heads with 8 query heads each, or 4 in 64 slots, and rows of
    [value | key]."""
    latent = H == 576
    K, G = (1, 64) if latent else (2, 4 if B == 64 else 8) if packed else (8, 4)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays: dict[str, Any] = dict(
        q_BTNH=array((B, 1, K * G, H), BF16), k_BKSH=array((B, K, S, 2 * H if packed else H), dtype)
    )
    arrays |= dict(lengths_B=array((B,), jnp.int32))
    arrays["v_BKSH"] = None if latent or packed else arrays["k_BKSH"]
    if dtype == INT8:
        scaled = SCALES[:1] if latent else SCALES
        arrays |= {x: array((B, K, S), F32) for x in scaled}
    return arrays, dict(v_dim=512 if latent else H if packed else None, scale=0.1)


@functools.cache
def compiled(topology, *args, wraps=False, **options):
    sharding = one_device(topology)
    arrays, options = shapes_of(*args, sharding, **options)
    run = functools.partial(ragged_decode_attention, wraps=wraps, **options)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.jit(lambda arrays: run(**arrays)).lower(arrays).compile(), arrays


def assert_no_copies(program, arrays):
    """Measured: no temporaries, or 98 KB of padded queries with packed rows."""
    assert program.as_text().count(KERNEL) == 1
    assert_nothing_as_large(program, arrays)


def assert_nothing_as_large(program, arrays):
    """Asserts that temporaries are smaller than the smallest array of the cache."""
    smallest = min(
        math.prod(x.shape) * x.dtype.itemsize for n, x in arrays.items() if x and "K" in n
    )
    assert program.memory_analysis().temp_size_in_bytes < smallest


@pytest.mark.one_in(7)
@pytest.mark.parametrize("topology, H, dtype", COMPILED)
def test_on_tpu_the_kernel_is_chosen_and_copies_neither_cache_nor_scales(topology, H, dtype):
    assert_no_copies(*compiled(topology, H, dtype))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("topology, dtype, B", PACKED)
def test_nor_does_it_copy_rows_that_hold_values_and_keys(topology, dtype, B):
    assert_no_copies(*compiled(topology, 64, dtype, B=B, packed=True))


@pytest.mark.parametrize("topology, dtype", [("v5e:2x2", INT8), ("v6e:2x2", BF16)])
def test_nor_if_the_cache_wraps(topology, dtype):
    assert_no_copies(*compiled(topology, 64, dtype, S=2560, packed=True, wraps=True))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_compiler_lays_a_cache_out_as_the_kernel_expects(topology):
    shapes = [(S, H) for S in (128, 384, 2048) for H in (*WIDTHS, 192)]
    caches = [
        jax.ShapeDtypeStruct((2, 3, *shape), dtype, sharding=one_device(topology))
        for shape in shapes
        for dtype in (*DTYPES, F32)
    ]
    program = jax.jit(lambda caches: 0, keep_unused=True).lower(caches).compile()
    layouts = re.findall(r"\[2,3,(\d+),(\d+)\]\{(\d,\d)", program.as_text().split("->")[0])
    assert len(layouts) == len(caches)
    for S, H, order in layouts:
        assert order == ("2,3" if positions_last(int(S), int(H)) else "3,2"), (S, H)


def heads_step(q, cache, lengths):
    B, K, T, H = len(q), jax.tree.leaves(cache)[0].shape[1], 1, q.shape[-1]
    new = jnp.resize(q, (B, T, K, H))
    cache = append(cache, new, new, lengths - T)
    return attend_to_cache(q, cache, lengths, scale=0.1), cache


def latent_step(q, cache, lengths):
    cache = append_latent(cache, q[:, :, 0], lengths - 1)
    return attend_latent(q, cache, lengths, v_dim=512, scale=0.1), cache


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "H, dtype", [(64, BF16), (64, INT8), (64, FP8), (96, BF16), (128, INT8), (576, BF16)]
)
def test_a_step_that_appends_a_token_and_attends_works_on_the_cache_in_place(H, dtype):
    mesh = make_mesh(devices=devices_of("v5e:2x2")[:1])
    put = NamedSharding(mesh, P())
    B, K, S = 16, 8, 2048
    make, step = (lambda: empty_cache((B, K, S, H), dtype)), heads_step
    if H == 576:
        make, step = (lambda: empty_latent((B, S, H), dtype)), latent_step
    given = jax.eval_shape(lambda: (jnp.zeros((B, 1, 32, H), BF16), make(), jnp.zeros(B, int)))
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=put), given)
    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    program = jax.jit(step, donate_argnums=1).lower(*given).compile()
    memory = program.memory_analysis()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(given[1]))
    assert program.as_text().count(KERNEL) == 1
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 16


def compiled_prefill(topology, H, dtype, T, S, packed=False, **allowed):
    sharding = one_device(topology)
    arrays, options = shapes_of(H, dtype, sharding, B=2, S=S, packed=packed)
    (B, _, N, H) = arrays["q_BTNH"].shape
    arrays["q_BTNH"] = jax.ShapeDtypeStruct((B, T, N, H), BF16, sharding=sharding)
    run = functools.partial(prefill_attention, **allowed, **options)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        lowered = jax.jit(lambda arrays: run(**arrays)).lower(arrays)
    assert lowered.as_text().count("tpu_custom_call") == 1
    return lowered.compile(), arrays


@pytest.mark.one_in(10)
@pytest.mark.parametrize("topology, H, dtype", COMPILED)
def test_prefill_attention_copies_neither_cache_nor_scales(topology, H, dtype):
    """So few queries, and their log-sum-exps, take less than the scales. A latent has only one."""
    S = 1 << (21 if H == 576 else 16)
    assert_nothing_as_large(*compiled_prefill(topology, H, dtype, T=16, S=S))


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "allowed, packed",
    [
        (dict(window=128), True),
        (dict(window=1000), False),
        (dict(chunk=8192), False),
        (dict(chunk=3000), True),
        (dict(window=700, chunk=1024), False),
        (dict(window=128, wraps=True), True),
        (dict(chunk=8192, wraps=True), False),
    ],
    ids=str,
)
def test_prefill_attention_compiles_for_any_window_and_chunk(allowed, packed):
    H, T, S = 64 if packed else 128, 600, 1 << 16  # several blocks of queries
    topology = "v6e:2x2" if "wraps" in allowed else "v5e:2x2"
    assert_nothing_as_large(*compiled_prefill(topology, H, BF16, T, S, packed, **allowed))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("G", [1, 3, 5, 7, 9, 12, 40])
def test_prefill_attention_compiles_for_any_number_of_heads_that_share_a_key(G):
    array = functools.partial(jax.ShapeDtypeStruct, sharding=one_device("v5e:2x2"))
    k = array((1, 2, 4096, 128), INT8)
    scale = array((1, 2, 4096), F32)
    arrays = array((1, 600, 2 * G, 128), BF16), k, k, array((1,), jnp.int32), scale, scale
    jax.jit(functools.partial(prefill_attention_tpu, scale=0.1)).lower(*arrays).compile()


@pytest.mark.one_in(11)
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("dtype", [BF16, INT8, FP8], ids=str)
def test_prefill_attention_makes_keys_and_values_of_latents(topology, dtype):
    sharding = one_device(topology)
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    made_by = array((2, 640, 192), BF16), array((2, 640, 128), BF16)
    rows, scale = array((1, 1, 16384, 640), dtype), array((1, 1, 16384), F32)
    arrays = array((1, 600, 2, 192), BF16), rows, array((1,), jnp.int32), made_by
    arrays += (scale,) if dtype == INT8 else ()

    def run(q, rows, lengths, made_by, *scale):
        return prefill_attention_tpu(q, rows, None, lengths, *scale, made_by=made_by, scale=0.1)

    program = jax.jit(run).lower(*arrays).compile()
    assert program.memory_analysis().temp_size_in_bytes < 4 << 20


@pytest.mark.one_in(2)
@pytest.mark.parametrize("cache", [F32, INT8], ids=["f32", "int8"])
def test_prefill_attention_reads_no_memory_that_nothing_was_copied_to(cache, capfd):
    case = Case(40, 2, 3, 33, S=300, cache=cache, sinks=True)
    inputs = make(case, (33, 300, 77, 0, 20, 320))
    o, lse = prefill_attention_tpu(
        **inputs.arrays, scale=inputs.scale, return_lse=True, interpret=STRICT
    )
    assert_close(o, inputs.o, **bound(case))
    assert_lse(np.asarray(lse), inputs.lse, **bound(case))
    assert "RACE" not in "".join(capfd.readouterr())


def test_the_compiler_is_told_what_a_full_cache_costs():
    program, arrays = compiled("v5e:2x2", 128, BF16)
    cost, k, N = program.cost_analysis(), arrays["k_BKSH"], arrays["q_BTNH"].shape[2]
    assert cost["bytes accessed"] >= 2 * 2 * k.size
    B, _, S, H = k.shape
    assert_close(cost["flops"], 2 * 2 * B * N * S * H, rtol=0.01)


# ---- what it refuses


def lowered(arrays, **options):
    run = functools.partial(ragged_decode_attention, **options)
    traced = jax.jit(lambda arrays: run(**arrays)).trace(arrays)
    return traced.lower(lowering_platforms=("tpu",)).as_text()


def refused():
    shape = jax.ShapeDtypeStruct
    arrays, options = shapes_of(128, BF16, None)
    changes = {
        "queries in float32 or bfloat16": dict(q_BTNH=shape((16, 1, 32, 128), jnp.float16)),
        "a cache in float32, bfloat16, int8": dict(k_BKSH=shape((16, 8, 2048, 128), jnp.float16)),
        "multiple of 128": dict.fromkeys(CACHE, shape((16, 8, 2049, 128), BF16)),
        "scales of both": dict(k_scale_BKS=shape((16, 8, 2048), F32)),
        "at most 131072 blocks": dict(
            q_BTNH=shape((1024, 1, 32, 128), BF16),
            lengths_B=shape((1024,), jnp.int32),
            **dict.fromkeys(CACHE, shape((1024, 8, 65536, 128), BF16)),
        ),
    }
    return [(message, arrays | change, options) for message, change in changes.items()]


@pytest.mark.parametrize("message, arrays, options", refused(), ids=[x for x, _, _ in refused()])
def test_what_the_kernel_does_not_take_is_refused_by_name_and_left_to_the_blocked_one(
    message, arrays, options
):
    with pytest.raises(ValueError, match=message) as error:
        lowered(arrays, **options, implementation="tpu")
    assert "\n" not in str(error.value)
    assert "tpu_custom_call" not in lowered(arrays, **options)


def test_what_the_kernel_takes_is_lowered_to_it_from_any_host():
    arrays, options = shapes_of(128, BF16, None)
    assert lowered(arrays, **options).count("@tpu_custom_call") == 1
    assert lowered(arrays, **options, implementation="tpu").count("@tpu_custom_call") == 1
    assert "tpu_custom_call" not in lowered(arrays, **options, implementation="blocked")
