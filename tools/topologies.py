"""Makes docs/topologies.md, .csv and .svg: which model fits where, and how fast it can be.

    python tools/topologies.py compile   # fills docs/topologies.json; resumes where it stopped
    python tools/topologies.py search    # adds how good the chosen meshes are
    python tools/topologies.py shapes    # adds the figures that follow from shapes alone
    python tools/topologies.py write     # writes the page, the table of all rows and the picture

It compiles every published size, as stored, in bfloat16 and in int8, some sizes also in 4 bits, on
the smallest TPU slice and on the fewest H100s that hold it, and the steps that other
implementations published. All layers are compiled. The rows of GPUs need pip install -e '.[hopper]'
in place of libtpu.
"""

import argparse
import csv
import importlib
import importlib.metadata
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from families import SHOWN  # noqa: E402

from common.fields import with_layers  # noqa: E402
from common.loading.shape import model_dtype  # noqa: E402
from common.machines.chips import CHIPS, devices_of  # noqa: E402
from common.machines.dryrun import compile_step  # noqa: E402
from common.machines.mesh_choice import (  # noqa: E402
    USABLE,
    Plan,
    best_axes,
    best_mesh,
    load_of,
    loads,
    step_seconds,
)
from common.quant import storage_named  # noqa: E402
from common.sharding import axes_of, make_mesh  # noqa: E402

DATA = ROOT / "docs" / "topologies.json"
SLOTS, CAPACITY = 8, 2048
TPUS = {"v5e:1x1": 1, "v5e:2x2": 4, "v5e:2x4": 8, "v5e:4x4": 16, "v5e:4x8": 32, "v5e:8x8": 64}
TPUS |= {"v6e:8x8": 64}
ONE = dict(data=1, expert=1, tensor=1)
GPUS = {f"h100:{n}": n for n in (1, 2, 4, 8)}
# Sizes that are compiled in 4 bits too.
IN_4_BITS = ["llama3.1-70b", "qwen3-235b-a22b", "gpt-oss-120b", "llama-4-scout", "deepseek-r1"]
IN_4_BITS += ["kimi-k2-instruct", "qwen3.8-2.4t-a95b"]
ON_GPUS = ["gpt2-xl", "llama3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite"]
# Sizes of the same shape as another. The fp8 files of Qwen3 are left out too.
ALIKE = {"deepseek-v3": "deepseek-r1", "kimi-k2-instruct-0905": "kimi-k2-instruct"}
ALIKE |= {f"r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("7b", "32b")}
# The rows on the page: size, storage, topology. docs/topologies.csv has all.
COMMON = [
    ("gpt2-xl", "bf16", "v5e:1x1"),
    ("llama3.1-8b", "bf16", "h100:1"),
    ("llama3.1-8b", "int8", "v5e:1x1"),
    ("llama3.1-70b", "int8", "v5e:2x4"),
    ("qwen3-30b-a3b", "int8", "v5e:2x2"),
    ("qwen3-235b-a22b", "int8", "v5e:4x4"),
    ("gpt-oss-20b", "as stored", "v5e:1x1"),
    ("gpt-oss-120b", "as stored", "v5e:2x4"),
    ("llama-4-scout", "int8", "v5e:2x4"),
    ("deepseek-r1", "as stored", "v5e:8x8"),
    ("kimi-k2-instruct", "as stored", "v6e:8x8"),
    ("qwen3.8-27b", "int8", "v5e:2x2"),
]


class Row(NamedTuple):
    """One size, in one storage, on one slice."""

    family: str
    size: str
    storage: str  # "as stored", "bf16", "int8" or "int4"
    topology: str
    slots: int = SLOTS
    capacity: int = CAPACITY
    mesh: str = ""  # empty: the library chooses
    kv: str = ""

    @property
    def key(self) -> str:
        return " ".join(map(str, self)).strip()


def config_of(family: str, size: str, storage: str) -> dict[str, Any]:
    """The published configuration. For "bf16", without the quantisation that it may name."""
    hf = importlib.import_module(f"{family}.shapes").SHAPES[size]
    dropped = ("quantization_config",) if storage == "bf16" else ()
    return {name: value for name, value in hf.items() if name not in dropped}


def plan_of(row: Row) -> Plan:
    module = importlib.import_module(f"{row.family}.model")
    config = module.config_from_hf(config_of(row.family, row.size, row.storage))
    capacity = min(row.capacity, config.max_position_embeddings)
    stored = config_of(row.family, row.size, row.storage)
    dtype = model_dtype(stored, None, None if row.storage == "as stored" else "bfloat16")
    quant = row.storage if row.storage in ("int8", "int4") else None
    cache = jnp.dtype(row.kv or ("int8" if quant else dtype))
    storage = storage_named(quant)
    return Plan(
        module, config, row.slots, capacity, dtype=dtype, cache_dtype=cache, storage=storage
    )


def fits(plan: Plan, topology: str, devices: int) -> bool:
    """Whether some mesh can hold the model, judged by shapes."""
    room = USABLE * CHIPS[topology.partition(":")[0]].memory
    whole = load_of(plan, ONE)
    if whole.weights + whole.cache > room * devices:
        return False
    return any(load.weights + load.cache <= room for _, load in loads(plan, devices))


def storages(family: str, size: str) -> list[str]:
    stored = config_of(family, size, "as stored")
    others = "quantization_config" in stored or stored.get("torch_dtype") == "float32"
    found = ["as stored", "bf16", "int8"] if others else ["bf16", "int8"]
    return [*found, "int4"] if size in IN_4_BITS else found


def sizes() -> Iterator[tuple[str, str]]:
    for family in SHOWN:
        for size in importlib.import_module(f"{family}.shapes").SHAPES:
            if size not in ALIKE and not size.endswith("-fp8"):
                yield family, size


# The steps that others published, or that their code compiles to: see the page. POINTS has their
# figures, in this order.
REFERENCE = [
    Row("llama3", "llama3.1-70b", "int8", "v5e:4x4"),
    Row("deepseek_r1", "deepseek-r1", "int8", "v5e:8x8", 1, 512, kv="bfloat16"),
    Row("qwen3", "qwen3-235b-a22b", "int8", "v5e:4x8"),
    Row("gpt_oss", "gpt-oss-120b", "int8", "v5e:4x4"),
    Row("llama4", "llama-4-scout", "int8", "v5e:4x4", 16, 4096),
    Row("kimi_k2", "kimi-k2-instruct", "int8", "v6e:8x8", kv="bfloat16"),
    Row("kimi_k2", "kimi-k2-instruct", "int8", "v6e:8x8", mesh="expert=32,tensor=2", kv="bfloat16"),
]


def rows() -> list[Row]:
    """All rows of the table, TPUs first."""
    found = list(REFERENCE)
    for ladder in (TPUS, GPUS):
        for family, size in sizes():
            if ladder is GPUS and size not in ON_GPUS:
                continue
            for storage in storages(family, size):
                row = Row(family, size, storage, "")
                plan = plan_of(row)
                if topology := next((t for t, n in ladder.items() if fits(plan, t, n)), None):
                    found.append(row._replace(topology=topology))
                    if ladder is GPUS:
                        break  # the first storage that fits
    return list(dict.fromkeys(found))


def read() -> dict[str, Any]:
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def versions() -> str:
    return f"jax {jax.__version__}, libtpu {importlib.metadata.version('libtpu')}"


def keep(data: dict[str, Any]) -> None:
    text = json.dumps(data, sort_keys=True)
    text = text.replace('}, "', '},\n"')  # a run a line
    DATA.write_text(text + "\n", encoding="utf-8")


def command(row: Row, config: str) -> list[str]:
    """Returns the command that prints a row's figures."""
    plan = plan_of(row)
    words = [sys.executable, "-m", f"{row.family}.main", "--ckpt", config, "--json"]
    words += ["--dry-run", row.topology, "--slots", str(row.slots)]
    words += ["--max-len", str(plan.capacity), "--dtype", str(plan.dtype)]
    words += ["--quant", row.storage] if plan.storage else []
    words += ["--kv-quant", "int8"] if plan.cache_dtype == jnp.int8 else []
    return [*words, "--mesh", row.mesh] if row.mesh else words


def compile_rows(match: str) -> None:
    """Compiles the missing rows one after the other, each in its own process."""
    package = dict(h100="jax_cuda13_plugin")
    for row in rows():
        missing = package.get(row.topology.partition(":")[0], "libtpu")
        if row.key in read() or match not in row.key or not importlib.util.find_spec(missing):
            continue
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "config.json"
            file.write_text(json.dumps(config_of(row.family, row.size, row.storage)))
            done = subprocess.run(command(row, str(file)), capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            print(row.key, done.stderr.strip().splitlines()[-1:], flush=True)
            continue
        [run] = json.loads(done.stdout)
        keep(read() | {row.key: run | dict(model=row.size)})
        print(row.key, {k: v.get("seconds") for k, v in run["steps"].items()}, flush=True)


# ---- the search


def few_layers(config: Any) -> Any:
    """The config with two layers, one of each kind if there are two kinds."""
    few = with_layers(config, 2)
    if "layer_types" in config._fields:
        few = few._replace(layer_types=tuple(dict.fromkeys(config.layer_types)))
    dense = "first_k_dense_replace" in config._fields
    return few._replace(first_k_dense_replace=1) if dense else few


def search(row: Row) -> dict[str, Any]:
    """Compiles a decoding step of two layers on every mesh that holds all layers, and returns the
    estimated time on each, and which mesh the library chooses."""
    plan, chip = plan_of(row), CHIPS[row.topology.partition(":")[0]]
    devices = devices_of(row.topology)
    chosen = axes_of(best_mesh(plan, devices))
    meshes: list[Any] = [
        make_mesh(**axes, devices=devices)
        for axes, load in loads(plan, len(devices))
        if load.weights + load.cache <= USABLE * chip.memory
    ]
    few = plan._replace(config=few_layers(plan.config))

    def estimate(mesh: Any) -> float | None:
        report = compile_step(few, mesh)
        if report.refusal:
            return None
        return 1e3 * step_seconds(chip, report.traffic, report.sent, report.messages)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = dict(zip(map(axes_of, meshes), pool.map(estimate, meshes), strict=True))
    return dict(chosen=chosen, meshes={x: round(ms, 4) for x, ms in found.items() if ms})


def searched(every: list[Row]) -> list[Row]:
    """Returns the rows to search: for every size, its first slice of several devices."""
    first: dict[str, Row] = {}
    for row in every:
        if row not in REFERENCE and TPUS.get(row.topology, 1) > 1:
            first.setdefault(row.size, row)
    return list(first.values())


def search_rows(match: str) -> None:
    for row in searched(rows()):
        key = f"search {row.key}"
        if match in key and key not in read():
            found = search(row)
            jax.clear_caches()
            keep(read() | {key: found})
            print(key, found, flush=True)


# ---- what follows from shapes alone


def floor_ms(plan: Plan, topology: str, devices: int) -> float | None:
    """Milliseconds in which a device on the best mesh reads its weights (without the experts that
    no token is expected to choose) and the whole cache; None if these do not fit."""
    chip = CHIPS[topology.partition(":")[0]]
    load = load_of(plan, best_axes(plan, devices, chip))
    if load.weights + load.cache > USABLE * chip.memory:
        return None
    return 1e3 * (load.moved - load.unread) / chip.bandwidth


def shape_cells() -> dict[str, dict[str, list[Any]]]:
    """Returns the first storage that fits, and its floor, for each size and topology."""
    found: dict[str, dict[str, list[Any]]] = {}
    for family, size in sizes():
        plans = {x: plan_of(Row(family, size, x, "")) for x in ("as stored", "int8", "int4")}
        cells = found.setdefault(size, {})
        for topology, devices in (TPUS | GPUS).items():
            for storage, plan in plans.items():
                if fits(plan, topology, devices) and (ms := floor_ms(plan, topology, devices)):
                    cells[topology] = [storage, round(ms, 3)]
                    break
        print(size, cells, flush=True)
    return found


# ---- the page


def bound(step: dict[str, Any]) -> tuple[float, str]:
    """Returns the lower bound of a step in milliseconds, and what sets it."""
    return max((ms, name) for name, ms in step["floor_ms"].items())


def collectives(step: dict[str, Any]) -> tuple[int, int]:
    """Returns how many a step has, and the bytes that they return."""
    each = [c for c in step["collectives"] if not c["conditional"]]
    return sum(c["times"] for c in each), sum(c["bytes"] for c in each)


def least(step: dict[str, Any]) -> str:
    if "refusal" in step:
        return "-"
    ms, by = bound(step)
    return f"{ms:.2f}" if by == "memory" else f"{ms:.2f} ({by})"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]


def run_row(row: Row, run: dict[str, Any]) -> list[str]:
    memory = f"{run['memory'] / 1e9:.2f}"
    verdict = memory if run["fits"] else f"{memory}: does not fit"
    times = [least(run["steps"][step]) for step in ("decode", "prompt")]
    place = [row.size, row.storage, row.topology, f"`{run['mesh']}`"]
    return [*place, verdict, *times, str(run["most_slots"])]


class Point(NamedTuple):
    """Another implementation's compiled step, on one device."""

    memory: float  # GB
    traffic: str  # GB
    collectives: int
    sent: float  # MB


POINTS = [
    Point(7.03, "4.54 to 4.88", 160, 21.0),
    Point(13.98, "5.1 to 12.0", 182, 2.6),
    Point(10.77, "", 188, 12.3),
    Point(9.99, "", 75, 3.3),
    Point(12.25, "5.7 to 11.7", 144, 23.6),
    Point(20.7, "2.8 to 18.5", 184, 20.9),
    Point(20.7, "2.8 to 18.5", 184, 20.9),
]


def point_row(row: Row, point: Point, run: dict[str, Any]) -> list[str]:
    decode = run["steps"]["decode"]
    traffic = f"{decode['traffic'] / 1e9:.2f}"
    times, sent = collectives(decode)
    read = decode["floor_ms"]["memory"] * run["chip"]["bandwidth"] / 1e12
    both = traffic if abs(read - float(traffic)) < 0.01 else f"{read:.2f} to {traffic}"
    return [
        f"{row.size}, {row.slots} x {row.capacity}, {row.topology}, `{run['mesh']}`",
        f"{point.memory} → **{decode['memory'] / 1e9:.2f}**",
        f"{point.traffic or '?'} → **{both}**",
        f"{point.collectives} → **{times}**",
        f"{point.sent} → **{sent / 1e6:.1f}**",
        least(decode),
    ]


def best_of(found: dict[str, Any]) -> tuple[str, float]:
    """Returns the best mesh of a search, and how much longer the chosen one takes: a ratio."""
    best = min(found["meshes"], key=lambda axes: found["meshes"][axes])
    ratio = found["meshes"][found["chosen"]] / found["meshes"][best]
    return found["chosen"] if ratio == 1 else best, ratio


def row_of(key: str) -> Row:
    """Returns the row that has this key in the data."""
    every = rows_read(read())
    keys = {row.key: row for row in every}
    keys |= {f"search {row.key}": row for row in searched(every)}
    return keys[key]


def rows_read(data: dict[str, Any]) -> list[Row]:
    """Returns the rows in the data, in the order of the families."""
    return [Row(*fields) for fields in data["rows"]]


def table_of_all(data: dict[str, Any]) -> str:
    """Returns all compiled rows, as a CSV file: those of the page and those of REFERENCE too."""
    every = rows_read(data)
    lines: list[dict[str, Any]] = []
    for row in every:
        if row.key not in data:
            continue
        run = data[row.key]
        line: dict[str, Any] = dict(
            family=row.family, model=row.size, weights=row.storage, slice=row.topology
        )
        line |= dict(slots=run["slots"], positions=run["capacity"], stored=run["stored"])
        line |= dict(mesh=run["mesh"], memory=run["memory"], memory_of_chip=run["chip"]["memory"])
        line |= dict(fits=run["fits"], slots_that_fit=run["most_slots"])
        for name in ("decode", "prompt"):
            step = run["steps"][name]
            cells: list[Any] = [""] * 5
            if "refusal" not in step:
                cells = [step["traffic"], *bound(step), *collectives(step)]
            of_step = ("traffic", "at_least_ms", "bound", "collectives", "returned")
            line |= {f"{name}_{head}": cell for head, cell in zip(of_step, cells, strict=True)}
        if found := data.get(f"search {row.key}"):
            best, ratio = best_of(found)
            line |= dict(meshes_tried=len(found["meshes"]), best_mesh=best)
            line |= dict(chosen_over_best=f"{ratio:.3f}")
        lines.append(line)
    out = io.StringIO()
    heads = dict.fromkeys(head for line in lines for head in line)
    writer = csv.DictWriter(out, list(heads), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()


def page(data: dict[str, Any]) -> str:
    every = rows_read(data)
    rows = {row[1:4]: row for row in every if row not in REFERENCE}
    head = ["model", "weights", "slice", "mesh", "memory, GB"]
    head += ["decode, ms at least", "prompt of 512, ms at least", "slots that fit"]
    ratios = [best_of(data[f"search {row.key}"])[1] for row in searched(every)]
    filled = dict(
        versions=data["versions"],
        count=str(sum(row.key in data for row in every)),
        searched=str(len(ratios)),
        best=str(ratios.count(1)),
        sizes="\n".join(table(head, [run_row(rows[x], data[rows[x].key]) for x in COMMON])),
        points="\n".join(
            table(
                ["step", "memory, GB", "traffic, GB", "collectives", "returned, MB", "ms at least"],
                [
                    point_row(row, point, data[row.key])
                    for row, point in zip(REFERENCE, POINTS, strict=True)
                ],
            )
        ),
    )
    text = (ROOT / "tools" / "topologies.template.md").read_text(encoding="utf-8")
    for name, value in filled.items():
        text = text.replace("{{" + name + "}}", value)
    return text


# ---- the picture


STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .head { font-weight: 600 } .value { text-anchor: middle }
  .small { font-size: 11px; fill: #59636e }
  rect { rx: 3px } .yes { fill: #2da44e } .int8 { fill: #0969da } .int4 { fill: #bf8700 }
  .no { fill: #8c959f; fill-opacity: 0.15 }
  @media (prefers-color-scheme: dark) { text { fill: #f0f6fc } .small { fill: #9198a1 } }
"""
LEFT, TOP, WIDTH, HEIGHT = 180, 64, 58, 22


def number(ms: float) -> str:
    return f"{ms:.2f}" if ms < 1 else f"{ms:.1f}" if ms < 10 else f"{ms:.0f}"


def picture(data: dict[str, Any]) -> str:
    """Draws a cell for each size and slice: green as stored, blue in int8, amber in 4 bits, and
    stronger if faster."""
    topologies = [*TPUS, *GPUS]
    cells = data["shapes"]
    wide = LEFT + WIDTH * len(topologies) + 8
    high = TOP + HEIGHT * len(cells) + 46
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">',
        "<title>Which model fits which slice, and the least time of a decoding step</title>",
        f"<style>{STYLE}</style>",
        f'<text class="head" x="8" y="20">ms to decode one token in each of {SLOTS} slots of '
        f"{CAPACITY:,} positions, at best</text>",
    ]
    for i, topology in enumerate(topologies):
        name, _, size = topology.partition(":")
        count = (TPUS | GPUS)[topology]
        middle = LEFT + WIDTH * i + WIDTH // 2
        out.append(f'<text class="value head" x="{middle}" y="{TOP - 22}">{name}</text>')
        out.append(f'<text class="value small" x="{middle}" y="{TOP - 8}">{count}</text>')
    for j, (_, size) in enumerate(sizes()):
        fitting = cells[size]
        y = TOP + HEIGHT * j
        out.append(f'<text x="8" y="{y + 15}">{size}</text>')
        for i, topology in enumerate(topologies):
            storage, ms = fitting.get(topology, ("", 0.0))
            kind = {"as stored": "yes", "": "no"}.get(storage, storage)
            strength = f"{max(0.2, min(0.75, 0.75 - 0.2 * math.log10(max(ms, 0.3) / 0.3))):.2f}"
            fill = f' fill-opacity="{strength}"' if ms else ""
            x = LEFT + WIDTH * i
            box = f'x="{x + 2}" y="{y + 1}" width="{WIDTH - 4}" height="{HEIGHT - 3}"'
            out.append(f'<rect class="{kind}" {box}{fill}/>')
            if ms:
                middle = x + WIDTH // 2
                out.append(f'<text class="value" x="{middle}" y="{y + 15}">{number(ms)}</text>')
    y = high - 26
    legend = dict(yes="weights as stored", int8="only in int8", int4="only in 4 bits")
    for i, (kind, text) in enumerate((legend | dict(no="does not fit")).items()):
        x = 8 + 170 * i
        out.append(f'<rect class="{kind}" x="{x}" y="{y}" width="16" height="14"/>')
        out.append(f'<text x="{x + 22}" y="{y + 12}">{text}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("what", choices=["compile", "search", "shapes", "write"])
    ap.add_argument("--match", default="", help="compile or search only rows whose key holds this")
    args = ap.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.what == "compile":
        compile_rows(args.match)
    elif args.what == "search":
        search_rows(args.match)
    elif args.what == "shapes":
        keep(read() | dict(rows=rows(), shapes=shape_cells(), versions=versions()))
    else:
        (ROOT / "docs" / "topologies.md").write_text(page(read()), encoding="utf-8")
        (ROOT / "docs" / "topologies.csv").write_text(table_of_all(read()), encoding="utf-8")
        (ROOT / "docs" / "topologies.svg").write_text(picture(read()), encoding="utf-8")


if __name__ == "__main__":
    main()
