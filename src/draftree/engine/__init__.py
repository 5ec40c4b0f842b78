"""The engine and its faces."""

from draftree.engine.engine import Engine
from draftree.engine.generate import GenerateOutput, generate
from draftree.engine.request import Emitted, Request, Rules, State
from draftree.engine.stats import RequestStats, RunStats

__all__ = [
    "Emitted",
    "Engine",
    "GenerateOutput",
    "Request",
    "RequestStats",
    "Rules",
    "RunStats",
    "State",
    "generate",
]
