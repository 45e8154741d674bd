"""The rollout's server without Ray around it: what it answers, and what it refuses.

Run as: served.py MODEL. Prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import Counter

import verl  # noqa: F401 - opens the device stack
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl.workers.config import RolloutConfig

from anytron.base.errors import AnytronError
from anytron_verl.rollout.server import TransformersServer

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [11], [5, 6, 7]]
LIKELY = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "logprobs": True}
DRAWS = 3000


def server(model, lora=None, **settings):
    """Build a server from verl's own configuration classes."""
    rollout = RolloutConfig(**{
        "name": "transformers", "dtype": "float32", "tensor_model_parallel_size": 1, "prompt_length": 8,
        "response_length": 12, "max_num_seqs": 4096, **settings,
    })  # fmt: skip
    described = {"_target_": "verl.workers.config.HFModelConfig", "path": model, "lora": lora or {}}
    return TransformersServer(rollout, OmegaConf.create(described), 0)


def recorded(one):
    """Keep the sizes of the batches that a server generates."""
    sizes, generate = [], one._generation.generate
    one._generation.generate = lambda requests, event: (sizes.append(len(requests)), generate(requests, event))[1]
    return sizes


async def answers(one, prompts, **params):
    found = await asyncio.gather(*(one.generate(prompt, dict(params), "id") for prompt in prompts))
    return [(each.token_ids, each.log_probs, each.stop_reason) for each in found]


async def refusal(awaitable):
    try:
        await awaitable
    except AnytronError as error:
        return str(error)
    return ""


async def refusals(model, one, weights):
    found = {}
    for what, settings in {
        "tensor parallelism": {"tensor_model_parallel_size": 2},
        "weights of its own": {"load_format": "auto"},
        "log-probs of the model": {"logprobs_mode": "raw_logprobs"},
        "adapters": {"lora": {"rank": 8}},
        "a dtype": {"dtype": "auto"},
    }.items():
        found[what] = await refusal(asyncio.to_thread(server, model, **settings))
    for what, params in {
        "a penalty": {"repetition_penalty": 1.1},
        "min_p": {"min_p": 0.1},
        "stop strings": {"stop": ["w3"]},
    }.items():
        found[what] = await refusal(one.generate([5], params, "id"))
    found["images"] = await refusal(one.generate([5], {}, "id", image_data=["an image"], video_data=None))
    found["too long"] = await refusal(one.generate([5] * 2048, {}, "id"))
    found["half of the weights"] = await refusal(one.load_weights(weights[::2], last=True, global_steps=3))
    found["no weights"] = await refusal(one.generate([5], {}, "id"))
    return found


async def aborted(one):
    """Abort what is under way and what waits; let later ones wait, then refuse them."""
    facts, long = {}, {"max_tokens": 2000, "ignore_eos": True, "logprobs": True}
    running = asyncio.create_task(answers(one, PROMPTS, **long))
    while not one._model_in_use.locked():
        await asyncio.sleep(0.01)
    await asyncio.sleep(1)
    other = asyncio.create_task(answers(one, [[7, 7]], temperature=0.5))  # sampled in another way: it waits
    await asyncio.sleep(0.1)
    facts["count"] = (await one.abort_all_requests())["aborted_count"]
    facts["running"], facts["waiting"] = await running, await other
    parked = asyncio.create_task(answers(one, [[5]], max_tokens=2, ignore_eos=True))
    await asyncio.sleep(0.2)
    facts["parked"] = not parked.done()
    await one.resume_generation()
    facts["after"] = await parked
    await one.abort_all_requests(reject_request=True)
    facts["rejected"] = await answers(one, [[5]])
    await one.resume_generation()
    return facts


async def main(model):
    one, facts = server(model), {}
    sizes = recorded(one)
    weights = list(load_file(f"{model}/model.safetensors").items())
    facts["before"] = await refusal(one.generate([5], {}, "id"))
    for start in range(0, len(weights), 5):
        await one.load_weights(weights[start : start + 5], last=start + 5 >= len(weights), global_steps=7)
    facts["steps"] = (await one.generate([5], {}, "id")).extra_fields
    sizes.clear()
    facts["greedy"] = await answers(one, PROMPTS, temperature=0, top_k=-1, top_p=1.0, logprobs=True, ignore_eos=True)
    facts["likely"] = await answers(one, PROMPTS * 8, **LIKELY, ignore_eos=True)
    facts["batches"] = list(sizes)
    facts["plain"] = await answers(one, PROMPTS * 8, temperature=1.0, logprobs=True, ignore_eos=True)
    drawn = await answers(one, [PROMPTS[1]] * DRAWS, **LIKELY, max_tokens=1, ignore_eos=True)
    facts["drawn"] = Counter(tokens[0] for tokens, _, _ in drawn)
    seeded = [await answers(one, [PROMPTS[0]], seed=5, ignore_eos=True) for _ in range(2)]
    facts["one seed"] = seeded[0] == seeded[1]
    facts["without log-probs"] = seeded[0][0][1]
    stop = facts["greedy"][0][0][4]
    facts["stop"] = stop, (await answers(one, PROMPTS[:1], temperature=0, stop_token_ids=[stop], ignore_eos=True))[0]
    lengths = {}
    for prompt, params in (
        (3, {}),
        (8, {}),
        (15, {}),
        (25, {}),
        (3, {"max_tokens": 30}),
        (2046, {"max_new_tokens": 9}),
    ):
        found = await answers(one, [[5] * prompt], **params, ignore_eos=True)
        lengths[f"{prompt} {params}"] = len(found[0][0])
    facts["lengths"] = lengths
    ended = await answers(one, PROMPTS * 200, temperature=1.0)
    facts["ended"] = [tokens for tokens, _, _ in ended if 2 in tokens]
    facts["aborted"] = await aborted(one)
    facts["refused"] = await refusals(model, one, weights)
    return facts


if __name__ == "__main__":
    found = asyncio.run(main(sys.argv[1]))
    print(json.dumps(found), flush=True)
    os._exit(0)
