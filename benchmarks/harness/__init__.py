"""What all experiments share: how they are declared, set up, measured, summed up, drawn and written."""

from benchmarks.harness.experiment import Experiment
from benchmarks.harness.measure import PLAIN, Way, differing, measure
from benchmarks.harness.plots import bars, lines, points
from benchmarks.harness.setup import Setup, Task
from benchmarks.harness.tables import table_of
from draftree.bench.measure import Share

__all__ = [
    "PLAIN",
    "Experiment",
    "Setup",
    "Share",
    "Task",
    "Way",
    "bars",
    "differing",
    "lines",
    "measure",
    "points",
    "table_of",
]
