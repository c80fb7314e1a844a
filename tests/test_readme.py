"""Runs what the pages tell people to type."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from engine import ENVIRONMENT
from families import FAMILIES, SHOWN

from common.command.arguments import parser
from common.machines.mesh_choice import load_of
from common.sharding import parse_mesh
from tools import topologies

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("[a-z]*/README.md")]
PAGES = sorted([*PAGES, *ROOT.glob("common/*/README.md")])
PAGES = [x for x in PAGES if x.parent.name not in FAMILIES or x.parent.name in SHOWN]


def blocks(language):
    text = "\n".join(file.read_text() for file in PAGES)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


LINES = {line for block in blocks("sh") for line in block.splitlines() if line.strip()}
# uv, and comments at the end, are for people.
COMMANDS = sorted(re.sub(r"^uv run .*?(?=python )|  # .*", "", line) for line in LINES)
MODEL_COMMANDS = [x for x in COMMANDS if re.match(r"python -m (\w+\.main|folio) ", x)]
# Servers and single processes do not end by themselves; test_reading.py runs the reading path.
OTHERS = ("--ckpt", "--help", "--serve", "--process")
READING = (ROOT / "docs" / "reading.md").read_text()
OFFLINE = [x for x in MODEL_COMMANDS if x not in READING and not any(o in x for o in OTHERS)]
# The first page shows a part of a function; a client needs a server (see test_agents.py).
EXAMPLES = [x for x in blocks("python") if x[0] != " " and "client" not in x]


def call(command, **kwargs):
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300, **kwargs
    )


@pytest.mark.parametrize("line", MODEL_COMMANDS)
def test_every_option_that_a_page_uses_exists(line):
    words = shlex.split(line.split(">")[0].split("<")[0].split("|")[0])
    name = words[2].removesuffix(".main")
    if "--help" not in words:
        for axes in parser(name).parse_args(words[3:]).mesh:
            parse_mesh(axes)


@pytest.mark.one_in(10)
@pytest.mark.parametrize("line", OFFLINE)
def test_a_command_that_needs_no_checkpoint_prints_text(line, tmp_path):
    words = shlex.split(line)
    done = call([sys.executable, *words[1:], "--max-new-tokens", "30"], stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.strip()) > 30


@pytest.mark.one_in(5)
@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_runs(code):
    done = call([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() or "print" not in code


def test_the_pages_name_the_commands_that_are_tested_here():
    assert "pip install -e '.[test]'" in COMMANDS
    assert "python -m pytest" in COMMANDS
    assert OFFLINE


@pytest.mark.parametrize("file", PAGES, ids=lambda f: str(f.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)#:]+)[#)]", file.read_text()):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"
    for target, place in re.findall(r"\]\(([^)#:]*)#([a-z][^)]*)\)", file.read_text()):
        page = (file.parent / target if target else file).read_text()
        titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
        places = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert place in places, f"{file.name} links to {target}#{place}"


FIRST_PAGE = (ROOT / "README.md").read_text()


def test_the_first_page_shows_lines_of_llama3():
    (shown,) = (x for x in blocks("python") if x.startswith(" "))
    assert shown in (ROOT / "llama3" / "model.py").read_text()


def test_the_pages_are_short():
    words = {file: len(file.read_text().split()) for file in PAGES}
    assert words[ROOT / "README.md"] <= 1300 and sum(words.values()) <= 20_000


def test_the_first_page_counts_the_lines_of_every_model_file():
    counted = re.findall(r"^\| \[`(\w+)/`\].*\| (\d+) \|", FIRST_PAGE, re.MULTILINE)
    assert dict(counted).keys() == set(SHOWN)
    for family, lines in counted:
        assert int(lines) == len((ROOT / family / "model.py").read_text().splitlines()), family


FAMILY_OF = {size: family for family, size in topologies.sizes()}
SIZES = (ROOT / "docs" / "commands.md").read_text()
MEMORY = re.findall(r"^\| ([a-z][\w.-]*)[^|]*((?:\| [\d.,]+ ){5})\|$", SIZES, re.M)


def test_a_page_has_the_memory_of_every_family():
    assert {FAMILY_OF[size] for size, _ in MEMORY} >= set(SHOWN)


@pytest.mark.parametrize("size, cells", MEMORY, ids=[size for size, _ in MEMORY])
def test_the_memory_on_the_page_follows_from_the_shapes(size, cells):
    loads = []
    for storage in ("as stored", "bf16", "int8"):
        row = topologies.Row(FAMILY_OF[size], size, storage, "", slots=1, capacity=4096)
        plan = topologies.plan_of(row)
        loads.append(load_of(plan, topologies.ONE))
    sizes = [*(load.weights for load in loads), *(load.cache for load in loads[1:])]
    assert cells == "".join(f"| {n / 1e9:,.2f} " for n in sizes)
