"""Images by the doors that take files: `Chat`, the command line and the server, on a folder with a processor."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image
from seeing_models import llava_folder
from serve_driver import serving
from transformers import AutoConfig, AutoTokenizer
from typer.testing import CliRunner

import draftree
from draftree.cli import app
from draftree.encoding import MOST_PIXELS, encode_seen, open_image
from draftree.serve.settings import ServerSettings

ASKED = "What is on the picture?"


@pytest.fixture(scope="module")
def folder(demo: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llava_folder(tmp_path_factory.mktemp("llava"), demo.tokenizer)


@pytest.fixture(scope="module")
def seeing(folder: Path) -> tuple[Any, Any]:
    return draftree.load_model(folder)


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def message(text: str, *images: bytes) -> dict[str, Any]:
    seen = [{"type": "image", "image": open_image(image)} for image in images]
    return {"role": "user", "content": [*seen, {"type": "text", "text": text}]}


def expected(seeing: tuple[Any, Any], *messages: dict[str, Any], new: int = 16) -> list[int]:
    model, tokenizer = seeing
    ids, inputs = encode_seen(tokenizer, messages)
    return model.generate(**inputs, max_new_tokens=new, do_sample=False)[0, len(ids) :].tolist()


def url(image: bytes) -> dict[str, Any]:
    data = base64.b64encode(image).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def test_a_dialogue_about_images(seeing: tuple[Any, Any]) -> None:
    """The second turn is of text alone and reads the image's keys and values again; the third shows another."""
    model, tokenizer = seeing
    with draftree.Chat(model, tokenizer, "lookahead", max_new_tokens=16) as chat:
        said: list[dict[str, Any]] = []
        for text, images in ((ASKED, [picture(0)]), ("And now?", []), ("Which is older?", [picture(1)])):
            said.append(message(text, *images) if images else {"role": "user", "content": text})
            answer = "".join(chat.send(text, images=images))
            assert chat.requests[-1].tokens == expected(seeing, *said)
            said.append({"role": "assistant", "content": answer})
        assert chat.requests[1].reused > 16
        assert chat.requests[2].reused == 0
        before = list(chat.messages)
        with pytest.raises(ValueError, match="An image cannot be read"):
            "".join(chat.send("More?", images=[b"no image"]))
        assert chat.messages == before


def test_the_command_line_shows_images(seeing: tuple[Any, Any], folder: Path, tmp_path: Path) -> None:
    files = []
    for seed in (2, 3):
        files.append(tmp_path / f"{seed}.png")
        files[-1].write_bytes(picture(seed))
    options = [word for file in files for word in ("--image", str(file))]
    done = CliRunner().invoke(app, ["generate", "-m", str(folder), "--json", "--max-new-tokens", "16", *options, ASKED])
    assert done.exit_code == 0, done.output
    shown = message(ASKED, picture(2), picture(3))
    assert json.loads(done.stdout.splitlines()[-1])["token_ids"] == expected(seeing, shown)
    for more, words in ((["--raw", ASKED], "leave --prompts and --raw out"), (["-m", "embedded", ASKED], "text alone")):
        done = CliRunner().invoke(app, ["generate", *options, *more])
        assert done.exit_code != 0
        assert words in str(done.exception)


def test_the_server_reads_data_urls_and_nothing_else(seeing: tuple[Any, Any]) -> None:
    model, tokenizer = seeing
    fine = url(picture(4))
    body = {"messages": [{"role": "user", "content": [fine, {"type": "text", "text": ASKED}]}], "max_tokens": 16}
    with serving(model, tokenizer) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model=client.models.list().data[0].id, temperature=0, n=2, **body)
        wanted = tokenizer.decode(expected(seeing, message(ASKED, picture(4))), skip_special_tokens=True)
        assert [choice.message.content for choice in answer.choices] == [wanted] * 2
        elsewhere = fine | {"image_url": {"url": "https://localhost/a.png"}}
        for bad in (url(b"no image"), elsewhere, url(picture(5)[:80]), {"type": "text", "text": "<image>"}):
            messages = [{"role": "user", "content": [bad, {"type": "text", "text": ASKED}]}]
            refused = running.http.post("/v1/chat/completions", json=body | {"messages": messages})
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"].startswith("messages")


def test_responses_read_images(seeing: tuple[Any, Any]) -> None:
    model, tokenizer = seeing
    shown = {"type": "input_image", "image_url": url(picture(4))["image_url"]["url"], "detail": "auto"}
    items = [{"role": "user", "content": [shown, {"type": "input_text", "text": ASKED}]}]
    with serving(model, tokenizer) as running, openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        made = client.responses.create(
            model=client.models.list().data[0].id, input=items, temperature=0, max_output_tokens=16
        )
        wanted = tokenizer.decode(expected(seeing, message(ASKED, picture(4))), skip_special_tokens=True)
        assert made.output_text == wanted
        items[0]["content"][0] = {"type": "input_image", "file_id": "file-1"}
        refused = running.http.post("/v1/responses", json={"input": items})
        assert refused.status_code == 400
        assert "no text and no image_url" in refused.json()["error"]["message"]


def test_the_server_reads_files_of_its_folder(seeing: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = seeing
    inside, outside = tmp_path / "inside", tmp_path / "outside.png"
    inside.mkdir()
    (inside / "a b.png").write_bytes(picture(4))
    outside.write_bytes(picture(5))
    (inside / "link.png").symlink_to(outside)
    wanted = tokenizer.decode(expected(seeing, message(ASKED, picture(4))), skip_special_tokens=True)

    def post(running: Any, address: str) -> Any:
        part = {"type": "image_url", "image_url": {"url": address}}
        asked = [{"role": "user", "content": [part, {"type": "text", "text": ASKED}]}]
        return running.http.post("/v1/chat/completions", json={"messages": asked, "temperature": 0, "max_tokens": 16})

    with serving(model, tokenizer, images=inside) as running:
        for address in ("file://a%20b.png", f"file://{inside}/a%20b.png"):
            answer = post(running, address)
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["message"]["content"] == wanted
        for address in ("file://../outside.png", f"file://{outside}", "file://link.png", "file://none.png", "file://"):
            refused = post(running, address)
            assert refused.status_code == 400
            assert "no such image" in refused.json()["error"]["message"]
    with serving(model, tokenizer) as running:
        assert "not fetched" in post(running, f"file://{inside}/a%20b.png").json()["error"]["message"]
    with pytest.raises(ValueError, match="no folder"):
        ServerSettings(images=outside)


def test_a_server_of_a_model_of_text_refuses_images(server: Any) -> None:
    content = [url(picture(6)), {"type": "text", "text": ASKED}]
    refused = server.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})
    assert refused.status_code == 400
    assert "reads text alone" in refused.json()["error"]["message"]


def test_absent_packages_are_named(demo: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo.tokenizer.save_pretrained(tmp_path)
    AutoConfig.for_model("qwen2_vl").save_pretrained(tmp_path)
    for name in ("preprocessor", "video_preprocessor"):
        kind = {"image_processor_type": "Qwen2VLImageProcessor", "video_processor_type": "Qwen2VLVideoProcessor"}
        file = tmp_path / f"{name}_config.json"
        file.write_text(json.dumps({**kind, "processor_class": "Qwen2VLProcessor"}), encoding="utf-8")
    tokenizer, seen = AutoTokenizer.from_pretrained(tmp_path), message(ASKED, picture(0))
    # As where it is absent, which it is in some environments.
    monkeypatch.setattr("transformers.utils.import_utils.is_torchvision_available", lambda: False)
    with pytest.raises(ValueError, match="pip install torchvision"):
        encode_seen(tokenizer, [seen])
    data = picture(0)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ValueError, match="pip install pillow"):
        open_image(data)


def test_a_picture_of_too_many_pixels_is_refused_before_it_is_unpacked() -> None:
    file = io.BytesIO()
    Image.new("1", (10_000, MOST_PIXELS // 10_000 + 1)).save(file, "PNG")
    assert len(file.getvalue()) < 20_000
    with pytest.raises(ValueError, match=f"at most {MOST_PIXELS} are read"):
        open_image(file.getvalue())
