"""Published drafters: their draft logits are those of the libraries that made them, row by row, and texts stay equal.

`tests/data/drafters` holds folders as these libraries save them, and what they answer; see its README.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import draftree
from draftree.drafting.folder import base_of
from draftree.drafting.published import compiled, features, recursion
from draftree.drafting.published.block import DFlash
from draftree.drafting.published.eagle import Eagle3
from draftree.drafting.published.features import Text
from draftree.drafting.published.layers import Span, States, causal
from draftree.engine.request import State
from draftree.engine.sampling import SamplingParams
from draftree.native import load_library
from draftree.runner.cpu.layers import CompiledNorm
from draftree.runner.cpu.runner import CpuRunner
from draftree.runner.target import inspect_model
from draftree.training.speculators import eagle3

DATA = Path(__file__).parents[1] / "data" / "drafters"
LAYERS = 8  # of the target
BLOCKS = sorted(
    p.name for p in DATA.iterdir() if p.name.endswith("jetspec") or "dflash" in p.name or "dspark" in p.name
)
EAGLE = sorted(p.name for p in DATA.glob("*eagle3*"))


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(DATA / "target", dtype=torch.float32).eval()


@pytest.fixture
def exact(monkeypatch):
    """Keep heads in float32; on a CPU they have 8 bits otherwise."""
    monkeypatch.setattr(features, "load_library", lambda: None)


def taps_in(recorded, taps):
    return [recorded[f"hidden.{tap}"] for tap in taps]


def eagle_logits(drafter, target, tokens, taps, start, deeper):
    """Return the draft logits [1 + len(deeper), Vd] behind row `start`, and behind tokens that follow it.

    tokens: certain ones up to that behind row `start`; taps: hidden states [T, d] of each layer.
    """
    head, states = drafter.head, States()
    table = target.get_input_embeddings() if head.embed_tokens is None else head.embed_tokens
    rows = start + 1
    x = head.fuse([tap[:rows] for tap in taps])
    out = head(table(tokens[1 : rows + 1]), x, torch.arange(rows), [Span(states, 0, rows, causal(0, rows, "cpu"))])
    found = [out[-1:]]
    for i, token in enumerate(deeper):
        place = rows + i
        span = Span(states, place, 1, None)
        found.append(head(table(token[None]), head.fed_back(found[-1]), torch.tensor([place]), [span]))
    closed = head.head_input(torch.cat(found))
    return target.lm_head(closed) if head.lm_head is None else head.lm_head(closed)


@pytest.mark.parametrize("name", EAGLE)
@torch.no_grad()
def test_rows_of_eagle_equal_the_reference(name, target):
    recorded = load_file(DATA / name / "recorded.safetensors")
    drafter = Eagle3.load(DATA / name, LAYERS)
    tokens, taps = recorded["input_ids"], taps_in(recorded, drafter.taps)
    depths = sum(key.startswith("logits.") for key in recorded)
    assert depths >= 2
    for start in range(len(tokens) - 1):
        deeper = tokens[start + 2 : start + 1 + depths]
        found = eagle_logits(drafter, target, tokens, taps, start, deeper)
        for depth, logits in enumerate(found):
            assert (logits - recorded[f"logits.{depth}"][start]).abs().max() < 1e-5


@pytest.mark.parametrize("name", EAGLE)
@torch.no_grad()
def test_training_goes_on_from_each_layout_of_eagle(name, target, tmp_path):
    recorded = load_file(DATA / name / "recorded.safetensors")
    if not Eagle3.load(DATA / name, LAYERS).head.layout.norm_before_head:
        with pytest.raises(ValueError, match="reads what is not normed"):
            eagle3(target, source=DATA / name)
        return
    made = eagle3(target, embeddings=True, source=DATA / name)  # its own stay
    made.base = base_of(target)
    made.save_pretrained(tmp_path, dtype=torch.float32)
    drafter = Eagle3.load(tmp_path, LAYERS)
    assert made.config["speculators_model_type"] == "eagle3"
    tokens, taps = recorded["input_ids"], taps_in(recorded, drafter.taps)
    for depth, logits in enumerate(eagle_logits(drafter, target, tokens, taps, 3, tokens[5:6])):
        assert (logits - recorded[f"logits.{depth}"][3]).abs().max() < 1e-5


@pytest.mark.skipif(load_library() is None, reason="not built: python hatch_build.py")
@torch.no_grad()
def test_norms_in_c_are_the_stock_ones(target):
    folder = DATA / "speculators_eagle3_norms"
    stock = dict(Eagle3.load(folder, LAYERS).head.named_modules())
    own = draftree.load_drafter(folder, target).head.named_modules()
    found = {name: norm for name, norm in own if type(norm) is CompiledNorm}
    assert len(found) == 7  # three of states, three of the layer, the last one
    for name, norm in found.items():
        rows = 3 * torch.randn(2, 5, len(norm.weight)).transpose(0, 1)  # with gaps
        assert torch.allclose(norm(rows), stock[name](rows), rtol=0, atol=1e-5)


@torch.no_grad()
def test_training_goes_on_from_no_head_of_several_layers(target, tmp_path):
    config = json.loads((DATA / "speculators_eagle3" / "config.json").read_text())
    config["transformer_layer_config"]["num_hidden_layers"] = 2
    tensors, width = load_file(DATA / "speculators_eagle3" / "model.safetensors"), target.config.hidden_size
    below = {name.replace("layers.0", "layers.1"): t for name, t in tensors.items() if "layers.0" in name}
    below = {name: (t[:, :width] if name[-13] in "qkv" else t).clone() for name, t in below.items()}
    del below["layers.1.hidden_norm.weight"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors | below, tmp_path / "model.safetensors")
    assert len(draftree.load_drafter(tmp_path, target).head.layers) == 2
    with pytest.raises(ValueError, match="has several layers, which is not trained here"):
        eagle3(target, source=tmp_path)


@torch.no_grad()
def test_rows_of_p_eagle_equal_the_reference(target):
    folder = DATA / "speculators_peagle"
    recorded = load_file(folder / "recorded.safetensors")
    head = Eagle3.load(folder, LAYERS).head
    tokens, taps = recorded["input_ids"], taps_in(recorded, (2, 4, 5))
    rows = zip(recorded["anchors"].tolist(), recorded["depths"].tolist(), recorded["logits"], strict=True)
    for anchor, depth, expected in rows:
        certain, count = anchor + 1, anchor + 1 + depth
        ids = torch.cat([tokens[1 : certain + 1], torch.full((depth,), head.layout.mask_token)])
        features = torch.cat([head.fuse([tap[:certain] for tap in taps]), head.unknown().expand(depth, -1)])
        span = Span(States(), 0, count, causal(0, count, "cpu"))
        out = head(head.embed_tokens(ids), features, torch.arange(count), [span])
        assert (head.lm_head(head.head_input(out[-1])) - expected).abs().max() < 1e-5


class Runner:
    """What a block drafter asks of a runner."""

    def __init__(self, model):
        self.target, self.model = inspect_model(model), model

    def close(self, hidden):
        """Norm the last layer's output."""
        return self.model.model.norm(hidden)


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_blocks_equal_the_reference(name, target):
    recorded = load_file(DATA / name / "recorded.safetensors")
    drafter = DFlash.load(DATA / name, LAYERS)
    head, layout, tokens = drafter.head, drafter.head.layout, recorded["input_ids"]
    taps = [recorded.get(f"hidden.{tap}") for tap in drafter.taps]
    if None in taps:  # recorded behind the norm
        taps = [recorded["hidden.final"] if tap is None else tap for tap in taps]
        features = head.fuse(taps)
    else:
        features = drafter.features_of(taps, Runner(target))
    assert len(recorded["anchors"]) > 5
    for i, anchor in enumerate(recorded["anchors"].tolist()):
        text = Text([], count=anchor)
        text.features.put(0, features[:anchor])
        head.read(text)
        ids = torch.tensor([int(tokens[anchor]), *[layout.mask_token] * (layout.block - 1)])
        embeddings = target.get_input_embeddings()(ids) * layout.more.get("input_embedding_scale", 1.0)
        rows = head.block(embeddings, [text])
        logits = drafter._factored(target.lm_head(rows) if head.lm_head is None else head.lm_head(rows))
        assert (logits - recorded["logits"][i]).abs().max() < 1e-5
        check_pairs(drafter, recorded, i, rows, logits)


def check_pairs(drafter, recorded, i, rows, logits):
    """Compare what DSpark and DFlash2 make of block number i with the reference."""
    head, tokens = drafter.head, recorded["input_ids"]
    anchor = int(recorded["anchors"][i])
    if "markov" in recorded:
        previous = tokens[anchor : anchor + len(rows)][None, :, None]
        everything = torch.arange(logits.shape[-1]).expand(1, len(rows), -1)
        bias = head.markov_head(rows[None], previous, everything, everything)[0, :, 0]
        assert (bias - recorded["markov"][i]).abs().max() < 1e-5
        joined = torch.cat([rows, head.markov_head.markov_w1(previous[0, :, 0])], -1)
        assert (head.confidence_head(joined) - recorded["confidence"][i]).abs().max() < 1e-5
    if "scores" in recorded:
        previous, candidates = tokens[anchor - 1 :][: len(rows)][None, :, None], recorded["candidates"][i][None]
        own = logits[None].gather(-1, candidates) + head.pairs(rows[None], previous, candidates, candidates)[:, :, 0]
        assert (own - recorded["scores"][i])[:, 1:].abs().max() < 1e-5  # The anchor's own row drafts nothing.
    if "path" in recorded:
        drafter.branching = 6
        candidates, scores = drafter.lattice(rows[None, 1:], logits[None, 1:], tokens[anchor][None])
        path, row = [], 0
        for depth in range(len(rows) - 1):
            row = int(scores[0, depth, row].argmax())
            path.append(int(candidates[0, depth, row]))
        assert path == recorded["path"][i].tolist()


def drafted(model, drafter, prompts, engine=None):
    """Return the texts that an engine writes with a drafter, and all drafted trees with the texts they follow."""
    seen, draft = [], drafter.draft

    def spy(requests, budgets):
        tree = draft(requests, budgets)
        seen.extend((list(r.tokens), tree, b) for b, r in enumerate(requests) if tree.sizes[b] > 1)
        return tree

    drafter.draft = spy
    engine = engine or draftree.Engine(model, drafter=drafter, slots=len(prompts), shape=draftree.Fixed(12))
    # Trees of different sizes: the compiled runner leaves out the padding of such batches.
    params = [SamplingParams(max_new_tokens=16, node_budget=12 - 4 * i) for i in range(len(prompts))]
    requests = [engine.add(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    while any(request.state is not State.FINISHED for request in requests):
        engine.step()
    del drafter.draft
    return [request.tokens for request in requests], seen


PROMPTS = [[5, 9, 0, 33, 12, 7], [60, 3, 3, 41, 8, 22, 17, 50, 11, 4, 9, 63, 2, 1], [44, 0, 7]]


def answers(model, prompts):
    """Return Hugging Face's greedy answers of 16 tokens."""
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
        found.append(made[0, len(prompt) :].tolist())
    return found


def check_trees(target, drafter, seen):
    """Compare the log-probabilities of drafted nodes with those of the head's rows over Hugging Face's states."""
    vocabulary = range(64) if drafter.vocabulary is None else drafter.vocabulary
    place = {int(token): i for i, token in enumerate(vocabulary)}
    for tokens, tree, b in seen:
        hidden = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        taps = [hidden[tap][0] for tap in drafter.taps]
        for node in range(1, tree.sizes[b]):
            path, above = [node], int(tree.parents[b, node])
            while above > 0:
                path.insert(0, above)
                above = int(tree.parents[b, above])
            own = tree.tokens[b, path]
            logits = eagle_logits(drafter, target, torch.tensor(tokens), taps, len(tokens) - 2, own[:-1])
            logp = logits.log_softmax(-1)
            expected = sum(float(logp[i, place[int(token)]]) for i, token in enumerate(own))
            assert float(tree.logp[b, node]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("name", "in_c"),
    [*((name, True) for name in EAGLE if name != "speculators_eagle3_norm_fc"), ("speculators_eagle3_qwen3", False)],
)
@torch.no_grad()
def test_trees_of_eagle_are_those_of_its_rows(name, in_c, target, monkeypatch):
    if not in_c:
        monkeypatch.setattr(compiled, "load_library", lambda: None)
    drafter = draftree.load_drafter(DATA / name, target)
    packed, run = [], CpuRunner._run_packed
    monkeypatch.setattr(CpuRunner, "_run_packed", lambda *given: packed.append(given) or run(*given))
    texts, seen = drafted(target, drafter, PROMPTS)
    assert texts == answers(target, PROMPTS)
    assert len(seen) > 20
    assert packed or load_library() is None
    check_trees(target, drafter, seen)


@pytest.mark.usefixtures("exact")
@torch.no_grad()
def test_texts_that_begin_like_one_that_ended(target, monkeypatch):
    """An engine reads only what is new of a dialogue; the drafter keeps its own states of the rest."""
    monkeypatch.setattr(recursion, "CHUNK", 4)
    starts, behind = [], Eagle3._behind
    monkeypatch.setattr(Eagle3, "_behind", lambda *given: starts.append(given[-1]) or behind(*given))
    drafter = draftree.load_drafter(DATA / "speculators_eagle3", target)
    engine = draftree.Engine(target, drafter=drafter, slots=1, shape=draftree.Fixed(12), keep_prefixes=True)
    (first,), _ = drafted(target, drafter, PROMPTS[1:2], engine=engine)
    longer = [*PROMPTS[1], *first, 7, 30]
    (second,), seen = drafted(target, drafter, [longer], engine=engine)
    assert [second] == answers(target, [longer])
    assert starts[1] >= len(PROMPTS[1]) + 14  # All but the newest tokens were there.
    check_trees(target, drafter, seen)
    other = [*PROMPTS[1][:10], 20, 30, 40]
    (third,), seen = drafted(target, drafter, [other], engine=engine)
    assert [third] == answers(target, [other])
    assert starts[2] == 10
    check_trees(target, drafter, seen)


@pytest.mark.parametrize("name", [*BLOCKS, "speculators_peagle", "speculators_eagle3_norm_fc"])
@torch.no_grad()
def test_texts_stay_those_of_hugging_face(name, target):
    drafter = draftree.load_drafter(DATA / name, target)
    texts, seen = drafted(target, drafter, PROMPTS)
    assert texts == answers(target, PROMPTS)
    assert max(tree.height for _, tree, _ in seen) >= 2
    merged = draftree.Merge([draftree.Lookahead(), drafter])
    ids = torch.tensor([PROMPTS[0]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": True, "temperature": 1.5}
    torch.manual_seed(5)
    expected = target.generate(ids, **options)
    torch.manual_seed(5)
    assert draftree.generate(target, ids, drafter=merged, **options).sequences.tolist() == expected.tolist()


def broken(tmp_path, name, **changed):
    """Return a copy of a recorded folder with other keys in its configuration."""
    folder = tmp_path / name
    shutil.copytree(DATA / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changed))
    return folder


NAMES = "eagle_aux_hidden_state_layer_ids"
WRONG = {
    "names layers twice": ("speculators_eagle3", {"eagle_config": {NAMES: [2, 3, 5]}}),
    "and the model has 8": ("speculators_eagle3", {NAMES: [2, 4, 9]}),
    "'fc.weight', and a tensor of shape .* is expected": ("speculators_eagle3", {"target_hidden_size": 24}),
    "layers of the kind 'mixtral'": ("zlab_dflash", {"model_type": "mixtral"}),
    "with layers 6, and this one has 8": ("zlab_dflash", {"num_target_layers": 6}),
    "with vocab_size 32": ("zlab_dflash", {"vocab_size": 32}),
    "has no usable 'block_size'": ("speculators_dflash", {"block_size": None}),
    "'gated' Markov head": ("speculators_dspark", {"markov_head_type": "gated"}),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_folders_that_do_not_fit_are_refused(tmp_path, target, sentence):
    name, changed = WRONG[sentence]
    with pytest.raises(ValueError, match=sentence):
        draftree.load_drafter(broken(tmp_path, name, **changed), target)


@pytest.mark.parametrize("missing", [True, False])
def test_missing_and_left_over_tensors_are_refused(tmp_path, target, missing):
    folder = broken(tmp_path, "speculators_eagle3")
    tensors = load_file(folder / "model.safetensors")
    name = "layers.0.hidden_norm.weight" if missing else "layers.0.more.weight"
    tensors = {k: v for k, v in tensors.items() if k != name} if missing else {**tensors, name: torch.zeros(3)}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"{name}', and (a|no) tensor"):
        draftree.load_drafter(folder, target)


def test_more_than_tensors_is_not_opened(tmp_path, target):
    folder = broken(tmp_path, "original_eagle3")
    (file,) = folder.glob("*.bin")
    torch.save({"fc.weight": torch.zeros(2), "note": Path("a")}, file)
    with pytest.raises(ValueError, match="holds more than tensors"):
        draftree.load_drafter(folder, target)


@torch.no_grad()
def test_the_packages_head_drafts_for_models_of_its_sizes_alone(target):
    with pytest.raises(ValueError, match="made for a model with hidden_size 576, and this one has"):
        draftree.Engine(target, drafter=draftree.load_drafter("eagle-3", target))
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 30}
    config = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=64, tie_word_embeddings=True, **heads)
    model = LlamaForCausalLM(config).eval()
    drafter = draftree.load_drafter("eagle-3", model)
    texts, seen = drafted(model, drafter, PROMPTS[:1])
    assert texts == answers(model, PROMPTS[:1])
    assert len(seen) > 5
