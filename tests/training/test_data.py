"""Training data: answers equal Hugging Face's, a killed run continues, bad input gets one sentence."""

import json

import pytest
import torch
from typer.testing import CliRunner
from zoo import build

from draftree.cli import app
from draftree.runner import inspect_model
from draftree.training.answers import JOURNAL, META, AnswerOptions, answer_all, make_data
from draftree.training.options import Question, Template, read_given, read_questions
from draftree.training.rows import read_data


def ask(count):
    return [Question(i, f"q-{i}", "shell", (f"List {i + 1} files of the folder number {i}.",)) for i in range(count)]


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def make(demo, tmp_path):
    """Return a function that makes a data set of short answers by the embedded model."""

    def made(questions, name="data", template="short", **options):
        progress = options.pop("progress", None)
        about = make_data(
            demo.model,
            demo.tokenizer,
            questions,
            tmp_path / name,
            template=Template(template, demo.tokenizer),
            options=AnswerOptions(**({"max_new_tokens": 12, "slots": 3} | options)),
            progress=progress,
        )
        return tmp_path / name, about

    return made


# -------------------------------------------------------------------- answers


def test_answers_equal_hugging_face_s(make, demo):
    folder, about = make(ask(5))
    rows = rows_of(folder)
    assert [row["id"] for row in rows] == [f"q-{i}" for i in range(5)]
    assert about["rows"] == 5
    assert about["model"]["name"] == "chat_4m"
    assert len(about["model"]["hash"]) == 64
    assert about["template"] == "short"
    assert about["answer_tokens"] == sum(len(row["answer_ids"]) for row in rows)
    for row in rows:
        ids = torch.tensor([row["prompt_ids"]])
        expected = demo.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        assert row["answer_ids"] == expected[0, ids.shape[1] :].tolist()
        assert row["answer"] == demo.tokenizer.decode(row["answer_ids"], skip_special_tokens=True)
        assert row["finish"] == ("eos" if row["answer_ids"][-1] == demo.tokenizer.eos_token_id else "length")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("short", "<s><|user|>\nHow?\n<|assistant|>\n"),
        ("full", "<s><|system|>\nYou are a helpful assistant.\n<|user|>\nHow?\n<|assistant|>\n"),
        ("Q: {question}\nA:", "Q: How?\nA:"),
    ],
)
def test_templates(demo, kind, text):
    ids = Template(kind, demo.tokenizer).encode(["How?"])
    assert demo.tokenizer.decode(ids) == text


def test_later_turns_include_earlier_answers(make, demo):
    talk = Question(0, "talk", "chat", ("Hello there.", "And then?"))
    for template in ("short", "U: {question}\nB:"):
        folder, _ = make([talk], name=f"talk-{template[0]}", template=template)
        first, second = rows_of(folder)
        assert (first["turn"], second["turn"]) == (0, 1)
        expected = Template(template, demo.tokenizer).encode(talk.turns, [first["answer"]])
        assert second["prompt_ids"] == expected
        assert first["answer"] in demo.tokenizer.decode(expected)


# -------------------------------------------------------------------- continued runs


def test_only_open_questions_are_answered(make, monkeypatch, tmp_path):
    import draftree.training.answers as module

    asked = []
    real = module.answer_all

    def count(model, tokenizer, template, questions, options):
        questions = list(questions)
        asked.append([q.number for q in questions])
        for i, answered in enumerate(real(model, tokenizer, template, questions, options)):
            if len(asked) == 1 and i == 2:
                raise KeyboardInterrupt
            yield answered

    monkeypatch.setattr(module, "answer_all", count)
    with pytest.raises(KeyboardInterrupt):
        make(ask(6))
    with (tmp_path / "data" / JOURNAL).open("ab") as journal:
        journal.write(b'{"number": 5, "rows": [{"id": "to')  # A full disk leaves such a line.
    folder, _ = make(ask(6))
    done = set(asked[0]) - set(asked[1])
    assert len(done) == 2
    assert len(rows_of(folder)) == 6
    make(ask(6))
    assert len(asked) == 2, "a finished data set is left as it is"


# -------------------------------------------------------------------- bad input


def refused(match, call):
    with pytest.raises(ValueError, match=match) as error:
        call()
    assert "\n" not in str(error.value)


def test_other_folders_are_refused(make, tmp_path):
    make(ask(2))
    refused("holds data with other questions", lambda: make(ask(3)))
    refused("data with other template", lambda: make(ask(2), template="full"))
    refused("data with other max new tokens", lambda: make(ask(2), max_new_tokens=13))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    refused("'thesis.txt' and no data", lambda: make(ask(2), name="mine"))
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_prompts_beyond_the_context_are_left_out(make):
    long = Question(2, "long", "s", ("word " * 3000,))
    folder, about = make([*ask(2), long])
    assert about["skipped"] == 1
    assert len(rows_of(folder)) == 2
    refused("No question fits", lambda: make([long], name="none"))


def test_refuses_unknown_templates(demo):
    refused("choose 'full', 'short' or a text with {question}", lambda: Template("fulll", demo.tokenizer))

    class Bare:
        chat_template = None

    refused("no chat template", lambda: Template("short", Bare()))


@pytest.mark.parametrize(
    ("kind", "role", "sentence"),
    [
        ("full", "system", r"takes no system message .*: give 'short' or a text"),
        ("short", "user", r"takes no question alone .*: give a text"),
    ],
)
def test_chat_templates_that_raise_are_refused(demo, kind, role, sentence, monkeypatch):
    raising = f"{{% if messages[0]['role'] == '{role}' %}}{{{{ raise_exception('Not supported') }}}}{{% endif %}}"
    monkeypatch.setattr(demo.tokenizer, "chat_template", raising)
    refused(sentence, lambda: Template(kind, demo.tokenizer))


def test_reads_rows_of_several_forms_and_refuses_others(tmp_path):
    file = tmp_path / "set.jsonl"
    forms = [{"prompt": "a", "response": "never read"}, {"question": "b"}, {"turns": ["c", "d"], "question_id": 7}]
    file.write_text("\n".join(map(json.dumps, forms)) + "\n\n")
    questions = read_questions([tmp_path])
    assert [q.turns for q in questions] == [("a",), ("b",), ("c", "d")]
    assert [q.id for q in questions] == ["set-1", "set-2", "7"]
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "x"}))
    assert [q.id for q in read_questions([file, other], limit=2)] == ["set-1", "other-1"]
    assert [q.id for q in read_questions([file, other], limit=3)] == ["set-1", "set-2", "other-1"]
    for text, match in (
        ("{", "line 1, is not JSON"),
        ('{"text": "plain"}', "line 1, has no 'turns' or 'prompt' or 'question' with text, but text"),
        ('{"turns": ["a", 3]}', "has no 'turns' or 'prompt' or 'question' with text"),
        ('{"prompt": "  "}', "has no 'turns' or 'prompt' or 'question' with text"),
        ("[1]", "has no 'turns' or 'prompt' or 'question' with text"),
        ("", "There are no questions"),
    ):
        other.write_text(text)
        refused(match, lambda: read_questions([other]))
    refused("no questions file", lambda: read_questions([tmp_path / "none.jsonl"]))
    (tmp_path / "empty").mkdir()
    refused("holds no .jsonl", lambda: read_questions([tmp_path / "empty"]))


def test_unusable_data_is_refused(make, demo, tmp_path):
    target = inspect_model(demo.model)
    refused("is no data set", lambda: read_data(tmp_path, target))
    folder, _ = make(ask(2))
    refused("leaves 2 rows to train on and 0 to report on", lambda: read_data(folder, target))
    refused("after 2 were left out as too long or too short", lambda: read_data(folder, target, max_length=5))
    meta = json.loads((folder / META).read_text())
    (folder / META).write_text(json.dumps(meta | {"complete": False}))
    refused("is unfinished", lambda: read_data(folder, target))
    meta["model"]["hash"] = "0"
    (folder / META).write_text(json.dumps(meta))
    refused("made by 'chat_4m' with other weights", lambda: read_data(folder, target))


# -------------------------------------------------------------------- the command


def test_the_command_makes_a_data_set(tmp_path):
    file = tmp_path / "asked.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"Say {i}."}) + "\n" for i in range(3)))
    arguments = ["train", "data", str(file), "--out", str(tmp_path / "d"), "--max-new-tokens", "6", "--limit", "2"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("2 rows, ")
    assert len(rows_of(tmp_path / "d")) == 2
    done = CliRunner().invoke(app, [*arguments, "--system", "Be brief."])
    assert "--system belongs to the template 'full'" in str(done.exception)


def test_encoder_decoders_answer_too():
    class Words:
        """Stand for a tokenizer."""

        chat_template = None

        def __call__(self, text):
            return type("Ids", (), {"input_ids": [3 + ord(c) % 90 for c in text]})

        def decode(self, ids, skip_special_tokens=True):
            return " ".join(map(str, ids))

    model = build("t5")
    template = Template("{question}", Words())
    options = AnswerOptions(max_new_tokens=8, slots=2)
    answered = dict(answer_all(model, Words(), template, ask(3), options))
    assert sorted(answered) == [0, 1, 2]
    for number, rows in answered.items():
        ids = torch.tensor([rows[0]["prompt_ids"]])
        assert ids[0].tolist() == template.encode(ask(3)[number].turns)
        expected = model.generate(ids, max_new_tokens=8, do_sample=False)[0, 1:].tolist()
        assert rows[0]["answer_ids"] == expected[: len(rows[0]["answer_ids"])]
        assert len(rows[0]["answer_ids"]) == 8 or rows[0]["finish"] == "eos"


# -------------------------------------------------------------------- given answers and several templates


def test_given_answers_are_used_as_they_are(make, demo, tmp_path):
    """Beside rows that the model answers: prompts with answers, and dialogues of two forms, in lines or an array."""
    talk = [{"from": "gpt", "value": "Lost."}, {"from": "human", "value": "Hello."}, {"from": "gpt", "value": "Hi!"}]
    talk += [{"from": "human", "value": "And?"}, {"from": "gpt", "value": "Bye."}, {"from": "human", "value": "What?"}]
    api = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who?"}]
    api += [{"role": "assistant", "content": "Me."}]
    rows = [{"id": "one", "prompt": "Why?", "response": "So."}, {"id": "two", "conversations": talk}]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "array.json").write_text(json.dumps([{"messages": api}, {"conversations": []}]), encoding="utf-8")
    given = read_given([tmp_path / "lines.jsonl", tmp_path / "array.json"], first=1)
    folder, about = make([*ask(1), *given])
    made = rows_of(folder)
    assert about["rows"] == 5
    assert [row["answer"] for row in made][1:] == ["So.", "Hi!", "Bye.", "Me."]
    assert [row["turn"] for row in made] == [0, 0, 0, 1, 0]
    assert made[3]["prompt_ids"] == Template("short", demo.tokenizer).encode(["Hello.", "And?"], ["Hi!"])
    assert demo.tokenizer.decode(made[1]["answer_ids"]) == "So." + demo.tokenizer.eos_token
    (tmp_path / "lines.jsonl").write_text('{"prompt": "Why?"}', encoding="utf-8")
    refused("row 1, has no 'prompt' with an 'answer'", lambda: read_given([tmp_path / "lines.jsonl"]))


def test_each_template_makes_a_row_of_every_question(demo, tmp_path):
    """As BiTA's training data have it; both rows of a question are on the same side of the dev split."""
    both = [Template(kind, demo.tokenizer) for kind in ("short", "full")]
    about = make_data(*demo, ask(3), tmp_path / "d", template=both, options=AnswerOptions(5, 2))
    rows = rows_of(tmp_path / "d")
    assert about["template"] == ["short", "full"]
    assert [row["prompt_ids"] for row in rows] == [one.encode(q.turns) for one in both for q in ask(3)]
    assert [row["id"] for row in rows] == 2 * [q.id for q in ask(3)]
