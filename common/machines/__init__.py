"""Absent hardware, and processes that work together (`hosts`). `chips`, `bandwidth` and `hlo` serve
`dryrun` and `mesh_choice`. Imports from `common/loading`. To start, read `mesh_choice`."""
