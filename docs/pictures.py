"""Makes the manual's pictures of the server's page: python docs/pictures.py, with Chromium installed.

The embedded model is inflated to the size from which drafting pays.
"""

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests"), str(HERE.parent)]

from devtools import browsing  # noqa: E402
from serve_driver import serving  # noqa: E402

import draftree  # noqa: E402
from benchmarks.inflate import inflate, inflate_drafter  # noqa: E402
from draftree.demo_model import demo_model  # noqa: E402

ASKED = (
    "Name three colours.",
    "Tell me about the sea and the ships that sail on it.",
)
# A step with a large tree of which about half was accepted.
TELLING = """(() => {
  const bars = [...document.querySelectorAll('#strip g')];
  const high = (bar, part) => bar.querySelector(part).height.baseVal.value;
  const worth = (bar) => high(bar, '.all') - Math.abs(high(bar, '.hit') - high(bar, '.all') / 2);
  bars.sort((a, b) => worth(b) - worth(a))[0].dispatchEvent(new Event('click', {bubbles: true}));
})()"""


def main() -> None:
    small, tokenizer = demo_model()
    model = inflate(small, "60M")
    drafter = draftree.Merge([draftree.Lookahead(), inflate_drafter(draftree.demo_drafter("medusa", small), model)])
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
            page.get(TELLING)
            page.picture(HERE / "pictures" / f"playground-{width}.png")
            print(page.get("document.getElementById('verdict').textContent"))


if __name__ == "__main__":
    main()
