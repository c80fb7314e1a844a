"""The TPU kernel of ragged decode attention: interpreted it computes the formula, and compiled for
each TPU it copies no cache."""

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
from test_attention import BF16, F32, INT8, Case, assert_lse, bound, decode, make, oracle

from common.cache import append, empty, parts
from common.dryrun import devices_of
from common.kernels import decode_attention_tpu as kernel
from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.decode_attention_tpu import Blocks, decode_attention_tpu, plan, positions_last
from common.sharding import DATA, MODEL, make_mesh

FP8 = jnp.float8_e4m3fn
KERNEL = 'custom_call_target="tpu_custom_call"'
STRICT = pltpu.InterpretParams(detect_races=True)  # memory begins as NaN, copies end at their wait


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def attend(inputs, interpret=True, blocks=None, **arrays):
    """The kernel itself, on what `make` gave."""
    arrays = dict(v_BKSH=None) | inputs.arrays | arrays
    B, T = arrays["q_BTNH"].shape[:2]
    starts = jnp.asarray(arrays.pop("starts", np.zeros(B, np.int32)))
    arrays["starts_BT"] = jnp.broadcast_to(starts if starts.ndim == 2 else starts[:, None], (B, T))
    options = dict(scale=inputs.scale, v_dim=inputs.v_dim, blocks=blocks, interpret=interpret)
    if arrays["v_BKSH"] is None:
        arrays |= dict(v_scale_BKS=arrays.get("k_scale_BKS"))
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
    Case(40, 3, 1, 2, S=384, starts="query"),
    Case(128, 1, 4, 8, S=384, dtype=BF16, cache=BF16, starts="query", sinks=True),
    Case(80, 2, 4, 5, S=384, cache=INT8, starts="slot"),
    Case(96, 2, 1, 3, S=384, dtype=BF16, cache=FP8, starts="query"),
    Case(256, 2, 3, 1, S=384, dtype=BF16, cache=INT8, sinks=True),
    Case(576, 1, 16, 1, S=384, dtype=BF16, cache=BF16, v_dim=512),
    Case(80, 1, 9, 2, S=384, cache=INT8, v_dim=56, starts="query"),
    Case(576, 1, 4, 2, S=384, dtype=BF16, cache=FP8, v_dim=512, starts="slot"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_computes_the_formula_whatever_lies_past_the_lengths(case):
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, blocks=Blocks(128, 3)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_reads_no_memory_that_nothing_was_copied_to_and_waits_for_every_copy(case, capfd):
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, STRICT, Blocks(128, 3)))
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("blocks", [(128, 2), (128, 16), (256, 2), (256, 3), (384, 2)], ids=str)
def test_the_sizes_of_blocks_and_ring_change_nothing(blocks):
    """Blocks of 256 do not divide the capacity: the last one overlaps the one before it."""
    case = Case(40, 2, 3, 5, S=384, sinks=True, cache=INT8)
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, blocks=Blocks(*blocks)))


def test_windows_and_lengths_may_end_on_either_side_of_a_block():
    """One query of each slot's two sees from `start` on, the other one from 0."""
    case, edges = Case(40, 1, 2, 2, S=384), (127, 128, 129)
    ends, windows = (x.ravel() for x in np.meshgrid((*edges, 255, 256, 257), (0, 1, *edges)))
    inputs, starts = make(case, tuple(ends)), np.stack([windows, 0 * windows], 1).astype(np.int32)
    for starts_BT in (starts, starts[:, ::-1]):
        q, k, v, lengths = (inputs.arrays[x] for x in ("q_BTNH", "k_BKSH", "v_BKSH", "lengths_B"))
        o, lse = oracle(q, k, v, lengths, starts_BT, scale=inputs.scale)
        got = attend(inputs, blocks=Blocks(128, 3), starts=starts_BT)
        check(case, inputs._replace(o=o, lse=lse), *got)


@pytest.mark.parametrize("T", range(1, 9))
def test_from_one_to_eight_queries_see_what_stands_before_them(T):
    case = Case(40, 2, 2, T, S=256, starts="query")
    inputs = make(case, (T, 256, 130, 0, 1))
    check(case, inputs, *attend(inputs, blocks=Blocks(128, 2)))


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
    """In blocks of its own choice: 512 of 640 positions, and all of 77."""
    inputs = make(case, (0, 77, 3, *((640, 520, 512) if case.S == 640 else ())))
    check(case, inputs, *decode(inputs, "tpu"))


def test_a_batch_of_empty_slots_gives_zeros():
    """Whose caches are NaN throughout."""
    o, lse = attend(make(Case(40, 2, 3, 2, S=256), (0, 0)), STRICT)
    assert not np.asarray(o).any() and np.isneginf(lse).all()


def test_a_window_that_begins_before_position_0_begins_at_0():
    case = Case(40, 2, 3, 5, S=384, starts="before 0")
    inputs = make(case, LENGTHS)
    check(case, inputs, *attend(inputs, blocks=Blocks(128, 2)))


@pytest.mark.parametrize("implementation", ["reference", "blocked"])
def test_the_plain_forms_take_a_cache_in_fp8(implementation):
    case = Case(40, 2, 3, 2, cache=FP8, starts="query")
    inputs = make(case, (0, 1, 129, 150))
    check(case, inputs, *decode(inputs, implementation))


def test_heads_and_slots_split_over_eight_devices_give_the_same():
    case = Case(64, 4, 3, 2, S=256, cache=INT8, starts="query", sinks=True)
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
    """Slot and number of each block with a position that some query sees."""
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
def test_the_plan_lists_each_visible_block_once_and_no_other(lengths, starts, sizes):
    """Lengths beyond the capacity, empty slots, windows that begin behind the length."""
    slot_I, begin_B, first_B = map(np.asarray, plan(jnp.array(lengths), jnp.array(starts), *sizes))
    slots = slot_I[: begin_B[-1]]
    items = [(b, first_B[b] + i - begin_B[b]) for i, b in enumerate(slots)]
    assert items == visible_blocks(lengths, starts, *sizes)
    assert all((np.flatnonzero(slots == b) >= begin_B[b]).all() for b in range(len(lengths)))
    assert len(slot_I) == len(lengths) * -(-sizes[0] // sizes[1])


def test_the_kernel_copies_the_blocks_of_the_plan_and_each_once(monkeypatch):
    """The last block of a capacity that blocks do not divide begins early."""
    case, blocks, copied = Case(64, 2, 3, 2, S=384, starts="slot"), Blocks(256, 3), []
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
    check(case, inputs, *attend(inputs, blocks=blocks))
    jax.effects_barrier()
    starts = np.broadcast_to(inputs.arrays["starts"][:, None], (len(LENGTHS), case.T))
    visible = visible_blocks(LENGTHS, starts, case.S, blocks.block)
    want = [(b, min(j * blocks.block, case.S - blocks.block)) for b, j in visible for _ in "kv"]
    assert sorted(copied) == sorted(want) and want


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


@functools.cache
def one_device(topology):
    return NamedSharding(Mesh(np.array(devices_of(topology)[:1]), ("x",)), P())


def shapes_of(H, dtype, sharding, B=16, S=2048):
    """A model's: 8 key/value heads with 4 queries each, or one latent one with 64."""
    latent = H == 576
    K, G = (1, 64) if latent else (8, 4)

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    arrays: dict[str, Any] = dict(
        q_BTNH=array((B, 1, K * G, H), BF16), k_BKSH=array((B, K, S, H), dtype)
    )
    arrays |= dict(lengths_B=array((B,), jnp.int32))
    arrays["v_BKSH"] = None if latent else arrays["k_BKSH"]
    if dtype == INT8:
        scaled = "k" if latent else "kv"
        arrays |= {f"{x}_scale_BKS": array((B, K, S), F32) for x in scaled}
    return arrays, dict(v_dim=512 if latent else None, scale=0.1)


def compiled(topology, H, dtype):
    sharding = one_device(topology)
    arrays, options = shapes_of(H, dtype, sharding)
    run = functools.partial(ragged_decode_attention, **options)
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.jit(lambda arrays: run(**arrays)).lower(arrays).compile(), arrays


@pytest.mark.parametrize("topology, H, dtype", COMPILED)
def test_on_tpu_the_kernel_is_chosen_and_copies_neither_cache_nor_scales(topology, H, dtype):
    """Temporaries are less than the smallest of them; reached: none at all."""
    program, arrays = compiled(topology, H, dtype)
    assert program.as_text().count(KERNEL) == 1
    smallest = min(
        math.prod(x.shape) * x.dtype.itemsize for n, x in arrays.items() if x and "K" in n
    )
    assert program.memory_analysis().temp_size_in_bytes < smallest


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


@pytest.mark.parametrize("H, dtype", [(64, BF16), (64, INT8), (96, BF16), (576, FP8)])
def test_a_step_that_appends_a_token_and_attends_works_on_the_cache_in_place(H, dtype):
    sharding = one_device("v5e:2x2")
    arrays, options = shapes_of(H, dtype, sharding)
    q, k = arrays["q_BTNH"], arrays["k_BKSH"]
    cache = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(lambda: [empty(k.shape, dtype)] * (1 if H == 576 else 2)),
    )

    def step(q, cache, lengths):
        new = jnp.repeat(q[:, :, :1], k.shape[1], 2)
        cache = [append(x, new, lengths - 1) for x in cache]
        (k_, k_scale), (v_, v_scale) = parts(cache[0]), parts(cache[-1])
        scales = dict(k_scale_BKS=k_scale, v_scale_BKS=v_scale)
        if H == 576:
            v_ = scales["v_scale_BKS"] = None
        return ragged_decode_attention(q, k_, v_, lengths, **scales, **options), cache

    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        program = jax.jit(step, donate_argnums=1).lower(q, cache, arrays["lengths_B"]).compile()
    memory = program.memory_analysis()
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert program.as_text().count(KERNEL) == 1
    assert memory.alias_size_in_bytes == size
    assert memory.temp_size_in_bytes < size / 16


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
        "multiple of 128": {f"{x}_BKSH": shape((16, 8, 2049, 128), BF16) for x in "kv"},
        "scales of both": dict(k_scale_BKS=shape((16, 8, 2048), F32)),
        "at most 131072 blocks": dict(
            q_BTNH=shape((1024, 1, 32, 128), BF16),
            lengths_B=shape((1024,), jnp.int32),
            **{f"{x}_BKSH": shape((1024, 8, 65536, 128), BF16) for x in "kv"},
        ),
    }
    return [(message, arrays | change, options) for message, change in changes.items()]


@pytest.mark.parametrize("message, arrays, options", refused(), ids=[x for x, _, _ in refused()])
def test_what_the_kernel_does_not_take_is_refused_by_name_and_left_to_the_blocked_form(
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
