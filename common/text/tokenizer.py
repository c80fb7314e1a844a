"""Text to token ids and back: tokenizer files, the checkpoint's own chat template, streamed text.

A checkpoint directory holds `tokenizer.json` (or GPT-2's `vocab.json` and `merges.txt`, or Kimi's
`tiktoken.model`). JSON files beside it name the special tokens, the stop ids and the chat template.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from common.loading.files import is_there, read_json_if_there, read_text
from common.text.added import BY_ID, add_tokens
from common.text.tiktoken import load_tiktoken

# In a multimodal model's config.json.
IMAGE_KEYS = ("image_token_index", "image_token_id", "media_placeholder_token_id")
ADVICE = f"; download it again, or it may need a newer tokenizers than {tokenizers.__version__}"


class Tokenizer(NamedTuple):
    backend: tokenizers.Tokenizer
    chat_template: str | None  # jinja source; None if the checkpoint is not made for chat
    special_tokens: dict[str, str]  # "bos_token", "eos_token", ... -> text, as templates see them
    special_ids: frozenset[int]  # ids that `decode` leaves out
    added_tokens: tuple[tuple[str, bool], ...]  # (text of one token, is it special)
    control_tokens: tuple[str, ...] | None  # those that no message may hold, if the files list them
    stop_ids: frozenset[int]  # generation ends at any of these
    image_ids: frozenset[int]  # placeholders for an image; no prompt of text may hold them
    bos_id: int | None
    vocab_size: int  # the largest id plus one; the model may have more logits
    notes: tuple[str, ...] = ()  # what the files say that is not done


def has_tokenizer(directory: Path) -> bool:
    names = ("tokenizer.json", "tiktoken.model", "vocab.json")
    return any(is_there(directory / name) for name in names)


def load_tokenizer(directory: Path | str) -> Tokenizer:
    """Reads the tokenizer of a checkpoint directory.

    Raises FileNotFoundError if there is none, ValueError if a file cannot be understood.
    """
    directory = Path(directory)
    config = read_json_if_there(directory / "tokenizer_config.json")
    flags = dict(split_special_tokens=False, add_bos_token=True, add_prefix_space=True)
    if wrong := [key for key, most in flags.items() if config.get(key) not in (None, False, most)]:
        what = f"{wrong[0]}={config[wrong[0]]!r} is not implemented"
        raise ValueError(f"{directory / 'tokenizer_config.json'}: {what}")
    controls = config.get("chat_control_tokens")
    if not isinstance(controls, list | None) or any(not isinstance(x, str) for x in controls or ()):
        raise ValueError("tokenizer_config.json: chat_control_tokens must be a list of texts")
    backend, config = _load_backend(directory, config)
    special_tokens = add_tokens(backend, directory, config)
    # Training may have saved limits with the tokenizer, which would silently cut prompts.
    backend.no_truncation()
    backend.no_padding()

    model = read_json_if_there(directory / "config.json")
    end = backend.token_to_id(special_tokens.get("eos_token", ""))
    stop_ids = set() if end is None else {end}
    for name in ("config.json", "generation_config.json"):
        stop_ids |= _stop_ids(directory / name)

    bos = special_tokens.get("bos_token", "")
    bos_id = backend.token_to_id(bos)
    # Some families say only in tokenizer_config.json that prompts begin with BOS.
    if bos_id is not None and config.get("add_bos_token") and bos_id not in backend.encode("").ids:
        backend.post_processor = processors.TemplateProcessing([bos, "$A"], None, [(bos, bos_id)])
    added = backend.get_added_tokens_decoder()
    template, notes = _chat_template(directory, config)
    words = backend.pre_tokenizer.__getstate__() if backend.pre_tokenizer else b""
    if config.get("add_prefix_space") and b'"add_prefix_space":false' in words:
        notes += ("add_prefix_space=true is not applied: tokenizer.json says false",)
    return Tokenizer(
        backend=backend,
        chat_template=template,
        special_tokens=special_tokens,
        special_ids=frozenset(i for i, token in added.items() if token.special),
        added_tokens=tuple((token.content, token.special) for token in added.values()),
        control_tokens=None if controls is None else tuple(controls),
        stop_ids=frozenset(stop_ids),
        image_ids=frozenset(model[k] for k in IMAGE_KEYS if type(model.get(k)) is int),
        bos_id=bos_id,
        vocab_size=1 + max(backend.get_vocab().values(), default=-1),
        notes=notes,
    )


def _stop_ids(file: Path) -> set[int]:
    outer, ids = read_json_if_there(file), list[Any]()
    for values in (outer, outer.get("text_config")):
        value = values.get("eos_token_id") if isinstance(values, dict) else None
        ids += value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise ValueError(f"{file}: eos_token_id must be an integer or a list of integers")
    return set(ids)


def _load_backend(
    directory: Path, config: dict[str, Any]
) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Returns the tokenizer, and tokenizer_config.json with what counts if it does not say it."""
    family, ranks = config.get("tokenizer_class"), directory / "tiktoken.model"
    whole, vocab, merges = (directory / n for n in ("tokenizer.json", "vocab.json", "merges.txt"))
    if is_there(whole):
        text = read_text(whole)
        with as_value_error(str(whole), ADVICE):
            return tokenizers.Tokenizer.from_str(text), config
    if is_there(ranks):
        backend, special = load_tiktoken(ranks)
        named = config.get(BY_ID, {})
        return backend, {**config, BY_ID: special | named if isinstance(named, dict) else named}
    if not (is_there(vocab) and is_there(merges)):
        raise FileNotFoundError(
            f"{directory}: no tokenizer.json (nor vocab.json with merges.txt); "
            "download the checkpoint's tokenizer files into this directory"
        )
    with as_value_error(f"{vocab} with merges.txt", ADVICE):
        backend = tokenizers.Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    # Other families publish the same two files, but split text into words by other rules.
    if family not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise ValueError(
            f"{directory}: vocab.json with merges.txt is enough for GPT2Tokenizer "
            f"only, not for {family}; add the checkpoint's tokenizer.json"
        )
    spaced = config.get("add_prefix_space", False) is True
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    backend.decoder = decoders.ByteLevel()
    return backend, dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>") | config


@contextlib.contextmanager
def as_value_error(what: str, advice: str = "") -> Iterator[None]:
    """Turns whatever foreign code raises into ValueError: `tokenizers` raises bare Exception, and
    its panics, as at millions of spaces in a row, are not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        told = " ".join(str(error).split())[:500] or type(error).__name__
        raise ValueError(f"{what}: {told}{advice}") from error


def _chat_template(directory: Path, config: dict[str, Any]) -> tuple[str | None, tuple[str, ...]]:
    """The template of a conversation; and a note, if there are several, but none to be taken."""
    file, older = directory / "chat_template.jinja", directory / "chat_template.json"
    template = config.get("chat_template") or read_json_if_there(older).get("chat_template")
    template = read_text(file) if is_there(file) else template  # `older` is of a processor
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        named = {entry.get("name"): entry.get("template", 0) for entry in template}
        if template and "default" not in named:
            names = ", ".join(map(str, named))
            return None, (f"no chat template is used: there are {names}, and none is the default",)
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be a text, or a list of "
            "objects with name and template"
        )
    return template, ()


def encode(tok: Tokenizer, text: str) -> list[int]:
    """Encodes a raw prompt, with what the tokenizer itself adds (BOS), but never two BOS."""
    ids = ids_of(tok, tok.backend, text, add_special_tokens=True)
    while tok.bos_id is not None and ids[:2] == [tok.bos_id] * 2:
        del ids[0]  # the prompt spells out its own BOS
    return ids


def ids_of(
    tok: Tokenizer, backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool = False
) -> list[int]:
    """Encodes a text. ValueError if that cannot be, or if the text has the place of an image."""
    if not isinstance(text, str):
        raise TypeError(f"a prompt is a text, not {str(text)[:80]}")
    # Bytes that are not UTF-8 reach Python as surrogates.
    if text.encode(errors="ignore").decode() != text:
        raise ValueError("the prompt is not valid Unicode text; give it as UTF-8")
    with as_value_error("the prompt cannot be encoded"):
        # In a batch, because `encode` would let no other thread run until it is done.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids = list(encoding.ids)
    if images := tok.image_ids.intersection(ids):
        name = tok.backend.id_to_token(min(images))
        raise ValueError(f"the prompt has {name}, the place of an image, but only text is computed")
    return ids


def decode(tok: Tokenizer, ids: Sequence[int], keep_special: bool = False) -> str:
    """Returns the text of ids as the decoder gives it; it removes no space before punctuation."""
    return str(tok.backend.decode(list(ids), skip_special_tokens=not keep_special))


def ids_behind(tok: Tokenizer, backend: tokenizers.Tokenizer, before: str, text: str) -> list[int]:
    """Encodes a text that stands behind another: a tokenizer that puts a space before each text
    puts none before this one. If the two share a token, `text` is encoded alone."""
    known, ids = (ids_of(tok, backend, x) for x in (before, before + text))
    if ids[: len(known)] == known:
        return ids[len(known) :]
    return ids_of(tok, backend, text)


# An unfinished UTF-8 character has at most three bytes, and a token at least one, so the last three
# tokens hold all of it. One more goes before them, because the decoder treats the first token of a
# text in its own way (sentencepiece drops its leading space).
_WINDOW = 4
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Stream(NamedTuple):
    seen: tuple[int, ...] = ()  # the last tokens whose text is out, but for an unfinished character
    held: tuple[int, ...] = ()  # the byte tokens after them
    keep_special: bool = False
    stop: Sequence[str] = ()  # the text ends before the first of these, and is `stopped`
    tail: str = ""  # text that may be the beginning of one of them
    stopped: bool = False


def stream_start(tok: Tokenizer, context: Sequence[int] = (), keep_special: bool = False) -> Stream:
    """Returns an empty stream. If its text continues that of other ids, `context` is those ids."""
    stream = Stream(keep_special=keep_special)
    for token_id in context[-4 * _WINDOW :]:
        stream, _ = stream_push(tok, stream, token_id)
    return stream


def stream_push(tok: Tokenizer, stream: Stream, token_id: int) -> tuple[Stream, str]:
    """Adds a token; returns the text now certain. Joined, they equal `decode`, until a stop."""
    token = tok.backend.id_to_token(token_id)
    if token is None or (token_id in tok.special_ids and not stream.keep_special):
        return stream, ""  # decodes to nothing
    if _BYTE_TOKEN.fullmatch(token):
        # Byte fallback decodes a run of byte tokens as one: a bad byte spoils the good ones before.
        return stream._replace(held=(*stream.held, token_id)), ""
    ids = (*stream.seen, *stream.held, token_id)
    text = _certain(tok, stream, ids).removeprefix(_certain(tok, stream, stream.seen))
    return before_stop(stream._replace(seen=ids[-_WINDOW:], held=()), text)


def before_stop(stream: Stream, text: str) -> tuple[Stream, str]:
    """Adds text; returns what comes before a stop text, and holds back what may begin one."""
    if stream.stopped:
        return stream, ""
    text = stream.tail + text
    found = [at for stop in stream.stop if (at := text.find(stop)) >= 0]
    if found:
        return stream._replace(stopped=True, tail=""), text[: min(found)]
    begins = lambda end: any(stop.startswith(end) for stop in stream.stop)
    out = next((at for at in range(len(text)) if begins(text[at:])), len(text))
    return stream._replace(tail=text[out:]), text[:out]


def stream_flush(tok: Tokenizer, stream: Stream) -> str:
    """Returns the text held back, at the end. An unfinished character comes out as U+FFFD."""
    text = decode(tok, stream.seen + stream.held, stream.keep_special)
    text = text.removeprefix(_certain(tok, stream, stream.seen))
    stream, text = before_stop(stream, text)
    return text + stream.tail


def _certain(tok: Tokenizer, stream: Stream, ids: Sequence[int]) -> str:
    """Decodes `ids` without a last U+FFFD, because the next token may complete that character."""
    return decode(tok, ids, stream.keep_special).removesuffix("\ufffd")
