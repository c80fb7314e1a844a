"""What we read from a compiled program, on programs that are small enough to count by hand."""

import jax
import jax.numpy as jnp
import pytest

from common.machines import hlo
from common.machines.hlo import Collective, collectives, cycles, moved, operations, parse, traffic

TOY = """\
HloModule toy, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%body (p: (s32[], f32[64,128])) -> (s32[], f32[64,128]) {
  %p = (s32[]{:S(6)}, f32[64,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:S(6)} get-tuple-element(%p), index=0
  %x = f32[64,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %y = f32[64,128]{1,0:T(8,128)} all-reduce(%x), replica_groups={{0,1}}, to_apply=%sum
  ROOT %out = (s32[]{:S(6)}, f32[64,128]{1,0:T(8,128)}) tuple(%i, %y)
}

%limited (q: (s32[], f32[64,128])) -> pred[] {
  %q = (s32[]{:S(6)}, f32[64,128]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:S(6)} get-tuple-element(%q), index=0
  %end = s32[]{:S(6)} constant(LIMIT)
  ROOT %less = pred[]{:S(6)} compare(%j, %end), direction=LT
}

%gathers (r: f32[8,128]) -> f32[16,128] {
  %r = f32[8,128]{1,0} parameter(0)
  %start = (f32[8,128]{1,0}, f32[16,128]{1,0}) all-gather-start(%r), dimensions={0}
  ROOT %done = f32[16,128]{1,0} all-gather-done(%start)
}

%nothing (s: f32[8,128]) -> f32[16,128] {
  %s = f32[8,128]{1,0} parameter(0)
  ROOT %zero = f32[16,128]{1,0} broadcast(%s), dimensions={0,1}
}

%scattering (t: f32[64,128]) -> f32[32,128] {
  %t = f32[64,128]{1,0:T(8,128)} parameter(0)
  ROOT %share = f32[32,128]{1,0} reduce-scatter(%t), dimensions={0}, to_apply=%sum
}

ENTRY %main (x: f32[64,128], s: f32[8,128], f: s32[]) -> f32[32,128] {
  %x.1 = f32[64,128]{1,0:T(8,128)} parameter(0)
  %s.1 = f32[8,128]{1,0} parameter(1)
  %f = s32[] parameter(2)
  %zero.1 = s32[]{:S(6)} constant(0)
  %t.1 = (s32[]{:S(6)}, f32[64,128]{1,0:T(8,128)}) tuple(%zero.1, %x.1)
  %loop = (s32[]{:S(6)}, f32[64,128]{1,0:T(8,128)}) while(%t.1), condition=%limited, body=%bodyTRIPS
  %l = f32[64,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  %pick = f32[16,128]{1,0} conditional(%f, %s.1, %s.1), branch_computations={%gathers, %nothing}
  ROOT %fused = f32[32,128]{1,0} fusion(%l), kind=kCustom, calls=%scattering
}
"""
COSTS = {"{{0,1}}": 3, "calls=%scattering": 100, "dimensions={0}, to_apply=%sum": 7}
KNOWN = ', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{}}'


@pytest.mark.parametrize(
    "limit, known, rounds",
    [("5)", "", 5), ("7)", KNOWN, 5), ("5), frontend", "", 5), (None, "", 1)],
    ids=["a constant limit", "as the compiler says", "with attributes", "unknown"],
)
def test_collectives_count_by_loop_round_inside_fusions_and_apart_in_branches(limit, known, rounds):
    text = TOY.replace("LIMIT)", limit or "5)").replace("TRIPS", known)
    if limit is None:
        text = text.replace("constant(5)", "add(%j, %j)")
    assert collectives(parse(text)) == (
        Collective("all-reduce", "f32[64,128]", rounds, rounds * 64 * 128 * 4, False),
        Collective("reduce-scatter", "f32[32,128]", 1, 32 * 128 * 4, False),
        Collective("all-gather", "f32[16,128]", 1, 16 * 128 * 4, True),
    )


def test_cycles_and_operations_count_by_loop_round_and_neither_inside_fusions_nor_in_branches():
    text = TOY.replace("LIMIT)", "5)").replace("TRIPS", "")
    for attribute, n in COSTS.items():
        costs = f'{attribute}, backend_config={{"estimated_cycles":"{n}"}}'
        text = text.replace(attribute, costs)
    program = parse(text)
    # Five rounds, each with an all-reduce and a comparison; and the fusion, including its inside.
    assert cycles(program) == 5 * 3 + 100
    assert operations(program) == 5 * 2 + 1


def test_a_type_tells_shape_bytes_and_memory_of_each_array_in_it():
    type_ = "(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, s4[3]{0}, /*index=2*/pred[], f8e4m3fn[2,2]{1,0})"
    assert hlo.arrays(type_) == [
        ("bf16[8,128]", 2048, False),
        ("s4[3]", 2, True),
        ("pred[]", 1, True),
        ("f8e4m3fn[2,2]", 4, True),
    ]


MOVES = """\
%slice (p0: f32[64,128], p1: s32[]) -> f32[1,128] {
  %p0 = f32[64,128]{1,0} parameter(0)
  %p1 = s32[]{:S(6)} parameter(1)
  ROOT %ds = f32[1,128]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,128}
}

%relaid (r0: f32[64,128]) -> f32[64,128] {
  %r0 = f32[64,128]{1,0} parameter(0)
  ROOT %copied = f32[64,128]{0,1} copy(%r0)
}

%slice_of_copy (s0: f32[64,128], s1: s32[]) -> f32[1,128] {
  %s0 = f32[64,128]{1,0} parameter(0)
  %s1 = s32[]{:S(6)} parameter(1)
  %inner = f32[64,128]{0,1} fusion(%s0), kind=kLoop, calls=%relaid
  ROOT %piece = f32[1,128]{1,0} dynamic-slice(%inner, %s1, %s1), dynamic_slice_sizes={1,128}
}

%update (q0: f32[64,128], q1: f32[1,128], q2: s32[]) -> f32[64,128] {
  %q0 = f32[64,128]{1,0} parameter(0)
  %q1 = f32[1,128]{1,0} parameter(1)
  %q2 = s32[]{:S(6)} parameter(2)
  %dus = f32[64,128]{1,0} dynamic-update-slice(%q0, %q1, %q2, %q2)
  ROOT %view = f32[64,128]{1,0} bitcast(%dus)
}

ENTRY %main (x: f32[64,128], i: s32[]) -> f32[64,128] {
  %x = f32[64,128]{1,0} parameter(0)
  %row = f32[1,128]{1,0} parameter(1)
  %chip = f32[64,128]{1,0:S(1)} parameter(2)
  %i = s32[]{:S(6)} parameter(3)
  ROOT %op = OP
}
"""
ALL, ROW = 64 * 128 * 4, 128 * 4


# What lies in main memory and on the chip: all rows, and one of them.
X, ON_CHIP = "f32[64,128]{1,0}", "f32[64,128]{1,0:S(1)}"
ONE, ONE_ON_CHIP = "f32[1,128]{1,0}", "f32[1,128]{1,0:S(1)}"
PREFETCH = f"({ON_CHIP}, {X}, u32[]{{:S(2)}}) copy-start(%x)"
KERNEL = f'{ONE} custom-call(%x, %row), custom_call_target="tpu_custom_call"'
OPERATIONS = {
    "a copy": (f"{X} copy(%x)", ALL, ALL),
    "a sum on the chip": (f"{ON_CHIP} add(%x, %chip)", ALL, 0),
    "a view": ("f32[8192]{0} bitcast(%x)", 0, 0),
    "a slice": (f"{ONE} dynamic-slice(%x, %i, %i)", ROW, ROW),
    "a fused slice": (f"{ONE} fusion(%x, %i), calls=%slice", ROW, ROW),
    "a fused copy": (f"{X} fusion(%x), calls=%relaid", ALL, ALL),
    "a fused slice of a copy": (f"{ONE} fusion(%x, %i), calls=%slice_of_copy", ROW, ROW),
    "an update": (f"{X} dynamic-update-slice(%x, %row, %i, %i)", ROW, ROW),
    "a fused update": (f"{X} fusion(%x, %row, %i), calls=%update", ROW, ROW),
    "a prefetch": (PREFETCH, ALL, 0),
    "a prefetch by the step before": (f"{PREFETCH}, cross_program_prefetch_index=0", 0, 0),
    "a write back": (f"({X}, {ON_CHIP}, u32[]{{:S(2)}}) copy-start(%chip)", 0, ALL),
    "a piece of a prefetch": (f"(({X}), {ONE_ON_CHIP}, s32[]{{:S(2)}}) slice-start(%x)", ROW, 0),
    "a kernel": (KERNEL, ALL + ROW, ROW),
    "a kernel that reads what is filled": (KERNEL, 0, ROW),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_an_operation_moves_what_it_touches_in_main_memory(what):
    op, read, written = OPERATIONS[what]
    name = "prefill_attention.1" if "filled" in what else "op"
    program = parse(MOVES.replace("OP", op).replace("%op", f"%{name}"))
    main = program["main"]
    assert moved(program, main, main[name]) == (read, written)
    assert traffic(program) == read + written


def test_the_traffic_of_a_compiled_program_is_what_its_loop_reads_and_writes():
    @jax.jit
    def f(x, ys):
        return jax.lax.scan(lambda c, y: (c * y, None), x, ys)[0]

    n, rounds = 1 << 16, 7
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n,), (rounds, n))]
    got = traffic(parse(f.lower(*shapes).compile().as_text()))
    # Each round reads a row and the product so far, and writes the product. Before the first round
    # the product may be copied.
    assert 3 * 4 * n * rounds <= got < 1.01 * (3 * rounds + 2) * 4 * n
