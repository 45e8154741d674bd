"""The example of a vision-language model: pictures through processor, rollout and Megatron, as a user runs it."""

from __future__ import annotations

import json

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from anytron.config.imports import resolve
from anytron.task.data.pretrained import PROCESSOR
from anytron.task.data.sources import DATA_SOURCE
from tests.demo.test_grpo_sort import ROOT, anytron

EXAMPLE = ROOT / "examples" / "grpo_count_shapes.yaml"
IMAGE_TOKEN, BLIND = 13, 1 / 6
QWEN3_VL = (
    "model.config.model_type=qwen3_vl",
    "model.config.text_config.head_dim=16",
    "model.config.text_config.rope_parameters.mrope_interleaved=true",
    "model.config.vision_config.num_position_embeddings=36",
    "model.config.vision_config.deepstack_visual_indexes=[0]",
)


def train(output, *overrides):
    finished = anytron("train", str(EXAMPLE), f"trainer.output_dir={output}", *overrides)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def questions(count, seed):
    """Pictures that were drawn for this call, with their answers."""
    drawn = resolve(f"{ROOT}/examples/count_shapes.py:prompts", DATA_SOURCE)(count=count, seed=seed)
    return [(prompt.images[0], prompt.data["answer"]) for prompt in drawn]


@torch.no_grad()
def accuracy(directory, asked):
    """How often a saved model's likeliest answer is right: transformers alone, one picture at a time."""
    model = AutoModelForImageTextToText.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = AutoImageProcessor.from_pretrained(directory)
    right = 0
    for picture, answer in asked:
        seen = processor(images=[picture], return_tensors="pt")
        places = "<|image_pad|>" * (int(seen["image_grid_thw"].prod()) // processor.merge_size**2)
        tokens = tokenizer(f"<|vision_start|>{places}<|vision_end|>?", return_tensors="pt")["input_ids"]
        logits = model(tokens, mm_token_type_ids=(tokens == IMAGE_TOKEN).int(), **seen).logits
        right += tokenizer.decode(logits[0, -1].argmax()) == answer
    return right / len(asked)


@pytest.fixture(
    scope="module", params=[(), pytest.param(QWEN3_VL, marks=pytest.mark.slow)], ids=["qwen2_5_vl", "qwen3_vl"]
)
def short_run(request, tmp_path_factory):
    """Three steps with a reference model and two updates per step; answers of up to three tokens."""
    output = tmp_path_factory.mktemp("short") / "run"
    metrics = train(
        output,
        "trainer.total_steps=3",
        "trainer.rollout_log_prob_tolerance=1e-5",
        "data.options.count=64",
        "data.prompts_per_step=8",
        "rollout.max_new_tokens=3",
        "algorithm.kl_coefficient=0.01",
        "algorithm.mini_batches=2",
        *request.param,
    )
    return output, metrics


@pytest.mark.slow
def test_rollout_and_training_see_the_same_pictures(short_run):
    _, metrics = short_run
    assert [line["step"] for line in metrics] == [1, 2, 3]
    for line in metrics:
        assert line["rollout/log_prob_abs_diff"] < 1e-5
        assert line["grad_norm"] > 0
    assert all(line["loss/kl"] > 0 for line in metrics)


def test_the_run_leaves_its_pictures_and_a_model_that_sees(short_run):
    output, _ = short_run
    samples = [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]
    assert len({name for sample in samples for name in sample["images"]}) == len(samples) == 12
    for sample in samples:
        with Image.open(output / sample["images"][0]) as picture:
            assert set(picture.size) <= {32, 48}
    given = resolve(f"{ROOT}/examples/count_shapes.py:image_processor", PROCESSOR)().to_dict()
    for directory in ("initial_model", "hf"):
        assert AutoImageProcessor.from_pretrained(output / directory).to_dict() == given
    names = {name for name, _ in AutoModelForImageTextToText.from_pretrained(output / "hf").named_parameters()}
    before, after = (
        AutoModelForImageTextToText.from_pretrained(output / name).state_dict() for name in ("initial_model", "hf")
    )
    still = [name for name in names if before[name].equal(after[name]) and before[name].any()]
    assert not still, "the vision tower learns too"


@pytest.mark.slow
def test_the_model_comes_out_of_the_checkpoint_with_its_processor(short_run, tmp_path):
    output, _ = short_run
    code = f"{ROOT}/examples/count_shapes.py"
    functions = (f"model.tokenizer={code}:tokenizer", f"model.processor={code}:image_processor")
    finished = anytron("checkpoint", "export", str(output), str(tmp_path / "model"), *functions)
    assert finished.returncode == 0, finished.stderr

    assert {file.name for file in (tmp_path / "model").iterdir()} == {file.name for file in (output / "hf").iterdir()}
    weights = (output / "hf" / "model.safetensors").read_bytes()
    assert (tmp_path / "model" / "model.safetensors").read_bytes() == weights


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_to_count_by_looking(tmp_path):
    output = tmp_path / "run"
    metrics = train(output)
    rewards = [line["reward/mean"] for line in metrics]
    assert sum(rewards[:5]) / 5 < BLIND
    assert sum(rewards[-10:]) / 10 > sum(rewards[:5]) / 5 + 0.3

    unseen = questions(300, seed=1)
    shuffled = [(picture, answer) for (picture, _), (_, answer) in zip(unseen, unseen[1:] + unseen[:1], strict=True)]
    assert accuracy(output / "initial_model", unseen) < 0.25
    assert accuracy(output / "hf", shuffled) < 0.25
    assert accuracy(output / "hf", unseen) > 0.6
