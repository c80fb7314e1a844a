"""Tests the GPU kernels without a GPU. An interpreter that detects races runs them, and the results
are compared with the formula. They are lowered on every machine. If the compiler of the `hopper`
extra is installed, they are also compiled for sm_90a, and must keep everything in registers.

None of this measures their speed.
"""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, refused, rounding
from engine import ENVIRONMENT, ROOT
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from test_attention import BF16_RTOL, assert_lse, attend_around, merge, oracle, split

from common.kernels import decode_attention_gpu as gpu
from common.kernels import ragged_dot_gpu as ragged
from common.kernels.decode_attention_gpu import decode_attention_gpu, kernel_sizes, unsupported
from common.kernels.hopper import plgpu
from common.kernels.ragged_dot_gpu import list_tiles, ragged_dot_gpu, rows_of_tile
from common.machines.chips import devices_of
from common.products import linear
from common.quant import Fp8, Grouped, Mxfp4, Rowwise, dequantize_fp8, dequantize_mxfp4

SCALES = ("k_scale_BKS", "v_scale_BKS")
ARRAYS = ("q_BTNH", "k_BKSH", "v_BKSH", *SCALES)
BF16, INT8, FP8, U8 = jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.uint8

IMPORTED = pytest.mark.skipif(
    plgpu is None, reason="JAX 0.10 imports Mosaic GPU only with absl-py installed"
)
INTERPRETED = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="JAX before 0.11 has no public interpreter of Mosaic GPU",
)
JOINS = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"),
    reason="mxfp4 is refused: Mosaic GPU of JAX before 0.11 cannot join its scales",
)
COMPILED = pytest.mark.skipif(
    not importlib.util.find_spec("jax_cuda13_plugin"),
    reason="compiling for sm_90a needs the compiler that the `hopper` extra installs",
)


class Case(NamedTuple):
    H: int
    K: int
    G: int
    T: int
    S: int
    cache: Any = BF16
    Hv: int | None = None
    latent: bool = False  # the values are the first Hv columns of the keys
    row: int | None = None  # columns of rows that begin with values and end with keys
    scaled: bool = False
    window: int | None = None
    sinks: bool = False
    wraps: bool = False

    def __str__(self):
        words = [f"{x}{n}" for x, n in zip("HKGTS", self[:5], strict=True)]
        words += [jnp.dtype(self.cache).name, f"values{self.Hv}" if self.Hv else ""]
        words += [f"rows{self.row}" if self.row else ""]
        switches = ("latent", "scaled", "window", "sinks", "wraps")
        words += [x for x in switches if getattr(self, x)]
        return "-".join(w for w in words if w)

    @property
    def v_dim(self):
        return self.Hv if self.latent or self.row else None


def shapes_of(case, B, shape=jax.ShapeDtypeStruct):
    """Returns the shapes of the kernel's arguments."""
    H, K, G, T, S = case[:5]
    f32 = functools.partial(shape, dtype=jnp.float32)
    arrays = dict(
        q_BTNH=shape((B, T, K * G, H), BF16),
        k_BKSH=shape((B, K, S, case.row or H), case.cache),
        v_BKSH=None if case.v_dim else shape((B, K, S, case.Hv or H), case.cache),
        lengths_B=shape((B,), jnp.int32),
        starts_BT=shape((B, T), jnp.int32),
    )
    if case.scaled:
        arrays |= {x: f32((B, K, S)) for x in (SCALES[:1] if case.latent else SCALES)}
    if case.sinks:
        arrays["sinks_N"] = f32((K * G,))
    return arrays


def make(case, lengths):
    """Returns arguments with NaN, or the largest numbers, past the lengths; and the formula's
    results."""
    rng = np.random.default_rng(0)
    lengths = np.array(lengths, np.int32)
    B, (_, K, _, T, S) = len(lengths), case[:5]
    stale_BKS = np.broadcast_to((np.arange(S) >= lengths[:, None])[:, None], (B, K, S))
    arrays: dict[str, Any] = {}
    for name, x in shapes_of(case, B).items():
        if x is None:
            arrays[name] = None
        elif name.endswith("scale_BKS"):
            scale = rng.uniform(0.5, 2, x.shape) * (1 if case.cache == FP8 else 1 / 60)
            arrays[name] = jnp.asarray(np.where(stale_BKS, np.nan, scale), x.dtype)
        elif x.dtype == INT8:
            values = rng.integers(-127, 128, x.shape)
            arrays[name] = jnp.asarray(np.where(stale_BKS[..., None], -128, values), x.dtype)
        else:
            values = rng.standard_normal(x.shape)
            stale = name[:2] in ("k_", "v_") and stale_BKS[..., None]
            arrays[name] = jnp.asarray(np.where(stale, np.nan, values), x.dtype)
    position_BT = lengths[:, None] - T + np.arange(T)
    first_BT = position_BT - case.window + 1 if case.window else np.zeros((B, T))
    arrays |= dict(lengths_B=lengths, starts_BT=first_BT.astype(np.int32))
    options = dict(scale=0.2, sinks=arrays.get("sinks_N"))
    k_scale, v_scale = (arrays.get(x) for x in SCALES)
    options |= dict(k_scale=k_scale, v_scale=k_scale if v_scale is None else v_scale)
    q, k, v = (arrays[x] for x in ("q_BTNH", "k_BKSH", "v_BKSH"))
    if v is None:
        k, v = k[..., k.shape[3] - case.H :], k[..., : case.Hv]
    return arrays, *oracle(q, k, v, lengths, arrays["starts_BT"], **options)


def attend(case, **options):
    options = dict(scale=0.2, v_dim=case.v_dim, wraps=case.wraps) | options
    run = functools.partial(decode_attention_gpu, **options)
    return lambda arrays: run(**arrays)


def interpret(run, arrays, capfd):
    """Runs on the CPU, and asserts that the interpreter finds no race."""
    races = plgpu.InterpretGPUParams(detect_races=True)
    out = jax.block_until_ready(jax.jit(lambda arrays: run(interpret=races)(arrays))(arrays))
    printed = capfd.readouterr().out
    assert "RACE" not in printed, printed[:2000]
    return out


# ---- interpreted, against the formula


LENGTHS = (0, 3, 64, 130, 150)
CASES = [  # every value of each field
    Case(64, 2, 3, 1, 150),
    Case(64, 1, 3, 5, 150, Hv=48, window=17, sinks=True),
    Case(80, 2, 1, 2, 150, sinks=True),
    Case(96, 1, 9, 8, 150, window=70),  # 72 query rows, in two blocks
    Case(128, 1, 2, 1, 152, cache=INT8, scaled=True, window=70, sinks=True),
    Case(64, 2, 2, 4, 152, cache=FP8, scaled=True),
    Case(32, 1, 2, 2, 150, cache=FP8, Hv=64),
    Case(96, 1, 2, 2, 150, Hv=64, latent=True),
    Case(80, 2, 1, 2, 152, cache=INT8, scaled=True),
    Case(320, 1, 3, 2, 152, cache=INT8, Hv=288, latent=True, scaled=True, window=70),
    Case(320, 1, 2, 1, 150, cache=FP8, Hv=288, latent=True),
    Case(320, 1, 5, 3, 150, Hv=288, latent=True, window=17, sinks=True),  # two warpgroups
    Case(64, 2, 3, 3, 150, Hv=64, row=128, window=70, sinks=True),
    Case(64, 1, 2, 1, 152, cache=INT8, Hv=48, row=112, scaled=True),
    Case(64, 1, 1, 8, 150, cache=FP8, Hv=64, row=128, window=17),
]


@pytest.mark.one_in(11)
@INTERPRETED
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_computes_the_formula_whatever_lies_past_the_lengths(case, capfd):
    arrays, want_o, want_lse = make(case, LENGTHS)
    o, lse = interpret(functools.partial(attend, case), arrays, capfd)
    assert o.dtype == BF16 and not np.asarray(o[0]).any()  # slot 0 is empty
    assert_close(o, want_o, rtol=BF16_RTOL, what=str(case))
    assert_lse(lse, want_lse, str(case))


@pytest.mark.one_in(4)
@INTERPRETED
@pytest.mark.parametrize("multiprocessors", [0, 3, 132])
@pytest.mark.parametrize("case", [Case(64, 2, 3, 2, 450, window=400), CASES[11]], ids=str)
def test_the_number_of_splits_changes_nothing(case, multiprocessors, capfd, monkeypatch):
    """With few splits, the blocks go round the ring buffer more than once."""
    monkeypatch.setattr(gpu, "MULTIPROCESSORS", multiprocessors)
    monkeypatch.setattr(gpu, "MAX_STAGES", 2)
    arrays, want_o, want_lse = make(case, (case.S, 0, case.S - 20))
    o, lse = interpret(functools.partial(attend, case), arrays, capfd)
    assert_close(o, want_o, rtol=BF16_RTOL)
    assert_lse(lse, want_lse)


@pytest.mark.one_in(3)
@INTERPRETED
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 1, 2, 8, 256, window=100),
        Case(64, 1, 2, 3, 256, cache=INT8, Hv=64, row=128, scaled=True),
        Case(320, 1, 3, 1, 256, Hv=288, latent=True),
    ],
    ids=str,
)
def test_parts_of_a_cache_with_lengths_below_0_and_above_them_merge_to_the_whole(case, capfd):
    """Some parts hold only NaN, and some queries see nothing of a part that is filled."""
    parts = 4 if case.T == 8 else 2
    arrays, want_o, want_lse = make(case, (3, 64, 130, 256))
    part = split({x: a for x, a in arrays.items() if a is not None}, parts)
    part["starts_BT"] = part.pop("starts")
    part = dict(v_BKSH=None) | part
    o, lse = interpret(functools.partial(attend, case), part, capfd)
    o, lse = merge(o, lse, parts)
    assert_close(o, want_o, rtol=BF16_RTOL)
    assert_lse(lse, want_lse)


@INTERPRETED
def test_blocks_before_the_window_are_not_read(capfd):
    """The blocks before the first slot's window hold NaN, and 0 * NaN would show."""
    case = Case(64, 1, 2, 2, 300, window=70)
    arrays, want_o, want_lse = make(case, (299, 140))
    for name in ("k_BKSH", "v_BKSH"):
        arrays[name] = arrays[name].at[0, :, :192].set(jnp.nan)
    o, lse = interpret(functools.partial(attend, case), arrays, capfd)
    assert_close(o, want_o, rtol=BF16_RTOL)
    assert_lse(lse, want_lse)


@pytest.mark.full
@INTERPRETED
@pytest.mark.parametrize(
    "cache, allowed, T, packed",
    [(BF16, dict(window=70), 3, True), (INT8, dict(chunk=128), 1, False)],
)
def test_a_cache_that_wraps_gives_what_one_of_all_positions_gives(cache, allowed, T, packed):
    (o, lse), (want_o, want_lse) = attend_around("gpu", T, BF16, cache, allowed, packed)
    assert_close(o, want_o, rtol=2 * BF16_RTOL)  # both are rounded
    assert_lse(np.asarray(lse), np.asarray(want_lse))


# ---- how splits share the blocks


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 20))
def test_the_splits_share_the_visible_blocks_without_gap_or_overlap(first, end, splits):
    shares = [map(int, gpu._share(*map(jnp.int32, (first, end, s)), splits)) for s in range(splits)]
    blocks = [j for at, count in shares for j in range(at, at + count)]
    assert blocks == list(range(first, end))


def grid(case, B):
    arrays = shapes_of(case, B)
    sizes = kernel_sizes(*(arrays.get(x) for x in ARRAYS), case.v_dim)
    return B * case.K * sizes.row_blocks * sizes.splits, sizes


@pytest.mark.parametrize("K", [1, 2, 8])
@pytest.mark.parametrize("B", [1, 3, 16])
def test_every_multiprocessor_has_work_at_any_batch_and_none_waits_for_a_second_turn(B, K):
    blocks, sizes = grid(Case(128, K, 8, 1, 32768), B)
    assert sizes.stages >= 2
    assert 132 <= blocks <= 264


def test_partial_results_move_no_more_than_the_cache_that_a_split_reads():
    case = Case(576, 1, 128, 1, 8192, Hv=512, latent=True)
    _, sizes = grid(case, 1)
    assert 2 * 64 * 512 * 4 * sizes.splits <= 8192 * 576 * 2


# ---- ragged dot


class Groups(NamedTuple):
    """Rows per expert. The last `tail` rows belong to none."""

    sizes: tuple[int, ...]
    tail: int
    n_in: int
    n_out: int
    form: Any = BF16

    def __str__(self):
        sizes = "+".join(map(str, self.sizes))
        return f"{sizes}+{self.tail}-in{self.n_in}-out{self.n_out}-{self.form.__name__}"


def weights(form, E, n_out, n_in, shape=jax.ShapeDtypeStruct):
    """Returns the shapes of E matrices [O, I]."""
    if form is Rowwise:
        return Rowwise(shape((E, n_out, n_in), INT8), shape((E, n_out), jnp.float32))
    if form is Fp8:
        blocks = (E, -(-n_out // 128), -(-n_in // 128))
        return Fp8(shape((E, n_out, n_in), FP8), shape(blocks, jnp.float32))
    if form is Mxfp4:
        return Mxfp4(shape((E, n_out, n_in // 2), U8), shape((E, n_out, n_in // 32), U8))
    return shape((E, n_out, n_in), form)


def multiply(interpret=False):
    run = functools.partial(ragged_dot_gpu, out_dtype=jnp.float32, interpret=interpret)
    return lambda arrays: run(**arrays)


GROUPS = [
    Groups((1,), 0, 128, 64),
    Groups((3, 0, 5, 1), 2, 144, 80),  # blocks of columns and of rows: one, and part of another
    Groups((0, 20, 13, 0, 1), 5, 272, 128, Rowwise),
    Groups((2, 0, 40), 0, 144, 96, Rowwise),
    Groups((0, 3, 9), 0, 272, 160, Fp8),
    Groups((17, 0, 1), 3, 128, 200, Fp8),
    Groups((0, 3, 9), 2, 416, 80, Mxfp4),  # part of a block of columns; some rows twice
    Groups((17, 0, 1), 3, 32, 128, Mxfp4),
    Groups((0, 0), 9, 128, 64),
]


@pytest.mark.one_in(3)
@INTERPRETED
@pytest.mark.parametrize("case", GROUPS, ids=str)
def test_ragged_dot_multiplies_each_row_by_its_experts_matrix(case, capfd, monkeypatch):
    """Rows of no expert hold NaN, and give zeros. With 2 stages, the blocks go round the ring
    buffer."""
    monkeypatch.setattr(ragged, "MAX_STAGES", 2)
    rng = np.random.default_rng(0)
    sizes, tail, n_in, n_out, form = case
    E, own = len(sizes), np.repeat(np.arange(len(sizes)), sizes)
    x = np.append(rng.standard_normal((len(own), n_in)), np.full((tail, n_in), np.nan), axis=0)

    def draw(shape, dtype):
        if dtype == U8:  # scales, or codes
            values = rng.integers(*((118, 134) if shape[2] == n_in // 32 else (0, 256)), shape)
        elif dtype == INT8:
            values = rng.integers(-127, 128, shape)
        else:
            values = rng.standard_normal(shape)
        return jnp.asarray(values, dtype)

    w = weights(form, E, n_out, n_in, draw)
    wide = w.values * w.scale[..., None] if form is Rowwise else w
    wide = np.float64({Fp8: dequantize_fp8, Mxfp4: dequantize_mxfp4}.get(form, lambda w: wide)(w))
    arrays = dict(x_MI=jnp.asarray(x, BF16), w_EOI=w, group_sizes_E=np.array(sizes, np.int32))
    arrays["bias_EO"] = draw((E, n_out), jnp.float32)
    y = np.array(interpret(multiply, arrays, capfd))
    rows, want = np.float64(arrays["x_MI"][: len(own)]), np.zeros(y.shape)
    want[: len(own)] = np.einsum("mi,moi->mo", rows, wide[own]) + np.float64(arrays["bias_EO"])[own]
    assert_close(y, want, rtol=rounding(n_in), what=str(case))


@given(st.lists(st.integers(0, 30), min_size=6, max_size=6), st.sampled_from([16, 32]))
def test_every_row_has_a_place_in_a_tile_and_no_tile_reads_an_expert_without_rows(sizes, rows):
    tail = 180 - sum(sizes)
    tiles = list_tiles(jnp.array(sizes), 180, rows)
    expert, start, used, expert_M, tile_M, row_M = map(np.asarray, tiles)
    own = np.repeat(np.arange(len(sizes)), sizes)
    n = len(own)
    assert (expert_M == np.append(own, np.full(tail, len(sizes)))).all()
    assert (expert[tile_M[:n]] == own).all() and used[tile_M[:n]].all()
    assert (start[tile_M[:n]] + row_M[:n] == np.arange(n)).all()
    assert (row_M[:n] < rows).all() and not (start[used == 1] % 8).any()
    assert set(np.flatnonzero(used)) == set(tile_M[:n])  # each used tile has a row


@pytest.mark.parametrize("M, E, rows", [(8, 128, 16), (64, 128, 16), (64, 8, 32), (4096, 8, 128)])
def test_a_tile_holds_twice_the_average_group(M, E, rows):
    assert rows_of_tile(M, E) == rows


# ---- lowered and compiled


REAL = [
    Case(64, 8, 4, 1, 2048),
    Case(80, 8, 4, 1, 2048),
    Case(96, 8, 1, 1, 2048),
    Case(128, 8, 8, 1, 2048, sinks=True),
    Case(128, 8, 8, 8, 2048, window=128),
    Case(256, 2, 4, 1, 2048),
    Case(256, 2, 4, 8, 2048),
    Case(64, 8, 8, 1, 2048, cache=INT8, scaled=True),
    Case(128, 8, 8, 1, 2048, cache=INT8, scaled=True),
    Case(128, 8, 8, 8, 2048, cache=FP8, scaled=True),
    Case(96, 8, 1, 2, 2048, cache=FP8),
    Case(256, 2, 4, 1, 2048, cache=INT8, scaled=True),
    Case(256, 2, 4, 8, 2048, cache=FP8, scaled=True),
    Case(576, 1, 16, 1, 2048, Hv=512, latent=True),
    Case(80, 8, 4, 1, 2048, cache=INT8, scaled=True),
    Case(80, 8, 4, 8, 2048, cache=FP8),
    Case(576, 1, 16, 1, 2048, cache=INT8, Hv=512, latent=True, scaled=True),
    Case(576, 1, 128, 2, 2048, cache=FP8, Hv=512, latent=True),
    Case(576, 1, 128, 2, 2048, Hv=512, latent=True),
    Case(64, 8, 8, 1, 2048, Hv=64, row=128, sinks=True),
    Case(64, 2, 8, 8, 2048, Hv=64, row=128, window=128),
    Case(64, 8, 8, 1, 2048, cache=INT8, Hv=64, row=128, scaled=True),
    Case(64, 8, 8, 3, 2048, cache=FP8, Hv=64, row=128),
    Case(64, 2, 8, 8, 2560, Hv=64, row=128, window=128, wraps=True),
]
FEW = [REAL[3], REAL[9], REAL[-2], REAL[-1]]
REAL_GROUPS = {
    f"M{M}-in{n_in}-out{n_out}-E{E}-{form.__name__}": (M, n_in, n_out, E, form)
    for M, n_in, n_out, E, form in (
        (8, 2048, 768, 128, BF16),
        (64, 768, 2048, 128, Rowwise),
        (8, 7168, 2048, 32, Fp8),
        (2048, 2880, 2880, 32, BF16),
        (1024, 2048, 7168, 8, Fp8),
        (8, 2880, 5760, 32, Mxfp4),
        (64, 416, 360, 32, Mxfp4),
        (2048, 2880, 2880, 32, Mxfp4),
    )
}


def shapes_of_groups(M, n_in, n_out, E, form, shape=jax.ShapeDtypeStruct):
    w, sizes = weights(form, E, n_out, n_in, shape), shape((E,), jnp.int32)
    return dict(x_MI=shape((M, n_in), BF16), w_EOI=w, group_sizes_E=sizes)


HOPPER = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")


@pytest.mark.one_in(3)
@IMPORTED
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_kernel_lowers_for_cuda_on_a_machine_without_a_gpu(case, devices):
    """The same holds with the slots split over eight devices, which all run one program."""
    types = (AxisType.Auto,)
    mesh = AbstractMesh((devices,), ("x",), axis_types=types, abstract_device=HOPPER)
    arrays = {x: a for x, a in shapes_of(case, 8).items() if x != "sinks_N" and a is not None}
    run = lambda arrays: attend(case)(dict(v_BKSH=None) | arrays)
    run = jax.shard_map(run, mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


@IMPORTED
@pytest.mark.parametrize(
    "case", [*list(REAL_GROUPS)[:3], pytest.param("M8-in2880-out5760-E32-Mxfp4", marks=JOINS)]
)
def test_ragged_dot_lowers_for_cuda_on_a_machine_without_a_gpu(case):
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=HOPPER)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(multiply()).trace(shapes_of_groups(*REAL_GROUPS[case]))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 1


@IMPORTED
@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_beside_a_plain_implementation_the_kernel_is_in_programs_for_cuda_alone(platform):
    """The program is traced for each platform, on a machine without a GPU."""
    case = FEW[0]
    arrays = shapes_of(case, 2)
    plain = lambda arrays: jax.tree.map(
        jnp.zeros_like, (arrays["q_BTNH"], arrays["q_BTNH"][..., 0])
    )
    kernel = lambda arrays: jax.tree.map(lambda x: x.astype(BF16), attend(case)(arrays))
    run = lambda arrays: jax.lax.platform_dependent(arrays, cuda=kernel, default=plain)
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=HOPPER)
    with jax.sharding.use_abstract_mesh(mesh):
        text = jax.jit(run).trace(arrays).lower(lowering_platforms=(platform,)).as_text()
    assert ("mosaic_gpu" in text) == (platform == "cuda")


@functools.cache
def hopper():
    """Returns a mesh of one GPU that is not there."""
    return Mesh(np.array(devices_of("h100")), ("x",))


@pytest.fixture
def compile_for_hopper(capfd, monkeypatch):
    """Compiles for a GPU that is not there, and asserts that no registers are spilled.
    Returns the bytes of temporaries."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh = hopper()
    place = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))

    def run(f, shapes):
        shapes = jax.tree.map(lambda x: place(x.shape, x.dtype), shapes)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            compiled = jax.jit(f).lower(shapes).compile()
        said = "".join(capfd.readouterr())
        used = re.search(r"Used (\d+) registers", said)
        assert "sm_90a" in said and used, said
        spilled = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", said)]
        assert len(spilled) >= 3 and max(spilled) == 0, said
        temporaries = compiled.memory_analysis().temp_size_in_bytes
        print(f"{used[1]} registers, {temporaries} bytes of temporaries")
        return temporaries

    return run


@COMPILED
@pytest.mark.parametrize("case", REAL, ids=str)
def test_compiled_for_hopper_attention_spills_no_register_and_copies_no_cache(
    case, compile_for_hopper
):
    temporaries = compile_for_hopper(attend(case), shapes_of(case, 4))
    blocks, sizes = grid(case, 4)
    partial_results = blocks * min(sizes.T * sizes.G, 64) * sizes.Hv * 4
    assert temporaries < partial_results + (1 << 20)


@COMPILED
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(name, marks=JOINS if case[-1] is Mxfp4 else ())
        for name, case in REAL_GROUPS.items()
    ],
)
def test_compiled_for_hopper_ragged_dot_spills_no_register_and_upcasts_no_matrix(
    case, compile_for_hopper
):
    M, _, n_out, E, _ = REAL_GROUPS[case]
    temporaries = compile_for_hopper(multiply(), shapes_of_groups(*REAL_GROUPS[case]))
    rows = rows_of_tile(M, E)
    tiles = len(list_tiles(jnp.zeros((E,), jnp.int32), M, rows).expert)
    assert temporaries < tiles * n_out * rows * 4 + (1 << 20)


@COMPILED
@pytest.mark.parametrize("rows, is_whole", [(8, False), (32, False), (64, True)])
def test_compiled_for_hopper_a_product_with_groups_writes_no_matrix_out_for_few_rows(
    rows, is_whole
):
    n_in, n_out, group = 3584, 8192, 64
    place = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(hopper(), P()))
    w = Grouped(place((n_in, n_out), jnp.int4), place((n_in // group, n_out), BF16))
    with jax.sharding.use_abstract_mesh(hopper().abstract_mesh):
        compiled = jax.jit(linear).lower(place((rows, n_in), BF16), w).compile()
    text = compiled.as_text()
    text = text[text.index("\nENTRY") :]  # the operations that are not within another
    copies = re.findall(r"= bf16\[(?:8192,56,64|56,64,8192|3584,8192|8192,3584)\]", text)
    assert bool(copies) == is_whole
    sums = 4 * rows * n_out * n_in // group
    assert compiled.memory_analysis().temp_size_in_bytes < max(sums, 2 * n_in * n_out) + (8 << 20)


# ---- refusals


REFUSED = {
    "queries of bfloat16, not float32": dict(q_BTNH=jax.ShapeDtypeStruct((2, 1, 4, 64), "float32")),
    "not ['float32']": dict(cache=jnp.float32),
    "multiples of 16 (of 32 for values wider than 256), not [72, 72]": dict(H=72),
    "not [64, 528]": dict(Hv=528),
    "no heads as wide as [1024, 64]": dict(H=1024, Hv=64),
    "a multiple of 64 places, not 150": dict(wraps=True),
    "a multiple of 4, not 150": dict(cache=INT8, scaled=True),
    "scales of both keys and values": dict(
        k_scale_BKS=jax.ShapeDtypeStruct((2, 2, 150), "float32")
    ),
    "on-chip memory is too small": dict(H=576, Hv=512, row=576, cache=INT8, scaled=True),
}


@IMPORTED
@pytest.mark.parametrize("message", REFUSED)
def test_what_the_kernel_cannot_do_is_refused_in_one_sentence(message):
    options = dict(REFUSED[message])
    replaced = {x: options.pop(x) for x in ("q_BTNH", "k_scale_BKS") if x in options}
    case = Case(64, 2, 2, 1, 150)._replace(**options)
    arrays = shapes_of(case, 2) | replaced
    refused(ValueError, message, jax.eval_shape, attend(case), arrays)


@IMPORTED
@pytest.mark.parametrize("case", CASES + REAL, ids=str)
def test_what_the_kernel_can_do_is_not_refused(case):
    arrays = shapes_of(case, 2)
    assert unsupported(*(arrays.get(x) for x in ARRAYS), case.v_dim) is None


REFUSED_GROUPS = {
    "rows of bfloat16, not float32": dict(x_MI=jax.ShapeDtypeStruct((8, 64), jnp.float32)),
    "weights in bfloat16, Rowwise, Fp8 and Mxfp4": dict(
        w_EOI=jax.ShapeDtypeStruct((4, 96, 64), FP8)
    ),
    "a multiple of 16 columns, not 72": dict(x_MI=jax.ShapeDtypeStruct((8, 72), BF16)),
    "of 64 rows or more, not 48": dict(w_EOI=weights(Mxfp4, 4, 48, 64)),
    "a multiple of 8 rows, not 92": dict(w_EOI=jax.ShapeDtypeStruct((4, 92, 64), BF16)),
}


@IMPORTED
@pytest.mark.parametrize("message", REFUSED_GROUPS)
def test_what_ragged_dot_cannot_do_is_refused_in_one_sentence(message):
    arrays = shapes_of_groups(8, 64, 96, 4, BF16) | REFUSED_GROUPS[message]
    refused(ValueError, message, jax.eval_shape, multiply(), arrays)


@COMPILED
@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_a_dry_run_compiles_both_steps_of_a_model_for_gpus_that_are_not_there(family):
    options = ["--mesh", "tensor=2", "--max-len", "128", "--prompt-tokens", "32", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", f"{family}.main", "--dry-run", "h100:2", *options],
        **dict(capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300),
    )
    assert done.returncode == 0, done.stderr
    [run] = json.loads(done.stdout)
    assert run["fits"] and run["chip"]["memory"] > 84e9
    for step in run["steps"].values():
        assert step["aliased"] >= step["cache"] and step["floor_ms"]["memory"] > 0
        reduced = [c for c in step["collectives"] if c["kind"] == "all-reduce"]
        assert sum(c["times"] for c in reduced if not c["conditional"]) >= 9  # of four layers
