"""tools/pictures.py draws the pictures in the READMEs, and what they say is true."""

import importlib
import itertools
import re
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine import ROOT

from common.sharding import Shards, make_mesh
from tools import pictures

FILES = sorted(pictures.FOLDER.glob("*.svg"))
# gelu and softmax have no weights; a layer norm has a weight and a bias.
D, F, V = 768, 3072, 50257


def words(name):
    """Returns the words of a committed picture, one line for each line of text."""
    root = ElementTree.parse(pictures.FOLDER / f"{name}.svg").getroot()
    return "\n".join(e.text for e in root.iter() if e.tag.endswith("}text"))


def softmax(x):
    p = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[pytest.mark.full] * (x == "slots")) for x in pictures.PICTURES],
)
def test_the_committed_picture_is_the_one_that_is_drawn(name):
    committed = (pictures.FOLDER / f"{name}.svg").read_bytes()
    drawn = pictures.svg(pictures.PICTURES[name]()).encode()
    assert committed == drawn, "run python tools/pictures.py"


def test_every_file_is_drawn_by_the_script():
    assert [file.stem for file in FILES] == sorted(pictures.PICTURES)


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_is_in_the_readme_that_it_belongs_to(name):
    pages = dict(
        kernels="common/kernels/README.md", house="docs/forking.md", serving="docs/serving.md"
    ) | dict(slots="docs/serving.md", steps="docs/library.md", speed="docs/cpu.md")
    pages |= dict(perplexity="docs/four_bits.md")
    page = ROOT / pages.get(name, f"{name}/README.md")
    folder, shown = page.parent, re.findall(r"!\[([^\]\n]+)\]\(([^)]+)\)", page.read_text())
    texts = {(folder / target).resolve(): alt for alt, target in shown}
    assert len(texts[pictures.FOLDER / f"{name}.svg"]) > 20


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_has_both_colours_and_fetches_nothing(name):
    source = (pictures.FOLDER / f"{name}.svg").read_text()
    assert "prefers-color-scheme:dark" in source
    assert not re.findall(r"href|@import|@font-face|<image|<script", source)
    assert re.findall(r"\w+://\S+?(?=\")", source) == ["http://www.w3.org/2000/svg"]  # its name
    assert len(source) < 50_000


def extents(name, letter=6.6):
    """Returns (words, left, right, baseline) of each line of text, and (left, right, top, bottom)
    of each box. Assumes that every letter is `letter` wide, and 1.2 times that in a title."""
    texts, boxes = [], []
    for e in ElementTree.parse(pictures.FOLDER / f"{name}.svg").getroot().iter():
        kind = e.get("class", "")
        if e.tag.endswith("}text"):
            width = len(e.text) * letter * (1.2 if "title" in kind else 1)
            left = float(e.get("x")) - (0 if "left" in kind else width / 2)
            texts.append((e.text, left, left + width, float(e.get("y"))))
        elif e.tag.endswith("}rect") and kind != "frame":
            x, y, w, h = (float(e.get(key)) for key in ("x", "y", "width", "height"))
            boxes.append((x, x + w, y, y + h))
    return texts, boxes


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_words_stay_in_the_picture_and_in_their_box(name):
    """Even a font that is wider than most fits."""
    _, (background, *_) = extents(name)
    for words, left, right, y in extents(name, letter=7.2)[0]:
        assert left >= 4 and right <= background[1], words
        assert 12 < y < background[3] - 6, words
    texts, (_, *boxes) = extents(name)
    for words, left, right, y in texts:
        for x, end, top, bottom in boxes:
            outside = right <= x or end <= left or not top < y < bottom
            assert outside or (x <= left and right <= end), words


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_no_words_lie_on_others(name):
    texts, _ = extents(name)
    for i, (words, left, right, y) in enumerate(texts):
        for others, left_2, right_2, y_2 in texts[:i]:
            apart = abs(y - y_2) > 12 or right < left_2 or right_2 < left
            assert apart, f"{words} on {others}"


def collectives(jaxpr):
    """Yields the shape and dtype of each all-reduce of a program, but skips the branches of a
    `cond`, which greedy decoding does not take."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if re.match(r"psum|pmax|pmin", name):
            for x in eqn.invars:
                yield x.aval.shape, x.aval.dtype
        if name != "cond":
            for value in jax.tree.leaves(tuple(eqn.params.values()), is_leaf=is_jaxpr):
                if is_jaxpr(value):
                    yield from collectives(getattr(value, "jaxpr", value))


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_llama3_sends_what_the_picture_says():
    """The step itself is traced over four devices."""
    model = importlib.import_module("llama3.model")
    shapes = importlib.import_module("llama3.shapes")
    c, shards = model.config_from_hf(shapes.SHAPES["llama3.1-8b"]), Shards(tensor=4)
    layout = model.weight_layout(c, shards)
    weights = jax.tree.map(
        lambda w: jax.ShapeDtypeStruct(w.shape, jnp.bfloat16),
        layout,
        is_leaf=lambda x: hasattr(x, "kind"),
    )
    state = jax.eval_shape(lambda: model.init_state(c, 8, 128, jnp.bfloat16, shards))
    mesh = make_mesh(tensor=4)
    step = jax.make_jaxpr(
        lambda w, s: model.generate(w, s, config=c, mesh=mesh, implementation="reference")
    )(weights, state)
    found = list(collectives(step.jaxpr))
    hidden = [x for x in found if x[0] == (8, 1, 4096)]
    others = [x for x in found if x[0] != (8, 1, 4096)]
    assert {x[1] for x in hidden} == {jnp.dtype(jnp.bfloat16)}
    assert [x[0] for x in others] == [(8,), (8,)]
    sent = 8 * 4096 * 2
    greedy = sum(8 * dtype.itemsize for _, dtype in others)
    said = words("llama3")
    assert f"all-reduce [8, 1, 4096] bfloat16: {sent:,} bytes" in said
    total = (len(hidden) * sent + greedy) / 1e6
    assert f"{len(hidden)} x {sent:,} + {greedy} bytes = {total:.2f} MB into" in said


def test_the_experts_of_the_picture_compute_what_it_says():
    """Computed token by token, without a sort."""
    x = np.array([[0.0, 1], [1, 2], [2, 0], [3, 2]])
    router = np.array([[-0.3, 0.8], [0.7, -0.6], [0.2, -0.2], [0, -0.6]])
    matrices = np.array([np.eye(2), 2 * np.eye(2), [[0, 1], [1, 0]], 3 * np.eye(2)])
    said, sizes = words("qwen3"), [0] * 4
    for m, token in enumerate(x):
        p = softmax(router @ token)
        chosen = np.argsort(-p)[:2]
        weight = p[chosen] / p[chosen].sum()
        parts = [matrices[e] @ token for e in chosen]
        terms = [f"{w:.2f} ({y[0]:.0f}, {y[1]:.0f})" for w, y in zip(weight, parts, strict=True)]
        total = weight @ np.array(parts)
        rounded = np.round(weight, 2) @ np.array(parts)
        assert f"token {m}: {' + '.join(terms)} = ({total[0]:.2f}, {total[1]:.2f})" in said
        np.testing.assert_allclose(np.round(total, 2), rounded, atol=1e-9)  # by hand it is the same
        for e, w in zip(chosen, weight, strict=True):
            assert f"token {m}: {w:.2f} of expert {e}" in said
            sizes[e] += 1
        assert "\n".join(f"{n:.2f}" for n in p) in said
    assert f"group sizes {sizes}" in said
    assert sizes[3] == 0 and "expert 3: no rows, not read" in said


def test_the_byte_of_the_picture_is_decoded_by_the_rule():
    def decoded(code):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
        return -size if sign else size

    said = words("gpt_oss")
    byte = int(re.search(r"a byte: 0x(\w\w)", said).group(1), 16)
    scale = 2.0 ** (int(re.search(r"another byte: (\d+)", said).group(1)) - 127)
    assert f"first: {decoded(byte & 15):g} / {1 / scale:g} = {decoded(byte & 15) * scale}" in said
    assert f"second: {decoded(byte >> 4):g} / {1 / scale:g} = {decoded(byte >> 4) * scale}" in said
    assert "\n".join(f"{decoded(code):g}" for code in range(8)) in said
    assert f"{(16 + 1) * 8 / 32} bits a number" in said


def test_the_sink_of_the_picture_takes_its_share():
    keys, sink = [2.0, 1, 0, -1], 3.0
    said = words("gpt_oss")
    without, having = softmax(np.array(keys)), softmax(np.array([*keys, sink]))
    for shares in (without, having):
        lines = [f"key {i}: {key:g}\n{shares[i]:.2f}" for i, key in enumerate(keys)]
        assert "\n".join(lines) in said
    assert f"sink: 3\n{having[-1]:.2f}" in said
    assert f"with the sink, the values' weights sum to {having[:4].sum():.2f}" in said


def test_the_experts_of_the_two_models_are_those_that_the_picture_says():
    """Computed by the rules, in numpy: the sum of the two best in each group, then the best experts
    of four groups."""
    s_E = 1 / (1 + np.exp(-np.random.default_rng(1).normal(size=384)))
    groups = s_E[:256].reshape(8, 32)
    sums = np.sort(groups)[:, -2:].sum(axis=1)
    kept = np.argsort(-sums)[:4]
    allowed = [e for e in np.argsort(-s_E[:256]) if e // 32 in kept][:8]
    best, kimi = np.argsort(-s_E[:256])[:8], np.argsort(-s_E)[:8]
    root = ElementTree.parse(pictures.FOLDER / "kimi_k2.svg").getroot()
    elements = [e for e in root.iter() if e.tag[-4:] in ("rect", "text")]
    drawn = {"green": [], "yellow": []}
    for e, inside in itertools.pairwise(elements):
        if e.get("class") in drawn:
            drawn[e.get("class")].append(int(inside.text))
    assert drawn["green"] == sorted(allowed) + sorted(kimi)
    assert drawn["yellow"] == sorted(set(best) - set(allowed)) != []
    frames = [e.get("class") for e in elements if e.get("width") == "99"]
    assert frames == ["blue" if g in kept else "empty" for g in range(8)]
    said = words("kimi_k2")
    assert all(f"group {g}\nsum {total:.2f}" in said for g, total in enumerate(sums))


def test_the_states_of_the_picture_are_written_and_weighed_by_the_rule():
    S, k, v = np.array([[2.0, 1], [0, 3]]), np.array([1.0, 0]), np.array([1.0, 3])
    u = 0.5 * (v - S.T @ k)
    S, said = S + np.outer(k, u), words("qwen3_5")
    assert "\n".join(f"{n:g}" for n in S.ravel()) in said
    assert f"= ({u[0]:.1f}, {u[1]:.1f})" in said
    assert f"now reads ({(S.T @ k)[0]:.1f}, {(S.T @ k)[1]:.1f})" in said
    token, states = 16 * 2 * 4 * 256 * 2, 48 * 48 * 128 * 128 * 4
    channels = 2 * 16 * 128 + 48 * 128  # queries, keys and values
    rest = 48 * 4 * (channels * (3 + 8) + 48 * (2 * 8 + 1))
    for n in (1, 8192, 262_144):
        assert f"{n * token:,}\n{states + rest:,}\n" in said
    assert f"values of {(states + rest) // token:,} tokens" in said and f"{states:,} bytes" in said


def test_a_query_of_the_picture_sees_its_chunk():
    """Checks the coloured squares of both grids one by one."""
    root = ElementTree.parse(pictures.FOLDER / "llama4.svg").getroot()
    squares = {"blue": set(), "green": set()}
    for e in root.iter():
        if e.get("class") in squares and e.get("width") == "22":
            kind = e.get("class")
            x, y = float(e.get("x")) - (70 if kind == "blue" else 490), float(e.get("y")) - 96
            squares[kind].add((y / 22, x / 22))
    pairs = [(q, k) for q in range(12) for k in range(q + 1)]
    assert squares["green"] == set(pairs)
    assert squares["blue"] == {(q, k) for q, k in pairs if q // 4 == k // 4}
    said = words("llama4")
    assert "Scout's 48 layers: 36 rotary, in chunks of 8,192" in said
    for p in (0, 8191, 131071, 10485759):
        assert f"{1 + 0.1 * np.log(1 + (p + 1) // 8192):.2f} at {p:,}" in said


def test_the_kernels_picture_reads_what_is_filled_and_seen():
    root = ElementTree.parse(pictures.FOLDER / "kernels.svg").getroot()
    read = sum(e.get("class") == "blue" and e.get("width") == "75" for e in root.iter())
    seen = [(0, 700), (0, 130), (0, 0), (700, 1000)]
    blocks = {(b, s // 128) for b, (start, end) in enumerate(seen) for s in range(start, end)}
    assert read == len(blocks)
    assert f"{len(blocks)} of 32 blocks of 128" in words("kernels")


def test_the_online_softmax_of_the_picture_is_the_softmax():
    scores, values = np.array([[1.0, 3, 2], [4, 0, 2]]), np.array([[10.0, 20, 30], [40, 50, 60]])
    said = words("kernels")
    for i, largest in enumerate((3, 4)):
        seen, v = scores[: i + 1].ravel(), values[: i + 1].ravel()
        p = np.exp(seen - largest)
        assert f"m = {largest}" in said
        assert f"= {p.sum():.3f}" in said and f"= {p @ v:.2f}" in said
        assert f"({', '.join(f'{n:.3f}' for n in p[-3:])})" in said
    assert f"exp(m before - m) = {np.exp(3 - 4):.3f}" in said
    whole = softmax(scores.ravel()) @ values.ravel()
    assert f"o / total = {whole:.2f}" in said and f"six at once: {whole:.2f}" in said
