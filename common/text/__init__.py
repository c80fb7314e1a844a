"""From text to token ids and back. `tokenizer` reads tokenizer files, and streams text token by
token. `tiktoken` reads Kimi's tokenizer format. `template` runs chat templates in jinja2's
sandbox. `harmony` follows the channels of a GPT-OSS reply.

Imports the readers of small files from `common/loading`. To start, read `tokenizer.py`.
"""
