"""From prompts to text. In a `session`, `steps` share slots, `prefixes` and `rules`; `load` makes
its model, `score` keeps logits. Imports all but server and command line. To start, read `serve`."""
