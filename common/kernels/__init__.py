"""Attention over a ragged cache, and products of rows with the matrices of their experts: one
public function for each operation, with an implementation for TPU, one for NVIDIA Hopper, one in
plain jnp that runs anywhere, and a short reference that defines what is correct. `dispatch` selects
one of them. They share `shapes`, `softmax` (also merges parts by their log-sum-exp), `visible` (the
positions that a query sees), `varying` (what `shard_map` knows of a value) and `hopper`.

Kernels import each other and the stored forms of `common/quant.py`, and nothing else of this
library. To start, read `reference.py`, then README.md.
"""
