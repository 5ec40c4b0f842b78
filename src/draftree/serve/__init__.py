"""Serve a model under the OpenAI API, with drafting.

    app (routes) -> server (lets requests in) -> calls (prompts and sampling parameters) -> worker (steps the engine)
        -> output (tokens to text) -> responses (objects of the API)

It needs the extra `serve`: pip install -e '.[serve]'.
"""
