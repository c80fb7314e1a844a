"""The house of `common`: each folder is a floor, and imports only from the floors below it. So the
folder of a file says who uses it."""

import ast
from pathlib import Path

import pytest
from engine import ROOT

# From the lowest to the highest; "" is common/*.py.
FLOORS = ("kernels", "", "loading", "text", "machines", "serving", "server", "command")
# Kernels may import these from the floor above them: they define how a matrix is stored.
BELOW_KERNELS = ("common.quant", "common.sharding")
FILES = sorted((ROOT / "common").rglob("*.py"))
MODEL_FILES = sorted(
    file
    for folder in ROOT.glob("*/model.py")
    for file in folder.parent.glob("*.py")
    if file.name not in ("main.py", "shapes.py")
)


def imports(source: str) -> list[str]:
    """Returns the modules of this library that a file imports, at its top or later."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert not node.level or not node.module, "a relative import of a module"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found += [x if is_module(x) else x.rpartition(".")[0] for x in names]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    families = {folder.parent.name for folder in ROOT.glob("*/model.py")}
    return [x for x in found if x.split(".")[0] in {"common", "tests", "tools", *families}]


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def floor_of(module: str) -> int:
    """Returns the floor of a module of `common`."""
    words = module.split(".")
    return FLOORS.index(words[1] if words[1] in FLOORS else "")


def wrong_imports(module: str, source: str) -> list[str]:
    """Returns the modules that a module of `common` imports, but may not."""
    found = imports(source)
    if FLOORS[floor_of(module)] == "kernels":
        return [x for x in found if floor_of(x) != 0 and x not in BELOW_KERNELS]
    if module in BELOW_KERNELS:
        return [x for x in found if x not in BELOW_KERNELS]
    return [x for x in found if not x.startswith("common.") or floor_of(x) > floor_of(module)]


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_room_imports_from_the_floors_below_it_alone(file):
    assert wrong_imports(name_of(file), file.read_text()) == []


@pytest.mark.parametrize("file", MODEL_FILES, ids=name_of)
def test_a_model_file_imports_its_words_and_the_kernels_alone(file):
    found = imports(file.read_text())
    own = file.parent.name
    others = [x for x in found if not x.startswith("common.") and x.split(".")[0] != own]
    assert not others
    assert all(floor_of(x) <= 1 for x in found if x.startswith("common.")), found


def test_every_word_of_the_vocabulary_is_used_by_a_model_file():
    """A file that no model file imports belongs in a folder."""
    used = {x for file in MODEL_FILES for x in imports(file.read_text())}
    words = {name_of(file) for file in FILES if file.parent.name == "common"}
    assert words - {"common.__init__"} <= used


def test_every_folder_says_what_is_in_it_and_where_to_start():
    for floor in FLOORS:
        folder = ROOT / "common" / floor
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
        assert "mport" in text and "o start, read" in text
        for file in folder.glob("*.py"):
            if floor not in ("", "kernels") and file.stem != "__init__":
                assert f"`{file.stem}`" in text or f"`{file.name}`" in text, (floor, file.name)


@pytest.mark.parametrize(
    "module, line",
    [
        ("common.cache", "from common.loading.files import first_line"),
        ("common.loading.hub", "from common.serving import load"),
        ("common.loading.hub", "def f():\n    import common.machines.hosts"),
        ("common.kernels.softmax", "from common.cache import attend"),
        ("common.quant", "from common.kernels.dispatch import choose"),
        ("common.machines.dryrun", "from llama3 import model"),
    ],
)
def test_an_import_that_goes_up_is_seen(module, line):
    assert wrong_imports(module, line)
