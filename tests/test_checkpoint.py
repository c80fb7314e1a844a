"""safetensors' own writer makes the checkpoints. Loaded weights are compared with plain numpy."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_trees_equal, refused
from engine import load as load_fixture
from engine import tensors_of
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from common.loading import checkpoint as ck
from common.loading import reading
from common.loading.files import MOST_LINES
from common.loading.matching import Source, rows_by_path
from common.loading.random_weights import random_weights
from common.loading.reading import check_finite, limits_of
from common.loading.stored import StoredTensor, open_tensors
from common.names import Order, Same
from common.quant import INT8, TRANSPOSED, Rowwise, Transposed
from common.sharding import MODEL, P, Shards, make_mesh, model_shards, round_up
from common.weights import is_weight, matrix, norm

BF16 = np.dtype(jnp.bfloat16)
D, H, N, F, V, L = 10, 3, 6, 14, 13, 2  # all distinct, and no number of devices divides them all


class Layer(NamedTuple):
    norm: Any
    wq: Any
    wo: Any
    down: Any


class Weights(NamedTuple):
    embed: Any
    layers: tuple[Layer, ...]
    head: Any  # None when tied


def head_blocks(shards):
    """Returns the heads in reverse, dealt out to the shards. A shard that has too few gets a head
    of zeros (-1)."""
    return tuple(
        N - 1 - i if i < N else -1
        for i in np.arange(round_up(N, shards)).reshape(-1, shards).T.ravel()
    )


def layout(config, shards=Shards()):  # noqa: B008
    n = shards.model
    heads, vocab = len(head_blocks(n)) * H, round_up(V, n)
    layer = Layer(
        norm=norm(D),
        wq=matrix((heads, D), P(MODEL, None)),
        wo=matrix((D, heads), P(None, MODEL)),
        down=matrix((D, round_up(F, n)), P(None, MODEL)),
    )
    head = None if config.tied else matrix((vocab, D), P(MODEL, None))
    return Weights(matrix((vocab, D), P(MODEL, None)), (layer,) * L, head)


def table(config, shards=Shards()):  # noqa: B008
    blocks = head_blocks(shards.model)
    return {
        "m.embed.weight": "embed",
        "m.h.*.norm.weight": "layers.*.norm",
        "m.h.*.q.weight": ("layers.*.wq", Order(0, H, blocks)),
        "m.h.*.o.weight": ("layers.*.wo", Order(1, H, blocks)),
        "m.h.*.down.weight": "layers.*.down",
        "head.weight": Same("embed") if config.tied else "head",
        "m.h.*.rotary": None,
        "vision.**": None,
    }


UNTIED, TIED = SimpleNamespace(tied=False), SimpleNamespace(tied=True)
MODEL_FILE = SimpleNamespace(weight_layout=layout, checkpoint_table=table)


def specs():
    return jax.tree.map(lambda w: w.spec, layout(UNTIED), is_leaf=is_weight)


def stored_tensors(dtype=np.float32):
    rng = np.random.default_rng(0)
    shape = {"norm": (D,), "q": (N * H, D), "o": (D, N * H), "down": (D, F)}
    names = {f"m.h.{i}.{n}.weight": s for i in range(L) for n, s in shape.items()}
    names |= {"m.embed.weight": (V, D), "head.weight": (V, D)}
    return {name: rng.normal(size=s).astype(dtype) for name, s in names.items()}


def dense(stored, order, shape):
    """Reorders the blocks of a stored array, then pads each axis with zeros at the end."""
    if order is not None:
        blocks = np.split(stored, stored.shape[order.axis] // order.size, order.axis)
        stored = np.concatenate(
            [blocks[b] if b >= 0 else 0 * blocks[0] for b in order.blocks], order.axis
        )
    return np.pad(stored, [(0, n - m) for n, m in zip(shape, stored.shape, strict=True)])


def expected(tensors, shards):
    shards = Shards(tensor=shards)
    rows, want = table(UNTIED, shards), layout(UNTIED, shards)

    def get(name, weight):
        target = rows[re.sub(r"\d+", "*", name)]
        return dense(tensors[name], target[1] if isinstance(target, tuple) else None, weight.shape)

    names = ("norm", "q", "o", "down")
    layers = tuple(
        Layer(*(get(f"m.h.{i}.{n}.weight", s) for n, s in zip(names, want.layers[i], strict=True)))
        for i in range(L)
    )
    return Weights(get("m.embed.weight", want.embed), layers, get("head.weight", want.head))


def load(directory, mesh=None, dtype=np.float32, config=UNTIED, model=MODEL_FILE, **options):
    return ck.load_weights(directory, model, config, mesh or make_mesh(), dtype, **options)


def write_sharded(directory, tensors):
    """Writes the tensors to several files in turn, and an index. Returns the index."""
    files = ("weights-a.safetensors", "b of many.safetensors", "ZZ.safetensors")
    weight_map = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def assert_equal(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        a = np.asarray(a)
        assert a.dtype == b.dtype, path
        assert np.isfinite(a.astype(np.float32)).all(), path
        np.testing.assert_array_equal(a, b, err_msg=str(path))


MESHES: dict[str, dict[str, int]] = {
    "1": {},
    "2": {"tensor": 2},
    "4": {"expert": 2, "tensor": 2},
    "8": {"tensor": 8},
    "data": {"data": 4, "expert": 2},
}
EVERY_MESH = pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)


@pytest.fixture
def checkpoint(tmp_path):
    save_file(stored_tensors(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


# ---- what is loaded


@EVERY_MESH
@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16], ids=lambda d: np.dtype(d).name)
def test_weights_arrive_in_order_padded_and_sharded_on_every_mesh(tmp_path, axes, stored):
    mesh, tensors = make_mesh(**axes), stored_tensors(stored)
    save_file(tensors, tmp_path / "model.safetensors")
    for dtype in (np.dtype(np.float32), BF16):
        weights = load(tmp_path, mesh, dtype)
        want = expected(
            {name: x.astype(dtype) for name, x in tensors.items()}, model_shards(mesh).model
        )
        assert_equal(weights, want)
        for array, spec in zip(jax.tree.leaves(weights), jax.tree.leaves(specs()), strict=True):
            assert array.sharding == jax.sharding.NamedSharding(mesh, spec)


def test_weights_come_from_several_files_through_their_index(tmp_path):
    tensors = stored_tensors()
    write_sharded(tmp_path, tensors)
    assert_equal(load(tmp_path, make_mesh(tensor=2)), expected(tensors, 2))


def test_known_tensors_that_the_model_does_not_need_are_dropped_whatever_their_dtype(tmp_path):
    tensors, more = stored_tensors(), {"m.h.0.rotary": np.arange(3)}
    more |= {"vision.tower.3.weight": np.arange(4), "vision.bias": np.arange(2)}
    save_file(tensors | more, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), expected(tensors, 1))


def test_a_tied_head_that_repeats_the_embedding_is_dropped_and_another_is_refused(tmp_path):
    tensors = stored_tensors()
    same = tensors | {"head.weight": tensors["m.embed.weight"]}
    save_file(same, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path, config=TIED), expected(tensors, 1)._replace(head=None))
    one_number = tensors["m.embed.weight"].copy()
    one_number[-1, -1] += 1
    save_file(tensors | {"head.weight": one_number}, tmp_path / "model.safetensors")
    what = "head.weight differs from m.embed.weight, although config.json ties them"
    refused(ValueError, what, load, tmp_path, config=TIED)


@pytest.mark.parametrize(
    "family, variant, name",
    [
        ("llama3", "tied", "model.embed_tokens.weight"),
        ("qwen3", "tied", "model.embed_tokens.weight"),
        ("gpt2", "prefixed", "transformer.wte.weight"),
    ],
)
def test_a_tied_head_that_stands_alone_is_the_embedding(tmp_path, family, variant, name):
    tensors, want = tensors_of(family, variant), load_fixture(family, variant, "tensor=2")
    tensors["lm_head.weight"] = tensors[name]
    for _ in range(2):  # beside the embedding, and alone
        save_file(tensors, tmp_path / "model.safetensors")
        got = load(tmp_path, want.mesh, config=want.config, model=want.model)
        assert_trees_equal(got, want.weights)
        tensors.pop(name, None)


@pytest.mark.parametrize("start", ["", "model."])
def test_a_model_without_a_head_is_named_in_one_line(tmp_path, start):
    """Qwen3-Embedding has names without `model.`, and a config.json like that of a causal model."""
    tensors, other = tensors_of("qwen3", "moe_untied"), load_fixture("qwen3", "moe_untied")
    del tensors["lm_head.weight"]
    tensors = {start + x.removeprefix("model."): tensor for x, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    what = f"{tmp_path} holds no head (lm_head.weight): this is an embedding model"
    refused(ValueError, what, load, tmp_path, config=other.config, model=other.model)


def test_a_weight_without_a_row_in_the_table_is_named(checkpoint):
    rows = {name: target for name, target in table(UNTIED).items() if ".q." not in name}
    model = SimpleNamespace(weight_layout=layout, checkpoint_table=lambda *_: rows)
    what = "the checkpoint table of the model file has no row for layers.*.wq"
    refused(ValueError, what, load, checkpoint, model=model)


@EVERY_MESH
def test_int8_matrices_have_a_scale_per_channel_and_shard_of_the_input(tmp_path, axes):
    mesh, tensors = make_mesh(**axes), stored_tensors(BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    shards = model_shards(mesh).model
    weights, want = load(tmp_path, mesh, BF16, storage=INT8), expected(tensors, shards)
    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, Rowwise))
    for got, x, spec in zip(leaves, jax.tree.leaves(want), jax.tree.leaves(specs()), strict=True):
        if x.ndim == 1:
            np.testing.assert_array_equal(got, x)
            continue
        into = shards if spec[1] else 1
        parts = x.astype(np.float32).reshape(len(x), into, -1)
        scale = np.abs(parts).max(-1) / 127
        assert got.values.dtype == jnp.int8 and got.scale.shape == (into, len(x))
        np.testing.assert_allclose(got.scale, scale.T, rtol=1e-6)
        error = np.asarray(got.values).reshape(parts.shape) * scale[..., None] - parts
        assert (np.abs(error) <= 0.5001 * scale[..., None]).all()
        for part, s in zip(
            got.values.addressable_shards, got.scale.addressable_shards, strict=True
        ):
            assert s.data.shape == (1, part.data.shape[0])


@pytest.mark.one_in(2)
@EVERY_MESH
def test_transposed_matrices_hold_the_same_numbers(tmp_path, axes):
    mesh, tensors = make_mesh(**axes), stored_tensors(BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, mesh, np.float32, storage=TRANSPOSED)
    plain = jax.tree.map(
        lambda w: w.values.T if isinstance(w, Transposed) else w,
        weights,
        is_leaf=lambda w: isinstance(w, Transposed),
    )
    assert isinstance(weights.embed, Transposed)
    want = expected(tensors, model_shards(mesh).model)
    assert_equal(plain, jax.tree.map(lambda x: x.astype(np.float32), want))


def test_int8_is_made_from_the_stored_numbers_and_not_from_rounded_ones(checkpoint):
    one, other = (load(checkpoint, None, dtype, storage=INT8) for dtype in (np.float32, BF16))
    np.testing.assert_array_equal(one.embed.values, other.embed.values)
    assert one.layers[0].norm.dtype == np.float32 and other.layers[0].norm.dtype == BF16


class Layout(NamedTuple):
    stored: tuple[int, ...]
    padded: tuple[int, ...]
    order: Order | None
    grid: tuple[int, ...]  # the number of parts along each axis


@st.composite
def layouts(draw):
    rank = draw(st.integers(1, 3))
    grid = [draw(st.integers(1, 4)) for _ in range(rank)]
    stored = [draw(st.integers(1, 12)) for _ in range(rank)]
    padded = [round_up(n, g) for n, g in zip(stored, grid, strict=True)]
    order = None
    if draw(st.booleans()):
        axis, size, count = (
            draw(st.integers(0, rank - 1)),
            draw(st.integers(1, 4)),
            draw(st.integers(1, 5)),
        )
        stored[axis] = size * count
        per_part = draw(st.integers(1, 4))
        blocks = st.lists(
            st.integers(-1, count - 1),
            min_size=per_part * grid[axis],
            max_size=per_part * grid[axis],
        )
        turned = rank > 1 and draw(st.booleans())
        order = Order(axis, size, tuple(draw(blocks)), swapped=turned)
        padded[axis] = size * len(order.blocks)
    return Layout(tuple(stored), tuple(padded), order, tuple(grid))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(1, 200), st.sampled_from([np.dtype(np.float32), BF16]))
def test_every_part_of_every_layout_is_what_numpy_cuts_from_the_whole(layout, chunk, dtype):
    stored = np.arange(1, 1 + np.prod(layout.stored), dtype=np.float32).reshape(layout.stored)
    whole = dense(stored, layout.order, layout.padded).astype(dtype)
    if layout.order is not None and layout.order.swapped:
        stored = np.ascontiguousarray(stored.swapaxes(-1, -2))
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "READ_BYTES", chunk)
        save_file(
            {"before": np.ones(5, np.float32), "x": stored}, Path(directory) / "model.safetensors"
        )
        tensor = open_tensors(directory)["x"]
        for where in np.ndindex(layout.grid):
            steps = [n // g for n, g in zip(layout.padded, layout.grid, strict=True)]
            part = tuple((i * s, (i + 1) * s) for i, s in zip(where, steps, strict=True))
            source = Source((tensor,), layout.order, False)
            got = ck.read_shard(source, layout.padded, part, dtype)
            np.testing.assert_array_equal(got, whole[tuple(slice(*p) for p in part)])


@pytest.mark.parametrize(
    ("stored", "padded", "order"),
    [(8, 6, None), (8, 8, Order(0, 2, (0, 1, 2, 4))), (8, 8, Order(0, 2, (0, 1, 2)))],
    ids=["cut off", "beyond the end", "too few blocks"],
)
def test_a_layout_that_would_lose_or_invent_numbers_is_refused(stored, padded, order):
    with pytest.raises(ValueError, match=f"cannot lay {stored} stored elements out as {padded}"):
        reading.spans(stored, padded, (0, padded), order)


# ---- what is read, and when


@pytest.fixture
def reads(monkeypatch):
    """Records (offset, bytes) of every read of data."""
    ranges, read_into = [], reading.read_into

    def record(file, offset, out):
        ranges.append((offset, out.nbytes))
        read_into(file, offset, out)

    monkeypatch.setattr(reading, "read_into", record)
    return ranges


def test_a_shard_that_several_devices_hold_is_read_once(checkpoint, reads):
    load(checkpoint, make_mesh(data=4, expert=2))
    whole_rows = (x for n, x in stored_tensors().items() if ".o." in n or ".down." in n)
    twice = sum(x.nbytes for x in whole_rows)
    assert sum(n for _, n in reads) == sum(x.nbytes for x in stored_tensors().values()) + twice


def test_reads_go_through_each_file_from_front_to_back(checkpoint, reads):
    load(checkpoint)
    starts = np.array(sorted(t.offset for t in open_tensors(checkpoint).values()))
    tensor_of_read = [int(np.searchsorted(starts, offset, side="right")) for offset, _ in reads]
    assert tensor_of_read == sorted(tensor_of_read)
    assert set(tensor_of_read) == set(range(1, 1 + len(starts)))


def test_progress_counts_up_to_the_bytes_of_all_shards(checkpoint):
    calls = []
    load(checkpoint, make_mesh(tensor=8), progress=lambda *call: calls.append(call))
    done, totals = zip(*calls, strict=True)
    assert list(done) == sorted(set(done)) and set(totals) == {done[-1]}
    assert done[-1] == 4 * sum(x.size for x in jax.tree.leaves(expected(stored_tensors(), 8)))


def test_the_bar_is_drawn_on_a_terminal_and_nowhere_else():
    stream, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for out in (stream, terminal):
        draw = ck.progress_bar(out)
        draw(1 * 10**9, 2 * 10**9)
        draw(2 * 10**9, 2 * 10**9)
    assert stream.getvalue() == ""
    _, half, full = terminal.getvalue().split("\r")
    assert "#" * 20 + " " * 20 in half and "1.00/2.00 GB" in half and not half.endswith("\n")
    assert "#" * 40 in full and full.endswith("\n")


MEMORY = """
import gc, json, sys
from pathlib import Path
from types import SimpleNamespace
import jax
from common.loading import checkpoint as ck
from common import quant
from common.sharding import P, make_mesh
from common.weights import matrix

directory, (stored, dtype, storage, eager) = Path(sys.argv[1]), map(json.loads, sys.argv[2:])
SIZE = 2**23
shape = (2048, SIZE // 2048 // dict(F32=4, BF16=2)[stored])
if eager:
    kept, read_shard = [], ck.read_shard
    ck.read_shard = lambda *args: (kept.append(read_shard(*args)), kept[-1].copy())[1]

def write(count):  # the file system does not store the data, which is zeros
    places = {str(i): [i * SIZE, (i + 1) * SIZE] for i in range(count)}
    tensor = dict(dtype=stored, shape=shape)
    header = {name: dict(tensor, data_offsets=place) for name, place in places.items()}
    text = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        f.truncate(8 + len(text) + count * SIZE)

def load(count):
    model = SimpleNamespace(
        weight_layout=lambda *_: [matrix(shape, P(None, None))] * count,
        checkpoint_table=lambda *_: {"*": "*"},
    )
    options = dict(storage=storage and getattr(quant, storage))
    weights = ck.load_weights(directory, model, None, make_mesh(), dtype, **options)
    return sum(x.nbytes for x in jax.tree.leaves(weights)), resident("VmHWM")

def resident(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0]) * 1024

write(1)
load(1)  # pages code in, and compiles
gc.collect()
write(50)
Path("/proc/self/clear_refs").write_text("5")  # from here on the peak counts anew
before = resident("VmRSS")
assert resident("VmHWM") < before + 2**22
arrays, peak = load(50)
print(json.dumps(dict(checkpoint=50 * SIZE, arrays=arrays, overhead=peak - before - arrays)))
"""


def child(code, *arguments, devices):
    """Starts a Python process that runs `code` with its own CPU devices, and pipes its output."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    # Makes malloc return large arrays at once. Otherwise it keeps 30 to 90 MB, by chance.
    malloc = {"MALLOC_MMAP_THRESHOLD_": "131072"}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **malloc},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.one_in(5)
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux reports the peak in /proc"
)
@pytest.mark.parametrize(
    ("stored", "dtype", "storage", "eager"),
    [
        ("F32", "float32", None, False),
        ("F32", "bfloat16", None, False),
        ("BF16", "bfloat16", "INT8", False),
        ("BF16", "float32", "TRANSPOSED", False),
        ("F32", "float32", None, True),
    ],
    ids=["f32", "f32 to bf16", "bf16 to int8", "bf16 to transposed f32", "eager"],
)
def test_host_memory_is_the_arrays_and_a_constant_however_large_the_checkpoint(
    tmp_path, stored, dtype, storage, eager
):
    """On CPU the arrays are host memory, too. The eager reader must exceed the bound, which shows
    that the measurement works."""
    arguments = map(json.dumps, (stored, dtype, storage, eager))
    result = json.loads(child(MEMORY, tmp_path, *arguments, devices=1).communicate(timeout=120)[0])
    print(result)
    allowance = 64 * 2**20
    assert result["checkpoint"] > 4 * allowance
    assert result["overhead"] > 4 * allowance if eager else result["overhead"] < allowance


TWO_PROCESSES = """
import json, sys
import jax, numpy as np
directory, port, process = sys.argv[1:]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=int(process))
sys.path.insert(0, "tests")
import test_checkpoint as t
from common.loading import reading

reads, read_into = [], reading.read_into
def record(file, offset, out):
    reads.append((offset, out.nbytes))
    read_into(file, offset, out)
reading.read_into = record

mesh = t.make_mesh(tensor=4)
weights, want = t.load(directory, mesh), t.expected(t.stored_tensors(), 4)
for got, x in zip(jax.tree.leaves(weights), jax.tree.leaves(want), strict=True):
    assert got.shape == x.shape and len(got.addressable_shards) == 2 < mesh.size
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])
mine = list(reads)
t.load(directory, mesh, storage=t.INT8)
print(json.dumps(mine))
"""


def test_each_of_two_processes_reads_the_rows_of_its_own_devices_alone(checkpoint):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    both = [child(TWO_PROCESSES, checkpoint, port, i, devices=2) for i in range(2)]
    try:
        outputs = [p.communicate(timeout=120)[0] for p in both]
    finally:
        for p in both:
            p.kill()
    assert [p.returncode for p in both] == [0, 0]
    embed = open_tensors(checkpoint)["m.embed.weight"]
    row = 4 * D
    held = [set(range(8)), set(range(8, V))]  # of V = 13 rows, padded to 16
    for output, rows in zip(outputs, held, strict=True):
        read = [
            ((o - embed.offset) // row, n // row)
            for o, n in json.loads(output)
            if 0 <= o - embed.offset < row * V
        ]
        assert sorted(r for first, n in read for r in range(first, first + n)) == sorted(rows)


# ---- what is refused


def test_all_that_does_not_fit_is_reported_together_before_any_data_is_read(tmp_path, reads):
    tensors = stored_tensors()
    del tensors["m.h.1.down.weight"]
    tensors["m.h.0.q.weight"] = np.zeros((N * H + 1, D), np.float32)
    tensors["head.weight"] = np.zeros((V, D), np.int64)
    for name in ("m.h.0.extra.weight", "m.h.2.norm.weight", "m.h.{0}.{x.__class__}"):
        tensors[name] = np.zeros(D, np.float32)
    weight_map = write_sharded(tmp_path, tensors)
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    want = {
        "m.h.0.q.weight": " has shape [19, 10], but the config says [18, 10]",
        "head.weight": " has dtype I64, but only F32, F16, BF16 can be read",
        "m.h.0.extra.weight": " is not a weight of this model",
        "m.h.{0}.{x.__class__}": " is not a weight of this model",
        "m.h.2.norm.weight": " is not a weight of this model: it has no layers.2.norm",
    }
    lines = {f"{weight_map[name]}: {name}{text}" for name, text in want.items()}
    lines.add("no file has m.h.1.down.weight, of shape [10, 14]")
    assert set(str(caught.value).splitlines()) == lines
    assert reads == []


def test_of_many_that_do_not_fit_the_first_are_named(tmp_path):
    more = {f"more.{i}": np.zeros(1, np.float32) for i in range(100)}
    write_sharded(tmp_path, {**stored_tensors(), **more})
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == MOST_LINES + 1 and lines[-1] == "and 94 more such lines"


def test_two_stored_names_for_one_weight_are_refused(checkpoint):
    rows = table(UNTIED) | {"lm.weight": "head"}
    more = stored_tensors() | {"lm.weight": np.zeros((V, D), np.float32)}
    save_file(more, checkpoint / "model.safetensors")
    model = SimpleNamespace(weight_layout=layout, checkpoint_table=lambda *_: rows)
    what = "lm.weight is the same weight as head.weight"
    refused(ValueError, what, load, checkpoint, model=model)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_crash(checkpoint, monkeypatch):
    file = checkpoint / "model.safetensors"
    tensors = open_tensors(checkpoint)
    os.truncate(file, file.stat().st_size - 1)
    monkeypatch.setattr(ck, "open_tensors", lambda directory: tensors)
    refused(ValueError, f"{file} became shorter", load, checkpoint)


# ---- numbers that are not finite

BAD = {"NaN": np.nan, "negative NaN": -np.nan, "infinity": np.inf, "negative infinity": -np.inf}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=["f32", "f16", "bf16"])
@pytest.mark.parametrize("number", BAD.values(), ids=BAD)
@pytest.mark.parametrize("name", ["m.h.1.q.weight", "m.h.1.norm.weight"])
def test_a_number_that_is_not_finite_is_refused_by_the_name_of_its_tensor(
    tmp_path, dtype, number, name
):
    tensors = stored_tensors(dtype)
    tensors[name].flat[-1] = number
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    what = f"{file}: {name} holds NaN or infinity; download it again, or run it as it is with"
    for kind in (dtype, np.float32):  # read in place, and cast while reading
        refused(ValueError, what, load, tmp_path, dtype=kind)
    weights = load(tmp_path, allow_nonfinite=True)
    assert sum(not np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(weights)) == 1


def test_the_largest_numbers_of_each_dtype_are_numbers(tmp_path):
    for dtype in (np.float32, np.float16, BF16):
        tensors, largest = stored_tensors(dtype), jnp.finfo(dtype).max
        tensors["m.h.0.down.weight"][:2] = [[largest], [-largest]]
        save_file(tensors, tmp_path / "model.safetensors")
        load(tmp_path, dtype=dtype)


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
def test_nan_in_8_bit_floats_and_in_exponents_of_scales_is_found(bits):
    tensor = StoredTensor(Path("a"), "x", (5,), "F8_E4M3", 0)
    fp8, scale = np.array([1, 0x7E, 0xFE, 0, bits], np.uint8), np.array([0, 254, 255], np.uint8)
    refused(ValueError, "x holds NaN", check_finite, tensor, fp8, limits_of("w.values", "F8_E4M3"))
    check_finite(tensor, fp8[:-1], limits_of("w.values", "F8_E4M3"))
    refused(ValueError, "x holds NaN", check_finite, tensor, scale, limits_of("w.scale", "U8"))
    check_finite(tensor, scale[:-1], limits_of("w.scale", "U8"))
    assert limits_of("w.values", "U8") is None


# ---- weights without a checkpoint


@pytest.mark.one_in(5)
@pytest.mark.parametrize("axes", [MESHES["8"], MESHES["data"]], ids=["8", "data"])
@pytest.mark.parametrize("storage", [None, INT8, TRANSPOSED], ids=["plain", "int8", "transposed"])
def test_random_weights_are_laid_out_like_loaded_ones(checkpoint, axes, storage):
    mesh = make_mesh(**axes)
    random = random_weights(layout(UNTIED, model_shards(mesh)), mesh, BF16, 0, storage)
    loaded = load(checkpoint, mesh, BF16, storage=storage)
    assert jax.tree.structure(random) == jax.tree.structure(loaded)
    for a, b in zip(jax.tree.leaves(random), jax.tree.leaves(loaded), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


@pytest.mark.parametrize("storage", [None, INT8], ids=["plain", "int8"])
def test_random_matrices_are_centred_have_the_published_scale_and_never_repeat(storage):
    mesh, shape = make_mesh(data=2, tensor=4), (512, 256)
    tree = (
        norm(256),
        norm(256, initial=0.0),
        matrix(shape, P(MODEL, None)),
        matrix(shape, P(None, MODEL)),
    )
    trees = [random_weights(tree, mesh, np.float32, seed, storage) for seed in (0, 1)]
    assert (np.asarray(trees[0][0]) == 1).all() and (np.asarray(trees[0][1]) == 0).all()
    matrices = [
        np.asarray(x.values * x.scale.max() if storage else x) for tree in trees for x in tree[2:]
    ]
    for x in matrices:
        np.testing.assert_allclose(x.std(), 0.02, rtol=0.01)
        assert abs(x.mean()) < 0.02 / np.sqrt(x.size) * 5
    columns = [tuple(np.round(c[:8] * 1e6)) for x in matrices for c in x.T]
    columns += [tuple(np.round(r[:8] * 1e6)) for x in matrices for r in x]
    assert len(set(columns)) == len(columns)


def test_two_rows_that_make_one_weight_in_two_ways_are_refused():
    """With the name of a layer's second kind the last row would win in silence."""
    one, other = (("layers.*.w", Order(0, 1, blocks)) for blocks in ((0, 1), (1, 0)))
    rows_by_path({"a.*.w": one, "b.*.w": one})
    told = "a.*.w and b.*.w become layers.*.w in two ways"
    refused(ValueError, told, rows_by_path, {"a.*.w": one, "b.*.w": other})
