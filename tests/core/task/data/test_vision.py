"""Prompts with pictures: read, expanded, checked before anything starts, and prepared when they are drawn."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from anytron.base.errors import ConfigError, DataError
from anytron.config.imports import resolve
from anytron.config.schema import DataSection, ModelSection
from anytron.task.data import Prompt
from anytron.task.data.pretrained import TOKENIZER, load_image_processor, save_processor
from anytron.task.data.prompts import tokenize
from anytron.task.data.sources import load_prompts
from anytron.task.data.vision import load_vision

EXAMPLES = Path(__file__).parents[4] / "examples"
IMAGE, VIDEO = 13, 15
LIMITS = {"vocab_size": 16}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}
{%- for part in message.content %}{{ PLACE if part.type == 'image' else part.text }}{% endfor %}
{%- endfor %}{{ '?' if add_generation_prompt }}""".replace("PLACE", repr(PLACE))


def vision_config(**changes):
    fields = {
        "text_config": {"vocab_size": 16, "hidden_size": 16, "num_attention_heads": 2},
        "vision_config": {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    }
    return AutoConfig.for_model("qwen2_5_vl", **fields | changes)


@pytest.fixture(scope="module")
def tokenizer():
    return resolve(f"{EXAMPLES}/count_shapes.py:tokenizer", TOKENIZER)()


@pytest.fixture
def model():
    return ModelSection(
        config={"model_type": "qwen2_5_vl"}, tokenizer="t", processor=f"{EXAMPLES}/count_shapes.py:image_processor"
    )


@pytest.fixture
def vision(model, tokenizer):
    return load_vision(model, vision_config(), tokenizer, pytest.fail)


def picture(width=32, height=32, mode="RGB"):
    return Image.new(mode, (width, height), 7)


def test_an_image_token_becomes_one_for_each_merged_patch(tokenizer, vision):
    prompts = [
        Prompt("two", text=f"1{PLACE}2{PLACE}?", images=[picture(48, 32), picture(16, 32)]),
        Prompt("none", text="12?"),
        Prompt("ids", tokens=(IMAGE, 6), images=(picture(16, 16),)),
    ]
    two, none, ids = tokenize(prompts, tokenizer, vision, **LIMITS)
    assert two.tokens == (0, 12, *[IMAGE] * 6, 14, 1, 12, *[IMAGE] * 2, 14, 6)
    assert two.text == prompts[0].text
    assert none.tokens == (0, 1, 6)
    assert ids.tokens == (IMAGE, 6)
    patches = vision.patches(two.images, "two")
    assert patches.grid_thw.tolist() == [[1, 4, 6], [1, 4, 2]]
    assert patches.pixel_values.shape == (4 * 6 + 4 * 2, 3 * 2 * 8 * 8)
    assert patches.pixel_values.dtype is torch.float32


def test_what_the_library_s_processor_makes_of_the_same_pictures(tokenizer, vision, tmp_path):
    upright = Image.effect_noise((48, 32), 90).convert("RGB")
    path = tmp_path / "a.png"
    upright.save(path)
    expected = Qwen2VLImageProcessorPil(
        patch_size=8, size={"shortest_edge": 256, "longest_edge": 4096}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )(images=[upright], return_tensors="pt")
    for given in (upright, path, str(path)):
        patches = vision.patches([given], "a")
        assert torch.equal(patches.pixel_values, expected["pixel_values"])
        assert torch.equal(patches.grid_thw, expected["image_grid_thw"])


def test_a_photograph_that_was_taken_sideways_stands_upright(vision, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    picture(48, 32).save(tmp_path / "a.jpg", exif=exif)
    assert vision.patches([tmp_path / "a.jpg"], "a").grid_thw.tolist() == [[1, 6, 4]]


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK"])
def test_pictures_of_every_mode_are_read(vision, mode):
    assert vision.patches([picture(mode=mode)], "a").pixel_values.shape == (16, 384)


def damaged(tmp_path):
    path = tmp_path / "damaged.png"
    Image.effect_noise((64, 64), 90).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    return path


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (
            lambda _: {"text": "1?", "images": [picture()]},
            r"(?s)does not have one image token.*p7.*1 image, but 0 times.*image_pad.*13",
        ),
        (lambda _: {"text": f"{PLACE}?"}, "(?s)does not have one image token.*p7.*0 images, but 1 times"),
        (
            lambda _: {"text": f"{PLACE}{PLACE}?", "images": [picture()]},
            "(?s)does not have one image token.*p7.*1 image, but 2 times",
        ),
        (
            lambda _: {"text": f"{PLACE}?", "images": [picture()] * 3},
            "(?s)does not have one image token.*p7.*3 images, but 1 times",
        ),
        (
            lambda _: {"tokens": (IMAGE,) * 4, "images": [picture()]},
            "(?s)does not have one image token.*p7.*1 image, but 4 times",
        ),
        (lambda _: {"text": "<|video_pad|>?"}, "(?s)Videos are not supported.*p7"),
        (lambda path: {"text": f"{PLACE}?", "images": [path / "x.png"]}, r"(?s)cannot be read.*p7.*x\.png.*No such"),
        (lambda path: {"text": f"{PLACE}?", "images": [damaged(path)]}, r"(?s)cannot be read.*p7.*damaged\.png"),
        (lambda _: {"text": f"{PLACE}?", "images": [__file__]}, r"(?s)cannot be read.*p7.*test_vision\.py.*identify"),
        (lambda _: {"text": f"{PLACE}?", "images": [7]}, "(?s)cannot be read.*p7, int"),
        (lambda _: {"text": f"{PLACE}?", "images": [picture(8, 8 * 300)]}, "(?s)refuses a picture.*p7.*8x2400 pixels"),
        (lambda _: {"text": f"{PLACE}?", "images": [picture(0, 5)]}, "(?s)cannot be read.*p7.*no pixels"),
        (lambda _: {"text": f"{PLACE}?", "images": "a.png"}, "(?s)images must be a list.*p7.*their type is str"),
    ],
)
def test_a_prompt_whose_images_cannot_be_used_is_named(tokenizer, vision, tmp_path, prompt, message):
    fine = Prompt("fine", text=f"{PLACE}?", images=[picture()])
    with pytest.raises(DataError, match=message):
        list(tokenize([fine, Prompt("p7", **prompt(tmp_path))], tokenizer, vision, **LIMITS))


def test_images_for_a_model_that_takes_none(model, tokenizer):
    text_only = AutoConfig.for_model("qwen3", vocab_size=16)
    assert load_vision(model.model_copy(update={"processor": None}), text_only, tokenizer, pytest.fail) is None
    prompt = Prompt("p7", text=f"{PLACE}?", images=[picture()])
    with pytest.raises(DataError, match=r"(?s)the model takes text only.*p7"):
        list(tokenize([prompt], tokenizer, None, **LIMITS))
    with pytest.raises(ConfigError, match=r"(?s)takes no images.*model\.processor.*qwen3 has no vision_config"):
        load_vision(model, text_only, tokenizer, pytest.fail)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token_id": 16}, "(?s)outside of its vocabulary.*it is 16, but the vocabulary has 16"),
        ({"vision_config": {"patch_size": 14}}, "(?s)does not match the model.*patch_size is 8.*has 14"),
        (
            {"vision_config": {"patch_size": 8, "temporal_patch_size": 1}},
            "(?s)does not match the model.*temporal_patch_size is 2.*has 1",
        ),
        (
            {"vision_config": {"patch_size": 8, "spatial_merge_size": 1}},
            "(?s)does not match the model.*merge_size is 2.*has 1",
        ),
    ],
)
def test_a_model_that_its_processor_does_not_fit(model, tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        load_vision(model, vision_config(**changes), tokenizer, pytest.fail)


def test_a_model_whose_images_have_no_grid_gets_text_only(model, tokenizer):
    text = {"model_type": "qwen3", "vocab_size": 16, "hidden_size": 16}
    tiles, told = AutoConfig.for_model("internvl", text_config=text, image_token_id=IMAGE), []
    without = model.model_copy(update={"processor": None})
    assert load_vision(without, tiles, tokenizer, told.append) is None
    (line,) = told
    assert re.search(r"gets no images: internvl.*lacks.*temporal_patch_size, spatial_merge_size", line)
    with pytest.raises(ConfigError, match=r"(?s)not supported for models of model_type internvl.*model\.processor"):
        load_vision(model, tiles, tokenizer, pytest.fail)
    with pytest.raises(DataError, match=r"(?s)has images.*p7.*1 image.*gives its model none"):
        list(tokenize([Prompt("p7", text=f"{PLACE}?", images=[picture()])], tokenizer, None, **LIMITS))


def test_a_run_without_pictures_needs_no_processor(model, tokenizer):
    vision = load_vision(model.model_copy(update={"processor": None}), vision_config(), tokenizer, pytest.fail)
    assert next(tokenize([Prompt("a", text="1?")], tokenizer, vision, **LIMITS)).tokens == (0, 6)
    with pytest.raises(ConfigError, match=r"(?s)no image processor.*p7.*model\.processor"):
        list(tokenize([Prompt("p7", text=f"{PLACE}?", images=[picture()])], tokenizer, vision, **LIMITS))


def test_padding_with_the_image_token_is_refused(vision):
    vision.check_padding(8)
    for token in (IMAGE, VIDEO):
        with pytest.raises(ConfigError, match=f"(?s)token of an image or a video.*pad_token_id is {token}"):
            vision.check_padding(token)


def test_a_processor_from_a_directory_a_function_and_the_model(model, tmp_path):
    made = load_image_processor(model)
    saved, model_dir = tmp_path / "saved", tmp_path / "model"
    for directory in (saved, model_dir):
        directory.mkdir()
    save_processor(model, saved)
    from_directory = model.model_copy(update={"processor": str(saved)})
    assert load_image_processor(from_directory).to_dict() == made.to_dict()

    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model_dir / name).write_text('{"model_type": "qwen2_5_vl"}')
    pretrained = ModelSection(path=str(model_dir))
    assert load_image_processor(pretrained) is None
    save_processor(from_directory, model_dir)
    assert load_image_processor(pretrained).to_dict() == made.to_dict()


def test_a_processor_that_is_none(model, tmp_path):
    (tmp_path / "p.py").write_text("def number():\n    return 5\n")
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "NoSuchProcessor"}')
    for reference, message in (
        (f"{tmp_path}/p.py:number", r"(?s)processor's function returned an invalid value.*model\.processor.*int"),
        (str(tmp_path / "nowhere"), "image processor cannot be loaded"),
        (str(tmp_path), "image processor cannot be loaded"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_image_processor(model.model_copy(update={"processor": reference}))


def test_messages_become_text_by_the_chat_template(tokenizer, vision):
    tokenizer = type(tokenizer)(
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=TEMPLATE, eos_token="<eos>", pad_token="<pad>"
    )
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "12"}]}]
    prompts = [Prompt("a", messages=messages, images=[picture()]), Prompt("b", text="3?")]
    first, second = tokenize(prompts, tokenizer, vision, **LIMITS)
    assert first.text == f"{PLACE}12?"
    assert first.tokens == (12, *[IMAGE] * 4, 14, 0, 1, 6)
    assert second.tokens == (2, 6)
    with pytest.raises(DataError, match=r"(?s)template refuses.*p7.*no system turns"):
        list(tokenize([Prompt("p7", messages=[{"role": "system", "content": []}])], tokenizer, vision, **LIMITS))


def test_messages_need_a_chat_template(tokenizer):
    with pytest.raises(ConfigError, match=r"(?s)no chat template.*p7"):
        list(tokenize([Prompt("p7", messages=[{"role": "user", "content": "1"}])], tokenizer, **LIMITS))


def test_a_file_of_lines_names_pictures_relative_to_itself(tmp_path):
    (tmp_path / "data").mkdir()
    messages = [{"role": "user", "content": "?"}]
    lines = [
        {"prompt": f"{PLACE}?", "images": ["a.png", "sub/b.png"], "answer": "3"},
        {"question": messages, "pictures": ["c.png"], "images": 5},
    ]
    file = tmp_path / "data" / "p.jsonl"
    file.write_text(json.dumps(lines[0]))
    (prompt,) = load_prompts(DataSection(source="jsonl", options={"path": str(file)}))
    assert prompt.images == (tmp_path / "data" / "a.png", tmp_path / "data" / "sub" / "b.png")
    assert prompt.data == {"answer": "3"}

    file.write_text(json.dumps(lines[1]))
    options = {"path": str(file), "columns": {"prompt": "question"}}
    with pytest.raises(DataError, match=r"(?s)neither a path nor a picture.*its type is int"):
        list(load_prompts(DataSection(source="jsonl", options=options)))
    options["columns"]["images"] = "pictures"
    (prompt,) = load_prompts(DataSection(source="jsonl", options=options))
    assert (prompt.messages, prompt.images) == (tuple(messages), (tmp_path / "data" / "c.png",))


def test_a_picture_has_so_many_pixels_before_it_is_decoded(vision, tokenizer, tmp_path, monkeypatch):
    path = tmp_path / "bomb.png"
    Image.new("1", (13300, 13300)).save(path)  # a few kilobytes, below Pillow's own limit
    with pytest.raises(DataError, match=r"(?s)cannot be read.*p7.*176890000 pixels, but the limit is 67108864"):
        list(tokenize([Prompt("p7", text=f"{PLACE}?", images=[path])], tokenizer, vision, **LIMITS))

    # Its tokens follow from its size: no blank picture of that size goes through the processor.
    monkeypatch.setattr(type(vision._processor), "__call__", lambda *_, **__: pytest.fail("it was prepared"))
    (prompt,) = tokenize([Prompt("p", text=f"{PLACE}?", images=[picture(48, 32)])], tokenizer, vision, **LIMITS)
    assert prompt.tokens.count(IMAGE) == 6


def test_decoders_that_start_programs_and_files_that_are_none_are_refused(vision, tmp_path):
    (tmp_path / "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\nshowpage\n")
    os.mkfifo(tmp_path / "pipe.png")
    for name, why in (("a.png", "cannot identify"), ("pipe.png", "No such file, or not a regular file")):
        with pytest.raises(DataError, match=f"(?s)cannot be read.*{why}"):
            vision.patches([tmp_path / name], "p7")
