"""The engine and its faces."""

from draftree.engine.engine import Engine
from draftree.engine.generate import GenerateOutput, generate
from draftree.engine.recorder import Recorder
from draftree.engine.request import Emitted, Request, Rules, State
from draftree.engine.stats import RequestStats, RunStats

__all__ = [
    "Emitted",
    "Engine",
    "GenerateOutput",
    "Recorder",
    "Request",
    "RequestStats",
    "Rules",
    "RunStats",
    "State",
    "generate",
]
