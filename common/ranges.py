"""What a field of a `Config` may be: the range of a number, and how it relates to other fields.

num_key_value_heads: Annotated[UpTo10K, Divides("num_attention_heads")]
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple


class Rule(NamedTuple):
    """Whether a value is accepted, and how a refusal says what it must be."""

    accepts: Callable[[Any], bool]
    must_be: str


def is_whole(x: Any) -> bool:
    return type(x) is int and abs(x) < 2**31  # fits an int32


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) < 3.4e38  # fits a float32; NaN does not


MOST = 10_000

Count = Annotated[int, Rule(lambda n: is_whole(n) and n >= 1, "a whole number above 0")]
# Of layers, heads or experts: some list gets an entry for each, so a huge number must not pass.
UpTo10K = Annotated[
    int, Rule(lambda n: is_whole(n) and 1 <= n <= MOST, f"a whole number from 1 to {MOST}")
]
Index = Annotated[int, Rule(lambda n: is_whole(n) and n >= 0, "a whole number, 0 or above")]
Even = Annotated[
    int, Rule(lambda n: is_whole(n) and n >= 2 and n % 2 == 0, "an even number above 0")
]
Positive = Annotated[float, Rule(lambda x: is_number(x) and x > 0, "a number above 0")]
Fraction = Annotated[float, Rule(lambda x: is_number(x) and 0 < x <= 1, "above 0 and at most 1")]
AtLeast1 = Annotated[float, Rule(lambda x: is_number(x) and x >= 1, "a number of at least 1")]
Above1 = Annotated[float, Rule(lambda x: is_number(x) and x > 1, "a number above 1")]


# A relation's `problem` says what is wrong with a field, or "". `key` maps the name of a field to
# its key in the file.
KeyOf = Callable[[str], str]


class Divides(NamedTuple):
    """The field must divide another."""

    other: str

    def problem(self, name: str, config: Any, key: KeyOf) -> str:
        value, other = getattr(config, name), getattr(config, self.other)
        problem = f"{key(self.other)}={other} is not a multiple of {key(name)}={value}"
        return problem if other % value else ""


class AtMost(NamedTuple):
    """The field must not be above another."""

    other: str

    def problem(self, name: str, config: Any, key: KeyOf) -> str:
        value, other = getattr(config, name), getattr(config, self.other)
        return f"{key(name)}={value} is above {key(self.other)}={other}" if value > other else ""


class OneEach(NamedTuple):
    """The field is a list with as many entries as another field says."""

    other: str

    def problem(self, name: str, config: Any, key: KeyOf) -> str:
        length, other = len(getattr(config, name)), getattr(config, self.other)
        return f"{length} {key(name)}, but {key(self.other)} is {other}" if length != other else ""


class GroupsOf(NamedTuple):
    """The field is a number of equal groups of 2 or more experts. Of these groups `kept` are kept,
    and they must hold the experts that a token chooses."""

    experts: str
    kept: str
    chosen: str

    def problem(self, name: str, config: Any, key: KeyOf) -> str:
        groups = getattr(config, name)
        experts, kept, chosen = (getattr(config, field) for field in self)
        of_groups = f"{key(name)}={groups}"
        if experts % groups or experts < 2 * groups:
            return f"{experts} experts are not {of_groups} equal groups of 2 or more"
        if kept > groups or chosen > kept * (experts // groups):
            return f"{key(self.kept)}={kept} of {of_groups} groups have fewer than {chosen} experts"
        return ""


Relation = Divides | AtMost | OneEach | GroupsOf
