"""Turns a tokenizer file in tiktoken's format, as Kimi K2 publishes it, into a `tokenizers` one.

Each line of tiktoken.model is the bytes of a token in base64 and its rank, which is its id. If the
bytes of two neighbouring tokens together are a token, the two are joined, the pair of the lowest
rank first. The rule that first cuts text into words is Kimi's, and is in no data file.
"""

import base64
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from common.loading.files import read_text

SPECIAL = 256  # special tokens, whose ids follow the ranks; those without a name are reserved
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"  # the letters that may begin a word
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
WORDS = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}"
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)


def byte_characters() -> list[str]:
    """Returns the character of each byte in a `tokenizers` vocabulary, as GPT-2 defined them:
    printable bytes stand for themselves, and the others get the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b if b in printable else next(others)) for b in range(256)]


def read_ranks(file: Path) -> dict[bytes, int]:
    """Returns the rank of each token. ValueError names a line that cannot be read."""
    ranks: dict[bytes, int] = {}
    for i, line in enumerate(read_text(file).splitlines()):
        token, _, rank = line.partition(" ")
        try:
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{file}: line {i + 1} is not a token and rank") from None
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file}: the ranks are not 0, 1, 2, ... of all bytes and longer tokens")
    return ranks


def word_rule() -> Any:
    """Returns the step that cuts text into words and spells them in `byte_characters`."""
    words = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def load_tiktoken(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Returns the tokenizer of a tiktoken.model, and its special tokens by id, as in the
    added_tokens_decoder of tokenizer_config.json, which names some of them."""
    ranks, characters = read_ranks(file), dict(enumerate(byte_characters()))
    spelled = {token: token.decode("latin-1").translate(characters) for token in ranks}
    merges = []
    for token in sorted(ranks, key=lambda token: ranks[token]):
        halves = ((token[:i], token[i:]) for i in range(1, len(token)))
        merges += [(spelled[a], spelled[b]) for a, b in halves if a in ranks and b in ranks]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    backend.pre_tokenizer = word_rule()
    backend.decoder = decoders.ByteLevel()
    ids = range(len(ranks), len(ranks) + SPECIAL)
    special = {str(i): dict(content=f"<|reserved_token_{i}|>", special=True) for i in ids}
    return backend, special
