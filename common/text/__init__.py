"""Texts and token ids (`added`, `tiktoken`), conversations (`chat`), and replies (`reply`, `tools`,
`grammar`). Imports from `common/loading`. To start, read `tokenizer`."""
