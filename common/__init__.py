"""What a `model.py` imports: caches and the attention that reads them, stored forms of matrices and
the products with them, experts, sampling, the mesh, drafts; and how it declares its weights, their
published names and the fields of config.json.

These files import each other and `common/kernels`, and nothing else of this library. All other code
of `common` is in folders:

    kernels  <  *.py  <  loading  <  text  <  machines  <  serving  <  server  <  command

Each may import only from what stands to its left. There is one exception: kernels import the stored
forms of `quant.py`. To start, read `cache.py` next to a model file.
"""
