"""What a number of a config.json may be, as types of the fields of a `Config`."""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple


class Rule(NamedTuple):
    """What a number may be."""

    accepts: Callable[[Any], bool]
    must_be: str


def is_whole(x: Any) -> bool:
    return type(x) is int and abs(x) < 2**31  # what fits an int32


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 3.4e38  # what fits a float32; NaN does not


Count = Annotated[int, Rule(lambda n: is_whole(n) and n >= 1, "a whole number above 0")]
Index = Annotated[int, Rule(lambda n: is_whole(n) and n >= 0, "a whole number, 0 or above")]
Even = Annotated[
    int, Rule(lambda n: is_whole(n) and n >= 2 and n % 2 == 0, "an even number above 0")
]
Positive = Annotated[float, Rule(lambda x: is_number(x) and x > 0, "a number above 0")]
AtLeast1 = Annotated[float, Rule(lambda x: is_number(x) and x >= 1, "a number of at least 1")]
Above1 = Annotated[float, Rule(lambda x: is_number(x) and x > 1, "a number above 1")]
