"""How a model file declares the fields of its `Config`, which are those of config.json.

An `int` is a whole number above 0, and a `float` a number above 0. A field may also be an `Index`,
an `Even`, a bool, a Literal, a tuple of one of these, or one of these or None. Annotated adds
another name of its key, and how the field relates to another one:

    num_key_value_heads: Annotated[int, "n_head_kv", divides("num_attention_heads")]
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

Index = Annotated[int, range(2**31)]
Even = Annotated[int, range(2, 2**31, 2)]
annotations = partial(get_type_hints, include_extras=True)  # of a class, by field, as declared


class Relation(NamedTuple):
    """How a field must relate to another one."""

    other: str
    holds: Callable[[Any, Any], bool]
    must: str


def divides(other: str) -> Relation:
    return Relation(other, lambda x, y: y % x == 0, "must divide")


def at_most(other: str) -> Relation:
    return Relation(other, lambda x, y: x <= y, "must be at most")


def one_each(other: str) -> Relation:
    return Relation(other, lambda x, y: len(x) == y, "must have as many entries as")


def with_layers(config: Any, n: int) -> Any:
    """The config of a model that has the first n layers alone. A tuple with an entry for each
    layer, as `one_each("num_hidden_layers")` declares, is cut."""
    cut = {
        name: getattr(config, name)[:n]
        for name, hint in annotations(type(config)).items()
        for rule in getattr(hint, "__metadata__", ())
        if isinstance(rule, Relation) and rule.other == "num_hidden_layers"
        if isinstance(getattr(config, name), tuple)
    }
    return config._replace(num_hidden_layers=n, **cut)
