"""The words that a `model.py` is written in. Each file here is imported by a model file: caches and
the attention that reads them (`cache`), stored matrices (`quant`) and their products (`products`),
experts, sampling, the mesh (`sharding`), drafts (`speculate`), and what a model file declares of
its weights (`weights`), of their published names (`names`) and of config.json (`config`, `ranges`,
`packing`).

These files import each other and `common/kernels`, and nothing else of this library. Everything
that a model file does not import lies in a folder, on a floor above:

    kernels  <  *.py  <  loading  <  text  <  machines  <  serving  <  command

A folder imports from the folders on its left. To start, read `cache.py` next to a model file.
"""
