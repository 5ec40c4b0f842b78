"""Makes the manual's pictures of the server's page: python docs/pictures.py, with Chromium installed."""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from devtools import browsing  # noqa: E402
from serve_driver import serving  # noqa: E402

import draftree  # noqa: E402
from draftree.demo_model import demo_model  # noqa: E402

ASKED = (
    "Name three colours.",
    "Tell me about the sea and the ships that sail on it.",
)
# The step with most nodes in its tree.
LARGEST = """(() => {
  const bars = [...document.querySelectorAll('#strip g')];
  const high = (bar) => bar.querySelector('.all').height.baseVal.value;
  bars.sort((a, b) => high(b) - high(a))[0].dispatchEvent(new Event('click', {bubbles: true}));
})()"""


def main() -> None:
    model, tokenizer = demo_model()
    drafter = draftree.Merge([draftree.Lookahead(), draftree.demo_drafter("medusa", model)])
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(model, tokenizer, drafter) as server,
        browsing(Path(folder)) as page,
    ):
        for width, dark in ((1280, False), (400, True)):
            page.open(f"{server.url}/", width, dark=dark)
            page.wait("document.getElementById('about').textContent")
            for text in ASKED:
                page.get(f"document.getElementById('prompt').value = {text!r}")
                page.get("document.getElementById('send').click()")
                page.wait("document.getElementById('verdict').textContent")
                page.wait("!document.getElementById('send').disabled")
            page.get(LARGEST)
            page.picture(HERE / "pictures" / f"playground-{width}.png")
            print(page.get("document.getElementById('verdict').textContent"))


if __name__ == "__main__":
    main()
