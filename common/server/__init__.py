"""A session over HTTP, in the OpenAI protocol."""
