"""Positions of images as in Hugging Face's own models, and what must be refused."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from anytron.base.errors import DataError
from anytron.config.schema import RunConfig
from anytron.sequences.batch import RaggedBatch
from anytron.sequences.layout import ContextShard
from anytron.sequences.planning import plan_layout
from anytron.task.data.images import ImagePatches
from anytron_conformance.tiny_models import CONFIGS, IMAGE_TOKEN, VIDEO_TOKEN, VISION_END, VISION_START
from anytron_megatron.plugin import MegatronBackend
from anytron_megatron.training.vision import VisionInputs, refuse_images

WIDTH = 96
MODELS = {"qwen2_5_vl": Qwen2_5_VLModel, "qwen3_vl": Qwen3VLModel, "qwen3_5": Qwen3_5Model}


def hf_config(family):
    fields = dict(CONFIGS[family])
    return AutoConfig.for_model(fields.pop("model_type"), **fields)


def patches(*grids):
    return ImagePatches(torch.zeros(sum(t * h * w for t, h, w in grids), WIDTH), torch.tensor(grids))


def image(t, h, w):
    return [VISION_START, *[IMAGE_TOKEN] * (t * h * w // 4), VISION_END]


def batch_of(*sequences):
    """Each sequence is (prompt tokens, response tokens, images)."""
    prompts, responses, images = zip(*sequences, strict=True)
    return RaggedBatch(
        lengths=torch.tensor([len(prompt) + len(response) for prompt, response, _ in sequences]),
        tokens=torch.tensor([token for prompt, response, _ in sequences for token in [*prompt, *response]]),
        response_mask=torch.cat(
            [torch.arange(len(p) + len(r)) >= len(p) for p, r in zip(prompts, responses, strict=True)]
        ),
        images=images,
    )


PROMPTS = {
    "text only": [5, 6, 7],
    "an image first": [*image(1, 4, 4), 8],
    "text around an image": [3, 4, *image(1, 2, 6), 5, 6],
    "images of different sizes": [3, *image(1, 6, 2), 4, 4, *image(1, 2, 2), *image(1, 8, 4), 9],
    "an image at the end": [3, 4, 5, *image(1, 4, 6)[:-1]],
    "an image with a temporal dimension": [3, *image(3, 4, 2), 5],
}
GRIDS = {
    "text only": [],
    "an image first": [(1, 4, 4)],
    "text around an image": [(1, 2, 6)],
    "images of different sizes": [(1, 6, 2), (1, 2, 2), (1, 8, 4)],
    "an image at the end": [(1, 4, 6)],
    "an image with a temporal dimension": [(3, 4, 2)],
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("case", PROMPTS)
def test_positions_are_those_of_hugging_face(family, case):
    config, model = hf_config(family), MODELS[family]
    tokens, grids = torch.tensor([*PROMPTS[case], 10, 11]), GRIDS[case]
    batch = batch_of((PROMPTS[case], [10, 11], patches(*grids) if grids else None))
    # get_rope_index reads nothing of the model but its config.
    stand_in = SimpleNamespace(config=config)
    stand_in.get_vision_position_ids = model.get_vision_position_ids.__get__(stand_in)
    expected, _ = model.get_rope_index(
        stand_in,
        tokens[None],
        mm_token_type_ids=(tokens == IMAGE_TOKEN).int()[None],
        image_grid_thw=torch.tensor(grids) if grids else None,
    )
    torch.testing.assert_close(VisionInputs.from_config(config).position_ids(batch), expected[:, 0], atol=0, rtol=0)


@pytest.fixture
def vision():
    return VisionInputs.from_config(hf_config("qwen3_vl"))


def test_sequences_are_independent_of_each_other(vision):
    sequences = [(PROMPTS[case], [10, 11], patches(*GRIDS[case]) if GRIDS[case] else None) for case in PROMPTS]
    together = vision.position_ids(batch_of(*sequences))
    torch.testing.assert_close(together, torch.cat([vision.position_ids(batch_of(one)) for one in sequences], 1))


def test_image_tokens_that_the_model_drew_are_text(vision):
    drawn = batch_of(([3, *image(1, 4, 2)], [7, IMAGE_TOKEN, 8], patches((1, 4, 2))))
    plain = batch_of(([3, *image(1, 4, 2)], [7, 9, 8], patches((1, 4, 2))))
    torch.testing.assert_close(vision.position_ids(drawn), vision.position_ids(plain))
    arguments = vision.arguments(drawn, plan_layout(drawn.lengths), torch.device("cpu"))
    assert arguments["mm_token_type_ids"].tolist() == [[0, 0, 1, 1, 0, 0, 0, 0]]


def test_images_come_in_the_order_of_the_sequences_and_types_for_whole_sequences(vision):
    one, two = patches((1, 4, 4)), patches((1, 2, 2), (1, 2, 4))
    one.pixel_values.fill_(1)
    two.pixel_values.fill_(2)
    batch = batch_of(([3, *image(1, 4, 4)], [5], one), ([4], [6], None), ([*image(1, 2, 2), *image(1, 2, 4)], [7], two))
    layout = plan_layout(batch.lengths, format="bshd", shard=ContextShard(2, 1), input_layout="whole")
    arguments = vision.arguments(batch, layout, torch.device("cpu"))
    assert arguments["pixel_values"][:, 0].tolist() == [1] * 16 + [2] * 12
    assert arguments["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 2], [1, 2, 4]]
    assert arguments["mm_token_type_ids"].shape == layout.taken.shape
    assert arguments["mm_token_type_ids"].sum(1).tolist() == [4, 0, 3]


def test_a_micro_batch_without_images_adds_nothing_to_the_call(vision):
    batch = batch_of(([3, 4], [5], None))
    assert vision.arguments(batch, plan_layout(batch.lengths), torch.device("cpu")) == {}


SPLIT = [3, VISION_START, IMAGE_TOKEN, 7, IMAGE_TOKEN, VISION_END]


@pytest.mark.parametrize(
    ("prompt", "images", "reason"),
    [
        ([3, *image(1, 4, 4)], patches((1, 4, 2)), "4 image tokens, but patches for 2"),
        ([3, *image(1, 4, 4)], None, "4 image tokens, but patches for 0"),
        ([3, 4], patches((1, 4, 4)), "0 image tokens, but patches for 4"),
        (SPLIT, patches((1, 2, 4)), "the 2 tokens of an image are not contiguous"),
        ([3, *image(1, 4, 4)], ImagePatches(torch.zeros(16, 7), torch.tensor([[1, 4, 4]])), "patches have 7 values"),
        ([3, *image(1, 4, 4)], ImagePatches(torch.zeros(15, WIDTH), torch.tensor([[1, 4, 4]])), "15 patches, but"),
        ([3, IMAGE_TOKEN], patches((1, 3, 2)), "not multiples of spatial_merge_size 2"),
        ([3, VIDEO_TOKEN], None, "video token"),
    ],
)
def test_images_that_do_not_fit_their_tokens_are_named_by_sequence(vision, prompt, images, reason):
    batch = batch_of(([3], [4], None), (prompt, [5], images))
    with pytest.raises(DataError, match=reason) as error:
        vision.position_ids(batch)
    assert error.value.where == "sequence 1 of the micro-batch"


def test_a_text_model_refuses_images():
    refuse_images(batch_of(([3], [4], None)))
    with pytest.raises(DataError, match="does not accept images"):
        refuse_images(batch_of(([3, *image(1, 4, 4)], [5], patches((1, 4, 4)))))


def diagnostics(model, freeze=(), **parallel):
    config = RunConfig.model_validate(
        {
            "model": {"config": model, "tokenizer": "t", "freeze": list(freeze)},
            "data": {"source": "s"},
            "rewards": [{"function": "f"}],
            "parallel": parallel,
        }
    )
    return list(MegatronBackend().configure(config))


def remarks(model, freeze=(), **parallel):
    return [(remark.severity, remark.key, remark.message) for remark in diagnostics(model, freeze, **parallel)]


def test_parts_are_frozen_of_vision_language_models_only():
    assert remarks(CONFIGS["qwen3_vl"], ["vision_tower", "aligner"]) == []
    assert remarks(CONFIGS["qwen3"], ["aligner"]) == [
        ("error", "model.freeze", "the model has no vision_config, so it has no parts to freeze: aligner")
    ]


def test_something_is_trained_on_every_stage():
    everything = ["vision_tower", "aligner", "language_model"]
    all_frozen = ("error", "model.freeze", "all parts are frozen, so nothing is trained")
    assert remarks(CONFIGS["qwen3_vl"], everything) == [all_frozen]
    ((severity, key, message),) = remarks(CONFIGS["qwen3_vl"], ["language_model"], pipeline_model_parallel_size=2)
    assert (severity, key) == ("error", "model.freeze")
    assert "frozen language model" in message


def test_the_first_pipeline_chunk_holds_all_layers_that_take_deepstack_features():
    deep = {**CONFIGS["qwen3_vl"], "vision_config": {"deepstack_visual_indexes": [0, 1, 2]}}
    assert remarks(deep) == []
    ((severity, key, message),) = remarks(deep, pipeline_model_parallel_size=2)
    assert (severity, key) == ("error", "parallel.pipeline_model_parallel_size")
    assert "the first of 2 pipeline chunks has 2 layers, but needs 3: one for each deepstack feature" in message
    (found,) = diagnostics(deep, pipeline_model_parallel_size=2)
    assert found.fix.endswith("their product may be at most 1")
    (found,) = diagnostics({**deep, "vision_config": {"deepstack_visual_indexes": [0, 1, 2, 3, 4]}})
    assert found.fix == "use a model with at least 5 layers"
