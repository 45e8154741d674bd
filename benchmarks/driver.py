"""What a step costs the driver, by tokens and ranks, with simulated ranks that answer without computing.

All parts of a GRPO step with two mini-batches are those of a run: responses are received and checked, decoded to texts,
rewarded by a process of the reward ``exact_match`` and recorded; samples become a batch, the batch is scored,
advantages are estimated, each mini-batch is an update, and the step's metrics are computed. The part "start" makes the
first message and the environment of each rank, once before the step. A pass plans micro-batches, selects and encodes
each replica's share, sends it, and joins the answers. Lengths of responses are log-normal (median 1,100 tokens, at most
8,192), prompts have 256 tokens, micro-batches 16,384, and a replica has 16 ranks. The text of a token has four letters.
Each line is measured in a process of its own. Time that simulated ranks and the process of the reward take is not
counted. A message for several ranks is copied once, as a store that machines share would.

A part has seconds of the processor, the bytes that are encoded for each token, all bytes that are sent, and the peak of
the process's memory up to its end. A slope is the power of tokens, or of ranks, with which the seconds grow: 1 =
linear, 0 = flat.

    python benchmarks/driver.py [--json] [--ranks 16 128 1024] [--tokens 1 8 64]
"""

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from itertools import count, groupby, islice, product
from pathlib import Path
from string import ascii_lowercase

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from anytron.algorithms.policy_loss import PolicyLoss
from anytron.algorithms.registered import with_advantages
from anytron.config.running import ExecutorSection
from anytron.config.schema import RunConfig
from anytron.device.loading import open_session
from anytron.record.tracking.claim import ClaimedDirectory
from anytron.record.tracking.progress import Clock
from anytron.record.tracking.run_directory import RunDirectory
from anytron.run.rollout.replica import mistake_in
from anytron.run.trainer import experience as making
from anytron.run.trainer.metrics import step_metrics
from anytron.run.trainer.updates import UpdatePlan
from anytron.run.trainer.workers import TrainingWorkers
from anytron.sequences.batch import TokenOutputs
from anytron.task.data.prompts import TokenizedPrompt
from anytron.task.rewards.scoring import RewardSum
from anytron.workers.engines.rollout_engine import GenerationRequest, PromptInputs, Response, SamplingParams
from anytron.workers.engines.training_engine import Topology
from anytron.workers.executor.base import BaseExecutor, worker_environment
from anytron.workers.executor.channel import Result, decode, encode
from anytron.workers.executor.group import RankGroup
from anytron.workers.executor.protocol import GroupSpec
from harness import argument_parser, progress, report

ON_A_MACHINE = 8
PROMPT, LONGEST, LIMIT, OF_A_REPLICA, VOCABULARY = 256, 8192, 16384, 16, 150_000
AT_ONCE = 64
"""Responses in a message of a rollout process."""


class Bill:
    """Seconds that simulated ranks took, and bytes that were encoded and that were sent."""

    def __init__(self):
        self.outside_s, self.encoded, self.sent = 0.0, 0, 0

    @contextmanager
    def outside(self):
        start = time.process_time()
        yield
        self.outside_s += time.process_time() - start


class SimulatedRank:
    """Answers each call at once: scores and metrics are 0."""

    where = "simulated"

    def __init__(self, number, place, bill):
        self.name, self._place, self._bill = f"simulated rank {number}", place, bill
        self._answer, self._sizes = encode(Result(place)), None

    def send(self, message):
        self._bill.sent += len(message)
        if self._place.reports and message:
            with self._bill.outside():
                call = decode(message)
                self._sizes = [batch.num_tokens for batch in call.args[0]] if call.method == "score" else None
                if call.method == "update":
                    self._answer = encode(Result({"grad_norm": 1.0, "lr": 1.0, "update/skipped": 0.0}))

    def receive(self):
        if self._sizes is None:
            return self._answer
        with self._bill.outside():
            return encode(Result(scores(self._sizes)))

    def wait(self, timeout_s):
        del timeout_s
        return False

    def write_stacks(self):
        pass

    def standing(self):
        return None

    def fate(self):
        return "it is simulated"

    def log_tail(self):
        return ""


def scores(sizes):
    return [TokenOutputs(log_probs=-torch.rand(size), entropy=torch.rand(size)) for size in sizes]


class SimulatedGroup(RankGroup[SimulatedRank]):
    """Ranks that are all ready whenever they are awaited."""

    def __init__(self, places):
        self.bill = Bill()
        ranks = [SimulatedRank(number, place, self.bill) for number, place in enumerate(places)]
        super().__init__("simulated", ranks, ExecutorSection())

    @property
    def hosts(self):
        raise NotImplementedError

    @staticmethod
    def answered(ranks, timeout_s):
        del timeout_s
        return ranks

    def _carried(self, message, receivers):
        self.bill.encoded += len(message)
        return bytearray(message) if receivers > 1 else message

    def _new_store(self):
        raise NotImplementedError

    def _end_all(self):
        pass


class SimulatedExecutor(BaseExecutor):
    """Makes the first message and the environment of each rank; no process is started."""

    def start(self, spec):
        ranks = range(spec.world_size)
        for rank in ranks:
            here = range(rank - rank % ON_A_MACHINE, rank - rank % ON_A_MACHINE + ON_A_MACHINE)
            bootstrap = self._bootstrap(spec, rank, here=here, processors=ON_A_MACHINE)
            worker_environment(os.environ, bootstrap, self._session.hooks)
            encode(bootstrap)


def received(tokens):
    """Draw prompts and responses of about so many tokens in all, eight of each prompt; some in each rollout message."""
    generator = torch.Generator().manual_seed(0)
    prompt = None
    some = []
    for number in count():
        if tokens <= 0 or len(some) == AT_ONCE:
            yield [prompt for prompt, _ in some], encode(Result([response for _, response in some]))
            some = []
        if tokens <= 0:
            return
        length = int(torch.empty(1).log_normal_(7.0, 0.8, generator=generator).clamp(1, LONGEST))
        if number % 8 == 0:
            ids = tuple(torch.randint(VOCABULARY, (PROMPT,), generator=generator).tolist())
            prompt = TokenizedPrompt(f"prompt {number // 8}", "", ids, {"answer": "none"})
        drawn = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        log_probs = (-torch.rand(length, generator=generator)).tolist()
        some.append((prompt, Response(drawn, log_probs, "stop", [0] * length)))
        tokens -= PROMPT + length


def taken(prompts, message):
    """Take a message of responses as the driver does; return them, each with its prompt."""
    sampling = SamplingParams(max_new_tokens=LONGEST)
    responses = decode(message).value
    for prompt, response in zip(prompts, responses, strict=True):
        assert mistake_in(response, GenerationRequest(0, PromptInputs(prompt.tokens), sampling, 0), [0]) is None
    return list(zip(prompts, responses, strict=True))


class Prefetched:
    """Has the prompts and responses of the step; gives them away once, as the rollout does."""

    def __init__(self, pairs):
        groups = [list(group) for _, group in groupby(pairs, key=lambda pair: pair[0].id)]
        self._taken = [group[0][0] for group in groups], [[response for _, response in group] for group in groups]

    def take(self, step, number, missing):
        del step, number, missing
        taken, self._taken = self._taken, None
        return taken

    def move_on(self, step):
        del step
        return {}


def tokenizer():
    """Make a byte-level tokenizer whose tokens have four letters each."""
    words = ("".join(letters) for letters in product(ascii_lowercase, repeat=4))
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(islice(words, VOCABULARY))}, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


def configuration(folder, prompts):
    return RunConfig.model_validate(
        {
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": "driver.py:tokenizer"},
            "data": {"source": "jsonl", "prompts_per_step": prompts},
            "rewards": [{"function": "exact_match"}],
            "trainer": {"output_dir": str(folder)},
        }
    )


class Parts:
    """Measures the parts of a step. A part within another one does not count for that."""

    def __init__(self, bill, tokens):
        self.figures, self._bill, self._tokens, self._within_s = {}, bill, tokens, 0.0

    @contextmanager
    def __call__(self, name):
        bill, before_s, within_s = self._bill, self._own_s(), self._within_s
        encoded, sent = bill.encoded, bill.sent
        yield
        spent_s = self._own_s() - before_s
        figures = self.figures.setdefault(name, {"cpu_s": 0.0})
        figures["cpu_s"] += spent_s - (self._within_s - within_s)
        self._within_s = within_s + spent_s
        if bill.encoded > encoded:
            figures |= {"encoded_a_token": (bill.encoded - encoded) / self._tokens, "sent_bytes": bill.sent - sent}
        figures["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def around(self, name, call):
        """Return a function that calls another one as a part."""

        def measured(*arguments, **options):
            with self(name):
                return call(*arguments, **options)

        return measured

    def _own_s(self):
        return time.process_time() - self._bill.outside_s


def measure(ranks, tokens):
    """Return the figures of each part of a step."""
    torch.set_num_threads(1)
    replicas = max(1, ranks // OF_A_REPLICA)
    places = [Topology(dp_rank=rank % replicas, dp_size=replicas, reports=rank < replicas) for rank in range(ranks)]
    group = SimulatedGroup(places)
    part = Parts(group.bill, tokens)
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(Path(folder) / "run", max(1, tokens // 10_000))
        with (
            ClaimedDirectory(config, progress) as claimed,
            RunDirectory.begin(claimed, config) as run,
            RewardSum.from_config(config.rewards).start(Path(folder) / "logs", 600.0) as rewards,
        ):
            with part("start"):
                session = open_session(platform="cpu")
                spec = GroupSpec("trainer", "anytron.training_engines", "megatron", ranks, num_threads=1)
                SimulatedExecutor(config, session).start(spec)
            step(TrainingWorkers.of(group), config, run, rewards, part, received(tokens))
    whole = {"cpu_s": sum(one["cpu_s"] for name, one in part.figures.items() if name != "start")}
    return part.figures | {"all": whole | {"peak_bytes": part.figures["metrics"]["peak_bytes"]}}


def step(workers, config, run, rewards, part, messages):
    """Do what a run does in a step, part by part."""
    bill, clock, pairs = workers.group.bill, Clock(lambda _: None), []
    with part("receive"):
        while True:
            with bill.outside():
                found = next(messages, None)
            if found is None:
                break
            pairs += taken(*found)
    with bill.outside():
        prefetched, words = Prefetched(pairs), tokenizer()
        del pairs
    making.decode_responses = part.around("texts", making.decode_responses)
    run.write_samples = part.around("records", run.write_samples)
    maker = making.ExperienceMaker(config, prefetched, part.around("rewards", rewards), words, run)
    with part("experience"):
        experience = maker.make(1, clock)
    with part("assemble"):
        batch = experience.batch(config.rollout.temperature)
    plan = UpdatePlan(epochs=1, count=2, aggregation="token-mean", max_tokens=LIMIT)
    with part("score"):
        batch = workers.with_scores(batch, plan, reference=False)
    with part("advantages"):
        batch = with_advantages(batch, experience.used_rewards, config.algorithm)
    loss = PolicyLoss(config.algorithm)
    with part("update"), clock.measure("update"):
        outcomes = [workers.update(mini_batch, plan, loss) for mini_batch in plan.mini_batches(batch, seed=0)]
    with part("metrics"):
        run.write_metrics(step_metrics(1, experience, batch, outcomes, clock))


def slope(rows, column):
    """Return the power with which each part's seconds grow from the first of some rows to the last."""
    (first, little), *_, (last, much) = rows
    by = math.log(last / first)
    return {part: {column: math.log(much[part]["cpu_s"] / little[part]["cpu_s"]) / by} for part in much}


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 1024], help="numbers of training ranks")
    parser.add_argument("--tokens", type=float, nargs="+", default=[1, 8, 64], help="tokens of a step, in millions")
    parser.add_argument("--one", action="store_true", help="measure the first of both, in this process")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.ranks[0], int(arguments.tokens[0] * 1e6))))
        return
    lines = [(ranks, arguments.tokens[-1]) for ranks in arguments.ranks]
    lines += [(arguments.ranks[-1], tokens) for tokens in arguments.tokens[:-1]]
    tables = {}
    for ranks, tokens in lines:
        progress(f"{ranks} ranks, {tokens:g} million tokens")
        own = [sys.executable, __file__, "--one", "--ranks", str(ranks), "--tokens", str(tokens)]
        done = subprocess.run(own, stdout=subprocess.PIPE, check=True, text=True)
        tables[ranks, tokens] = json.loads(done.stdout)
    most, largest = arguments.ranks[-1], arguments.tokens[-1]
    slopes = slope([(tokens, tables[most, tokens]) for tokens in arguments.tokens], "by_tokens")
    by_ranks = slope([(ranks, tables[ranks, largest]) for ranks in arguments.ranks], "by_ranks")
    figures = {f"{ranks} ranks, {tokens:g} million tokens": parts for (ranks, tokens), parts in tables.items()}
    report({**figures, "slopes": {part: slopes[part] | by_ranks[part] for part in slopes}}, as_json=arguments.json)


if __name__ == "__main__":
    main()
