"""A session over HTTP. `fields` says what a body of the OpenAI protocol may have, `protocol` turns
bodies into requests, and `answers` turns events into answers. `responses` does both for the
Responses protocol. `http` has the endpoints, and passes requests to the thread that steps the
session. The page to talk to is `page.html`.

Imports the session, the tokenizer and the formats of calls. To start, read `http.py`.
"""
