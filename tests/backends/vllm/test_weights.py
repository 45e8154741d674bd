"""Weights reach vLLM complete, or the old ones stay in use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anytron.base.errors import AnytronError, TransferError
from anytron.workers.weights.memory import SharedMemory
from anytron.workers.weights.stream import WeightStream, _Sender
from tests.needs_vllm import NEEDS_VLLM
from tests.vllm_models import QWEN3, answers, hf_model, largest_difference, log_probs, requests, send, weights_of

pytestmark = NEEDS_VLLM

NORM = "model.norm.weight"
PROMPTS = [(3, 1, 9, 5, 10), (7, 10), (1,) * 300]


def test_after_every_update_log_probs_are_those_of_the_new_weights(loaded):
    """The long prompt fills blocks of the cache of keys and values, which must not outlive the weights."""
    for seed in (1, 2, 3):
        assert loaded.update(seed) == loaded.version
        for _ in range(2):
            asked = requests(PROMPTS)
            assert largest_difference(loaded.model, asked, answers(loaded.engine, asked)) < 5e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop(NORM), f"(?s)is missing.*{NORM}"),
        (lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"), "(?s)is missing.*k_proj"),
        (lambda weights: weights.update(extra=torch.ones(2)), "(?s)unknown to the model.*extra"),
        (lambda weights: weights.update({NORM: torch.ones(3)}), r"(?s)wrong shape.*\(3,\), and the model has \(64,\)"),
    ],
)
def test_incomplete_and_foreign_weights_are_refused_and_the_old_ones_stay_in_use(loaded, change, message):
    old, asked = loaded.model, requests(PROMPTS)
    before = answers(loaded.engine, asked)
    weights = weights_of(hf_model(QWEN3, 2), loaded.directory / "model")
    change(weights)
    with pytest.raises(AnytronError, match=message):
        loaded.engine.load_weights(send(weights, loaded.directory, 77))

    after = answers(loaded.engine, asked)

    assert [(one.tokens, one.versions) for one in after] == [(one.tokens, one.versions) for one in before]
    assert largest_difference(old, asked, after) < 5e-6


def test_damaged_and_unreadable_weights_are_refused_and_complete_ones_taken_after_them(loaded):
    manifest = send(loaded.weights(), loaded.directory, loaded.version + 1)
    damaged = load_file(manifest.path)
    damaged[NORM].view(torch.int32)[3] ^= 1  # one bit
    save_file(damaged, manifest.path)
    with pytest.raises(AnytronError, match=f"(?s)damaged in transfer.*{NORM}.*crc32"):
        loaded.engine.load_weights(manifest)
    checksums = {name: crc for name, crc in manifest.checksums.items() if name != NORM}
    with pytest.raises(AnytronError, match=f"(?s)manifest do not list the same weights.*{NORM}"):
        loaded.engine.load_weights(replace(manifest, checksums=checksums))
    Path(manifest.path).unlink()
    with pytest.raises(AnytronError, match="cannot be read"):
        loaded.engine.load_weights(manifest)

    assert loaded.update(seed=3) == loaded.version

    asked = requests(PROMPTS)
    assert largest_difference(loaded.model, asked, answers(loaded.engine, asked)) < 5e-6


def give_through_shared_memory(loaded, directory):
    """Send the weights of ``loaded.model`` as a new version, in about forty buckets."""
    memory = SharedMemory(str(directory / "transfer"))
    stream = WeightStream(memory, 1, 60.0, bucket_bytes=16384)
    version = loaded.version + 1
    with ThreadPoolExecutor() as pool:
        sent = pool.submit(stream.send, loaded.weights().items(), version, lambda name: False)
        try:
            return loaded.engine.load_weights(stream.origin(memory, 0))
        finally:
            assert sent.result().version == version


def test_weights_come_through_shared_memory_too(loaded, tmp_path):
    loaded.model = hf_model(QWEN3, 2)
    assert give_through_shared_memory(loaded, tmp_path) == loaded.version + 1
    loaded.version += 1
    asked = requests(PROMPTS)
    assert largest_difference(loaded.model, asked, answers(loaded.engine, asked)) < 5e-6


def test_a_bucket_that_is_skipped_is_noticed_and_the_old_weights_stay_in_use(loaded, tmp_path, monkeypatch):
    old, asked = loaded.model, requests(PROMPTS)
    tell = _Sender._tell
    monkeypatch.setattr(_Sender, "_tell", lambda self, said: None if said.get("number") == 3 else tell(self, said))
    loaded.model = hf_model(QWEN3, 2)
    with pytest.raises(TransferError, match=r"(?s)bucket 3 of the weights of version \d+.*bucket 4 was sent with"):
        give_through_shared_memory(loaded, tmp_path)
    answered = answers(loaded.engine, asked)
    assert {version for one in answered for version in one.versions} == {loaded.version}
    assert largest_difference(old, asked, answered) < 5e-6


def test_modules_for_speculative_decoding_are_left_out_if_they_are_declared(loaded):
    name = "model.layers.9.eh_proj.weight"
    manifest = send({**loaded.weights(), name: torch.ones(2, 4)}, loaded.directory, loaded.version + 1)
    with pytest.raises(AnytronError, match="unknown to the model"):
        loaded.engine.load_weights(manifest)
    assert loaded.engine.load_weights(replace(manifest, optional=frozenset({name}))) == loaded.version + 1
    loaded.version += 1


def test_what_is_under_way_goes_on_with_new_weights_from_its_next_token(loaded):
    prompt, old = (1,) * 200, loaded.model
    asked = requests([prompt, (7, 10)], max_new_tokens=12)
    loaded.engine.submit(asked)
    for _ in range(3):
        loaded.engine.poll(0.0)

    loaded.update(seed=2)

    found = {}
    while len(found) < 2:
        found |= dict(loaded.engine.poll(1.0))
    for request in asked:
        one = found[request.id]
        made = one.versions.index(loaded.version)
        assert one.versions == (loaded.version - 1,) * made + (loaded.version,) * (12 - made)
        assert 0 < made < 12
        given = torch.tensor(one.log_probs).double()
        tokens = request.prompt.tokens, one.tokens
        torch.testing.assert_close(given[:made], log_probs(old, *tokens)[:made], atol=5e-6, rtol=0)
        torch.testing.assert_close(given[made:], log_probs(loaded.model, *tokens)[made:], atol=5e-6, rtol=0)
