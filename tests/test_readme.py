"""What the READMEs tell people to type, typed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from engine import ENVIRONMENT

from common.arguments import parser
from common.sharding import parse_mesh

ROOT = Path(__file__).parent.parent
READMES = sorted(
    {*ROOT.glob("README.md"), *ROOT.glob("*/README.md"), *ROOT.glob("common/*/README.md")}
)


def blocks(language):
    text = "\n".join(file.read_text() for file in READMES)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


COMMANDS = sorted({line for block in blocks("sh") for line in block.splitlines() if line.strip()})
MODEL_COMMANDS = [line for line in COMMANDS if re.match(r"python -m \w+\.main", line)]
OFFLINE = [line for line in MODEL_COMMANDS if "--ckpt" not in line and "--help" not in line]


def call(command, **kwargs):
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=300, **kwargs
    )


@pytest.mark.parametrize("line", MODEL_COMMANDS)
def test_every_option_that_a_readme_uses_exists(line):
    words = shlex.split(line.split(">")[0])
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


@pytest.mark.parametrize("code", blocks("python"))
def test_an_example_runs(code):
    done = call([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Event(") == (16 if "serve" in code else 0)


def test_the_readmes_name_the_commands_that_are_tested_here():
    assert "pip install -e '.[test]'" in COMMANDS
    assert "python -m pytest" in COMMANDS
    assert OFFLINE


@pytest.mark.parametrize("file", READMES, ids=lambda f: str(f.relative_to(ROOT)))
def test_links_lead_somewhere(file):
    for target in re.findall(r"\]\(([^)#:]+)[#)]", file.read_text()):
        assert (file.parent / target).exists(), f"{file.name} links to {target}"
