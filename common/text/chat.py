"""Conversations: the checkpoint's template writes them as one text, which is then encoded.

A template gets what it asks for. If it leaves a message out, that is refused. No message can hold a
control token: one that is spelled out is encoded as plain text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers

from common.text.harmony import END
from common.text.tokenizer import Tokenizer, ids_behind, ids_of

OPEN, CLOSE = "\U000f0000", "\U000f0001"  # stand around a control token of a message
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field
Messages = Sequence[Mapping[str, Any]]


def encode_chat(tok: Tokenizer, messages: Messages, **variables: Any) -> list[int]:
    """Encodes a conversation, up to where a reply begins. The template writes BOS itself, so the
    tokenizer adds nothing. `variables` (`tools`, ...) reach the template.

    Raises ValueError if there is no template, if it complains, or if it leaves a message out.
    """
    messages, controls = for_template(tok, messages), either(control_tokens(tok))
    text = render_chat(tok, marked(messages, controls), **marked(variables, controls))
    added = either([text for text, _ in tok.added_tokens])
    # After the first piece, every second one is a marked token, or None for a lone mark.
    first, *pieces = re.split(f"{OPEN}({added}){CLOSE}|[{OPEN}{CLOSE}]", text)
    ids, plain = ids_of(tok, tok.backend, first), without_added(tok.backend)
    for token, rest in zip(pieces[::2], pieces[1::2], strict=True):
        spelled = ids_behind(tok, plain, "\n", token) if token else []
        if token and tok.backend.token_to_id(token) in spelled:
            raise ValueError(f"a message has {token!r}, which this tokenizer cannot spell out")
        ids += spelled + (ids_behind(tok, tok.backend, "\n", rest) if rest else [])
    return ids


def either(texts: Sequence[str]) -> str:
    """A pattern for any of the texts; where one contains another one, for the longer."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def without_added(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer without its added tokens."""
    plain = tokenizers.Tokenizer(backend.model)
    plain.normalizer, plain.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
    return plain


def control_tokens(tok: Tokenizer) -> list[str]:
    """The added tokens that steer the model: the special ones, and those that the checkpoint lists;
    if it has no list, those that the template writes, apart from white space."""
    listed, written = tok.control_tokens, literals(tok)
    return [
        text
        for text, special in tok.added_tokens
        if special or (text in written and not text.isspace() if listed is None else text in listed)
    ]


def marked(value: Any, controls: str) -> Any:
    """Puts OPEN and CLOSE around each control token in all texts of a value."""
    if isinstance(value, str):
        value = value.replace(OPEN, "").replace(CLOSE, "")
        return re.sub(controls, rf"{OPEN}\g<0>{CLOSE}", value)
    if isinstance(value, Mapping):
        return {key: marked(x, controls) for key, x in value.items()}
    return [marked(x, controls) for x in value] if isinstance(value, list | tuple) else value


def literals(tok: Tokenizer) -> str:
    """The texts in the template's code: what it writes, and what it compares with."""
    from common.text.template import literals  # imports jinja2, which not every run needs

    return literals(tok.chat_template or "")


def render_chat(
    tok: Tokenizer, messages: Messages, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Renders a conversation in the checkpoint's own format."""
    from common.text.template import render

    if tok.chat_template is None:
        raise ValueError(
            "the checkpoint has no chat template; give a raw prompt, or use an "
            "instruction-tuned checkpoint"
        )
    # Templates test whether a key exists, so a key whose value is None is left out.
    present = [{k: x for k, x in m.items() if x is not None} for m in messages]
    values = {"tools": None, "documents": None, **tok.special_tokens, **variables}
    more = dict(messages=present, add_generation_prompt=add_generation_prompt)
    return render(tok.chat_template, {**values, **more})


def for_template(tok: Tokenizer, messages: Messages) -> list[dict[str, Any]]:
    """The messages in the form that the template reads. ValueError if it leaves one out.

    A developer is `system` to a template that does not know the role, and a text becomes a list of
    parts for a template that writes only those. The reasoning of a reply gets all its names.
    """
    if not messages or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError("a conversation is a non-empty list of {'role': ..., 'content': ...}")
    known, told = "developer" in literals(tok), list[dict[str, Any]]()
    for message in messages:
        new = dict(message)
        if new.get("role") == "developer" and not known:
            new["role"] = "system"
        if (thoughts := next(filter(None, map(new.get, REASONING)), None)) is not None:
            new = {"thinking": thoughts, **new, "reasoning_content": thoughts}
        told.append(new)
    if (missing := left_out(tok, told)) is not None:
        in_parts = [with_text(m, lambda text: [dict(type="text", text=text)]) for m in told]
        if left_out(tok, in_parts) is not None:
            role = messages[missing].get("role")
            raise ValueError(f"the chat template leaves out message {missing + 1} (role: {role})")
        told = in_parts
    return told


def with_text(message: dict[str, Any], change: Callable[[str], Any]) -> dict[str, Any]:
    """The message with another content, if that is a text, or with other texts in its parts."""
    content = message.get("content")
    if isinstance(content, str) and content.strip():
        return message | dict(content=change(content))
    if isinstance(content, list):
        texts = [isinstance(part, Mapping) and "text" in part for part in content]
        pairs = zip(content, texts, strict=True)
        new = [{**part, "text": change(part["text"])} if text else part for part, text in pairs]
        return message | dict(content=new)
    return message


def signed(i: int, message: dict[str, Any]) -> dict[str, Any]:
    return with_text(message, lambda _: f"{OPEN}{i}{CLOSE}")


def left_out(tok: Tokenizer, messages: Sequence[dict[str, Any]]) -> int | None:
    """The index of the first message whose text the template does not write. For this, a sign takes
    the place of each text: the text itself may also stand elsewhere."""
    try:
        text = render_chat(tok, [signed(i, message) for i, message in enumerate(messages)])
    except ValueError:  # the messages themselves will be refused, too, or the template reads texts
        return None
    wanted = (i for i, message in enumerate(messages) if signed(i, message) != message)
    return next((i for i in wanted if f"{OPEN}{i}{CLOSE}" not in text), None)


def end_of_turn(tok: Tokenizer) -> set[int]:
    """The id of the special token that the template writes after a reply, if it is one token. For
    Harmony, which ends each message of a reply so, that is none."""
    turns = [dict(role="user", content=OPEN), dict(role="assistant", content=CLOSE)]
    try:
        after = render_chat(tok, for_template(tok, turns), False).rpartition(CLOSE)[2].strip()
    except ValueError:
        return set()
    id_ = tok.backend.token_to_id(after)
    return {id_} if id_ in tok.special_ids and after != END else set()
