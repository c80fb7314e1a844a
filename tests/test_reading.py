"""The reading path links to the definitions that it names, and its experiments print what it
says."""

import ast
import re
import shlex
import subprocess
import sys

import pytest
from engine import ENVIRONMENT, ROOT
from families import SHOWN
from test_differences import differences

PAGE = ROOT / "docs" / "reading.md"
STOPS = re.split(r"^## \d+\. ", PAGE.read_text(), flags=re.MULTILINE)[1:]
LINKS = re.findall(r"\[`(\w+)`\]\((\S+)#L(\d+)-L(\d+)\)", PAGE.read_text())


def experiment(stop):
    """Returns the one command of a stop, and the words that its output must hold."""
    (command,) = re.findall(r"```sh\n(.*)\n```", stop)
    return command, re.findall(r"`([^`]+)`", stop.split("*See*:")[1])


def run(command):
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        **dict(cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.DEVNULL),
        **dict(capture_output=True, text=True, timeout=300),
    )
    assert done.returncode == 0, done.stderr
    return done


COMMANDS = [
    pytest.param(*experiment(stop), id=f"{i}", marks=pytest.mark.full if " -m " in stop else ())
    for i, stop in enumerate(STOPS, 1)
]


def test_every_linked_range_is_that_of_the_definition_it_names():
    for name, file, first, last in LINKS:
        lines = (PAGE.parent / file).read_text().splitlines()
        assert re.match(rf"(def|class) {name}\b", lines[int(first) - 1]), (
            f"{file}#L{first} is not where {name} starts: run python tools/differences.py"
        )
        (node,) = ast.parse("\n".join(lines[int(first) - 1 : int(last)])).body
        assert node.name == name
    assert differences.reranged(PAGE) == PAGE.read_text(), "run python tools/differences.py"


def test_no_link_to_a_line_escapes_the_test():
    assert PAGE.read_text().count("#L") == len(LINKS) > 30


def test_a_name_that_is_gone_is_told(tmp_path):
    (tmp_path / "code.py").write_text("def one(): ...\n")
    page = tmp_path / "page.md"
    page.write_text("[`one`](code.py#L7-L9)")
    assert differences.reranged(page) == "[`one`](code.py#L1-L1)"
    page.write_text("[`two`](code.py#L1-L1)")
    with pytest.raises(ValueError, match="0 definitions of two"):
        differences.reranged(page)


def test_the_path_leads_through_every_family_in_the_order_of_their_ideas():
    families = [stop.split(":")[0] for stop in STOPS if stop.split(":")[0] in SHOWN]
    assert list(dict.fromkeys(families)) == SHOWN


def test_a_stop_has_lines_to_read_a_question_and_an_experiment():
    for stop in STOPS:
        assert "#L" in stop.split("*Ask*:")[0]
        assert stop.split("*Ask*:")[1].split("```")[0].strip().endswith("?")
        experiment(stop)


def test_other_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#:]+)[#)]", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


@pytest.mark.one_in(4)
@pytest.mark.parametrize("command, shown", COMMANDS)
def test_an_experiment_shows_what_the_page_says(command, shown):
    done = run(command)
    assert done.stdout.strip()
    for words in shown:
        if not words.startswith("--"):
            assert words in done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("option", ["--mesh expert=4 ", "--draft mtp "])
def test_the_text_is_the_one_without_the_option(option):
    (command,) = (c for c, _ in map(experiment, STOPS) if option in c)
    assert run(command).stdout == run(command.replace(option, "")).stdout


@pytest.mark.full
def test_the_likeliest_text_comes_again_and_a_drawn_one_is_another():
    command, _ = experiment(STOPS[0])
    (drawn,) = re.findall(r"`(--temperature [^`]+)`", STOPS[0])
    text = run(command).stdout
    assert run(command).stdout == text != run(f"{command} {drawn}").stdout


@pytest.mark.full
def test_a_draft_that_was_right_saves_a_step():
    (command,) = (c for c, _ in map(experiment, STOPS) if "--draft mtp" in c)
    line = run(command).stderr
    tokens, percent, steps = (
        int(re.search(words, line).group(1))
        for words in (r"decode (\d+) tokens", r"(\d+)% of \d+ drafts", r"of (\d+) drafts")
    )
    assert percent == round(100 * (tokens - steps) / steps) > 30


@pytest.mark.full
def test_a_text_is_what_its_prompt_gives_alone():
    (command,) = (c for c, _ in map(experiment, STOPS) if "--json" in c)
    start, *prompts, end = re.split(r'(--prompt "[^"]+" )', command)
    prompts = [p for p in prompts if p.startswith("--prompt")]
    texts = [run(start + prompt + end).stdout for prompt in prompts]
    words = [re.search(r'"text": "[^}]*?", "', text).group() for text in texts]
    assert re.findall(r'"text": "[^}]*?", "', run(command).stdout) == words
