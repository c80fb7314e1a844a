"""The small files of a checkpoint directory, read once and refused in one line."""

import json
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LARGEST = 1 << 28  # bytes: the index of a model of 1,000 files is some 20 MB
HALF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
MOST_LINES = 20  # of one message


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def first_lines(problems: Sequence[str]) -> str:
    """The first of many problems, a line each, and how many more there are."""
    more = len(problems) - MOST_LINES
    return "\n".join([*problems[:MOST_LINES], *[f"and {more} more such lines"] * (more > 0)])


def is_there(path: Path) -> bool:
    """Whether the directory has this name: also a link to nothing, which reading then refuses."""
    return os.path.lexists(path)


def check_regular(path: Path) -> int:
    """The size of a file in bytes; ValueError for what is no regular file, which may never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a regular file")
    return status.st_size


def read_text(path: Path) -> str:
    """FileNotFoundError names a missing file and its directory; ValueError one that is no text."""
    try:
        if (size := check_regular(path)) > LARGEST:
            raise ValueError(f"{path} has {size} bytes, more than the {LARGEST} that are read")
        return path.read_text(encoding="utf-8-sig")  # without a byte-order mark
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.name} is missing in {path.parent}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; download it again") from None


def parse_json(text: str, **hooks: Any) -> Any:
    """What a JSON text holds; ValueError, too, for half a surrogate pair, which is no character."""
    content = json.loads(text, **hooks)
    if HALF_A_PAIR.search(text):  # or a whole one
        json.dumps(content, ensure_ascii=False).encode()
    return content


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    text = read_text(path)
    try:
        content = parse_json(text)
    except RecursionError:
        raise ValueError(f"{path} is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {first_line(error)}; download it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object, but a {type(content).__name__}")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    """The same, empty where the file is missing."""
    return read_json(path) if is_there(path) else {}
