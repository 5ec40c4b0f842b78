"""What no experiment can measure is refused in a sentence, before anything is trained or decoded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from draftree.cli import app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Name an experiment"),
        (["lookahead-tabel3"], "Did you mean 'lookahead-table3'?"),
        (["pruning", "--set", "topk=3"], "Did you mean 'top_k'?"),
        (["pruning", "--set", "top_k"], "give NAME=VALUE"),
        (["pruning", "--set", "top_k=many"], "top_k is 'many': give a whole number"),
        (["pruning", "--nodes", "2", "--nodes", "4"], "nodes takes one value here"),
        (["pruning", "--drafter", "medussa"], "There is no drafter 'medussa'"),
        (["draft-accuracy", "--drafter", "x=./nowhere"], "There is no drafter './nowhere'"),
        (["draft-accuracy", "--drafter", "=x"], "give NAME, FOLDER or NAME=FOLDER"),
        (["draft-accuracy", "--drafter", "a=bita", "--drafter", "a=medusa"], "Two drafters are called 'a'"),
        (["pseudo-cosine", "--drafter", "medusa"], "takes drafters of hidden-transfer, and 'medusa' holds medusa"),
        (["bita-table3", "--set", "questions=./nowhere.jsonl"], "nowhere.jsonl"),
        (["hidden-transfer-table1", "--depth", "4"], "looks 3 tokens ahead, as in the paper, and depth is 4"),
        (
            ["hidden-transfer-table1", "--depth", "4", "--set", "paper_training=false"],
            "'hidden-transfer' looks 3 tokens ahead and depth is 4",
        ),
        (["hidden-transfer-figure3", "--depth", "4"], "or --set early_exits=false"),
        (["hidden-transfer-figure5", "--depth", "1"], "has no option 'depth'"),
        (["hidden-transfer-table1", "--warm-per-set", "0"], "no prompts but the measured ones"),
        (["propd-table2", "--warm-per-set", "0"], "no prompts but the measured ones"),
        (["propd-table1", "--depth", "9"], "tokens ahead and depth is 9"),
        (["propd-table1", "--set", "pruned_top_k=0"], "pruned_top_k is 0"),
        (["propd-table3", "--set", "early_layers=1,2"], "prunes by one early head"),
        (["propd-table3", "--set", "early_layers=8"], "There is no early head behind layer 8"),
        (["propd-table3", "--set", "early_layers=first"], "early_layers is 'first': give a whole number"),
        (["propd-table2", "--set", "train_learning_rate=-1"], "learning_rate is -1"),
        (["pruning", "--set", "top_k=4,0"], "top_k is 0"),
        (["lookahead-table2", "--set", "nodes=0"], "nodes is 0"),
        (["lookahead-figure7", "--set", "seen=100"], "give seen a number from 1"),
        (["bita-figure9", "--depth", "2"], "'1 masks' looks 1 tokens ahead and depth is 2"),
        (["hidden-transfer-figure5", "--set", "layers=9"], "give layers from 1 to 7"),
        (["hidden-transfer-figure6", "--set", "layers=3"], "give layers from 4, the first transfer's, to 7"),
        (["lookahead-table6", "--set", "types=float8"], "There is no 16-bit type 'float8'"),
        (["propd-table2", "--set", "early_layers=8"], "There is no early head behind layer 8"),
        (["bild-figure6", "--set", "exit_layer=8"], "give 1 to 7"),
        (["bild-figure6", "--params", "20M"], "leave --params out"),
        (["bild-figure6", "--set", "train_reference=answer"], "have no references"),
        (["bild-table1", "--set", "pair_data=a.jsonl"], "name them by --set pair_dev="),
        (["gate", "--params", "900B"], "GiB are free"),
        (["merge", "--drafter", "medusa"], "two drafters or more"),
        (["draft-accuracy", "--max-new-tokens", "5000"], "context"),
        (["premise", "--set", "rows=2,4"], "give rows from 1 on"),
        (["premise", "--set", "context=4000"], "do not fit the model's"),
        (["premise", "--batch", "40000"], "GiB are free: give a smaller batch"),
        (["propd-table1", "--drafter", "lookahead"], "lookahead has none"),
        (["propd-table1", "--early-head", "nowhere"], "There is no drafter 'nowhere'"),
        (["lookahead-table2", "--drafter", "medusa"], "has no option 'drafters'"),
        (["lookahead-table6", "--data", "rows.jsonl"], "give both --data and --set reference"),
        (["lookahead-table6", "--set", "score=f1"], "There is no score 'f1'"),
        (["lookahead-figure4", "--nodes", "8"], "has no option 'nodes'"),
        (["bita-table2", "--warm-per-set", "4"], "has no option 'warm_per_set'"),
        (["bild", "--set", "metric=bleu"], "BLEU needs references"),
        (["bild", "--set", "thresholds=0.6"], "give FALLBACK:ROLLBACK"),
        (["bild", "--set", "thresholds=1.2:3"], "fallback threshold is 1.2"),
        (["bild", "--set", "field=de"], "name your own rows"),
        (
            ["bild-table1", "--set", "pair_data=a", "--set", "pair_dev=b", "--set", "small=c", "--data", "d"],
            "leave small and data out",
        ),
        (["bild-table1", "--set", "pair_data=a", "--set", "pair_dev=b", "--params", "20M"], "cannot be inflated"),
        (["bild-figure6", "--data", "./nowhere.jsonl"], "nowhere.jsonl"),
        (["bild-figure6", "--set", "thresholds=2:1"], "fallback threshold is 2"),
        (["bild-table1", "--set", "pair_data=a", "--set", "pair_dev=b", "--set", "thresholds=2:1"], "threshold is 2"),
        (["propd-figure3", "--set", "context=4000"], "do not fit the model's"),
        (["propd-figure3", "--drafter", "lookahead"], "lookahead has none"),
        (["propd-table1", "--drafter", "bita"], "takes drafters of medusa, and 'bita' holds bita"),
        (["propd-table1", "--batch", "400"], "prompts fill no batch of 400"),
        (["propd-table1", "--set", "share_alpha=2"], "share_alpha is 2"),
        (["bita-figure9", "--max-new-tokens", "5000"], "context"),
        (["hidden-transfer-figure3", "--max-new-tokens", "5000"], "context"),
        (["bita-table2", "--set", "small=./nowhere"], "no model folder './nowhere'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, tmp_path):
    done = CliRunner().invoke(app, ["bench", "run", *arguments, "--out", str(tmp_path)])
    assert isinstance(done.exception, ValueError), done.output
    assert words in str(done.exception)
    assert "\n" not in str(done.exception)
    assert not list(tmp_path.glob("trained-on-demand/*")), "nothing is trained before it is refused"
