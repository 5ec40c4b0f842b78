"""Statistics of requests and runs.

The mean acceptance length is 1 + accepted / steps: accepted draft tokens, and one token of the target per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

STAGES = ("draft", "verify", "accept", "commit")
COUNTS = ("steps", "drafted", "accepted", "emitted", "pruned", "rollbacks")


@dataclass(slots=True)
class RequestStats:
    """Statistics of one request.

    Attributes:
        steps: passes of the target that could emit tokens; the first one reads the prompt. Of the passes that read a
            prompt of more than 512 tokens only the last one is a step.
        drafted: draft tokens that entered a pass.
        pruned: draft tokens that were pruned inside a pass.
        accepted: draft tokens that were accepted and emitted.
        emitted: new tokens.
        accepted_by_depth: accepted draft tokens at depth 1, 2, ...
        accepted_by_source: accepted draft tokens by drafter.
        seconds: time by stage. A step is shared equally by its requests. "verify" includes all passes that read the
            prompt.
        rollbacks: passes that rejected draft tokens, which for trees are most passes.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    pruned: int = 0
    rollbacks: int = 0

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted / steps."""
        return 1 + self.accepted / self.steps if self.steps else 0.0

    @property
    def calls_per_token(self) -> float:
        """Return steps / emitted, the passes of the target per token."""
        return self.steps / self.emitted if self.emitted else 0.0

    @property
    def engagement(self) -> float:
        """Return 1 - accepted / emitted, the share of the target's own tokens."""
        return 1 - self.accepted / self.emitted if self.emitted else 0.0

    @property
    def rollback_ratio(self) -> float:
        """Return rollbacks / steps, the share of passes that rejected draft tokens."""
        return self.rollbacks / self.steps if self.steps else 0.0

    @property
    def total_seconds(self) -> float:
        """Return the time of all stages."""
        return sum(self.seconds.values())

    def count(self, drafted_by: Sequence[int | None], drafted: int, *, passed: bool = True) -> None:
        """Add the counts of a step.

        Args:
            drafted_by: node that drafted each emitted token; None for the target's own.
            drafted: draft tokens of the step.
            passed: False if a lossy rule ended the text without a pass.
        """
        accepted = len(drafted_by) - drafted_by.count(None)
        self.steps += passed
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += len(drafted_by)
        self.rollbacks += accepted < drafted and len(drafted_by) > 0 and drafted_by[-1] is None
        by_depth = self.accepted_by_depth
        by_depth.extend([0] * (accepted - len(by_depth)))
        for depth in range(accepted):
            by_depth[depth] += 1

    def copy(self) -> RequestStats:
        """Return a copy; another thread may be in a step."""
        return replace(
            self,
            accepted_by_depth=self.accepted_by_depth.copy(),
            accepted_by_source=self.accepted_by_source.copy(),
            seconds=self.seconds.copy(),
        )

    def add(self, other: RequestStats) -> None:
        """Add the counts of another request."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.accepted_by_depth.extend([0] * (len(other.accepted_by_depth) - len(self.accepted_by_depth)))
        for depth, hits in enumerate(other.accepted_by_depth):
            self.accepted_by_depth[depth] += hits
        self.accepted_by_source.update(other.accepted_by_source)
        for stage, spent in other.seconds.items():
            self.seconds[stage] += spent

    def as_dict(self) -> dict[str, Any]:
        """Return the statistics as JSON values."""
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "acceptance_length": self.acceptance_length,
            "accepted_by_depth": list(self.accepted_by_depth),
            "accepted_by_source": dict(self.accepted_by_source),
            "seconds": dict(self.seconds),
            "calls_per_token": self.calls_per_token,
            "engagement": self.engagement,
            "rollback_ratio": self.rollback_ratio,
        }


@dataclass(slots=True)
class RunStats:
    """Statistics of the requests of a run.

    Attributes:
        requests: statistics of each.
        runner: name of the runner; None if it is unknown.
    """

    requests: list[RequestStats]
    runner: str | None = None

    @property
    def total(self) -> RequestStats:
        """Return the sum over all requests."""
        total = RequestStats()
        for request in self.requests:
            total.add(request)
        return total

    @property
    def acceptance_length(self) -> float:
        """Return 1 + accepted / steps over all requests."""
        return self.total.acceptance_length

    def summary(self) -> str:
        """Print a table of the run, and return it as text."""
        from rich.console import Console
        from rich.table import Table

        total = self.total
        table = Table(title=f"{len(self.requests)} request(s)", show_header=False, title_justify="left")
        if self.runner is not None:
            table.add_row("runner", self.runner)
        table.add_row("tokens emitted", str(total.emitted))
        table.add_row("steps (target passes)", str(total.steps))
        table.add_row("acceptance length (1 + accepted / steps)", f"{total.acceptance_length:.2f}")
        table.add_row("draft tokens accepted / drafted", f"{total.accepted} / {total.drafted}")
        own = f"{total.calls_per_token:.2f} / {total.engagement:.0%} / {total.rollback_ratio:.0%}"
        table.add_row("passes a token / own tokens / passes that rejected some", own)
        if total.pruned:
            table.add_row("draft tokens pruned inside the pass", f"{total.pruned} ({total.pruned / total.drafted:.0%})")
        depths = "  ".join(f"{depth + 1}: {hits}" for depth, hits in enumerate(total.accepted_by_depth))
        table.add_row("accepted by depth", depths or "-")
        sources = "  ".join(f"{name}: {hits}" for name, hits in sorted(total.accepted_by_source.items()))
        table.add_row("accepted by source", sources or "-")
        stages = "  ".join(f"{stage} {1000 * total.seconds[stage]:.1f}" for stage in STAGES)
        table.add_row("milliseconds by stage", stages)
        if total.total_seconds:
            table.add_row("tokens a second", f"{total.emitted / total.total_seconds:.1f}")
        console = Console()
        with console.capture() as captured:
            console.print(table)
        text = captured.get()
        print(text, end="")
        return text
