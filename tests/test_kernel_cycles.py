"""What tools/kernel_cycles.py counts in machine code."""

from tools.kernel_cycles import count

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


def test_bundles_count_once_for_each_round_of_the_loops_they_are_in():
    assert count(PROGRAM) == 3 + 4 * (4 + 3 * 2)
    assert count(PROGRAM.replace(", 6 /*", ", 2 /*")) == 3 + 1 * (4 + 3 * 2)
    assert count("") == 0


def test_a_loop_of_unknown_length_counts_once_and_does_not_hide_the_loop_around_it():
    assert count(PROGRAM.replace(", 3 /*", ", %s6 /*")) == 3 + 4 * (4 + 2)
