"""Matrices are quantised a block of rows at a time: with the same result, and in little memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from common.loading import converting
from common.loading.converting import BLOCK, convert
from common.machines.chips import devices_of
from common.quant import (
    INT8,
    SPECS,
    TRANSPOSED,
    Fp8,
    Transposed,
    dequantize_groups,
    int4,
    is_stored,
    quantize_weight,
)
from common.sharding import P, make_mesh

FORMS = ("plain", "transposed", "int8", "fp8")
STORAGES = {"int8": INT8, "transposed": TRANSPOSED, "int4": int4(32, True)}
BF16, SPEC = np.dtype(jnp.bfloat16), {2: P("tensor", None), 3: P(None, "tensor", None)}


def matrix_of(form, shape):
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal(shape, np.float32))
    if form == "transposed":
        return Transposed(w.swapaxes(-1, -2))
    if form == "int8":
        return quantize_weight(w)
    if form == "fp8":
        *lead, rows, columns = shape
        scale = rng.random((*lead, -(-rows // 128), -(-columns // 128)), np.float32)
        return Fp8(w.astype(jnp.float8_e4m3fn), jnp.asarray(scale))
    return w.astype(jnp.bfloat16)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("shape", [(513, 256), (3, 512, 256)], ids=["odd", "stack"])
@pytest.mark.parametrize("form", FORMS)
def test_blocks_of_rows_are_converted_as_the_whole_is(form, shape, storage, monkeypatch):
    mesh, spec = make_mesh(tensor=2 if shape[-2] % 2 == 0 else 1), SPEC[len(shape)]
    w = matrix_of(form, shape)
    specs = SPECS[type(w)](spec) if is_stored(w) else spec
    w = jax.tree.map(lambda a, s: jax.device_put(a, NamedSharding(mesh, s)), w, specs)

    def converted(block):
        monkeypatch.setattr(converting, "BLOCK", block)
        convert.clear_cache()
        return convert(w, spec, STORAGES[storage], BF16, mesh)

    got, want = converted(1 << 12), converted(1 << 30)
    convert.clear_cache()
    assert jax.tree.map(lambda a: (a.shape, a.dtype), got) == jax.tree.map(
        lambda a: (a.shape, a.dtype), want
    )
    if storage == "int4":  # sums of errors that are nearly equal may round either way
        got, want = (
            (jax.vmap(dequantize_groups)(x) for x in (got, want))
            if len(shape) == 3
            else (dequantize_groups(x) for x in (got, want))
        )
        assert (np.asarray(got) != np.asarray(want)).mean() < 0.03
        assert np.abs(got - want).mean() < 0.002 * np.abs(want).mean()
        return
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_a_matrix_of_many_blocks_takes_the_memory_of_one_beside_itself(form, storage):
    rows, columns = 16 * BLOCK // 4096, 4096
    shape = jax.eval_shape(lambda: matrix_of(form, (256, columns)))
    w = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((a.shape[0] * rows // 256, *a.shape[1:]), a.dtype), shape
    )
    memory = convert.lower(w, P(None, None), STORAGES[storage], BF16, make_mesh()).compile()
    given = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(w))
    # Beside a block, in float32 several times over, there may be a copy of the given bits.
    assert memory.memory_analysis().temp_size_in_bytes < given + 5 * 4 * BLOCK


@pytest.mark.full
@pytest.mark.parametrize("form", ["plain", "fp8"])
def test_a_tpu_takes_no_memory_beside_a_stack(form):
    mesh, spec = make_mesh(devices=devices_of("v5e:2x2")[:1]), P(None, None, None)
    # The experts of one device; a smaller stack would fit on the chip.
    w = jax.eval_shape(lambda: matrix_of(form, (16, 2048, 7168)))
    put = NamedSharding(mesh, spec)
    w = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=put), w)
    compiled = convert.lower(w, spec, INT8, BF16, mesh).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20
