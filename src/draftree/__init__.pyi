"""The public names: the only list of them. Type checkers read it, and `__init__.py` imports each name on first use."""

from draftree.acceptance import LossyTypical as LossyTypical
from draftree.chat import Chat as Chat
from draftree.demo_model import demo_model as demo_model
from draftree.drafting import BiLD as BiLD
from draftree.drafting import BiTA as BiTA
from draftree.drafting import DraftModel as DraftModel
from draftree.drafting import GrammarDrafter as GrammarDrafter
from draftree.drafting import HiddenTransfer as HiddenTransfer
from draftree.drafting import Lookahead as Lookahead
from draftree.drafting import Medusa as Medusa
from draftree.drafting import Merge as Merge
from draftree.drafting import PromptLookup as PromptLookup
from draftree.drafting.folder import demo_drafter as demo_drafter
from draftree.drafting.folder import load_drafter as load_drafter
from draftree.engine import Engine as Engine
from draftree.engine import Recorder as Recorder
from draftree.engine import SamplingParams as SamplingParams
from draftree.engine import generate as generate
from draftree.grammar import Grammar as Grammar
from draftree.integrations import custom_generate as custom_generate
from draftree.models import load_model as load_model
from draftree.pruning import EarlyHead as EarlyHead
from draftree.pruning import EarlyPruning as EarlyPruning
from draftree.pruning import demo_early_head as demo_early_head
from draftree.runner import open_runner as open_runner
from draftree.runner import pack_weights as pack_weights
from draftree.runner import unpack_weights as unpack_weights
from draftree.shaping import DynamicTree as DynamicTree
from draftree.shaping import Fixed as Fixed
from draftree.trace.file import read_trace as read_trace
from draftree.trace.file import write_trace as write_trace
from draftree.trace.file import write_trace_page as write_trace_page
from draftree.tuned import load_tuned as load_tuned

__version__: str
