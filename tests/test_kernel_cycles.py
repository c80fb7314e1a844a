"""What tools/kernel_cycles.py counts in machine code."""

from common.kernels.ragged_dot_tpu import TileSizes
from common.machines.hlo import parse
from tools.kernel_cycles import (
    Bundles,
    PromptBundles,
    PromptHeads,
    all_bundles,
    bundles_of_a_block,
    bundles_of_attention,
    count,
    of_prompt,
    parts_in_a_step,
)

# Three bundles that run once; a loop of 6 rounds, which makes 4 steps; in it one of 3 rounds.
PROGRAM = """
LB: loop body
     0   :  { %s1 = smov.u32 0 }
   0x1   :  { %s2 = smov.u32 4 }
   0x2 LB: > { %s3 = sphi %s1, %s4 }
   0x3   : > { %v1 = vld [vmem:[%s3]] }
   0x4 LB: >> { %v2 = vadd.f32 %v1, %v1 }
   0x5   : >> { %p1 = scmp.ge.s32.totalorder %s5, 3 /* loop exit test */ }
   0x6 PF: > { %s4 = sadd.s32 1, %s3 }
   0x7   : > { %p2 = scmp.ge.s32.totalorder %s4, 6 /* loop exit test */ }
   0x8   :  { %s9 = smov.u32 0 }
second_minor_factor: 1 */ }
"""
# The same with two of the inner loops, and these of unknown length.
TWICE = PROGRAM[: PROGRAM.index("   0x6")] + PROGRAM[PROGRAM.index("   0x4") :]
UNKNOWN = TWICE.replace(", 3 /*", ", %s6 /*")


def test_bundles_count_once_for_each_round_of_the_loops_they_are_in():
    assert count(PROGRAM) == 3 + 4 * (4 + 3 * 2)
    assert count(PROGRAM.replace(", 6 /*", ", 2 /*")) == 3 + 1 * (4 + 3 * 2)
    assert count("") == 0


def test_a_loop_of_unknown_length_counts_once_and_does_not_hide_the_loop_around_it():
    assert count(PROGRAM.replace(", 3 /*", ", %s6 /*")) == 3 + 4 * (4 + 2)


def test_loops_of_unknown_length_have_the_rounds_that_are_given_in_order():
    assert count(UNKNOWN, [0.5, 2]) == 3 + 4 * (4 + 2 * 0.5 + 2 * 2)
    assert count(UNKNOWN, [3]) == count(TWICE) == 3 + 4 * (4 + 2 * 3 + 2 * 3)


def test_a_step_of_ragged_dot_has_a_small_last_part_where_that_is_enough():
    sizes = TileSizes(64, (16, 8), 128, align=1)
    assert parts_in_a_step(sizes, 8, 8) == [0, 1]
    assert parts_in_a_step(sizes, 64, 1) == [4, 0]
    assert parts_in_a_step(sizes, 40, 1) == [2, 1]
    assert parts_in_a_step(sizes._replace(parts=(16,)), 40, 1) == [3]


def test_a_loop_that_tests_early_whether_it_ends_counts_whole_and_so_do_empty_bundles():
    early = PROGRAM.replace(
        "0x4 LB: >> {", "0x4 LB: >> { %p1 = scmp.ge.s32.totalorder %s5, 3 /* loop exit test */ ;;"
    )
    early = early.replace(
        "0x5   : >> { %p1 = scmp.ge.s32.totalorder %s5, 3 /* loop exit test */ }", "0x5   :  {}"
    )
    assert count(early) == count(PROGRAM) > 3


STEP = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %k.1 = f32[8]{0} custom-call(%a), custom_call_target="tpu_custom_call"
  %k.2 = f32[8]{0} custom-call(%k.1), custom_call_target="tpu_custom_call"
  %f = f32[8,2]{1,0} fusion(%k.2), backend_config={"estimated_cycles":"900"}
  ROOT %s = f32[8]{0} all-reduce(%f), backend_config={"estimated_cycles":"70"}
}
"""


def test_equal_kernels_of_a_step_count_each_and_what_has_no_code_as_it_is_estimated(tmp_path):
    for name in ("123-k.1-71", "124-f-9"):
        (tmp_path / f"{name}-final_bundles.txt").write_text(PROGRAM)
    assert all_bundles(parse(STEP), tmp_path) == 3 * count(PROGRAM) + 70


def test_an_expert_has_one_small_part_in_a_step(tmp_path):
    (tmp_path / "123-ragged_dot.1-71-final_bundles.txt").write_text(UNKNOWN)
    step = parse(STEP.replace("%k.", "%ragged_dot."))
    assert all_bundles(step, tmp_path) == 2 * (3 + 4 * (4 + 2)) + 900 + 70


def test_a_block_that_all_queries_see_counts_without_the_code_that_it_skips(tmp_path):
    """The code of the kernel, as lengths between marks: what always runs has 3 and 4 bundles."""
    lengths = {"  ": 3, "LB": 4, "PF": 20, "PF ": 100, " PF": 120, " PF ": 50}
    lines = (
        f"0x1 {tag.strip() if i == 0 else ''} : > {{ nothing }}"
        for tag, n in lengths.items()
        for i in range(n)
    )
    (tmp_path / "1-prefill_attention.2-3-final_bundles.txt").write_text("\n".join(lines))
    (tmp_path / "1-fusion.2-3-final_bundles.txt").write_text(PROGRAM)
    assert bundles_of_a_block(tmp_path) == 3 + 4 + 100


def test_a_prompt_counts_blocks_that_all_queries_see_apart_from_those_at_its_edge():
    """1,024 queries behind as many positions: a block that all see, and one at the edge. On v6e, a
    head of 128 fills half of a unit. The products of latents count once for each position."""
    n, heads = PromptBundles(edge=40, inside=20, ends=10, each=1), PromptHeads(1, 1, 128, 128, 128)
    seen = 1024 * 1024 + 1024 * 1025 // 2
    products = seen * 2 * 128 / (4 * 256**2)
    full, part = of_prompt(heads, n, 1024, 1024, "int8", "v6e:2x2")
    assert full * (10 + 20 + 40 + 2) == products and part == 2 * full
    latents = heads._replace(W=512, rank=256)
    more, _ = of_prompt(latents, n, 1024, 1024, "int8", "v6e:2x2")
    assert more * 72 == products + 2048 * 256 * 2 * 128 / (4 * 256**2)


ATTENTION = """
     0   :  { %1 = dma.hbm_to_smem %2 }
   0x1 LB: > { %3 = dma.hbm_to_vmem %4 }
   0x2   : > { %s5 = sadd.s32 1, %s5 }
   0x3   :  { %6 = sbr.rel (%p7) target = $region1 }
   0x4   :  {}
   0x5   :  {}
   0x6   :  {}
   0x7   :  {}
   0x8 PF:  { %8 = vst [vmem:%9] %v10 }
   0x9 LB: > { %11 = sbr.rel (%p12) target = $region2 }
   0xa   : > {}
   0xb   : > {}
   0xc   : > {}
   0xd   : > {}
   0xe   : > { %v13 = vand.u32 %v14, %v15 }
   0xf   : > { %16 = vst [vmem:%17] %v13 }
  0x10 PF: > { %18 = vmatmul.mubr.bf16 %v19 }
  0x11   : > { %20 = vst [vmem:%21] %v22 }
  0x12   : > { %23 = dma.hbm_to_vmem %24 }
  0x13   :  { %25 = sbr.rel (%p26) target = $region3 }
  0x14   :  {}
  0x15   :  {}
  0x16   :  {}
  0x17   :  {}
  0x18   :  { %27 = vst [vmem:%28] %v29 }
  0x19   :  { %30 = vst [vmem:%28] %v29 }
"""


def test_decode_attention_counts_by_step_and_the_zeros_of_partly_filled_blocks_apart():
    """A loop of 2 bundles copies ahead; that over the steps has a branch of 2 bundles, which write
    zeros. Both loops end with a branch, and the 4 bundles while it is taken."""
    expected = Bundles(step=5 + 3 + 5, zeros=2, ahead=2 + 5, group=0, once=1 + 1 + 2)
    assert bundles_of_attention(ATTENTION) == expected
    inner = ATTENTION.replace(": > {", ": >> {").replace(":  {", ": > {")
    inner = inner.replace("     0   : > {", "     0 LB: > {")
    assert bundles_of_attention(inner) == expected._replace(group=4, once=0)
