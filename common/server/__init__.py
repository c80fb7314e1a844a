"""A session over HTTP. `fields` and `protocol` read bodies, `answers` writes them, `responses` does
both for Responses. Imports the session and the tokenizer. To start, read `http`."""
