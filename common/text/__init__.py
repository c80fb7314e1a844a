"""From text to token ids and back, with `added` and `tiktoken`. `chat` encodes conversations;
`reply`, `tools` and `grammar` know replies. Imports from `common/loading`. To start, read
`tokenizer`."""
