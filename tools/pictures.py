"""Draws docs/pictures/*.svg, which the READMEs show.

    python tools/pictures.py

Each picture is a function that returns a list of shapes. Their numbers come from the library: from
the published configurations in shapes.py, and from the functions that the models call.
"""

import argparse
import ast
import importlib
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock
from xml.sax.saxutils import escape, quoteattr

import jax
import jax.numpy as jnp
import numpy as np

from common.cache import COPY_BLOCK
from common.experts import group_by_expert
from common.kernels.decode_attention import FEW_QUERIES
from common.kernels.decode_attention_tpu import list_blocks
from common.kernels.delta_rule import Tokens, delta_rule
from common.kernels.ragged_dot import ragged_dot
from common.kernels.reference import attention_reference
from common.kernels.softmax import NEG_INF, online_softmax
from common.kernels.visible import first_seen
from common.latents import empty_latent
from common.quant import MXFP4_GROUP, Mxfp4, dequantize_mxfp4, e2m1
from common.recurrent import PENDING, is_recurrent
from common.serving import steps as session_steps
from common.serving.load import load
from common.serving.prefixes import (
    HOST,
    KEPT,
    SLOT,
    Place,
    Prefixes,
    Text,
    hold,
    least_missed,
    longest,
)
from common.serving.serve import is_busy, step, submit
from common.serving.session import PROMPT_CHUNK, Request, start_session
from common.serving.steps import bucket_for
from common.sharding import P, Shards, make_mesh
from common.weights import by_path

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
WIDTH, LINE = 860, 17

# ---- drawing

# fill and line of each kind of shape: light, then dark
KINDS = {
    "plain": ("#f6f8fa", "#8c959f", "#161b22", "#6e7681"),
    "blue": ("#ddf4ff", "#0969da", "#0c2d4d", "#4493f8"),
    "green": ("#dafbe1", "#1a7f37", "#12361e", "#3fb950"),
    "purple": ("#fbefff", "#8250df", "#33214f", "#ab7df8"),
    "yellow": ("#fff8c5", "#9a6700", "#3f3000", "#d29922"),
    "empty": ("#ffffff", "#d0d7de", "#0d1117", "#30363d"),
    "frame": ("none", "#8c959f", "none", "#6e7681"),
}


def style() -> str:
    def colours(at: int, ink: str, faint: str, line: str) -> str:
        rules = [f".{k}{{fill:{c[at]};stroke:{c[at + 1]}}}" for k, c in KINDS.items()]
        rules += [f"text,.head{{fill:{ink}}}.faint{{fill:{faint}}}.arrow{{stroke:{line}}}"]
        return "".join(rules)

    font = 'Helvetica,Arial,"Liberation Sans",sans-serif'  # of one width on all systems
    return (
        f"text{{font:13px {font};text-anchor:middle}}.title{{font-weight:600;font-size:15px}}"
        ".left{text-anchor:start}.faint{font-size:12px}.arrow{fill:none;stroke-width:1.5}"
        ".frame{stroke-dasharray:5 4}"
        + colours(0, "#1f2328", "#59636e", "#59636e")
        + "@media (prefers-color-scheme:dark){"
        + colours(2, "#e6edf3", "#9198a1", "#9198a1")
        + "}"
    )


def text(x: float, y: float, words: str, kind: str = "") -> str:
    """Lines of words around the middle (x, y), or from x on if `left` is among the kinds."""
    lines = words.split("\n")
    top = y + 4.5 - LINE * (len(lines) - 1) / 2
    mark = f' class="{kind}"' if kind else ""
    return "\n".join(
        f'<text x="{x:g}" y="{top + i * LINE:g}"{mark}>{escape(line)}</text>'
        for i, line in enumerate(lines)
        if line
    )


def box(x: float, y: float, w: float, h: float, words: str = "", kind: str = "plain") -> str:
    rect = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="2"/>'
    return rect + (text(x + w / 2, y + h / 2, words) if words else "")


def arrow(*points: tuple[float, float], head: bool = True) -> str:
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    tip = ' marker-end="url(#head)"' if head else ""
    return f'<polyline class="arrow" points="{path}"{tip}/>'


def number(x: float, y: float, n: int) -> str:
    """Step n of a picture."""
    return f'<circle class="purple" cx="{x:g}" cy="{y:g}" r="10"/>' + text(x, y, f"{n}")


def grid(x: float, y: float, kinds: Any, w: float, h: float, words: Any = None) -> list[str]:
    """A box for each entry of rows of kinds, with its words."""
    return [
        box(x + j * w, y + i * h, w, h, words[i][j] if words else "", kind)
        for i, row in enumerate(kinds)
        for j, kind in enumerate(row)
    ]


def chain(x: float, y: float, *steps: tuple[str, float, str, str]) -> list[str]:
    """From x to the right, of each step an arrow with its label and a box of its width."""
    shapes = []
    for label, width, words, kind in steps:
        shapes += [arrow((x, y), (x + 70, y)), text(x + 35, y - 11, label, "faint")]
        shapes.append(box(x + 70, y - 20, width, 40, words, kind))
        x += 70 + width
    return shapes


class Picture(NamedTuple):
    title: str
    height: int
    shapes: list[str]


def svg(picture: Picture) -> str:
    size = f'viewBox="0 0 {WIDTH} {picture.height}" width="{WIDTH}" height="{picture.height}"'
    tip = '<path class="head" d="M0 0 8 4 0 8z"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" '
        f"aria-label={quoteattr(picture.title)}>",
        f"<style>{style()}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">{tip}</marker></defs>',
        box(0.5, 0.5, WIDTH - 1, picture.height - 1, kind="empty"),
        text(20, 26, picture.title, "title left"),
        *picture.shapes,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---- numbers


def published(family: str, size: str) -> tuple[Any, Any]:
    """The model file of a family, and the configuration of one of its sizes."""
    model, shapes = (importlib.import_module(f"{family}.{file}") for file in ("model", "shapes"))
    return model, model.config_from_hf(shapes.SHAPES[size])


def count(tree: Any, parts: int = 1) -> int:
    """Numbers in the declarations of some weights, on a device of `parts` that split whatever has
    an axis in its partition."""
    sizes = ((math.prod(w.shape), any(w.spec)) for w in by_path(tree).values())
    return sum(size // parts if is_split else size for size, is_split in sizes)


def attended(scores_S: Any, values_SH: Any, sink: float | None = None) -> np.ndarray:
    """What a query with these scores makes of the values: [H]."""
    q, end, start = jnp.ones((1, 1, 1, 1)), jnp.array([scores_S.size]), jnp.zeros((1, 1), jnp.int32)
    cache = scores_S.reshape(1, 1, -1, 1), values_SH[None, None]
    sinks = None if sink is None else jnp.array([sink])
    o, _ = attention_reference(q, *cache, end, start, sinks_N=sinks, scale=1.0)
    return np.asarray(o).ravel()


def shape(*sizes: Any) -> str:
    return "[" + ", ".join(str(n) for n in sizes) + "]"


def vector(x: Any, digits: int = 0) -> str:
    return "(" + ", ".join(f"{n:.{digits}f}" for n in np.asarray(x)) + ")"


def millions(tree: Any) -> str:
    return f"{count(tree) / 1e6:.2f} M"


# ---- pictures, whose shapes stand one by one
# fmt: off


def gpt2_layer() -> Picture:
    model, c = published("gpt2", "gpt2")
    w = model.weight_layout(c)
    layer, D, N = w.layers[0], c.hidden_size, c.num_attention_heads
    L, F, root = c.num_hidden_layers, c.intermediate_size, math.isqrt(c.head_dim)
    x, stream = 70, shape("T", D)
    shapes = [
        box(20, 45, 250, 44, f"embed[token] + positions[t]\n{shape(c.vocab_size, D)}, "
            f"{shape(c.max_position_embeddings, D)}", "blue"),
        text(80, 107, f"the residual stream x: {stream}", "left faint"),
        box(30, 122, 815, 270, kind="frame"),
        text(570, 107, f"one of {L} layers, {millions(layer)} numbers"),
        *(arrow((x, top), (x, end)) for top, end in ((89, 226), (244, 358), (376, 423))),
        *chain(x, 157, ("", 85, "layer norm", "plain"),
               (stream, 80, f"w_qkv\n{millions(layer.w_qkv)}", "plain"),
               (shape("T", 3 * D), 250, f"{N} heads of {c.head_dim} columns, over the\ntokens so "
                f"far: softmax(q · k / {root}) v", "green"),
               (stream, 65, f"wo\n{millions(layer.wo)}", "plain")),
        *grid(450, 182, [["empty"] * N], 20, 20, [[str(n) for n in range(N)]]),
        text(400, 198, f"k, v → cache\n2 x {shape('S', D)}", "faint"),
        arrow((797, 177), (797, 235), (79, 235)), text(250, 224, stream, "faint"),
        *chain(x, 295, ("", 85, "layer norm", "plain"),
               (stream, 80, f"w_up\n{millions(layer.w_up)}", "plain"),
               (shape("T", F), 80, "gelu", "green"),
               (shape("T", F), 80, f"w_down\n{millions(layer.w_down)}", "plain")),
        arrow((635, 315), (635, 367), (79, 367)), text(250, 356, stream, "faint"),
        *(box(x - 9, y, 18, 18, "+") for y in (226, 358)),
        box(20, 423, 105, 40, "layer norm"),
        *chain(125, 443, (stream, 140, "embed, transposed", "blue")),
        *chain(335, 443, (shape("T", c.vocab_size), 360,
                          "logits: a score for every token that may come next", "plain")),
        text(20, 488, f"{L} x {millions(layer)} in the layers, {millions(w.embed)} in embed, "
             f"{millions(w.positions)} in positions and {2 * D:,} in the last norm: {count(w):,} "
             "numbers.", "left"),
        text(20, 510, "T: tokens of the text. S: positions of the cache. M: million. The count of "
             "a layer includes its biases and norms.", "left faint"),
    ]
    return Picture("GPT-2 (124M): what a layer reads from the stream and adds to it", 532, shapes)


def llama3_step() -> Picture:
    (model, c), B, n = published("llama3", "llama3.1-8b"), 8, 4
    D, layers, nbytes = c.hidden_size, c.num_hidden_layers, 2  # of a bfloat16
    V, F = c.vocab_size // n, c.intermediate_size
    sent, reduces, greedy = B * D * nbytes, 1 + 2 * layers, 2 * B * 4
    weights = model.weight_layout(c, Shards(tensor=n))._replace(embed=())  # B rows are read
    state = jax.eval_shape(partial(model.init_state, c, 1, 1, jnp.bfloat16))
    position = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache)) // n
    columns = [135 + 180 * d for d in range(n)]

    def on_each(y: float, h: float, kind: str, words: Callable[[int], str]) -> list[str]:
        return [box(x, y, 165, h, words(d), kind) for d, x in enumerate(columns)]

    def collective(y: float, words: str) -> list[str]:
        down = [arrow((x + 82, y + at), (x + 82, y + at + 14)) for x in columns for at in (-14, 26)]
        return [*down, box(135, y, 705, 26, words, "yellow")]

    reduce = f"all-reduce {shape(B, 1, D)} bfloat16: {sent:,} bytes"
    N, K = c.num_attention_heads // n, c.num_key_value_heads // n
    heads = f"norm\n{N} query heads\n{K} key/value heads\nand their cache; wo"
    places = ((52, "device"), (87, "embedding"), (168, f"{layers} layers:"), (205, "attention"),
              (324, "MLP"), (421, "head"))
    shapes = [
        *(text(20, y, place, "left") for y, place in places),
        *(text(x + 82, 52, f"tensor = {d}") for d, x in enumerate(columns)),
        *on_each(66, 42, "blue", lambda d: f"embed, rows\n{d * V:,} to {(d + 1) * V - 1:,}"),
        *collective(122, reduce),
        box(125, 156, 725, 234, kind="frame"),
        *on_each(162, 86, "green", lambda d: heads),
        *collective(262, reduce),
        *on_each(302, 44, "green", lambda d: f"norm; gate, up, down:\n{F // n:,} of F = {F:,}"),
        *collective(360, reduce),
        *on_each(400, 42, "blue", lambda d: f"norm; logits\n{shape(B, 1, V)}"),
        *collective(456, f"all-reduces {shape(B)}: the largest logit, then the lowest id that "
                    f"has it: {greedy} bytes"),
        *on_each(496, 28, "plain", lambda d: f"the same {B} tokens"),
        text(20, 551, f"Each device puts {reduces} x {sent:,} + {greedy} bytes = "
             f"{(reduces * sent + greedy) / 1e6:.2f} MB into all-reduces. It reads "
             f"{count(weights, n) * nbytes / 1e9:.2f} GB of weights, and {position:,}", "left"),
        text(20, 570, "bytes of cache for each filled position of a slot. Queries, keys, values "
             "and scores stay where they are made.", "left"),
    ]
    return Picture(f"Llama 3.1 8B: one decode step of {B} slots on {n} devices", 594, shapes)


def qwen3_experts() -> Picture:
    x_MD = jnp.array([[0.0, 1], [1, 2], [2, 0], [3, 2]])
    router_ED = jnp.array([[-0.3, 0.8], [0.7, -0.6], [0.2, -0.2], [0, -0.6]])
    w_EOI = jnp.array([[[1.0, 0], [0, 1]], [[2, 0], [0, 2]], [[0, 1], [1, 0]], [[3, 0], [0, 3]]])
    model, config = published("qwen3", "qwen3-30b-a3b")
    config, layer = config._replace(num_experts_per_tok=2), model.Moe(router_ED, w_EOI)
    weight_MX, expert_MX = (np.asarray(a) for a in model.route(x_MD, layer, config))
    group = partial(group_by_expert, num_local=len(w_EOI))
    sort = jax.shard_map(group, mesh=make_mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    groups = jax.tree.map(np.asarray, sort(expert_MX))
    y_RO = ragged_dot(x_MD[groups.token], w_EOI, groups.sizes, implementation="reference")
    sum_MO = (y_RO[groups.row] * weight_MX[..., None]).sum(axis=1)
    p_ME = jax.nn.softmax(x_MD @ router_ED.T)

    (M, X), colours, h, top = expert_MX.shape, ("blue", "green", "purple", "empty"), 30, 98
    titles = ((150, "1. router: probabilities\nof experts 0 to 3"),
              (375, "2. two choices a token,\nscaled to a sum of 1"),
              (600, "3. sorted: an expert's\nrows are neighbours"),
              (775, "4. each group times\nits expert's matrix"))
    shapes = [text(x, 64, words) for x, words in titles]
    for m in range(M):
        y = top + (2 * m + 1) * h
        chosen = [[colour if e in expert_MX[m] else "empty" for e, colour in enumerate(colours)]]
        shapes.append(text(40, y, f"token {m}\n{vector(x_MD[m])}"))
        shapes += grid(76, y - 15, chosen, 42, 30, [[f"{p:.2f}" for p in p_ME[m]]])
        parts = (f"{weight_MX[m, x]:.2f} {vector(y_RO[groups.row[m, x]])}" for x in range(X))
        words = f"token {m}: {' + '.join(parts)} = {vector(sum_MO[m], 2)}"
        shapes.append(text(40 + 410 * (m // 2), 413 + 22 * (m % 2), words, "left"))
    for row, choice in enumerate(groups.choice):
        (m, x), y, from_y = divmod(choice, X), top + row * h, top + choice * h
        e = expert_MX[m, x]
        words = f"token {m}: {weight_MX[m, x]:.2f} of expert {e}"
        shapes += [box(285, from_y + 2, 180, h - 4, words, colours[e]),
                   arrow((465, from_y + 15), (550, y + 15)),
                   box(550, y + 2, 110, h - 4, f"token {m}: {vector(x_MD[m])}", colours[e]),
                   text(815, y + 15, f"→ {vector(y_RO[row])}")]
    ends = np.cumsum(groups.sizes) * h + top
    for e, (size, end) in enumerate(zip(groups.sizes, ends, strict=True)):
        if size:
            matrix = "\n".join("  ".join(f"{n:.0f}" for n in row) for row in w_EOI[e])
            words = f"expert {e}\n{matrix}"
            shapes.append(box(685, end - size * h + 2, 95, size * h - 4, words, colours[e]))
        else:
            shapes.append(box(585, end + 2, 200, h - 4, f"expert {e}: no rows, not read", "empty"))
    shapes += [
        text(490, 355, f"group sizes {groups.sizes.tolist()}"),
        text(20, 388, "5. back to the tokens, and the weighted sum:", "left"),
        text(20, 468, "In the model a row meets three matrices of its expert: gate and up, then "
             "down.", "left faint"),
    ]
    title = f"Experts: {M} tokens, {X} choices each, as {M * X} rows sorted by expert"
    return Picture(title, 490, shapes)


def gpt_oss_numbers() -> Picture:
    byte, exponent, group = 0x5B, 121, MXFP4_GROUP
    stored = (jnp.full((1, n), x, jnp.uint8) for n, x in ((group // 2, byte), (1, exponent)))
    earlier, later = np.asarray(dequantize_mxfp4(Mxfp4(*stored)))[0, :2]
    digits = np.asarray(e2m1(jnp.arange(16)))
    low, high, power = digits[byte & 15], digits[byte >> 4], exponent - 127
    halves = ["purple", "blue", "blue", "green"] * 2
    shapes = [
        text(40, 62, f"a byte: 0x{byte:X}", "left"),
        *grid(150, 46, [halves], 34, 32, [f"{byte:08b}"]),
        text(218, 94, f"second number: {high:g}", "faint"),
        text(354, 94, f"first number: {low:g}", "faint"),
        text(450, 62, f"the scale of {group} neighbours, another byte: {exponent}", "left"),
        text(450, 84, f"multiplies each by 2^({exponent} - 127) = 2^{power} = 1/{2**-power}",
             "left"),
        text(40, 128, "a number is a sign s (purple), two bits of exponent (blue) and one of "
             "mantissa (green):", "left"),
        *grid(40, 142, [["plain"] * 8, ["empty"] * 8], 66, 26,
              [[f"s{n:03b}" for n in range(8)], [f"{x:g}" for x in digits[:8]]]),
        text(590, 155, f"first: {low:g} / {2**-power} = {earlier:g}", "left"),
        text(590, 181, f"second: {high:g} / {2**-power} = {later:g}", "left"),
        text(40, 218, f"{group // 2} bytes and one of scale for {group} numbers: "
             f"{8 * (group // 2 + 1) / group:g} bits a number, where bfloat16 takes 16.", "left"),
        arrow((20, 244), (840, 244), head=False),
        text(20, 270, "A sink: a learned score that joins the softmax, and has no value",
             "title left"),
    ]
    logits, sink = jnp.array([2.0, 1, 0, -1]), 3.0
    for side, name in enumerate(("without a", "with the")):
        o, x = attended(logits, jnp.eye(4), sink if side else None), 40 + 420 * side
        shares, words = [*o, 1 - o.sum()], f"{name} sink, the values' weights sum to {o.sum():.2f}"
        shapes.append(text(x, 298, words, "left"))
        bars = [(f"key {i}: {logit:g}", "blue") for i, logit in enumerate(logits)]
        bars += [(f"sink: {sink:g}", "yellow")] * side
        for i, (label, kind) in enumerate(bars):
            y, width = 314 + 27 * i, 400 * shares[i]
            shapes += [text(x, y + 11, label, "left"), box(x + 80, y, round(width), 22, kind=kind),
                       text(x + 88 + round(width), y + 11, f"{shares[i]:.2f}", "left faint")]
    return Picture("mxfp4: a byte is two numbers, and 32 neighbours share a scale", 464, shapes)


def deepseek_attention() -> Picture:
    _, c = published("deepseek_r1", "deepseek-r1")
    C, R, N, S, D = c.kv_lora_rank, c.qk_rope_head_dim, c.num_attention_heads, 4096, c.hidden_size
    nope, v, layers = c.qk_nope_head_dim, c.v_head_dim, c.num_hidden_layers
    row = jax.eval_shape(partial(empty_latent, (1, 1, C + R), jnp.bfloat16)).rows
    latent, stored, full = 2 * (C + R), row.size * row.dtype.itemsize, 2 * N * (nope + R + v)
    shapes = [
        text(20, 64, f"x {shape('T', D)}", "left"), arrow((100, 64), (128, 64)),
        box(128, 46, 90, 36, "wkv_a"), arrow((218, 64), (246, 64)),
        box(246, 46, 170, 36, f"latent: {C}, normed", "blue"),
        box(416, 46, 140, 36, f"key: {R}, rotated", "green"),
        text(570, 64, f"= {C + R} numbers a token, for all {N} heads", "left"),
        text(20, 106, "bytes of cache a token, a layer:", "left"),
        box(240, 96, round(560 * latent / full), 18, kind="blue"),
        text(256, 105, f"{latent:,} ({stored:,} with zeros up to a multiple of 128 numbers), "
             f"{layers * stored / 1e3:.1f} kB in {layers} layers", "left"),
        box(240, 120, 560, 18, f"{full:,} of {N} heads' own keys ({nope + R}) and values ({v}): "
            f"{full / latent:.0f} times as many", "purple"),
    ]
    sides = (
        (f"Absorbed: up to {FEW_QUERIES} queries a slot, to decode", (
            (f"q {shape('T', N, nope)} times each head's W_k", "plain"),
            (f"{shape('T', N, C)}, then q's rotated {R}", "blue"),
            (f"scores: times the cache {shape('S', C + R)}", "yellow"),
            (f"softmax, times the cache's first {C} columns: {shape('T', N, C)}", "yellow"),
            (f"times each head's W_v: {shape('T', N, v)}", "plain"),
        ), (C + R, C), f"a row of the cache is read once for all {N} heads"),
        (f"Expanded: more than {FEW_QUERIES}, to read a prompt", (
            (f"the cache's {shape('S', C)} times each head's W_k and W_v", "plain"),
            (f"k {shape('S', N, nope)}, then the rotated {R}; v {shape('S', N, v)}", "purple"),
            (f"scores: q {shape('T', N, nope + R)} times k {shape('S', N, nope + R)}", "yellow"),
            (f"softmax, times v: {shape('T', N, v)}", "yellow"),
        ), (nope + R, v), f"{S:,} tokens: {full * S / 1e6:.0f} MB of keys and values a layer"),
    )
    for side, (title, steps, (k, value), note) in enumerate(sides):
        x = 20 + 420 * side
        cost = f"2 x ({k} + {value}) = {2 * (k + value):,} operations per query, key and head"
        for i, (words, kind) in enumerate(steps):
            y, below = 190 + 48 * i, 430 if i == len(steps) - 1 else 238 + 48 * i
            shapes += [box(x, y, 400, 32, words, kind), arrow((x + 200, y + 32), (x + 200, below))]
        shapes += [text(x, 172, title, "title left"), text(x, 484, cost, "left"),
                   text(x, 504, note, "left"), box(x, 430, 400, 32, f"times wo: {shape('T', D)}")]
    shapes.append(text(20, 528, "T: queries of a slot. S: positions of its cache.", "left faint"))
    return Picture("DeepSeek R1: one latent a token, and two ways to attend to it", 550, shapes)


def routed(logit_E: Any, model: Any, c: Any) -> tuple[np.ndarray, np.ndarray]:
    """The weights, and the numbers in ascending order, of the experts of a token whose logits start
    with logit_E."""
    E = c.n_routed_experts
    moe = model.Moe(logit_E[:E, None], jnp.zeros(E), None, None)
    weight_MX, expert_MX = model.route(jnp.ones((1, 1)), moe, c)
    return np.asarray(weight_MX[0]), np.sort(np.asarray(expert_MX[0]))


def figures(name: str, model: Any, c: Any, weight_X: np.ndarray) -> tuple[str, ...]:
    cache = f"{c.kv_lora_rank} + {c.qk_rope_head_dim} numbers"
    numbers = c.num_hidden_layers, c.first_k_dense_replace, c.num_attention_heads, cache
    parameters = f"{count(model.weight_layout(c)) / 1e9:,.0f} billion"
    rest = f"{c.rope_theta:,.0f}", f"{weight_X.sum():g}", parameters
    return (name, *map(str, numbers), *rest)


def kimi_router() -> Picture:
    r1, c = published("deepseek_r1", "deepseek-r1")
    k2, kimi = published("kimi_k2", "kimi-k2-instruct")
    E, size, X = c.n_routed_experts, c.n_routed_experts // c.n_group, c.num_experts_per_tok
    more, K = kimi.n_routed_experts - E, kimi.num_experts_per_tok
    logit_E = jnp.array(np.random.default_rng(1).normal(size=E + more), jnp.float32)
    weight_X, chosen = routed(logit_E, r1, c)
    kimi_weight_X, kimi_chosen = routed(logit_E, k2, kimi)
    s_E = jax.nn.sigmoid(logit_E[:E])
    is_kept_E = np.isfinite(np.asarray(r1.in_best_groups(s_E[None], 2, c)[0]))
    best = np.argsort(-s_E)[:X]  # of all groups
    shapes = [
        text(20, 60, f"DeepSeek R1: {E} experts in {c.n_group} groups. Kept (blue) are the "
             f"{c.topk_group} groups with the largest sums of their two best scores;", "left"),
        text(20, 78, f"the token goes to the {X} best experts of those (green). Better ones of "
             "other groups are left out (yellow).", "left"),
        text(20, 192, f"Kimi K2, the same scores and {more} more: {E + more} experts, no groups. "
             f"The token goes to the {K} best of all:", "left"),
        box(20, 206, 820, 32, kind="blue"),
    ]
    for g in range(c.n_group):
        x, own = 20 + 103 * g, range(g * size, (g + 1) * size)
        total = np.sort(s_E[g * size:(g + 1) * size])[-2:].sum()
        shapes += [box(x, 94, 99, 72, kind="blue" if is_kept_E[own[0]] else "empty"),
                   text(x + 49, 116, f"group {g}\nsum {total:.2f}")]
        for i, e in enumerate(e for e in own if e in chosen or e in best):
            kind = "green" if e in chosen else "yellow"
            shapes.append(box(x + 3 + 31 * i, 138, 31, 22, str(e), kind))
    shapes += [box(64 + 100 * i, 211, 31, 22, str(e), "green") for i, e in enumerate(kimi_chosen)]
    names = ("", "layers", "of them without experts", "heads", "cache of a token and layer",
             "rope_theta", "a token's expert weights sum to", "parameters")
    columns = (20, names), (300, figures("DeepSeek R1", r1, c, weight_X)), \
              (520, figures("Kimi K2", k2, kimi, kimi_weight_X))
    shapes += [text(x, 266 + 21 * i, words, "left")
               for x, column in columns for i, words in enumerate(column)]
    title = "Kimi K2 beside DeepSeek R1: which experts a token goes to (random scores)"
    return Picture(title, 438, shapes)


def llama4_chunks() -> Picture:
    model, c = published("llama4", "llama-4-scout")
    chunk, T, query, shapes = 4, 12, 9, []
    sides = (("rotary layers: a query sees its own chunk", "blue", chunk),
             ("layers without positions: it sees all so far", "green", None))
    for side, (name, kind, size) in enumerate(sides):
        x, first = 70 + 420 * side, np.asarray(first_seen(jnp.arange(T), chunk=size))
        kinds = [[kind if first[q] <= k <= q else "empty" for k in range(T)] for q in range(T)]
        shapes += [text(x + 132, 58, name), *grid(x, 96, kinds, 22, 22)]
        shapes += [text(x + 11 + 22 * i, 86, str(i), "faint") for i in range(T)]
        shapes += [text(x - 14, 107 + 22 * i, str(i), "faint") for i in range(T)]
        shapes += [text(x - 40, 86, "query", "left faint"), text(x + 280, 86, "key", "left faint"),
                   text(x + 132, 376, f"query {query} sees {query - first[query] + 1} keys",
                        "faint")]
    rotary = [model.is_rotary(i, c) for i in range(c.num_hidden_layers)]
    at = [0, c.floor_scale - 1, 131071, c.max_position_embeddings - 1]
    sharper = model.query_scale(jnp.array([at]), c).ravel().tolist()
    figures = ", ".join(f"{t:.2f} at {p:,}" for p, t in zip(at, sharper, strict=True))
    shapes += [
        text(20, 410, f"Scout's {len(rotary)} layers: {rotary.count(True)} rotary, in chunks of "
             f"{c.attention_chunk_size:,} (above: {chunk}), and {rotary.count(False)} without "
             "positions", "left"),
        *grid(22, 424, [["blue" if r else "green" for r in rotary]], 17, 24),
        text(20, 474, f"Green layers scale a query by its position: {figures}.", "left"),
    ]
    return Picture("Llama 4: which keys each query sees", 498, shapes)


def qwen3_5_memory() -> Picture:
    model, c = published("qwen3_5", "qwen3.8-27b")

    def cached(tokens: int) -> tuple[list[Any], list[Any]]:
        """What a slot holds of so many tokens: in layers of attention, in linear layers."""
        init = partial(model.init_state, c, 1, tokens, jnp.bfloat16)
        cache = jax.eval_shape(init).cache
        return tuple([x for x in cache if is_recurrent((x,)) == kind] for kind in (False, True))

    def nbytes(layers: Any) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers))

    counts = (1, 8192, c.max_position_embeddings)
    kv, linear = cached(1)
    H, (keys, values) = kv[0].k.shape[-1], linear[0].state.shape[-2:]
    each, of_all, states = nbytes(kv), nbytes(linear), nbytes([x.state for x in linear])
    before = jnp.array([[4.0, 2], [0, 6]])
    k, v, left, strength = jnp.array([1.0, 0]), jnp.array([1.0, 3]), 0.5, 0.5
    token = Tokens(*(x.reshape(1, 1, 1, 2) for x in (k, k)), v.reshape(1, 1, 1, 1, 2),
                   *(jnp.full((1, 1, 1, 1), x) for x in (math.log(left), strength)))
    S, o = delta_rule(before.reshape(1, 1, 1, 2, 2), token, 1, "reference", model.delta_step)
    forgot = before * left
    error = v - k @ forgot

    def matrix(x: float, S_HV: Any, kind: str, words: str) -> list[str]:
        numbers = [[f"{n:g}" for n in row] for row in np.asarray(S_HV)]
        return [*grid(x, 126, [[kind] * 2] * 2, 42, 30, numbers), text(x + 42, 204, words, "faint")]

    shapes = [
        text(20, 60, f"{len(kv)} layers of attention keep every token", "title left"),
        text(20, 82, f"a head of each: keys and values, 2 x {shape('T', H)}", "left faint"),
        text(395, 60, f"{len(linear)} linear layers keep one state", "title left"),
        text(395, 82, f"a head of each: {shape(keys, values)}, always (here: {shape(2, 2)})",
             "left faint"),
    ]
    for i, n in enumerate((1, 4, 8)):
        y = 102 + 44 * i
        shapes += grid(20, y, [["blue"] * n + ["empty"] * (8 - n)], 28, 28)
        shapes.append(text(252, y + 14, f"T = {n}", "left faint"))
    shapes += [
        text(20, 244, "The query of token T is compared with T keys.", "left"),
        text(20, 262, "A step reads all that is kept.", "left"),
        *matrix(395, before, "green", "S, before"), arrow((479, 156), (545, 156)),
        text(512, 143, f"times {left:g}", "faint"),
        *matrix(545, forgot, "green", "it forgets"), arrow((629, 156), (740, 156)),
        text(685, 143, "+ k outer u", "faint"),
        *matrix(740, S[0, 0, 0], "purple", "S, after"),
        text(395, 226, f"For k = {vector(k)}, S.T @ k is {vector(k @ forgot)}. "
             f"It should be v = {vector(v)}:", "left"),
        text(395, 244, f"u = strength · (v - S.T @ k) = {strength:g} · {vector(error)} = "
             f"{vector(error * strength, 1)}", "left"),
        text(395, 262, f"A query equal to k now reads {vector(o.ravel(), 1)}, whatever T is.",
             "left"),
        arrow((20, 284), (840, 284), head=False),
        text(20, 308, "Bytes of one slot of Qwen3.8 27B: keys and values in bfloat16 (blue), "
             "linear layers in float32 (purple)", "left"),
    ]
    scale = 560 / nbytes(cached(counts[-1])[0])
    for i, n in enumerate(counts):
        y, own = 328 + 44 * i, cached(n)
        shapes.append(text(20, y + 16, f"{n:,} token{'s' * (n > 1)}", "left"))
        for j, layers in enumerate(own):
            size = nbytes(layers)
            width, at = max(1, round(size * scale)), y + 18 * j
            shapes += [box(140, at, width, 14, kind="purple" if j else "blue"),
                       text(148 + width, at + 7, f"{size:,}", "left faint")]
    shapes += [
        text(20, 478, f"A token adds {each:,} bytes of keys and values. The linear layers take as "
             f"much as the keys and values of {of_all // each:,} tokens.", "left"),
        text(20, 496, f"Of that, {states:,} bytes are states. The rest is for the convolution, and "
             f"for the newest tokens, up to {PENDING}.", "left"),
    ]
    return Picture("Qwen3.5: what a slot keeps of its tokens, in two kinds of layers", 518, shapes)


def kernel_blocks() -> Picture:
    S, block, window, lengths = 1024, 128, 300, [700, 130, 0, 1000]
    starts = [0, 0, 0, int(first_seen(jnp.array(lengths[3] - 1), window=window))]
    listed = list_blocks(jnp.array(lengths), jnp.array(starts)[:, None], S, block)
    begins, firsts = listed.begin_B.tolist(), listed.first_B.tolist()
    scale, shapes = 600 / S, []
    for b, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        x, y, filled = 230, 52 + 44 * b, f"slot {b}: {length:,} filled"
        seen = f",\na window of {window}" if start else ""
        shapes += [text(20, y + 15, filled + seen, "left"), box(x, y, 600, 30, kind="empty")]
        items = range(begins[b], begins[b + 1])
        at = [x + (firsts[b] + i - begins[b]) * block * scale for i in items]
        shapes += [box(left, y, block * scale, 30, kind="blue") for left in at]
        if length:
            shapes.append(box(x + start * scale, y + 20, (length - start) * scale, 7, kind="green"))
        middles = zip(at, items, strict=True)
        shapes += [text(left + block * scale / 2, y + 10, str(i)) for left, i in middles]
    shapes += [
        text(20, 240, f"{begins[-1]} of {len(lengths) * S // block} blocks of {block} positions "
             "are read, in the order of their numbers; green is what the query sees.", "left"),
        arrow((20, 262), (840, 262), head=False),
        text(20, 288, "The online softmax: of one block, m, total and o go on to the next",
             "title left"),
    ]
    scores, values = jnp.array([[1.0, 3, 2], [4, 0, 2]]), jnp.array([[10.0, 20, 30], [40, 50, 60]])
    m, total, o = jnp.full(1, NEG_INF), jnp.zeros(1), jnp.zeros(1)
    for i, (s, v) in enumerate(zip(scores, values, strict=True)):
        m, total, keep, p = online_softmax(m, total, s[None])
        o = o * keep + (p * v).sum(-1)
        words = "\n".join((
            f"block {i} of three positions",
            f"scores {vector(s)}, values {vector(v)}",
            f"largest score so far, m = {m[0]:.0f}",
            f"keep = exp(m before - m) = {keep[0]:.3f}",
            "p = exp(scores - m)",
            f"= {vector(p[0], 3)}",
            f"total = keep · total + sum of p = {total[0]:.3f}",
            f"o = keep · o + sum of p · values = {o[0]:.2f}",
        ))
        x = 20 + 324 * i
        shapes += [box(x, 306, 300, 150, kind="blue"), text(x + 8, 381, words, "left"),
                   arrow((x + 300, 381), (x + 324, 381))]
    whole = attended(scores, values.reshape(-1, 1))[0]
    end = f"o / total = {o[0] / total[0]:.2f}\n\nThe softmax of all\nsix at once: {whole:.2f}"
    shapes.append(box(668, 306, 172, 150, end, "green"))
    return Picture(f"Ragged slots: capacity {S:,}, and what attention reads of it", 478, shapes)


def serving_slots() -> Picture:
    """The places are those that the session's own functions choose."""
    texts = {Place(SLOT, 0): 1700, Place(SLOT, 1): 640, Place(SLOT, 2): 1100, Place(SLOT, 3): 900,
             Place(KEPT, 0): 1500, Place(KEPT, 1): 700, Place(HOST, 0): 1900}
    index, capacity, scale, x = Prefixes(), 2048, 250 / 2048, 480
    for place, n in texts.items():
        hold(index, place, Text([100 * place.number + len(place.tier)] * n))
    hold(index, Place(SLOT, 2), Text([*range(1100)]))
    prompt = [*range(1060), *range(5000, 5140)]
    source, shared = longest(index, prompt[:-1])
    start = shared // PROMPT_CHUNK * PROMPT_CHUNK
    left = len(prompt) - start
    running = {Place(SLOT, 0), Place(SLOT, 2)}
    target = least_missed(index, [p for p in texts if p.tier == SLOT and p not in running])
    kept = least_missed(index, [p for p in texts if p.tier == KEPT])
    tops = {SLOT: 80, KEPT: 260, HOST: 370}
    ys = {place: tops[place.tier] + 36 * place.number for place in texts}

    def bar(place: Place) -> list[str]:
        filled, kind = len(index.texts[place].tokens), "green" if place in running else "plain"
        frame = [box(x, ys[place], capacity * scale, 26, kind="empty"),
                 text(x + 228, ys[place] + 13, f"slot {place.number}", "faint")]
        frame *= place.tier == SLOT
        return [*frame, box(x, ys[place], filled * scale, 26, f"{filled:,}", kind)]

    def down(above: Place, below: Place, n: int) -> str:
        side, far = x + capacity * scale, x + capacity * scale + 50
        line = arrow((side, ys[above] + 18), (far, ys[above] + 18),
                     (far, ys[below] + 8), (side, ys[below] + 8))
        return line + number(far, (ys[above] + ys[below]) / 2 + 13, n)

    slots = f"slot {source.number}", f"slot {target.number}"
    told = (
        f"The longest cached prefix is in {slots[0]}: {shared:,} tokens.\n"
        f"Of these, whole chunks of {PROMPT_CHUNK} are copied, in {start // COPY_BLOCK} blocks.",
        f"The other {left} tokens are prefilled, padded to {bucket_for(left)}.",
        f"{slots[1].capitalize()} is free, and least recently used.\n"
        "What it holds moves to kept memory.",
        "What was kept there longest moves to host memory.",
        f"insert copies the prompt into {slots[1]}, which now decodes.",
    )
    shapes = [
        text(20, 62, f"prefill buffer: a prompt of {len(prompt):,} tokens", "left"),
        box(20, 80, start * scale, 34, f"{start:,}", "blue"),
        box(20 + start * scale, 80, left * scale + 30, 34, f"{left}", "yellow"),
        number(20 + start * scale + left * scale / 2 + 15, 128, 2),
        text(x, 62, "slots (those that decode are green)", "left"),
        *(shape for place in texts for shape in bar(place)),
        text(x, 242, "kept in device memory (--keep)", "left"),
        text(x, 352, "kept in host memory (--keep-host)", "left"),
        arrow((206, 88), (430, 88), (430, ys[target] + 13), (x, ys[target] + 13)),
        number(400, 88, 5),
        arrow((x, ys[source] + 13), (320, ys[source] + 13), (320, 106), (206, 106)),
        number(360, ys[source] + 13, 1),
        down(target, kept, 3),
        down(kept, Place(HOST, 0), 4),
    ]
    y = 200.0
    for i, line in enumerate(told, 1):
        extra = LINE * line.count("\n")
        shapes += [number(30, y, i), text(48, y + extra / 2, line, "left")]
        y += 32 + extra
    return Picture("The prefix cache, step by step", 420, shapes)


Asks = dict[int, list[tuple[int, int]]]  # lengths of prompts and replies, by the step they come in


def recorded(slots: int, asks: Asks) -> list[tuple[str, dict[int, int]]]:
    """What each step of a session does: ("prefill", {number of the request: tokens}) or ("decode",
    {slot: number of the request})."""
    done: list[tuple[str, dict[int, int]]] = []

    def prefill(session: Any) -> None:
        [work] = session.reading.values()
        done.append(("prefill", {work.number: min(work.left, PROMPT_CHUNK)}))
        read(session)

    def generate(session: Any) -> None:
        done.append(("decode", {slot: work.number for slot, work in session.running.items()}))
        decode(session)

    read, decode = session_steps.prefill, session_steps.generate
    llama = load(importlib.import_module("llama3.model"), mesh=make_mesh())
    llama = llama._replace(config=llama.config._replace(max_position_embeddings=1024))
    session = start_session(llama, slots, 1024)
    with mock.patch.multiple(session_steps, prefill=prefill, generate=generate):
        while asks or is_busy(session):
            for n, new in asks.pop(len(done), ()):
                submit(session, Request([session.ids + 1] * n, new))  # no two begin alike
            step(session)
    return done


def slots_over_time() -> Picture:
    """The steps are those of a real session."""
    asks, slots = {0: [(700, 9), (90, 5), (300, 14)], 9: [(600, 4)], 10: [(60, 6)]}, 3
    kinds, names = ["blue", "green", "yellow", "purple", "plain"], "ABCDE"
    lengths = [ask for several in asks.values() for ask in several]
    done = recorded(slots, dict(asks))
    x, width = 130, 715 / len(done)
    shapes = [text(20, 87, "prefill", "left")]
    shapes += [text(20, 129 + 34 * i, f"slot {i}: decode", "left") for i in range(slots)]
    for i, (what, of) in enumerate(done):
        at = x + i * width
        for place, n in of.items():
            n, y = (place, 72) if what == "prefill" else (n, 114 + 34 * place)
            shapes.append(box(at, y, width - 2, 30, names[n], kinds[n]))
            if what == "prefill":
                shapes.append(text(at + width / 2 - 1, 60, str(of[n]), "faint"))
    y = 114 + 34 * slots + 10
    shapes += [arrow((x, y), (x + 715, y)), text(20, y, "steps", "left")]
    told = [f"{name}: {n} + {new}" for name, (n, new) in zip(names, lengths, strict=True)]
    shapes += [text(20, y + 30, f"Tokens of prompts and replies: {', '.join(told)}.", "left"),
               text(20, y + 48, f"At most {PROMPT_CHUNK} prompt tokens (the numbers above) are "
                    "prefilled between two steps of decoding.", "left"),
               text(20, y + 66, "D comes after 9 steps, E after 10, and wait for a slot.", "left")]
    return Picture("Five requests on three slots, step by step", y + 86, shapes)


def prompt_to_text() -> Picture:
    state, piece = "cache, length_B,\ntoken_B, sampling", f"[1, T]: at most {PROMPT_CHUNK}"
    shapes = [
        text(20, 56, "a DecodeState of one slot", "left"),
        box(20, 72, 170, 58, state, "blue"),
        *chain(190, 101, ("prefill", 170, f"{piece}\ntokens are appended", "blue")),
        arrow((345, 121), (345, 148), (105, 148), (105, 130)),
        text(225, 160, "until the prompt is in", "faint"),
        *chain(430, 101, ("insert", 180, "copied into\nslot slot_B[0]", "yellow")),
        arrow((590, 121), (590, 190)),
        text(330, 219, "a DecodeState of B slots", "left"),
        box(500, 190, 180, 58, state, "green"),
        *chain(680, 219, ("generate", 90, "token_B\nof all slots", "green")),
        arrow((800, 239), (800, 272), (590, 272), (590, 248)),
        text(695, 284, "again: one token in each slot", "faint"),
        text(20, 272, "Each function takes a state, donates it, and returns the next one.", "left"),
    ]
    return Picture("prefill, insert, generate: three functions of every model file", 304, shapes)


def table(page: str, first: str) -> list[list[str]]:
    """The rows of the table of a page whose head begins with these cells."""
    lines = (ROOT / page).read_text(encoding="utf-8").partition(first)[2].split("\n")[2:]
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def speed_on_a_cpu() -> Picture:
    """The ratios of the table in docs/cpu.md, on a logarithmic scale."""
    rows = table("docs/cpu.md", "| | | ours, tokens/s |")
    shapes, octave, high = list[str](), 38.0, 13
    for i, of_model in enumerate(zip(rows[::3], rows[1::3], rows[2::3], strict=True)):
        y = 92 + 38 * i
        shapes.append(text(20, y + high, of_model[0][0], "left"))
        for j, (_, _, _, *ratios, _, _) in enumerate(of_model):
            one = 300 + 212 * j
            for k, ratio in enumerate(ratios):
                if ratio:
                    width, at = octave * math.log2(float(ratio)), y + (high + 1) * k
                    kind, end = ("blue", "yellow")[k], one + width + (17 if width > 0 else -17)
                    shapes.append(box(one + min(width, 0), at, abs(width), high, kind=kind))
                    shapes.append(text(end, at + high / 2, ratio, "faint"))
    bottom = 92 + 38 * (len(rows) // 3)
    for j, what in enumerate(row[1] for row in rows[:3]):
        one = 300 + 212 * j
        shapes += [text(one, 72, what), arrow((one, 84), (one, bottom), head=False)]
    shapes += [box(20, bottom + 12, 14, high, kind="blue"),
               text(42, bottom + 18, "× transformers", "left"),
               box(160, bottom + 12, 14, high, kind="yellow"),
               text(182, bottom + 18, "× llama.cpp; right of the line ours is faster", "left")]
    return Picture("Our tokens per second over those of others, on two cores", bottom + 42, shapes)


def perplexity() -> Picture:
    """The table of docs/four_bits.md."""
    shapes = list[str]()
    for i, (name, *changes) in enumerate(table("docs/four_bits.md", "| | *Hamlet*, % |")):
        y = 62 + 38 * i
        shapes.append(text(20, y + 14, name, "left"))
        for k, change in enumerate(changes):
            width = 18 * abs(float(change))
            shapes += [box(180, y + 14 * k, width, 13, kind=("blue", "yellow")[k]),
                       text(188 + width, y + 14 * k + 7, change, "left faint")]
    y += 52
    shapes += [box(20, y, 14, 13, kind="blue"), text(42, y + 6, "Hamlet", "left"),
               box(160, y, 14, 13, kind="yellow"), text(182, y + 6, "pages", "left")]
    return Picture("By how much the perplexity of SmolLM2-135M changes, in %", y + 30, shapes)


def the_house() -> Picture:
    """The folders of common/, each above those that its files import. The lowest two floors are one
    folder, with kernels between them, because kernels import how a matrix is stored."""
    words = {"command": "options, checks, output", "server": "OpenAI's protocol",
             "serving": "from prompts to text", "machines": "chips, meshes, hosts",
             "text": "text to ids and back",
             "loading": "files to sharded arrays", "": "what model.py calls",
             "kernels": "for TPU, GPU and CPU", "forms": "how a matrix is stored"}
    files: dict[str, list[str]] = {floor: [] for floor in words}
    for file in sorted((ROOT / "common").rglob("*.py")):
        if file.stem != "__init__":
            floor = floor_of(module_of(file))
            files[floor].append(file.stem)
            under = [*words][[*words].index(floor) :]
            assert {*map(floor_of, imported(file))} <= {*under}, file
    shapes, y, left, right, tops = [], 50, 175, 700, dict[str, int]()
    for floor, means in words.items():
        lines, x = [[]], left
        for name in files[floor]:
            width = 7 * len(name) + 14
            if x + width > right:
                lines, x = [*lines, []], left
            lines[-1].append(box(x, y + 26 * (len(lines) - 1), width, 22, name,
                                 "green" if floor in ("", "forms") else "plain"))
            x += width + 6
        height, tops[floor] = max(26 * len(lines), 40), y
        own = f"common/{floor}" if floor not in ("", "forms") else "common/*.py"
        shapes += [box(10, y - 8, 700, height + 12, kind="frame"), text(20, y + 9, own, "left"),
                   text(20, y + 27, means, "left faint"), *(x for line in lines for x in line)]
        y += height + 22
    shapes += [box(750, tops["command"] - 6, 92, 36, "llama3/\nmain.py", "blue"),
               arrow((750, tops["command"] + 12), (711, tops["command"] + 12)),
               box(750, tops[""] - 8, 92, y - tops[""] - 6, "llama3/\nmodel.py", "blue")]
    shapes += [arrow((750, tops[x] + 14), (711, tops[x] + 14)) for x in ("", "kernels", "forms")]
    return Picture("common/: a folder imports only from those under it", y + 4, shapes)


def module_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def floor_of(module: str) -> str:
    """The folder of common/ that a module is in; "" for the words of the model files, and "forms"
    for the two files under the kernels."""
    if module in ("common.quant", "common.sharding"):
        return "forms"
    return module.split(".")[1] if module.count(".") > 1 else ""


def imported(file: Path) -> Iterator[str]:
    """The modules of common/ that a file imports, once for each import."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("common"):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            modules = [x for x in names if (ROOT / x.replace(".", "/")).with_suffix(".py").exists()]
            yield from modules or [str(node.module)]


# fmt: on
PICTURES = {
    "house": the_house,
    "gpt2": gpt2_layer,
    "llama3": llama3_step,
    "qwen3": qwen3_experts,
    "gpt_oss": gpt_oss_numbers,
    "llama4": llama4_chunks,
    "deepseek_r1": deepseek_attention,
    "kimi_k2": kimi_router,
    "qwen3_5": qwen3_5_memory,
    "kernels": kernel_blocks,
    "serving": serving_slots,
    "slots": slots_over_time,
    "steps": prompt_to_text,
    "speed": speed_on_a_cpu,
    "perplexity": perplexity,
}

if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(svg(draw()), encoding="utf-8")
