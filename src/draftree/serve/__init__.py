"""The OpenAI-compatible server: the engine behind HTTP, with drafting, for any model that the library drives.

    request -> schema (what may be asked) -> choosing (rules of the engine) -> worker (one thread that steps)
            -> text (tokens to text, stop strings) -> answers (objects of the API)

Needs the extra `serve`: pip install -e '.[serve]'.
"""
