"""The engine and its faces."""

from draftree.engine.engine import Engine
from draftree.engine.generate import GenerateOutput, generate
from draftree.engine.recorder import Recorder
from draftree.engine.request import Emitted, Request, RequestStats, RunStats, State
from draftree.engine.sampling import SamplingParams
