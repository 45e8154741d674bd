"""One update: tokens per second, MFU and peak memory; ours against a bare Megatron loop, and against whole logits.

Both train the same model: a random one of Qwen3's shape, built once by the engine, in its data-parallel wrapper and
with its optimizer. ``ours`` is the engine's ``update``: hooks, layout, pipeline schedule, log-probs and entropies
without whole logits, policy loss, optimizer step. ``bare`` is what stands in Megatron's own examples: the model's
forward with labels, cross entropy over whole logits, backward, ``finalize_model_grads``, ``optimizer.step()``. With
``--plain``, ``plain`` is ours with log-probs and entropies as people write them, from whole logits in float32
(``plain`` of log_probs.py). They take turns, and get the same packed sequences, up to 4096 tokens long, in one
micro-batch.

MFU is the floating-point operations that the model needs (:mod:`anytron.workers.engines.estimates`, as for the metric
``throughput/mfu``), by the time, by what the device does in a product of two large square matrices of the same element
type, measured in the same run (``matmul_flop_per_s``). Recomputed operations do not count.

The device is the platform's (``ANYTRON_PLATFORM``). ``--size tiny``, the default on a processor, ends in a minute.
What does not fit in memory has no figures. Of those without a table, each is of the most tokens that have it:
``ours_most_tokens`` and the like say of how many. ``*_peak_by_ours`` divides by our peak.

    python benchmarks/train_step.py [--json] [--size tiny|135m|0.6b|1.7b] [--tokens 4096 8192 16384 32768]
                                    [--turns 5] [--recompute none|selective|full] [--plain]
"""

import functools
import itertools
import os
import statistics
import tempfile
from pathlib import Path

from harness import argument_parser, in_turn, progress, report, timed, unless_out_of_memory

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.7b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
"""The numbers of SmolLM2-135M, Qwen3-0.6B and Qwen3-1.7B, as published, and a toy."""
LONGEST = 4096
"""Tokens of a sequence."""


def lengths_of(total):
    """Sequences of very different lengths that together have ``total`` tokens."""
    lengths, pattern = [], itertools.cycle((LONGEST, LONGEST // 4, LONGEST // 2, LONGEST // 8))
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(next(pattern), left))
    return lengths


def configuration(folder, shape, dtype, recompute):
    from anytron.config.schema import RunConfig

    model = {"model_type": "qwen3", **shape, "max_position_embeddings": LONGEST, "tie_word_embeddings": True}
    return RunConfig.model_validate(
        {
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            "model": {"config": model, "tokenizer": "unused", "dtype": dtype},
            "optimizer": {"name": "adam", "lr": 1e-6},
            "engine": {"recompute": recompute},
            "trainer": {"output_dir": str(folder / "run")},
        }
    )


def write_model(config, device):
    """Write the random model that the engine starts from; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from anytron.run.trainer.models import model_directory

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config.model.config), dtype=getattr(torch, config.model.dtype)
        )
    model.save_pretrained(model_directory(config))
    return sum(parameter.numel() for parameter in model.parameters())


def matmul_flop_per_s(runtime, dtype, size, repeats=10):
    """What the device does in products of square matrices of random numbers."""
    import torch

    one, other = torch.randn(2, size, size, device=runtime.current_device()).to(dtype)
    out = torch.empty_like(one)

    def products():
        for _ in range(repeats):
            torch.mm(one, other, out=out)

    times = in_turn({"products": lambda: timed(products, runtime)[0]}, 3)["products"]
    return 2 * size**3 * repeats / statistics.median(times)


class Ours:
    """The engine of this process: one rank."""

    def __init__(self, stack, config, process, init_method):
        from anytron.workers.engines.context import EngineContext
        from anytron_megatron.engine import MegatronEngine

        self.engine = MegatronEngine(EngineContext(config, stack, process, init_method))

    def batch(self, lengths, vocabulary):
        """Recorded trajectories of these lengths; every token but each first one is of a response."""
        import torch

        from anytron.sequences.batch import RaggedBatch

        total = sum(lengths)
        response = torch.cat([torch.arange(length) for length in lengths]) > 0
        recorded = torch.full((total,), -5.0) * response
        return RaggedBatch(
            lengths=torch.tensor(lengths),
            tokens=torch.randint(vocabulary, (total,), generator=torch.Generator().manual_seed(0)),
            response_mask=response,
            rollout_log_probs=recorded,
            old_log_probs=recorded,
            advantages=torch.ones(total),
            loss_weights=response / response.sum(),
            token_shares=response / response.sum(),
        )

    def update(self, batch):
        from anytron.algorithms.policy_loss import PolicyLoss
        from anytron.config.algorithm import AlgorithmSection

        return self.engine.update([batch], PolicyLoss(AlgorithmSection()))["grad_norm"]


class Bare:
    """The engine's model and optimizer, without the engine."""

    def __init__(self, engine):
        (chunk,) = engine._trained.chunks
        self.model, self.optimizer = chunk.module, engine._trained.optimizer
        self.output_layer = self.model.module.output_layer

    def inputs(self, batch, device):
        """What Megatron's forward takes, on the device: packed sequences, and the next tokens as labels."""
        import torch
        from megatron.core.packed_seq_params import PackedSeqParams

        tokens = batch.tokens.to(device)[None]
        ends = torch.nn.functional.pad(batch.lengths.cumsum(0), (1, 0)).to(device=device, dtype=torch.int32)
        longest = int(batch.lengths.max())
        positions = torch.cat([torch.arange(length) for length in batch.lengths.tolist()])
        return {
            "input_ids": tokens,
            "position_ids": positions.to(device)[None],
            "attention_mask": None,
            "labels": tokens.roll(-1, dims=1),
            "packed_seq_params": PackedSeqParams(
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                cu_seqlens_q_padded=ends,
                cu_seqlens_kv_padded=ends,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            ),
        }

    def update(self, inputs):
        from megatron.core.distributed import finalize_model_grads

        ours = self.output_layer.__dict__.pop("forward")  # the class's, which makes logits
        try:
            self.model.train()
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            self.model(**inputs).float().mean().backward()
            finalize_model_grads([self.model])
            return self.optimizer.step()[1]
        finally:
            self.output_layer.forward = ours


class Plain:
    """The engine, with the plain path in place of its kernel of log-probs and entropies."""

    def __init__(self, ours):
        from log_probs import plain

        (chunk,) = ours.engine._trained.chunks
        self.ours, self.head, self.kernel = ours, chunk.head, lambda *operands: plain(*operands[:4])

    def update(self, batch):
        ours, self.head._kernel = self.head._kernel, self.kernel
        try:
            return self.ours.update(batch)
        finally:
            self.head._kernel = ours


def measure(ways, runtime, turns):
    """Seconds and peak bytes of each way's updates, functions that return the norm; None for one that does not fit."""
    lost = set()

    def once(name):
        runtime.reset_peak_memory_stats()
        found = None if name in lost else unless_out_of_memory(lambda: timed(ways[name], runtime), runtime)
        if found is None:
            lost.add(name)
            return None
        seconds, norm = found
        assert 0 < norm < float("inf")
        return seconds, runtime.memory_stats().peak_allocated

    found = in_turn({name: functools.partial(once, name) for name in ways}, turns)
    return {name: None if name in lost else list(zip(*results, strict=True)) for name, results in found.items()}


def row(found, tokens, flop, peak, *, has_peak_bytes):
    columns = {}
    for name, results in found.items():
        if results is None:
            continue
        seconds = statistics.median(results[0])
        columns[f"{name}_tokens_per_s"] = tokens / seconds
        columns[f"{name}_mfu"] = flop / seconds / peak
        if has_peak_bytes and None not in results[1]:  # None: torch cannot tell on this device
            columns[f"{name}_peak_bytes"] = max(results[1])
    for name in found:
        if name == "ours" or None in (found[name], found["ours"]):
            continue
        columns[f"ours_by_{name}"] = columns["ours_tokens_per_s"] / columns[f"{name}_tokens_per_s"]
        if {f"{name}_peak_bytes", "ours_peak_bytes"} <= columns.keys():
            columns[f"{name}_peak_by_ours"] = columns[f"{name}_peak_bytes"] / columns["ours_peak_bytes"]
    return columns


def main():
    from anytron.device.hooks.types import ProcessInfo
    from anytron.device.loading import open_session
    from anytron.device.stack import open_device_stack
    from anytron.workers.executor.base import interface_variables, loopback_interface

    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SHAPES, help="default: tiny on a processor, else 0.6b")
    parser.add_argument("--tokens", type=int, nargs="+", help="packed tokens of an update, from few to many")
    parser.add_argument("--turns", type=int, default=5, help="updates of each that count")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--plain", action="store_true", help="measure ours with whole logits, too")
    arguments = parser.parse_args()
    session = open_session(engine="megatron")
    accelerated = session.platform.accelerator
    size = arguments.size or ("0.6b" if accelerated else "tiny")
    tokens = arguments.tokens or ([512, 1024] if size == "tiny" else [4096, 8192, 16384, 32768])
    shape, dtype = SHAPES[size], "bfloat16" if accelerated else "float32"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # What the driver settles for a training rank, and starts it with; nothing has used the device so far.
        config, *_ = session.hooks.configure(configuration(folder, shape, dtype, arguments.recompute))
        process = ProcessInfo("trainer", 0, 0, world_size=1)
        os.environ |= {
            **interface_variables(session.platform, loopback_interface()),
            **os.environ,
            **session.hooks.runtime_env(process, config),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
        }
        with open_device_stack(session.platform.name, config.platform.options, engine="megatron") as stack:
            import torch

            from anytron_megatron.estimate.flops import model_flops

            runtime = stack.platform.runtime()
            runtime.set_device(0)
            device = runtime.current_device()
            progress(f"a model of size {size} in {dtype} on {runtime.device_name()}")
            policy, _ = model_flops(config)
            peak = matmul_flop_per_s(runtime, getattr(torch, dtype), 8192 if accelerated else 1024)
            parameters = write_model(config, device)
            runtime.empty_cache()
            ours = Ours(stack, config, process, f"file://{folder / 'store'}")
            bare, plain = Bare(ours.engine), Plain(ours)
            rows = {}
            for total in tokens:
                progress(f"{total} tokens")
                lengths = lengths_of(total)
                batch = ours.batch(lengths, shape["vocab_size"])
                ways = {
                    "ours": functools.partial(ours.update, batch),
                    "bare": functools.partial(bare.update, bare.inputs(batch, device)),
                }
                if arguments.plain:
                    ways["plain"] = functools.partial(plain.update, batch)
                found = measure(ways, runtime, arguments.turns)
                flop = policy.update(lengths)
                rows[str(total)] = row(found, total, flop, peak, has_peak_bytes=accelerated)
            ours.engine.close()
            fit = {name: [total for total in tokens if f"{name}_mfu" in rows[str(total)]] for name in ways}
            figures = {
                "parameters": parameters,
                "matmul_flop_per_s": peak,
                **{f"{name}_most_tokens": max(totals, default=None) for name, totals in fit.items()},
                **{column: value for columns in rows.values() for column, value in columns.items()},
                "tokens": rows,
            }
            report(figures, as_json=arguments.json, runtime=runtime)


if __name__ == "__main__":
    main()
