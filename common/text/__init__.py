"""From text to token ids and back: tokenizer files and text that is streamed token by token
(`tokenizer`), Kimi's tokenizer format (`tiktoken`), chat templates, which run in a process of their
own (`template`), and the channels of a GPT-OSS reply (`harmony`).

Imports the readers of small files from `common/loading`. To start, read `tokenizer.py`.
"""
