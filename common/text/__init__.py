"""From text to token ids and back: `tokenizer`, which is to be read first, `added`, `tiktoken`; and
conversations (`chat`) and replies (`reply`, `tools`, `grammar`). Imports from `common/loading`."""
