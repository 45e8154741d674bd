"""What a checkpoint costs: how long training stands still, and how much is written.

A random model is trained for real, on the processor or the platform that ``ANYTRON_PLATFORM`` names, with Adam in
float32. Synchronous and asynchronous saves take turns in one run; both go through the executor, as in training, and
sync their files. ``standstill_s`` is the time in which no update can run: for a synchronous save until its files are on
disk, for an asynchronous one until the state is copied, and the questions whether its files are there.
``update_beside_writing_s`` is what an update takes while files are written.

    python benchmarks/checkpoint.py [--json] [--ranks 1] [--layers 8] [--hidden 768] [--saves 5]
"""

import statistics
import tempfile
from itertools import count
from pathlib import Path

import torch

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.config.algorithm import AlgorithmSection
from anytron.config.schema import RunConfig
from anytron.device.loading import open_session
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers
from anytron.sequences.batch import RaggedBatch
from anytron.workers.executor.local import LocalExecutor
from anytron.workers.executor.protocol import GroupSpec
from harness import argument_parser, in_turn, progress, report, timed

VOCABULARY, LENGTH = 8192, 16


def write_model(directory, layers, hidden):
    """Write a random model; return its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def trajectories(ranks):
    """One short recorded trajectory for each rank."""
    lengths = torch.full((ranks,), LENGTH)
    tokens = torch.randint(0, VOCABULARY, (int(lengths.sum()),), generator=torch.Generator().manual_seed(0))
    response = torch.arange(LENGTH).repeat(ranks) >= LENGTH // 2
    recorded = -9.0 * response
    return RaggedBatch(
        lengths=lengths,
        tokens=tokens,
        response_mask=response,
        rollout_log_probs=recorded,
        old_log_probs=recorded,
        advantages=torch.ones(tokens.numel()),
        loss_weights=response / response.sum(),
        token_shares=response / response.sum(),
    )


class Training:
    """An engine that is trained, and times what it does."""

    def __init__(self, workers, config):
        self.workers = workers
        self.plan = UpdatePlan.from_config(config, workers.topology[0])
        self.batch = trajectories(config.parallel.world_size)
        self.loss = PolicyLoss(AlgorithmSection())

    def update_s(self):
        return timed(lambda: self.workers.update(self.batch, self.plan, self.loss))[0]

    def save(self, path, *, asynchronous):
        """Save; return the standstill, what updates took until it was over, and the bytes written."""
        path.mkdir()
        standstill, _ = timed(lambda: self.workers.save_checkpoint(str(path), asynchronous=asynchronous))
        beside = []
        while True:
            asked, files = timed(lambda: self.workers.written_files(wait=False))
            standstill += asked
            if files is not None:
                return standstill, beside, sum(record.size for record in files.values())
            beside.append(self.update_s())


def measure(arguments, folder, session):
    progress("the model is written")
    parameters = write_model(folder / "model", arguments.layers, arguments.hidden)
    config = RunConfig.model_validate(
        {
            "data": {"source": "unused"},
            "rewards": [{"function": "unused"}],
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "optimizer": {"name": "adam", "lr": 1e-5},
            "parallel": {"data_parallel_size": arguments.ranks},
            "trainer": {"output_dir": str(folder / "run")},
        }
    )
    with LocalExecutor(config, session) as executor:
        group = executor.start(GroupSpec("trainer", "anytron.training_engines", "megatron", arguments.ranks))
        training = Training(TrainingWorkers.of(group), config)
        updates = [training.update_s() for _ in range(3)]
        steps = count()

        def save(*, asynchronous):
            step = next(steps)
            progress(f"save {step + 1} of {2 * (arguments.saves + 1)}")
            path = folder / f"step-{step}"
            saved = training.save(path, asynchronous=asynchronous)
            for file in path.iterdir():
                file.unlink()
            return saved

        ways = {"synchronous": lambda: save(asynchronous=False), "asynchronous": lambda: save(asynchronous=True)}
        saves = in_turn(ways, arguments.saves)
    standstill = {way: statistics.median(saved[0] for saved in found) for way, found in saves.items()}
    beside = [update for saved in saves["asynchronous"] for update in saved[1]]
    written = saves["synchronous"][-1][2]
    return {
        "parameters": parameters,
        "state_bytes": 12 * parameters,
        "written_bytes": written,
        "written_by_state": written / (12 * parameters),
        "synchronous_standstill_s": standstill["synchronous"],
        "asynchronous_standstill_s": standstill["asynchronous"],
        "asynchronous_by_synchronous": standstill["asynchronous"] / standstill["synchronous"],
        "update_s": statistics.median(updates[1:]),
        "update_beside_writing_s": statistics.median(beside) if beside else None,
    }


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel ranks; the optimizer is distributed")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind that count")
    parser.add_argument("--folder", help="where to write, a disk worth measuring; default: the temporary directory")
    arguments = parser.parse_args()
    session = open_session()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        figures = measure(arguments, Path(folder), session)
    report(figures, as_json=arguments.json, runtime=session.platform.runtime())


if __name__ == "__main__":
    main()
