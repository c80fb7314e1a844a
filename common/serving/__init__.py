"""From prompts to text: a checkpoint as a model that runs (`load`), slots to decode in and one step
of work (`session`), the loop that serves requests and `complete`, its shortest form (`serve`), and
the logits of every token of a text (`score`).

Imports everything but the command line. To start, read `serve.py`.
"""
