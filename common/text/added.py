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
BY_ID = "added_tokens_decoder"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def token_of(value: Any, where: Path, **flags: bool) -> AddedToken:
    """A token as a file gives it: its text, or an object with that as `content` and with flags."""
    given = {**value, **flags} if isinstance(value, Mapping) else dict(content=value, special=True)
    options = {flag: given[flag] for flag in FLAGS if flag in given}
    text = given.get("content")
    if not isinstance(text, str) or any(type(x) is not bool for x in options.values()):
        raise ValueError(f"{where}: a token must be a text, or an object with content and flags")
    return AddedToken(text, **options)


def read_names(
    given: Mapping[str, Any], where: Path, **flags: bool
) -> tuple[dict[str, AddedToken], Any]:
    """The tokens of keys such as eos_token, and the list of others as the file gives it."""
    by_key = {k: x for k, x in given.items() if k.endswith("_token") and isinstance(x, str | dict)}
    objects_first = sorted(by_key, key=lambda key: isinstance(by_key[key], str))
    names = {key: token_of(by_key[key], where, **flags) for key in objects_first}
    extra = given.get("extra_special_tokens")
    if isinstance(extra, Mapping):
        names |= {name: token_of(x, where) for name, x in extra.items()}
        extra = None
    return names, extra or given.get("additional_special_tokens", extra)  # its older name


def add_tokens(
    backend: tokenizers.Tokenizer, directory: Path, config: Mapping[str, Any]
) -> dict[str, str]:
    """Adds to a tokenizer all tokens that the files beside its own name. Returns the texts of those
    that have a name, as templates see them. `config` is tokenizer_config.json. ValueError if a file
    gives a token an id that it does not get."""
    where, tokens = directory / "tokenizer_config.json", dict[int, AddedToken]()
    names, others = read_names(config, where)
    if BY_ID in config:
        try:
            tokens = {int(i): token_of(x | {}, where) for i, x in config[BY_ID].items()}
        except (AttributeError, TypeError, ValueError):
            wrong = f"{where}: {BY_ID} must be an object of objects with content, by id"
            raise ValueError(wrong) from None
    else:
        where = directory / "special_tokens_map.json"
        given = read_json_if_there(where)
        older, more = read_names(given, where, special=True)
        named = map({**config, **given}.get, NAMES)
        special = {x for x in (*named, *(others or [])) if isinstance(x, str)}
        special |= {older[name].content for name in NAMES if name in older}
        names, others = names | older, more if others is None else others
        for text, i in read_json_if_there(where := directory / "added_tokens.json").items():
            if type(i) is not int:
                raise ValueError(f"{where}: the id of {text!r} must be an integer")
            tokens[i] = AddedToken(text, normalized=text not in special, special=text in special)
        tokens |= backend.get_added_tokens_decoder()
    new = [tokens[i] for i in sorted(tokens)]
    known = {token.content for token in (*new, *backend.get_added_tokens_decoder().values())}
    ordered = [names[name] for name in (*NAMES, *names) if name in names]
    listed = [token_of(x, directory) for x in others or []]
    new += [x for x in dict.fromkeys((*ordered, *listed)) if x.content not in known]
    called = {token.content for token in names.values()}
    for token in new:
        token.special |= token.content in called
    backend.add_tokens(new)
    for i, token in tokens.items():
        if (got := backend.token_to_id(token.content)) != i:
            wrong = f"its tokenizer files give {token.content!r} the id {i}, not {got}"
            raise ValueError(f"{directory}: {wrong}")
    return {name: token.content for name, token in names.items()}
