"""torch's global default type is the user's: what C reads and writes has a type of its own."""

from __future__ import annotations

import pytest
import torch
from runner_driver import Run, Tree, runners_for
from zoo import build


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float64])
def default(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("name", ["llama", "gemma2", "t5"])
def test_passes_do_not_depend_on_it(name: str, default: torch.dtype) -> None:
    models = build(name)
    for runner in runners_for(models):
        run = Run(runner, (9, 4)).prefill()
        trees = [Tree((-1, 0, 0, 1), 1), Tree((-1, 0), 2)]
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            result = run.step(trees)
        finally:
            torch.set_default_dtype(before)
        assert result.logits.dtype == torch.float32
        assert run.error(trees, result) < 1e-4, runner.name
