"""Models with Gated DeltaNet generate from left-padded prompts as they would from each prompt alone.

Padding to the left is what a recurrent state begins with unless it is kept out. transformers does keep it out
(``create_recurrent_attention_mask``), so that prompts of all lengths share a batch; this holds it to that.
"""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from anytron.task.data.pretrained import model_class
from anytron.workers.engines.rollout_engine import PromptInputs, SamplingParams
from anytron_conformance.tiny_models import write_tiny_model
from tests.backends.rollout.conftest import generate
from tests.backends.rollout.test_generation import teacher_forced

# Shorter than the convolution, and longer than a chunk of the delta rule.
LENGTHS = (1, 2, 3, 4, 7, 70)


@pytest.mark.parametrize("lengths", [LENGTHS, (1, 2)], ids=["many", "short"])
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5"])
def test_prompts_of_different_lengths_share_a_batch(family, lengths, new_engine, write, tmp_path):
    directory = write_tiny_model(family, tmp_path / family)
    reference = model_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory, dtype=torch.float32)
    engine = new_engine(model={"path": str(directory)}, max_batch_size=64)
    engine.load_weights(write(load_file(directory / "model.safetensors")))
    generator = torch.Generator().manual_seed(0)
    prompts = [PromptInputs(tuple(torch.randint(3, 119, (n,), generator=generator).tolist())) for n in lengths]

    groups = generate(engine, prompts, SamplingParams(max_new_tokens=5, pad_token_id=0), seed=1, samples=2)

    for prompt, group in zip(prompts, groups, strict=True):
        for response in group:
            alone = teacher_forced(reference, prompt, response.tokens, 1.0)
            torch.testing.assert_close(torch.tensor(response.log_probs).double(), alone, atol=2e-6, rtol=0)
