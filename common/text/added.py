"""The tokens that a checkpoint has beside those of its vocabulary, and the names of some of them.

Four files may name them: tokenizer.json, tokenizer_config.json, special_tokens_map.json and
added_tokens.json. They are read in the order in which transformers reads them, which decides where
two of them differ, and the tokens are added in its order, which decides their ids.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from common.loading.files import read_json_if_there

NAMES = [f"{name}_token" for name in "bos eos unk sep pad cls mask".split()]
EXTRA, OLD = "extra_special_tokens", "additional_special_tokens"  # one key, and its older name
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def token_of(value: Any, where: Path, **flags: bool) -> Any:
    """A token as a file gives it: its text, or an object with that as `content`: an AddedToken."""
    given = dict(value) | flags if isinstance(value, Mapping) else {}
    if not isinstance(text := given.get("content", value), str):
        raise ValueError(f"{where}: a token must be a text, or an object with content")
    options = {flag: bool(given[flag]) for flag in FLAGS if flag in given}
    return AddedToken(text, **options) if given else text


def read_names(given: Mapping[str, Any], where: Path, **flags: bool) -> dict[str, Any]:
    """The tokens of keys such as eos_token, and those of the two lists."""
    found = dict[str, Any]()
    for key, x in given.items():
        if key in (EXTRA, OLD) and isinstance(x, Mapping):
            found |= {name: token_of(token, where) for name, token in x.items()}
        elif key in (EXTRA, OLD):
            found[key] = [token_of(token, where) for token in x or []]
        elif isinstance(x, str | dict) and key.endswith("_token"):
            found[key] = token_of(x, where, **flags)
    return found


def add_tokens(
    backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]
) -> dict[str, str]:
    """Adds to a tokenizer all tokens that the files beside its own name. Returns the texts of those
    that have a name, as templates see them.

    ValueError if a file gives a token an id that it does not get.
    """
    where, tokens = directory / "tokenizer_config.json", dict[int, AddedToken]()
    names = read_names(config, where)
    if not names.get(EXTRA) and OLD in names:
        names[EXTRA] = names.pop(OLD)
    if "added_tokens_decoder" in config:
        try:
            given = config["added_tokens_decoder"].items()
            tokens = {int(i): token_of(x | {}, where) for i, x in given}
        except (AttributeError, TypeError, ValueError):
            raise ValueError(
                f"{where}: added_tokens_decoder must be an object of objects with content, by id"
            ) from None
    else:
        where = directory / "special_tokens_map.json"
        older = read_names(read_json_if_there(where), where, special=True)
        names |= older
        plain = [x for x in (*map(names.get, NAMES), *names.get(EXTRA, [])) if isinstance(x, str)]
        special = {*plain, *(text_of(older[name]) for name in NAMES if name in older)}
        for text, i in read_json_if_there(where := directory / "added_tokens.json").items():
            if type(i) is not int:
                raise ValueError(f"{where}: the id of {text!r} must be an integer")
            tokens[i] = AddedToken(text, normalized=text not in special, special=text in special)
        tokens |= backend.get_added_tokens_decoder()
    extra, old = names.pop(EXTRA, None), names.pop(OLD, [])
    same = {token.content: token for token in tokens.values()}
    names = {name: same.get(text_of(token), token) for name, token in names.items()}
    rank = {name: i for i, name in enumerate(NAMES)}
    first = sorted(
        names, key=lambda name: rank.get(name, len(NAMES) + isinstance(names[name], str))
    )
    new: list[Any] = [tokens[i] for i in sorted(tokens)]
    known = {*map(text_of, new), *(x.content for x in backend.get_added_tokens_decoder().values())}
    for token in (*(names[name] for name in first), *(old if extra is None else extra)):
        if text_of(token) not in known and token not in new:
            new.append(token)
    called = {text_of(token) for token in names.values()}
    for i, token in enumerate(new):
        if isinstance(token, str):
            new[i] = AddedToken(token, special=True)
        elif token.content in called:
            token.special = True
    backend.add_tokens(new)
    for i, token in tokens.items():
        if (got := backend.token_to_id(token.content)) != i:
            raise ValueError(f"{directory}: files give {token.content!r} the id {i}, not {got}")
    return {name: text_of(token) for name, token in names.items()}


def text_of(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content
