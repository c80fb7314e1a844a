"""From prompts to text. `load` turns a checkpoint into a model that runs. `session` has the slots
in which a model decodes, and single steps of work. `serve` has the loop that serves requests until
their stop ids, and `complete`, its shortest form. `score` computes the logits of every token of a
text.

Imports everything but the command line. To start, read `serve.py`.
"""
