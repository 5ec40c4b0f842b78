"""`draftree bench bild`: every way on a tiny pair, figures held to what they are made of, kept texts, refusals."""

import copy
import json

import pytest
import torch
from test_align import small_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner
from zoo import MEMBERS, construct

from draftree.bench import bild_texts
from draftree.bench.bild import BildSettings, run_bild
from draftree.bench.bild_cost import Shapes, operations_of
from draftree.bench.bild_open import open_rows, read_thresholds
from draftree.bench.bild_page import write_html
from draftree.bench.bild_show import findings_of
from draftree.bench.bild_ways import ASSISTED, BILD, FIXED, LOSSLESS, PLAIN, SMALL, Way, ways_of
from draftree.bench.findings_files import write_json, write_png
from draftree.bench.methods import Draftree
from draftree.cli import app
from draftree.training.align_inputs import template_of
from draftree.training.quality import quality
from draftree.training.questions import Question

pytestmark = pytest.mark.filterwarnings("ignore:The small model is no smaller")

TINY = BildSettings(((0.0, 2.0), (0.02, 3.0), (0.02, 8.0)), (2,), timed=2, max_new_tokens=8, batch=4, examples=2)


@pytest.fixture(scope="module")
def words():
    """A tokenizer of 97 words; id 0 is one of them."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w3")


@pytest.fixture(scope="module", params=["t5", "llama"])
def pair(request):
    """A large model, and two small ones that mostly agree with it."""
    large = construct(MEMBERS[request.param])
    near = copy.deepcopy(large)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in near.parameters():
            p.add_(0.01 * p.std() * torch.randn_like(p))
    for model in (large, near):
        model.generation_config.eos_token_id = [1, 40]
    far = small_model(request.param)
    far.generation_config.eos_token_id = [1, 40]
    return large, {"unaligned": far, "aligned": near}


def rows_of(count=7, reference=True):
    generator = torch.Generator().manual_seed(5)
    texts = []
    for i in range(count):
        ids = torch.randint(3, 97, (4 + i % 4,), generator=generator).tolist()
        texts.append(" ".join(f"w{token}" for token in ids))
    return [Question(i, f"r{i}", "s", (text,), texts[i - 1] if reference else None) for i, text in enumerate(texts)]


def run(pair, words, out, rows=None, settings=TINY):
    large, smalls = pair
    return run_bild(large, words, smalls, rows or rows_of(), template_of(words, None), settings, out)


def test_all_ways(pair, words, tmp_path):
    result = run(pair, words, tmp_path)
    assert not result.refused
    points = result.points
    assert {p.way.group for p in points.values()} == {w.group for w in ways_of(["a"], TINY.thresholds, (2,))}
    plain = points[PLAIN]
    assert plain.speed.value == 1.0
    known = [row.reference for row in result.rows]
    for point in points.values():
        assert point.seconds > 0
        assert point.tokens > 0
        assert point.differing == 0, point.way.name
        if point.way.exact:
            assert point.quality == plain.quality
        else:
            assert point.quality == pytest.approx(quality("bleu", result.texts[point.way.name], known))
        if point.way.group in (BILD, FIXED, LOSSLESS):
            assert 0 < point.stats.calls_per_token <= 1
            assert 0 < point.stats.engagement <= 1
    assert {p.way.pair for p in points.values() if p.way.group == SMALL} == {"unaligned", "aligned"}
    assert points[Way(ASSISTED, "aligned").name].stats is None
    for (name, loss), point in result.best.items():
        grid = [p for p in points.values() if p.way.group == BILD and p.way.pair == name]
        fit = [p for p in grid if p.quality >= plain.quality - loss]
        assert point is (max(fit, key=lambda p: p.speed.value) if fit else None)
    findings = findings_of(result)
    assert len(findings.rows) == len(points)
    written = json.loads(write_json(findings, result.about, tmp_path, "bild").read_text())
    assert written["rows"][0]["way"] == PLAIN
    assert written["about"]["metric"] == "BLEU"
    picture = write_png(findings, result.about, tmp_path, "bild")
    assert picture.name == "bench-bild.png"
    page = write_html(result, words, tmp_path, picture).read_text()
    assert page.count("<table class='said'>") == 2
    assert "<mark>" in page
    assert "http" not in page
    assert len(result.sources) == 2
    assert all(large for said in result.sources for _, large in said[:1]), "the large model says the first token"


def test_texts_are_kept_and_held_to(pair, words, tmp_path, monkeypatch):
    settings = BildSettings(TINY.thresholds[:1], (), timed=1, max_new_tokens=6, ablations=False, examples=0)
    first = run(pair, words, tmp_path, settings=settings)
    file = tmp_path / bild_texts.FILE
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2 + 2
    spoiled = json.loads(lines[0])
    spoiled["ids"][0] = [50, 51]
    file.write_bytes((json.dumps(spoiled) + "\n").encode() + b"".join(lines[1:]) + lines[-1][:20])  # torn by a kill
    again = run(pair, words, tmp_path, settings=settings)
    assert again.texts[PLAIN][0] == "w50 w51"
    assert again.points[PLAIN].differing == 1
    assert any("(column 'parted') are not the texts" in line for line in findings_of(again).remarks)
    assert file.read_bytes().count(b"\n") == len(lines)
    other = run(pair, words, tmp_path, rows=rows_of(5), settings=settings)
    assert len(other.texts[PLAIN]) == 5
    assert file.read_bytes().count(b"\n") == 2 * len(lines)
    assert first.texts[PLAIN][1:] == again.texts[PLAIN][1:]


def test_without_references_rouge_is_against_the_large_model(pair, words, tmp_path):
    settings = BildSettings(TINY.thresholds[:1], (), "rouge-l", 1, 1, 6, ablations=False, examples=0)
    result = run(pair, words, tmp_path, rows=rows_of(3, reference=False), settings=settings)
    assert result.points[PLAIN].quality == pytest.approx(100)
    assert result.about["against"] == "the plain large model's texts"


# -------------------------------------------------------------------- operations


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_operations_are_those_of_counting_by_hand(family):
    """Plain decoding: one pass of the prompt, then one row a pass, each behind one more column."""
    model = construct(MEMBERS[family])
    model.generation_config.eos_token_id = None
    shapes, new, ids = Shapes(model), 5, [9, 8, 7, 6]
    done = operations_of(Draftree("plain", "plain", model, new), [model], [ids])
    seq2seq = family == "t5"
    first = 1 if seq2seq else len(ids)
    rows = [first] + [1] * (new - 1)
    assert (done.passes, done.rows) == (new, sum(rows))
    source = len(ids) if seq2seq else 0
    d, layers, heads = model.config.hidden_size, shapes.layers, model.config.num_attention_heads
    expected = shapes.source(source).flops
    moved = shapes.source(source).moved
    context = 0
    for r in rows:
        seen = sum(context + i + 1 for i in range(r))
        expected += 2 * r * shapes.weights + 4 * layers * shapes.query * (seen + r * source)
        moved += shapes.weights + r * shapes.widths + 2 * layers * shapes.key * (context + r + source)
        context += r
    assert done.flops == pytest.approx(expected)
    assert done.moved == pytest.approx(moved)
    assert done.intensity == pytest.approx(expected / moved)
    head = model.get_output_embeddings().weight.numel()
    if seq2seq:
        inner = heads * model.config.d_kv
        mlp = 2 * d * model.config.d_ff
        assert shapes.weights == layers * (6 * d * inner + mlp) + head
        assert shapes.cross == layers * 2 * d * inner
        assert shapes.encoder == shapes.encoder_layers * (4 * d * inner + mlp)
    else:
        assert shapes.weights == sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2) - head
    assert "run" not in vars(__import__("draftree.host", fromlist=["open_host"]).open_host(model)), (
        "hosts are as before"
    )


# -------------------------------------------------------------------- what is refused


def test_bad_input(pair, words, tmp_path):
    with pytest.raises(ValueError, match=r"BLEU needs references: name their field with --reference, or take"):
        run(pair, words, tmp_path, rows=rows_of(2, reference=False))
    for bad, word in (
        ({"thresholds": ((1.2, 3.0),)}, "fallback threshold is 1.2"),
        ({"thresholds": ((0.5, -1.0),)}, "rollback threshold is -1.0"),
        ({"thresholds": ()}, "no thresholds"),
        ({"timed": 0}, "timed is 0"),
        ({"windows": (0,)}, "windows is"),
    ):
        with pytest.raises(ValueError, match=word):
            BildSettings(**bad)
    assert read_thresholds(["0.6:5", "0:1"]) == ((0.6, 5.0), (0.0, 1.0))
    for text in ("0.6", "a:b", ""):
        with pytest.raises(ValueError, match=r"give FALLBACK:ROLLBACK, as 0\.6:5"):
            read_thresholds([text])
    with pytest.raises(ValueError, match="name your own rows with --data"):
        open_rows(None, "de", None, 5)
    assert len({row.set for row in open_rows(None, None, None, 13)}) == 13


def test_the_command(tmp_path):
    result = CliRunner().invoke(app, ["bench", "bild", "--model", str(tmp_path), "--metric", "rouge-l"])
    assert "A large model is named and no small one" in str(result.exception)
    words = "bench bild --metric rouge-l --limit 2 --timed 1 --thresholds 0.5:3 --window 3 --max-new-tokens 8"
    options = ["--examples", "1", "--no-ablations", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, [*words.split(), *options])
    assert result.exit_code == 0, result.exception
    assert "Best points of the grid" in result.output
    assert {p.name for p in tmp_path.iterdir()} == {
        "bench-bild.json", "bench-bild.png", "bench-bild.html", bild_texts.FILE
    }  # fmt: skip
