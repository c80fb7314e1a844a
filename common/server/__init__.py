"""A session over HTTP. `protocol` turns bodies of the OpenAI protocol into requests, and events
into answers. `http` has the endpoints, and passes requests to the thread that steps the session.
The page to talk to is `page.html`.

Imports the session and the tokenizer. To start, read `http.py`.
"""
