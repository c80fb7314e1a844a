"""docs/topologies.md, .csv and .svg are what their script makes. The script still finds the same
figures, and the chosen meshes are as good as the page says."""

import csv
import json
import subprocess
import sys

import pytest
from compare import assert_close

from common.machines.chips import CHIPS
from common.machines.mesh_choice import best_axes
from common.sharding import parse_mesh
from tools import topologies

DATA = topologies.read()
SEARCHES = {key: found for key, found in DATA.items() if key.startswith("search ")}
SMALL = "gpt2 distilgpt2 bf16 v5e:1x1 8 2048"


def test_the_page_the_table_and_the_picture_are_those_of_the_data():
    docs = topologies.ROOT / "docs"
    assert (docs / "topologies.md").read_text() == topologies.page(DATA)
    assert (docs / "topologies.csv").read_text() == topologies.table_of_all(DATA)
    assert (docs / "topologies.svg").read_text() == topologies.picture(DATA)


def test_the_table_has_every_row_and_every_search_and_the_page_has_a_row_of_each_family():
    every = topologies.rows_read(DATA)
    with (topologies.ROOT / "docs" / "topologies.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(every) > 80
    for row, line in zip(every, lines, strict=True):
        run, decode = DATA[row.key], DATA[row.key]["steps"]["decode"]
        assert (line["model"], line["mesh"]) == (row.size, run["mesh"])
        assert int(line["memory"]) == run["memory"]
        assert float(line["decode_at_least_ms"]) == max(decode["floor_ms"].values())
    assert sum(line["best_mesh"] != "" for line in lines) == len(SEARCHES)
    of_page = {line[0] for line in topologies.COMMON}
    assert {family for family, size in topologies.sizes() if size in of_page} == {
        family for family, _ in topologies.sizes()
    }


def test_every_row_that_the_script_would_compile_is_in_the_data_and_each_size_fits_somewhere():
    rows = topologies.rows_read(DATA)
    assert {row.key for row in rows} <= set(DATA)
    fitting = {row.size for row in rows if DATA[row.key]["fits"]}
    assert fitting == {size for _, size in topologies.sizes()}


@pytest.mark.full
def test_a_row_compiled_again_has_the_same_figures(tmp_path):
    """Shapes agree to the byte. The compiler's figures may differ as its versions differ."""
    row = topologies.row_of(SMALL)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(topologies.config_of(row.family, row.size, row.storage)))
    words = [sys.executable, *topologies.command(row, str(config))[1:]]
    done = subprocess.run(words, capture_output=True, text=True, cwd=topologies.ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    [now], then = json.loads(done.stdout), DATA[SMALL]
    for name in ("mesh", "fits", "capacity", "chip", "stored"):
        assert now[name] == then[name]
    for step in ("decode", "prompt"):
        a, b = now["steps"][step], then["steps"][step]
        assert (a["weights"], a["cache"]) == (b["weights"], b["cache"])
        for name in ("memory", "traffic", "products"):
            assert_close(a[name], b[name], rtol=0.05)


def test_the_page_names_the_memory_of_its_chips():
    text = " ".join(topologies.page(DATA).split())
    memory = {name: f"{CHIPS[name].memory / 1e9:.1f}" for name in ("v5e", "v6e", "h100")}
    said = "A v5e chip has {v5e} GB, a v6e chip {v6e}, an H100 {h100}."
    assert said.format(**memory) in text
    assert {topology.partition(":")[0] for _, _, topology in topologies.COMMON} == set(memory)


def test_every_chosen_mesh_is_within_a_twentieth_of_the_best_that_a_search_found():
    rows = topologies.rows_read(DATA)
    assert set(SEARCHES) == {f"search {row.key}" for row in topologies.searched(rows)}
    alone = {row.size for row in rows if row.topology == "v5e:1x1"}
    searched = {topologies.row_of(key).size for key in SEARCHES}
    assert searched | alone == {size for _, size in topologies.sizes()}
    for key, found in SEARCHES.items():
        ratio = found["meshes"][found["chosen"]] / min(found["meshes"].values())
        assert ratio <= 1.05, f"{key}: {found}"


@pytest.mark.full
@pytest.mark.parametrize("key", list(SEARCHES))
def test_the_rule_still_chooses_what_the_search_was_compared_with(key):
    row = topologies.row_of(key)
    chip, devices = CHIPS[row.topology.partition(":")[0]], topologies.TPUS[row.topology]
    best = best_axes(topologies.plan_of(row), devices, chip)
    assert best == topologies.ONE | parse_mesh(SEARCHES[key]["chosen"])


@pytest.mark.full
def test_a_search_made_again_finds_the_same():
    key = next(key for key in SEARCHES if " llama3.1-8b " in key)
    found = topologies.search(topologies.row_of(key))
    assert found["chosen"] == SEARCHES[key]["chosen"]
    assert set(found["meshes"]) == set(SEARCHES[key]["meshes"])
    for axes, ms in found["meshes"].items():
        assert_close(ms, SEARCHES[key]["meshes"][axes], rtol=0.1)
