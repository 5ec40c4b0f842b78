"""Images of filled-in forms, the JSON that they say, and a tiny model that learns to write it.

A form has a field a line, in the font of PIL. The model is LLaVA's: a vision transformer reads the image in patches of
two letters, and a llama writes the answer in the tokens of a given tokenizer.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from transformers import LlavaConfig, LlavaForConditionalGeneration

SIDE, LINE, PATCH = 96, 12, 12  # pixels of a form and of its lines; a letter is 6 wide
PARTS = (SIDE // PATCH) ** 2  # placeholder tokens of an image
NAMES = [
    "Adam",
    "Anna",
    "Boris",
    "Clara",
    "David",
    "Elena",
    "Felix",
    "Greta",
    "Hanna",
    "Igor",
    "Julia",
    "Kevin",
    "Laura",
    "Martin",
    "Nina",
    "Oscar",
]
CITIES = [
    "Athens",
    "Berlin",
    "Cairo",
    "Dublin",
    "Geneva",
    "Lisbon",
    "London",
    "Madrid",
    "Oslo",
    "Paris",
    "Prague",
    "Vienna",
]
ARTICLES = [
    "apples",
    "books",
    "chairs",
    "desks",
    "forks",
    "glasses",
    "knives",
    "lamps",
    "pens",
    "plates",
    "shirts",
    "tables",
]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "number": {"type": "string"},
        "customer": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "city": {"type": "string"}},
            "required": ["name", "city"],
        },
        "date": {"type": "string"},
        "order": {
            "type": "object",
            "properties": {"article": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["article", "count"],
        },
        "paid": {"type": "boolean"},
    },
    "required": ["number", "customer", "date", "order", "paid"],
}
ASKED = "Write the form as JSON with number, customer, date, order and paid."


def form(seed: int) -> tuple[Image.Image, list[str], str]:
    """Return the image of form number `seed`, its lines, and its JSON."""
    rng = random.Random(seed)
    said: dict[str, Any] = {
        "number": str(rng.randint(1000, 9999)),
        "customer": {"name": rng.choice(NAMES), "city": rng.choice(CITIES)},
        "date": f"{rng.randint(2021, 2026)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
        "order": {"article": rng.choice(ARTICLES), "count": rng.randint(10, 99)},
        "paid": rng.random() < 0.5,
    }
    customer, order = said["customer"], said["order"]
    lines = [said["number"], *customer.values(), said["date"], order["article"], str(order["count"])]
    lines.append("paid" if said["paid"] else "due")
    image = Image.new("L", (SIDE, SIDE), 255)
    pen, font = ImageDraw.Draw(image), ImageFont.load_default_imagefont()
    for i, line in enumerate(lines):
        pen.text((0, LINE * i), line, fill=0, font=font)
    return image, lines, json.dumps(said)


def pixels_of(images: list[Image.Image]) -> Tensor:
    """Return images as the model reads them, [images, 3, SIDE, SIDE]."""
    held = [torch.frombuffer(bytearray(one.tobytes()), dtype=torch.uint8).view(1, SIDE, SIDE) for one in images]
    return (torch.stack(held).float() / 127.5 - 1).expand(-1, 3, -1, -1)


def tiny_model(vocabulary: int, eos: int) -> Any:
    """Return an untrained model; the placeholder token is the one behind `vocabulary`."""
    torch.manual_seed(0)
    text = {"model_type": "llama", "vocab_size": vocabulary + 1, "hidden_size": 96, "intermediate_size": 256}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True}
    text |= {"eos_token_id": eos, "pad_token_id": eos, "max_position_embeddings": 4096, "initializer_range": 0.06}
    eyes = {"model_type": "clip_vision_model", "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2}
    eyes |= {"num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "initializer_factor": 2.0}
    config = LlavaConfig(
        text_config=text,
        vision_config=eyes,
        image_token_index=vocabulary,
        image_seq_length=PARTS,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config).eval()


def prompt_of(tokenizer: Any, placeholder: int, forms: int = 1) -> Tensor:
    """Return the token ids [1, L] of a question about so many forms."""
    asked = tokenizer(f"\n{ASKED}\n", add_special_tokens=False).input_ids
    return torch.tensor([[placeholder] * PARTS * forms + asked])


def letters_of(lines: list[str]) -> Tensor:
    """Return the two letters of each patch, LongTensor [PARTS, 2]."""
    held = torch.full((SIDE // PATCH, SIDE // PATCH * 2), ord(" "))
    for row, line in zip(held, lines, strict=False):
        row[: len(line)] = torch.tensor(list(line.encode()))
    return held.view(PARTS, 2)


def train(model: Any, tokenizer: Any, steps: int, batch: int, step: Any = lambda loss, spelling: None) -> None:
    """Train on forms with numbers from 1000 on; `step` is called with each step's losses.

    What the text model reads of a patch is also taught to tell its two letters, which begins the learning.
    """
    torch.manual_seed(0)
    prompt = prompt_of(tokenizer, model.config.image_token_id)[0].tolist()
    eos, rate = model.config.text_config.eos_token_id, 3e-3
    speller = torch.nn.Linear(model.config.text_config.hidden_size, 2 * 128)
    parameters = [*model.parameters(), *speller.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01)
    entropy = torch.nn.functional.cross_entropy
    model.train()
    for number in range(steps):
        made = [form(1000 + number * batch + i) for i in range(batch)]
        answers = [[*tokenizer(text, add_special_tokens=False).input_ids, eos] for _, _, text in made]
        width = max(map(len, answers))
        ids = torch.tensor([[*prompt, *answer, *[eos] * (width - len(answer))] for answer in answers])
        labels = torch.tensor([answer + [-100] * (width - len(answer)) for answer in answers])
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (number + 1) / 50) * 0.5 * (1 + math.cos(math.pi * number / steps))
        output = model.model(input_ids=ids, pixel_values=pixels_of([image for image, _, _ in made]))
        logits = model.lm_head(output.last_hidden_state[:, len(prompt) - 1 : -1])
        loss = entropy(logits.flatten(0, 1), labels.flatten())
        spelt = speller(torch.stack(list(output.image_outputs.pooler_output)))
        letters = torch.stack([letters_of(lines) for _, lines, _ in made])
        spelling = entropy(spelt.view(-1, 128), letters.flatten())
        optimizer.zero_grad()
        (loss + spelling).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        step(loss.item(), spelling.item())
    model.eval()
