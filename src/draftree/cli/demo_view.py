"""Show a running demo or trial: live on a terminal, as plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftree.bench.methods import Answer
from draftree.bench.report import Table as FigureTable
from draftree.cli.screen import PIPED_WIDTH, ColouredText, source_style
from draftree.engine import Request
from draftree.showcase import Question, Scene

REFRESH = 1 / 15  # Seconds between redraws.
WIDEST = 120
PROMPT_LINES = 4
TABLE_CAPTION = "tokens a step: the acceptance length, 1 + accepted / steps"


class View:
    """Display `side_by_side` while it runs."""

    def __init__(self, tokenizer: Any, drafter: str) -> None:
        self.console = Console(highlight=False)
        self.console.width = min(self.console.width, WIDEST) if self.console.is_terminal else PIPED_WIDTH
        self._draws = self.console.is_terminal
        self._tokenizer = tokenizer
        self._drafter = drafter
        self._live: Live | None = None
        self._question = Question("", "")
        self._texts: dict[str, ColouredText] = {}
        self._shown: dict[str, int] = {}
        self._drawn = 0.0

    def opening(self, parameters: int, questions: int) -> None:
        """Print the model size and the number of questions."""
        said = f": a model of {parameters / 1e6:.0f}M parameters answers {questions} questions, plainly and with "
        self.console.print(Text.assemble(("draftree demo", "bold"), f"{said}drafter {self._drafter}."))
        self.explain()

    def explain(self) -> None:
        """Print the meaning of the colour on a terminal."""
        if self.console.is_terminal:
            self.console.print(f"Tokens in colour were drafted by {self._drafter} and accepted.", style="dim")

    def begin(self, question: Question) -> None:
        """Start the live display of a question."""
        self._question, self._texts = question, {way: ColouredText(self._tokenizer) for way in ("plain", "drafted")}
        self._shown = dict.fromkeys(self._texts, 0)
        if self._draws:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()

    def watch(self, way: str, request: Request) -> None:
        """Append the tokens of a step, and redraw at most every `REFRESH` seconds."""
        text, shown = self._texts[way], self._shown[way]
        for emitted in request.output[shown:]:
            text.add(emitted.token, emitted.source)
        self._shown[way] = len(request.output)
        now = time.perf_counter()
        if self._live is not None and now - self._drawn > REFRESH:
            self._live.update(self._picture(self._question, None), refresh=True)
            self._drawn = now

    def finish(self, scene: Scene) -> None:
        """Replace the live display by the finished answers."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self.console.is_terminal:
            self.console.print()
            self.console.print(self._picture(scene.question, scene))
            return
        self.console.print(f"\n{scene.question.kind}: {_shortened(scene.question.text, 300)}", markup=False)
        self.console.print(f"> {self._texts['drafted'].text.plain.strip()}", markup=False)
        equal = "NOT equal" if scene.differences else "equal"
        self.console.print(f"plain: {_work(scene.plain)}; {self._drafter}: {_work(scene.drafted)}; {equal}")

    def _picture(self, question: Question, scene: Scene | None) -> Group:
        grid, panels = Table.grid(padding=(0, 1)), []
        labels: dict[str, Any] = {"title_align": "left", "subtitle_align": "left"}
        width = (self.console.width - 1) // 2  # Equal, so that equal texts break at the same words.
        for way, title in (("plain", "plain"), ("drafted", self._drafter)):
            style = source_style(self._drafter) if way == "drafted" else "dim"
            about = None if scene is None else _work(getattr(scene, way))
            text = self._texts[way].text
            panels.append(Panel(text, title=title, subtitle=about, border_style=style, width=width, **labels))
        grid.add_row(*panels)
        head = Text.assemble((question.kind, "bold"), (f"  {_shortened(question.text, PROMPT_LINES * 70)}", "dim"))
        return Group(head, grid)

    def verdict(self, scenes: Sequence[Scene]) -> None:
        """Print one sentence about a dialogue: whether the texts are equal, and how much faster they were."""
        tokens = sum(len(scene.drafted.ids) for scene in scenes)
        plain, drafted = (sum(getattr(scene, way).seconds for scene in scenes) for way in ("plain", "drafted"))
        speed = f"{plain / drafted:.1f} times as fast"
        said = Text(f"The same {tokens} tokens, {speed}.", style="bold green")
        if any(scene.differences for scene in scenes):
            said = Text(f"The texts DIFFER (where: below); {self._drafter} was {speed}.", style="bold red")
        elif plain < 1.05 * drafted:
            said = Text(f"The same {tokens} tokens, {speed}: on this text drafting does not pay.", style="bold")
        self.console.print()
        self.console.print(said, soft_wrap=True)

    def closing(self, rows: list[dict[str, Any]], total: dict[str, Any], seconds: float) -> None:
        """Print the table of `figures`, the verdict and the next commands to try."""
        self.console.print()
        self.console.print(speed_table(rows, total, self._drafter))
        if total["equal"]:
            verdict = Text("All answers are equal, token for token", style="bold green")
        else:
            verdict = Text("ANSWERS DIFFER (where: below)", style="bold red")
        theirs = "Hugging Face's generate"
        if any(row["hf_generate_tokens_per_second"] is None for row in rows):
            theirs += " (which takes no JSON schema)"
        verdict.append(f": plain, {self._drafter} and {theirs}. {seconds:.0f} s in all.", style="not bold default")
        self.console.print(verdict)
        self.console.print("Next: draftree try MODEL     your own model: a folder, a GGUF file or a hub name")
        self.console.print("      draftree chat          a dialogue")
        self.console.print("      draftree bench quick   all methods on the embedded model")


def speed_table(rows: Sequence[dict[str, Any]], total: dict[str, Any], drafter: str) -> Table:
    """Return a table with one row per kind and a total row, from `figures`."""
    columns = {
        "kind": "kind",
        "tokens": "tokens",
        "plain_tokens_per_second": "plain tok/s",
        "drafted_tokens_per_second": f"{drafter} tok/s",
        "speed_up": "over plain",
        "acceptance_length": "tokens a step",
        "hf_generate_tokens_per_second": "HF tok/s",
        "speed_up_over_hf_generate": "over HF",
    }
    shown = [
        {heading: row[name] for name, heading in columns.items()} | {"equal": "yes" if row["equal"] else "NO"}
        for row in (*rows, total)
    ]
    return FigureTable("", shown, [*columns.values(), "equal"], TABLE_CAPTION).rich()


def _work(answer: Answer) -> str:
    passes = 0 if answer.stats is None else answer.stats.steps
    return f"{len(answer.ids)} tokens in {passes} passes, {answer.seconds:.2f} s"


def _shortened(text: str, length: int) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= length else flat[: length - 1] + "…"
