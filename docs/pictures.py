"""Makes the manual's pictures of the server's page: python docs/pictures.py MODEL, with Chromium installed.

MODEL is a folder or a GGUF file, here SmolLM2-135M-Instruct.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

from devtools import browsing  # noqa: E402
from serve_driver import serving  # noqa: E402

from draftree import Lookahead, load_model  # noqa: E402
from draftree.runner import pack_own  # noqa: E402

IDLE = "!document.getElementById('send').disabled"
WARM_UP = {"messages": [{"role": "user", "content": "Tell me about the sea."}], "max_tokens": 64}


def main() -> None:
    model, tokenizer = load_model(sys.argv[1])
    pack_own(model, "auto")  # As `draftree serve` does.
    for width, dark in ((1280, False), (400, True)):
        with (
            tempfile.TemporaryDirectory() as folder,
            serving(model, tokenizer, Lookahead(), model_name=Path(sys.argv[1]).stem) as server,
            browsing(Path(folder)) as page,
        ):
            server.post("/v1/chat/completions", **WARM_UP)
            page.open(f"{server.url}/", width, dark=dark)
            page.wait("document.getElementById('about').textContent")
            page.get("document.querySelector('#examples button').click()")
            page.wait(IDLE, 120)
            page.get("document.getElementById('send').click()")  # The example's second question.
            page.wait(IDLE, 120)
            page.picture(HERE / "pictures" / f"playground-{width}.png", whole=False)
            print(page.get("[...document.querySelectorAll('.verdict')].map((told) => told.textContent)"))


if __name__ == "__main__":
    main()
