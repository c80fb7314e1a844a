"""Reads the small files of a checkpoint directory. If one is bad, the error is a single line."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
MOST_LINES = 6  # in one error message


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_lines(problems: Sequence[str]) -> str:
    """Returns the first MOST_LINES problems, one a line, and says how many more there are."""
    more = len(problems) - MOST_LINES
    return "\n".join([*problems[:MOST_LINES], *[f"and {more} more such lines"] * (more > 0)])


def is_there(path: Path) -> bool:
    """Whether the directory has this name. A link to nothing counts, but reading it is an error."""
    return os.path.lexists(path)


def read_text(path: Path) -> str:
    """Reads a text file. An error names it: FileNotFoundError, or ValueError if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")  # without a byte-order mark
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.name} is missing in {path.parent}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; download it again") from None


def parse_json(text: str, **hooks: Any) -> Any:
    """Parses JSON. Half a surrogate pair, which is not a character, is a ValueError, too."""
    content = json.loads(text, **hooks)
    if HALF_A_PAIR.search(text):  # may be part of a whole pair
        json.dumps(content, ensure_ascii=False).encode()
    return content


def read_json(path: Path) -> dict[str, Any]:
    text = read_text(path)
    try:
        content = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object, but a {type(content).__name__}")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if is_there(path) else {}
