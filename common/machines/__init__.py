"""Hardware that is absent, and processes that work together. `chips` says what each chip can do.
`mesh_choice` picks the best mesh for a model. `dryrun` compiles programs for absent devices, and
`hlo` reads figures off such programs. `bandwidth` measures memory bandwidth. If several processes
run one command, `hosts` finds out which of them this is, and compares what they have.

Imports from `common/loading`. To start, read `mesh_choice.py`.
"""
