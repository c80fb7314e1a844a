"""Reads off a compiled program what one step sends, what it moves through memory, and what it runs
one after the other. The program is text (HLO): named computations, each with its operations."""

import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple


class Collective(NamedTuple):
    """Equal collectives of one step, on one device."""

    kind: str  # "all-reduce"
    shape: str  # of the result: "bf16[8,1,8192]"
    times: int
    bytes: int  # of all results together
    conditional: bool  # in a branch that a step may not take, such as sampling


class Op(NamedTuple):
    name: str
    type: str  # "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", or a tuple of such
    kind: str
    operands: tuple[str, ...]  # names; for a parameter its number, for a constant its value
    rest: str  # attributes
    root: bool


# The computations by name, each with its operations by name. The first one to run is under ENTRY.
Program = dict[str, dict[str, Op]]
ENTRY = "ENTRY"
OP = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, (.*))?$")
ARRAY = re.compile(r"\b([a-z]+(\d+)\w*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
CALLS = re.compile(
    r"\b(calls|to_apply|condition|body|\w+_computations?)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
COLLECTIVES = ["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"]
CONTROL = ("while", "conditional", "call", "async-start")  # these run other computations
READS_WHAT_IS_FILLED = "prefill_attention"  # the name of this kernel
VIEWS = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant", "opt-barrier")
SLICES = ("dynamic-slice", "slice", "slice-start", "gather")  # these read only what they return
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place; these write only this operand


def parse(text: str) -> Program:
    program: Program = {}
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = program[found[2]] = {}
            if found[1]:
                program[ENTRY] = current
        elif found := OP.match(line):
            root, name, type_, kind, operands, rest = found.groups("")
            names = tuple(re.findall(r"%([\w.\-]+)", operands)) or (operands,)
            current[name] = Op(name, type_, kind, names, rest, bool(root))
    return program


def arrays(type_: str) -> list[tuple[str, int, bool]]:
    """Lists the arrays in a type: dtype and shape, bytes, and whether they lie in main memory."""
    out = []
    for dtype, bits, shape, layout in ARRAY.findall(type_):
        size = math.prod(int(n) for n in shape.split(",") if n)
        bytes_ = -(-size * int(bits or 8) // 8)
        out.append((f"{dtype}[{shape}]", bytes_, "S(" not in layout))
    return out


def called(op: Op) -> dict[str, list[str]]:
    """Returns the computations that an operation runs, by the name of the attribute."""
    return {kind: re.findall(r"%([\w.\-]+)", names) for kind, names in CALLS.findall(op.rest)}


def trips(program: Program, loop: Op) -> int:
    """Returns how many rounds a loop runs; 1 if that is not known. A program for CPU says it. A
    program for TPU shows only the limit, if it is constant. The loop is then assumed to count from
    0 by 1, as `lax.scan` does."""
    if known := TRIPS.search(loop.rest):
        return int(known[1])
    condition = program[called(loop)["condition"][0]]
    root = next(op for op in condition.values() if op.root)
    limit = condition[root.operands[-1]]
    counts = root.kind == "compare" and "direction=LT" in root.rest and limit.kind == "constant"
    return int(limit.operands[0]) if counts else 1


def executed(
    program: Program, into: tuple[str, ...] = CONTROL
) -> Iterator[tuple[Op, dict[str, Op], int, bool]]:
    """Yields operations in the order of the text, each with its computation, how often it runs, and
    whether it is in a branch. A loop of unknown length counts once."""

    def walk(name: str, times: int, conditional: bool) -> Iterator[Any]:
        computation = program[name]
        for op in computation.values():
            yield op, computation, times, conditional
            if op.kind in into:
                repeat = times * trips(program, op) if op.kind == "while" else times
                for child in (c for names in called(op).values() for c in names):
                    yield from walk(child, repeat, conditional or op.kind == "conditional")

    return walk(ENTRY, 1, False)


def collectives(program: Program) -> tuple[Collective, ...]:
    """Groups equal collectives, and puts those of every step before those in branches."""
    counts: Counter[tuple[bool, str, str, int]] = Counter()
    for op, _, times, conditional in executed(program, (*CONTROL, "fusion")):
        kind = op.kind.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        results = arrays(op.type)
        if op.type.startswith("(("):  # all operands, then all results
            results = arrays(op.type.partition("), ")[2])
        elif op.kind in ("all-gather-start", "collective-permute-start"):
            results = results[1:2]  # the operand comes first
        shape = ", ".join(shape for shape, _, _ in results)
        counts[conditional, kind, shape, sum(n for _, n, _ in results)] += times
    return tuple(
        Collective(kind, shape, n, n * size, conditional)
        for (conditional, kind, shape, size), n in sorted(counts.items())
    )


def cycles(program: Program) -> int:
    """Sums the clock cycles of every step, as the TPU compiler estimates them for each operation; 0
    for other compilers. Branches do not count. A loop of unknown length counts once."""
    return sum(
        times * int(found[1])
        for op, _, times, conditional in executed(program)
        if not conditional and (found := CYCLES.search(op.rest))
    )


def operations(program: Program) -> int:
    """Counts the operations that every step runs one after the other, in all rounds of loops."""
    return sum(
        times
        for op, _, times, conditional in executed(program)
        if not conditional and op.kind not in (*VIEWS, *CONTROL) and not op.kind.endswith("-done")
    )


def traffic(program: Program) -> int:
    """Sums the bytes that every step moves between main memory and the chip.

    Operands and results count if they lie in main memory. For slices and updates in place, only the
    part that they touch counts. A prefetch into on-chip memory counts where it is made. A kernel
    counts as reading all of its operands, but prefill attention counts as reading none: it reads
    what is filled of the cache, and that is not known here. Branches do not count. XLA's own "bytes
    accessed" also counts on-chip memory, and a whole array for each piece of a prefetch.
    """
    return sum(
        times * sum(moved(program, computation, op))
        for op, computation, times, conditional in executed(program)
        if not conditional
    )


def moved(program: Program, computation: dict[str, Op], op: Op) -> tuple[int, int]:
    """Returns the bytes that an operation of `computation` reads from main memory, and writes."""
    earlier = "cross_program_prefetch_index" in op.rest  # the previous step made it, and counts it
    if earlier or op.kind in (*VIEWS, *CONTROL) or op.kind.endswith("-done"):
        return 0, 0
    read, reads = 0, not op.name.startswith(READS_WHAT_IS_FILLED)
    for i, name in enumerate(op.operands):
        if name in computation and reads:
            full = sum(n for _, n, main in arrays(computation[name].type) if main)
            read += full and _read(program, computation, op, i, full)
    return read, _written(_inside(program, op) or computation, op)


def _results(op: Op) -> list[tuple[str, int, bool]]:
    """Lists the arrays that an operation returns."""
    # In the type of a started slice, the operand comes first.
    return arrays(op.type)[1:] if op.kind == "slice-start" else arrays(op.type)


def _inside(program: Program, op: Op) -> dict[str, Op]:
    """Returns the operations of a fusion; of others, none."""
    return program[called(op)["calls"][0]] if op.kind == "fusion" else {}


def _read(program: Program, computation: dict[str, Op], op: Op, i: int, full: int) -> int:
    """Returns how many bytes `op` reads of its operand i, which has `full` bytes."""
    if op.kind in SLICES and i == 0:
        return min(full, _results(op)[0][1])
    if op.kind in UPDATES and i == 0:
        return 0
    if op.kind == "fusion":
        computation = _inside(program, op)
        parameters = (x for x in computation.values() if x.kind == "parameter")
        op = next(x for x in parameters if x.operands[0] == str(i))
    elif op.kind not in ("bitcast", "reshape", "convert"):
        return full
    if op.root:
        return full
    users = ((u, j) for u in computation.values() for j, x in enumerate(u.operands) if x == op.name)
    read = 0
    for user, j in users:
        if [x.kind for x in _inside(program, user).values()] == ["parameter", "copy"]:
            user = user._replace(kind="bitcast")  # inside a fusion, another layout reads nothing
        read += _read(program, computation, user, j, full)
    return min(full, read)


def _written(inner: dict[str, Op], op: Op) -> int:
    """Returns the bytes that `op` writes; `inner` holds the operations that it runs."""
    root = next((x for x in inner.values() if x.root), op) if op.kind == "fusion" else op
    parts = [inner[x] for x in root.operands] if root.kind == "tuple" else [root]
    written = 0
    for part, (_, size, main) in zip(parts, _results(op), strict=False):
        while part.kind == "bitcast":
            part = inner[part.operands[0]]
        if part.kind in UPDATES:
            size = arrays(inner[part.operands[UPDATES[part.kind]]].type)[0][1]
        written += size if main else 0
    return written
