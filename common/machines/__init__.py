"""Hardware that is not here, or that is many: the chips and what each can do (`chips`), the mesh
that suits a model best (`mesh_choice`), programs compiled for devices that are absent (`dryrun`)
and what is read off such programs (`hlo`), the memory bandwidth that was measured (`bandwidth`);
and several processes that run one command: which of them this is (`cluster`), whether all have the
same (`preflight`), and how they start and end together (`hosts`).

Imports from `common/loading`. To start, read `mesh_choice.py`.
"""
