"""Checkpoints come from safetensors' own writer; what is loaded is compared with plain numpy."""

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import errors as hub
from huggingface_hub.utils import filter_repo_objects
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from common import checkpoint as ck
from common.checkpoint import Order
from common.quant import INT8, TRANSPOSED, Int8, Transposed
from common.sharding import MODEL, make_mesh, model_shards, round_up

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
    """The heads in reverse, dealt out to the shards, with a head of zeros where one has too few."""
    return tuple(
        N - 1 - i if i < N else -1
        for i in np.arange(round_up(N, shards)).reshape(-1, shards).T.ravel()
    )


def shapes(shards=1, tied=False):
    heads = len(head_blocks(shards)) * H
    layer = Layer((D,), (heads, D), (D, heads), (D, round_up(F, shards)))
    vocab = round_up(V, shards)
    return Weights((vocab, D), (layer,) * L, None if tied else (vocab, D))


def specs(tied=False):
    layer = Layer(P(), P(MODEL, None), P(None, MODEL), P(None, MODEL))
    return Weights(P(MODEL, None), (layer,) * L, None if tied else P(MODEL, None))


def table(shards=1, tied=False):
    return {
        "m.embed.weight": ("embed", None),
        "m.h.*.norm.weight": ("layers.*.norm", None),
        "m.h.*.q.weight": ("layers.*.wq", Order(0, H, head_blocks(shards))),
        "m.h.*.o.weight": ("layers.*.wo", Order(1, H, head_blocks(shards))),
        "m.h.*.down.weight": ("layers.*.down", None),
        "head.weight": (None if tied else "head", None),
        "m.h.*.rotary": (None, None),
    }


def stored_tensors(dtype=np.float32):
    rng = np.random.default_rng(0)
    shape = {"norm": (D,), "q": (N * H, D), "o": (D, N * H), "down": (D, F)}
    names = {f"m.h.{i}.{n}.weight": s for i in range(L) for n, s in shape.items()}
    names |= {"m.embed.weight": (V, D), "head.weight": (V, D)}
    return {name: rng.normal(size=s).astype(dtype) for name, s in names.items()}


def dense(stored, order, shape):
    """Moved block by block, then padded with zeros at the end of each axis."""
    if order is not None:
        blocks = np.split(stored, stored.shape[order.axis] // order.size, order.axis)
        stored = np.concatenate(
            [blocks[b] if b >= 0 else 0 * blocks[0] for b in order.blocks], order.axis
        )
    return np.pad(stored, [(0, n - m) for n, m in zip(shape, stored.shape, strict=True)])


def expected(tensors, shards):
    rows = table(shards)

    def get(name, shape):
        return dense(tensors[name], rows[re.sub(r"\d+", "*", name)][1], shape)

    names = ("norm", "q", "o", "down")
    want = shapes(shards)
    layers = tuple(
        Layer(*(get(f"m.h.{i}.{n}.weight", s) for n, s in zip(names, want.layers[i], strict=True)))
        for i in range(L)
    )
    return Weights(get("m.embed.weight", want.embed), layers, get("head.weight", want.head))


def load(directory, mesh=None, dtype=np.float32, **options):
    mesh = mesh or make_mesh()
    shards = model_shards(mesh).model
    return ck.load_weights(
        directory, table(shards), shapes(), shapes(shards), specs(), mesh, dtype, **options
    )


def write_sharded(
    directory, tensors, files=("weights-a.safetensors", "b of many.safetensors", "ZZ.safetensors")
):
    """The tensors dealt out to files by turns, with an index; returns the index."""
    weight_map = {name: files[i % len(files)] for i, name in enumerate(tensors)}
    for file in files:
        save_file({n: tensors[n] for n, f in weight_map.items() if f == file}, directory / file)
    return write_index(directory, weight_map)


def write_index(directory, weight_map):
    (directory / ck.INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
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


def test_an_index_is_followed_whatever_the_files_are_called(tmp_path):
    tensors = stored_tensors()
    write_sharded(tmp_path, tensors)
    stale = {name: np.full_like(x, 7) for name, x in tensors.items()}
    save_file(stale, tmp_path / "consolidated.safetensors")
    save_file(stale, tmp_path / "model.safetensors")
    assert_equal(load(tmp_path, make_mesh(tensor=2)), expected(tensors, 2))


def test_several_files_without_an_index_are_read_together(tmp_path):
    tensors = stored_tensors()
    write_sharded(tmp_path, tensors)
    (tmp_path / ck.INDEX).unlink()
    assert_equal(load(tmp_path), expected(tensors, 1))


def test_known_tensors_that_the_model_does_not_need_are_dropped_whatever_their_dtype(tmp_path):
    tensors = stored_tensors()
    save_file(tensors | {"m.h.0.rotary": np.arange(3)}, tmp_path / "model.safetensors")
    weights = ck.load_weights(
        tmp_path,
        table(tied=True),
        shapes(tied=True),
        shapes(tied=True),
        specs(True),
        make_mesh(),
        np.float32,
    )
    assert_equal(weights, expected(tensors, 1)._replace(head=None))


@EVERY_MESH
def test_int8_matrices_have_a_scale_per_channel_and_shard_of_the_input(tmp_path, axes):
    mesh, tensors = make_mesh(**axes), stored_tensors(BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    shards = model_shards(mesh).model
    weights, want = load(tmp_path, mesh, BF16, form=INT8), expected(tensors, shards)
    leaves = jax.tree.leaves(weights, is_leaf=lambda x: isinstance(x, Int8))
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


@EVERY_MESH
def test_transposed_matrices_hold_the_same_numbers(tmp_path, axes):
    mesh, tensors = make_mesh(**axes), stored_tensors(BF16)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, mesh, np.float32, form=TRANSPOSED)
    plain = jax.tree.map(
        lambda w: w.values.T if isinstance(w, Transposed) else w,
        weights,
        is_leaf=lambda w: isinstance(w, Transposed),
    )
    assert isinstance(weights.embed, Transposed)
    want = expected(tensors, model_shards(mesh).model)
    assert_equal(plain, jax.tree.map(lambda x: x.astype(np.float32), want))


def test_int8_is_made_from_the_stored_numbers_and_not_from_rounded_ones(checkpoint):
    one, other = (load(checkpoint, None, dtype, form=INT8) for dtype in (np.float32, BF16))
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
        order = Order(axis, size, tuple(draw(blocks)))
        padded[axis] = size * len(order.blocks)
    return Layout(tuple(stored), tuple(padded), order, tuple(grid))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(1, 200), st.sampled_from([np.dtype(np.float32), BF16]))
def test_every_part_of_every_layout_is_what_numpy_cuts_from_the_whole(layout, chunk, dtype):
    stored = np.arange(1, 1 + np.prod(layout.stored), dtype=np.float32).reshape(layout.stored)
    whole = dense(stored, layout.order, layout.padded).astype(dtype)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ck, "CHUNK", chunk)
        save_file(
            {"before": np.ones(5, np.float32), "x": stored}, Path(directory) / "model.safetensors"
        )
        tensor = ck.open_tensors(directory)["x"]
        for where in np.ndindex(layout.grid):
            steps = [n // g for n, g in zip(layout.padded, layout.grid, strict=True)]
            part = tuple((i * s, (i + 1) * s) for i, s in zip(where, steps, strict=True))
            got = ck.read_shard(
                ck.Placement(ck.Stored((tensor,), layout.order, False), layout.padded, None),
                part,
                dtype,
            )
            np.testing.assert_array_equal(got, whole[tuple(slice(*p) for p in part)])


@pytest.mark.parametrize(
    ("stored", "padded", "order"),
    [(8, 6, None), (8, 8, Order(0, 2, (0, 1, 2, 4))), (8, 8, Order(0, 2, (0, 1, 2)))],
    ids=["cut off", "beyond the end", "too few blocks"],
)
def test_a_layout_that_would_lose_or_invent_numbers_is_refused(stored, padded, order):
    with pytest.raises(ValueError, match=f"cannot lay {stored} stored elements out as {padded}"):
        ck.runs(stored, padded, (0, padded), order)


# ---- what is read, and when


@pytest.fixture
def reads(monkeypatch):
    """(offset, bytes) of every read of data."""
    ranges, read_into = [], ck.read_into

    def record(file, offset, out):
        ranges.append((offset, out.nbytes))
        read_into(file, offset, out)

    monkeypatch.setattr(ck, "read_into", record)
    return ranges


def test_a_shard_that_several_devices_hold_is_read_once(checkpoint, reads):
    load(checkpoint, make_mesh(data=4, expert=2))
    whole_rows = (x for n, x in stored_tensors().items() if ".o." in n or ".down." in n)
    twice = sum(x.nbytes for x in whole_rows)
    assert sum(n for _, n in reads) == sum(x.nbytes for x in stored_tensors().values()) + twice


def test_reads_go_through_each_file_from_front_to_back(checkpoint, reads):
    load(checkpoint)
    starts = np.array(sorted(t.offset for t in ck.open_tensors(checkpoint).values()))
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
import jax
from jax.sharding import PartitionSpec as P
from common import checkpoint as ck, quant
from common.sharding import make_mesh

directory, (stored, dtype, form, eager) = Path(sys.argv[1]), map(json.loads, sys.argv[2:])
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
    tree = [shape] * count, [shape] * count, [P()] * count
    table = {"*": ("*", None)}
    options = dict(form=form and getattr(quant, form))
    weights = ck.load_weights(directory, table, *tree, make_mesh(), dtype, **options)
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
    """A Python process that runs `code` with CPU devices of its own; its output is piped."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak in /proc"
)
@pytest.mark.parametrize(
    ("stored", "dtype", "form", "eager"),
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
    tmp_path, stored, dtype, form, eager
):
    """On CPU the arrays are host memory as well. An eager reader shows that the measure tells."""
    arguments = map(json.dumps, (stored, dtype, form, eager))
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
from common import checkpoint as ck

reads, read_into = [], ck.read_into
def record(file, offset, out):
    reads.append((offset, out.nbytes))
    read_into(file, offset, out)
ck.read_into = record

mesh = t.make_mesh(tensor=4)
weights, want = t.load(directory, mesh), t.expected(t.stored_tensors(), 4)
for got, x in zip(jax.tree.leaves(weights), jax.tree.leaves(want), strict=True):
    assert got.shape == x.shape and len(got.addressable_shards) == 2 < mesh.size
    for shard in got.addressable_shards:
        np.testing.assert_array_equal(shard.data, x[shard.index])
mine = list(reads)
t.load(directory, mesh, form=t.INT8)
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
    embed = ck.open_tensors(checkpoint)["m.embed.weight"]
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


def refused(error, match, function, *args):
    """The message of `error`, which must hold `match` and be one line."""
    with pytest.raises(error) as caught:
        function(*args)
    message = str(caught.value)
    assert match in message and "\n" not in message, message
    return message


def test_all_that_does_not_fit_is_reported_together_before_any_data_is_read(tmp_path, reads):
    tensors = stored_tensors()
    del tensors["m.h.1.down.weight"]
    tensors["m.h.0.q.weight"] = np.zeros((N * H + 1, D), np.float32)
    tensors["head.weight"] = np.zeros((V, D), np.int64)
    tensors["m.h.0.extra.weight"] = tensors["m.h.2.norm.weight"] = np.zeros(D, np.float32)
    weight_map = write_sharded(tmp_path, tensors)
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    want = {
        "m.h.0.q.weight": " has shape [19, 10], but the config says [18, 10]",
        "head.weight": " has dtype I64, but only F32, F16, BF16 can be read",
        "m.h.0.extra.weight": " is not a weight of this model",
        "m.h.2.norm.weight": " is not a weight of this model: it has no layers.2.norm",
    }
    lines = {f"{weight_map[name]}: {name}{text}" for name, text in want.items()}
    lines.add("no file has m.h.1.down.weight, of shape [10, 14]")
    assert set(str(caught.value).splitlines()) == lines
    assert reads == []


def test_two_stored_names_for_one_weight_are_refused(checkpoint):
    rows = table() | {"lm.weight": ("head", None)}
    save_file(
        stored_tensors() | {"lm.weight": np.zeros((V, D), np.float32)},
        checkpoint / "model.safetensors",
    )
    args = checkpoint, rows, shapes(), shapes(), specs(), make_mesh(), np.float32
    refused(ValueError, "lm.weight is the same weight as head.weight", ck.load_weights, *args)


def rewrite_header(file, change):
    """The file with its parsed header changed in place by `change`."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    text = json.dumps(change(header) or header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


def move(header, by):
    header["head.weight"]["data_offsets"] = [n + by for n in header["head.weight"]["data_offsets"]]


DAMAGE = {
    "empty": lambda f: f.write_bytes(b""),
    "only a length": lambda f: f.write_bytes(f.read_bytes()[:8]),
    "half a header": lambda f: f.write_bytes(f.read_bytes()[:100]),
    "not safetensors": lambda f: f.write_text("<!DOCTYPE html><html>Sign in to download</html>"),
    "header not JSON": lambda f: f.write_bytes(f.read_bytes().replace(b"{", b"(", 1)),
    "header not text": lambda f: f.write_bytes(f.read_bytes().replace(b"{", b"\xff", 1)),
    "header a list": lambda f: rewrite_header(f, lambda h: [1]),
    "no shape": lambda f: rewrite_header(f, lambda h: h["head.weight"].pop("shape") and None),
    "no offsets": lambda f: rewrite_header(f, lambda h: h["head.weight"].update(data_offsets=[])),
    "offsets of another size": lambda f: rewrite_header(
        f, lambda h: h["head.weight"].update(data_offsets=[0, 4])
    ),
    "negative offset": lambda f: rewrite_header(f, lambda h: move(h, -10_000)),
    "offset past the end": lambda f: rewrite_header(f, lambda h: move(h, 10_000)),
    "negative shape": lambda f: rewrite_header(
        f, lambda h: h["head.weight"].update(shape=[-V, -D])
    ),
    "infinite offset": lambda f: rewrite_header(
        f, lambda h: h["head.weight"].update(data_offsets=[0, 1e999])
    ),
    "nested to exhaustion": lambda f: f.write_bytes(
        (200_000).to_bytes(8, "little") + b"[" * 200_000
    ),
    "cut short": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "too long": lambda f: f.write_bytes(f.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_name_before_any_data_is_read(checkpoint, reads, damage):
    damage(checkpoint / "model.safetensors")
    message = refused(ValueError, str(checkpoint / "model.safetensors"), load, checkpoint)
    assert re.search("is cut short|damaged header|incomplete download", message)
    assert reads == []


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_not_a_crash(checkpoint, monkeypatch):
    file = checkpoint / "model.safetensors"
    tensors = ck.open_tensors(checkpoint)
    os.truncate(file, file.stat().st_size - 1)
    monkeypatch.setattr(ck, "open_tensors", lambda directory: tensors)
    refused(ValueError, f"{file} became shorter", load, checkpoint)


def test_a_missing_file_of_the_index_is_named_with_a_tensor_it_holds(tmp_path):
    weight_map = write_sharded(tmp_path, stored_tensors())
    (tmp_path / "ZZ.safetensors").unlink()
    message = refused(
        FileNotFoundError, f"{tmp_path / 'ZZ.safetensors'} is missing; it holds ", load, tmp_path
    )
    assert weight_map[message.rsplit(" ", 1)[1]] == "ZZ.safetensors"


def test_a_tensor_that_its_file_does_not_hold_is_named_with_the_file(tmp_path):
    weight_map = write_sharded(tmp_path, stored_tensors())
    write_index(
        tmp_path, weight_map | {"head.weight": "ZZ.safetensors"} | {"more.weight": "ZZ.safetensors"}
    )
    held = weight_map["head.weight"] == "ZZ.safetensors"
    with pytest.raises(ValueError) as caught:
        load(tmp_path)
    lines = str(caught.value).splitlines()
    assert (
        f"{tmp_path / 'ZZ.safetensors'} lacks more.weight, which {ck.INDEX} says it holds" in lines
    )
    assert len(lines) == 2 - held


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]", "{", "\xff"]
)
def test_a_damaged_index_is_named(checkpoint, index):
    (checkpoint / ck.INDEX).write_text(index, encoding="latin-1")
    refused(ValueError, str(checkpoint / ck.INDEX), load, checkpoint)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    for name in "ab":
        save_file({"x": np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    message = refused(ValueError, "x is stored in a.safetensors as well", ck.open_tensors, tmp_path)
    assert str(tmp_path / "b.safetensors") in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    refused(
        FileNotFoundError,
        f"only {name}: pickles can run code and are never opened",
        ck.open_tensors,
        tmp_path,
    )


def test_a_directory_without_weights_is_an_error(tmp_path):
    refused(FileNotFoundError, f"{tmp_path} has no *.safetensors", ck.open_tensors, tmp_path)


def test_config_json_is_read_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1, "\u00e9"]}', encoding="utf-8")
    assert ck.read_config(tmp_path) == {"a": [1, "\u00e9"]}


@pytest.mark.parametrize(
    ("content", "error", "match"),
    [
        (None, FileNotFoundError, "config.json is missing in "),
        (b'{"a": 1', ValueError, "config.json is not JSON"),
        (b'{"a": "\xff"}', ValueError, "config.json is not JSON"),
        (b"[1]", ValueError, "config.json does not hold a JSON object"),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path, content, error, match):
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path) in refused(error, match, ck.read_config, tmp_path)


# ---- where the checkpoint is


@pytest.fixture
def downloads(monkeypatch):
    """Calls of the hub, which answers with the path /snapshot."""
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options))
        return "/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_directory_is_itself_and_asks_no_hub(tmp_path, monkeypatch, downloads):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ck.locate(str(tmp_path)) == tmp_path
    assert ck.locate("org/name") == Path("org/name")
    assert ck.locate("~/org") == tmp_path / "org"
    assert downloads == []


def test_one_call_downloads_what_is_read_and_nothing_else(downloads):
    assert ck.locate("org/some.model-1", "v1") == Path("/snapshot")
    ((repo, options),) = downloads
    assert repo == "org/some.model-1" and options.pop("revision") == "v1"
    wanted = {
        *(
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "vocab.json",
        ),
        *("special_tokens_map.json", "chat_template.jinja", "merges.txt", "tiktoken.model"),
        *("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"),
    }
    others = {
        *("original/consolidated.00.pth", "original/params.json", "original/model.safetensors"),
        *(
            "consolidated.safetensors",
            "consolidated.safetensors.index.json",
            "onnx/model.onnx",
            "model.onnx",
        ),
        *(
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "model-Q4.gguf",
            "rust_model.ot",
            "README.md",
        ),
        *("metal/model.bin", "fp8/model.safetensors", "modeling_custom.py", "consolidated.00.pth"),
    }
    assert set(filter_repo_objects(wanted | others, **options)) == wanted


HUB_ERRORS = {
    "gated": (
        hub.GatedRepoError,
        PermissionError,
        "accept the licence at https://huggingface.co/a/b and set HF_TOKEN",
    ),
    "missing": (hub.RepositoryNotFoundError, FileNotFoundError, "nor a repository on the hub"),
    "not a name": (hub.HFValidationError, FileNotFoundError, "nor a repository on the hub"),
    "revision": (
        hub.RevisionNotFoundError,
        FileNotFoundError,
        "a/b has no revision 'v9' on the hub",
    ),
    "unreachable": (hub.LocalEntryNotFoundError, ConnectionError, "the hub cannot be reached"),
    "anything else": (OSError, OSError, "a/b: the download failed: OSError"),
}


@pytest.mark.parametrize(("raised", "error", "match"), HUB_ERRORS.values(), ids=HUB_ERRORS)
def test_the_hub_refusing_is_one_line_that_says_what_to_do(monkeypatch, raised, error, match):
    def snapshot_download(repo, **options):
        raise raised.__new__(raised)  # their constructors want a response of the hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused(error, match, ck.locate, "a/b", "v9")


def test_an_offline_hub_without_the_files_in_its_cache_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused(
        ConnectionError,
        "org/name is neither a directory here nor complete in the hub's cache",
        ck.locate,
        "org/name",
    )


@pytest.mark.parametrize(
    "ckpt", ["", "name", "./no/such", "/no/such", "a/b/c", "~/nothing", "a b/c", "org/", "a/b\n"]
)
def test_a_path_that_is_not_there_and_no_hub_id_asks_no_hub(ckpt, downloads):
    refused(FileNotFoundError, f"{ckpt!r} is neither a directory nor a hub id", ck.locate, ckpt)
    assert downloads == []


def test_a_file_or_a_local_revision_is_refused(checkpoint):
    file = str(checkpoint / "model.safetensors")
    refused(NotADirectoryError, "a checkpoint is the directory it lies in", ck.locate, file)
    refused(ValueError, "has no revision 'main'", ck.locate, str(checkpoint), "main")


# ---- weights without a checkpoint


@pytest.mark.parametrize("axes", [MESHES["8"], MESHES["data"]], ids=["8", "data"])
@pytest.mark.parametrize("form", [None, INT8, TRANSPOSED], ids=["plain", "int8", "transposed"])
def test_random_weights_are_laid_out_like_loaded_ones(checkpoint, axes, form):
    mesh = make_mesh(**axes)
    random = ck.random_weights(shapes(model_shards(mesh).model), specs(), mesh, BF16, 0, form)
    loaded = load(checkpoint, mesh, BF16, form=form)
    assert jax.tree.structure(random) == jax.tree.structure(loaded)
    for a, b in zip(jax.tree.leaves(random), jax.tree.leaves(loaded), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for x, y in zip(a.addressable_shards, a.addressable_shards, strict=True):
            np.testing.assert_array_equal(x.data, y.data)


@pytest.mark.parametrize("form", [None, INT8], ids=["plain", "int8"])
def test_random_matrices_are_centred_have_the_published_scale_and_never_repeat(form):
    mesh, shape = make_mesh(data=2, tensor=4), (512, 256)
    tree = ((256,), shape, shape)
    trees = [
        ck.random_weights(tree, (P(), P(MODEL, None), P(None, MODEL)), mesh, np.float32, seed, form)
        for seed in (0, 1)
    ]
    assert (np.asarray(trees[0][0]) == 1).all()
    matrices = [
        np.asarray(x.values * x.scale.max() if form else x) for tree in trees for x in tree[1:]
    ]
    for x in matrices:
        np.testing.assert_allclose(x.std(), 0.02, rtol=0.01)
        assert abs(x.mean()) < 0.02 / np.sqrt(x.size) * 5
    columns = [tuple(np.round(c[:8] * 1e6)) for x in matrices for c in x.T] + [
        tuple(np.round(r[:8] * 1e6)) for x in matrices for r in x
    ]
    assert len(set(columns)) == len(columns)
