"""From prompts to text. `load` turns a checkpoint into a model that runs. `session` has requests,
and the slots in which a model decodes. `steps` has the single steps: they read prompts, decode, and
move texts between slots, kept slots and host memory. `prefixes` remembers which texts are held
where, and `rules` what requests ask of single tokens. `serve` has the loop, which takes requests at
any time, and `complete`, its shortest form. `score` computes the logits of every token of a text.

Imports everything but the server and the command line. To start, read `serve.py`.
"""
