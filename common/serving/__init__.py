"""From prompts to text. `load` turns a checkpoint into a model that runs. `session` has the slots
in which a model decodes, and single steps of work. `prefixes` remembers which texts the slots hold,
and `kept` moves them between slots and host memory. `drafts` verifies tokens that the text itself
or a smaller model drafts. `serve` has the loop, which takes requests at any time, and `complete`,
its shortest form. `score` computes the logits of every token of a text.

Imports everything but the server and the command line. To start, read `serve.py`.
"""
