"""From text to token ids and back. `tokenizer` reads tokenizer files, and streams text token by
token. `added` finds the tokens that a checkpoint has beside its vocabulary, and `tiktoken` reads
Kimi's tokenizer format. `chat` encodes conversations, whose templates run in jinja2's sandbox.
`reply` tells a reply's thoughts from its answer, `tools` reads the calls in it, and `grammar` says
which replies have calls that fit.

Imports the readers of small files from `common/loading`. To start, read `tokenizer.py`.
"""
