"""Fixed prompts for `benchmarks.serving`: two whose answers repeat them, and one whose does not."""

CODE = '''
def round_up(value, multiple):
    """Returns the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def split_heads(query_heads, kv_heads, shards):
    """Returns which heads each shard holds. Key and value heads are repeated if there are fewer
    of them than shards, so that every query head finds its own on its shard."""
    per_shard = round_up(query_heads, shards) // shards
    group = query_heads // kv_heads
    shard_heads = []
    for shard in range(shards):
        first_head = shard * per_shard
        heads = range(first_head, min(first_head + per_shard, query_heads))
        kv = sorted({head // group for head in heads})
        shard_heads.append((list(heads), kv))
    return shard_heads


def print_heads(shard_heads):
    for shard, (heads, kv) in enumerate(shard_heads):
        print(f"shard {shard}: query heads {heads}, key and value heads {kv}")
'''

PAGE = """
A slot is the room of one text. It holds the keys and the values of the tokens that were read, and
its length says how many these are. All slots are decoded together, one token each in every step.
When a text ends, its slot becomes free, and the next prompt takes it. A prompt is read in chunks of
512 tokens, and between two chunks every other slot decodes a token, so no text waits for a long
prompt. A prompt that begins like a text that was read before is not read from the start: the part
that both share is copied, and only the rest is read. What a slot holds is kept until the slot is
needed again. Then it moves to a kept slot, and from there to the memory of the host. The text that
was used least recently goes first. None of this changes what a text says: a token depends on the
prompt, on the parameters and on the seed, and on nothing that happens in other slots.
"""

PROMPTS = {
    "edit code": f"Copy this code, with every function name in upper case:\n{CODE}",
    "quote a page": f"Repeat this page word for word, then name its subject:\n{PAGE}",
    "tell a story": "Tell me a story about a fisherman who finds a clock in the sea.",
}
SAMPLED = {"tell a story"}  # greedy, a small model soon repeats itself
