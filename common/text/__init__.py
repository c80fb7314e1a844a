"""From text to token ids and back. `tokenizer` reads tokenizer files, and streams text token by
token. `added` finds the tokens that a checkpoint has beside its vocabulary, and `tiktoken` reads
Kimi's tokenizer format. `chat` encodes conversations, and `template` runs their templates in
jinja2's sandbox. `harmony` follows the channels of a GPT-OSS reply.

Imports the readers of small files from `common/loading`. To start, read `tokenizer.py`.
"""
