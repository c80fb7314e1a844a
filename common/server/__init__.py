"""A session over HTTP. `fields` says what a body of the OpenAI protocol may have, `protocol` turns
bodies into requests, and `answers` turns events into answers. `http` has the endpoints, and passes
requests to the thread that steps the session. The page to talk to is `page.html`.

Imports the session and the tokenizer. To start, read `http.py`.
"""
