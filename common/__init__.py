"""What a `model.py` imports. `cache` has caches of keys and values, `latents` those of latent
attention, and both have the attention that reads them. `quant` has the stored forms of matrices,
and `products` multiplies by them. `experts`, `sampling`, `sharding` (the mesh) and `speculate`
(drafts) are named for their subjects. A model file declares its weights with `weights`, their
published names with `names`, and the fields of its config.json with `fields`, which `config` and
`packing` read.

These files import each other and `common/kernels`, and nothing else of this library. All other code
of `common` is in folders:

    kernels  <  *.py  <  loading  <  text  <  machines  <  serving  <  server  <  command

Each may import only from what stands to its left. There is one exception: kernels import the stored
forms of `quant.py`. To start, read `cache.py` next to a model file.
"""
