"""``anytron verify --verl CONFIG``: check the results of verl's Megatron engine with verl's own configuration.

The command's process imports neither verl nor Megatron. It starts this module as a program, three times; the
programs exchange data in files of one directory:

1. ``expected``: without the plugin and without Megatron, transformers computes logits of sequences drawn at random;
2. ``alone``: if the configuration has several ranks, one rank computes their log-probs;
3. ``ranks``: the checks, on as many ranks as the parallel sizes need.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from anytron import EngineError
from anytron.verification import Report, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anytron.verification import Watcher

FACTS, EXPECTED, ALONE = "facts.json", "expected.safetensors", "alone.safetensors"
LAST_LINES = 3
PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"


def verify(path: Path, overrides: Sequence[str], directory: Path, watcher: Watcher) -> Report:
    """Make the checks of :func:`anytron.proof.verification.scores.check_scores`.

    Args:
        path: verl's configuration.
        overrides: Overrides of the configuration, in hydra's grammar.
        directory: Directory for exchanged files and for ``logs`` of the processes.
        watcher: Display of the progress.

    Raises:
        EngineError: A process has failed; the error names its log.
    """
    (directory / "logs").mkdir()
    given = [str(path), str(directory), *overrides]
    watcher.begins("transformers' logits")
    _run("expected", given, 1, directory, {PLUGINS: "none"})
    ranks = json.loads((directory / FACTS).read_text(encoding="utf-8"))["ranks"]
    if ranks > 1:
        watcher.begins("verl's engine on one rank")
        _run("alone", given, 1, directory, {})
    watcher.begins(f"verl's engine on {ranks} ranks" if ranks > 1 else "verl's engine")
    _run("ranks", given, ranks, directory, {})
    answers = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(directory.glob("results-*.json"))]
    return Report(_joined(answers))


def _run(what: str, arguments: Sequence[str], ranks: int, directory: Path, environment: dict[str, str]) -> None:
    """Run this module as a program on some ranks, and wait for all of them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in range(ranks):
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = directory / "logs" / f"{what}-{rank}.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "anytron_verl.verification", what, *arguments]
            processes.append((log, subprocess.Popen(  # noqa: S603 - this module
                command, env={**os.environ, **places, **address, **environment}, stdout=output, stderr=output
            )))  # fmt: skip
    try:
        waiting = dict(processes)
        while waiting:
            for log, process in list(waiting.items()):
                if process.poll() is not None:
                    del waiting[log]
                    if process.returncode:
                        said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                        raise EngineError(
                            "verl's engine cannot be verified: a process of the verification has failed.",
                            where=f"{what}, log: {log}",
                            why="\n".join(said[-LAST_LINES:]),
                            fix="read the whole log, and correct the configuration that it names",
                        )
            time.sleep(0.1)
    finally:
        for _, process in processes:
            process.kill()
            process.wait()


def _joined(answers: list[dict[str, list[dict[str, object]]]]) -> list[Result]:
    """Take the results of a rank that has outputs, but for gradients the first failed result of any rank."""
    found = [
        [Result(**one) for one in answer["results"]]  # type: ignore[arg-type]
        for answer in answers
    ]
    *results, gradients = next(one for one, answer in zip(found, answers, strict=True) if answer["has_outputs"])
    failed = [one[-1] for one in found if one[-1].status == "failed"]
    return [*results, *(failed or [gradients])[:1]]


def expected(path: Path, directory: Path, overrides: Sequence[str]) -> None:
    """Draw sequences, and compute their logits with transformers."""
    from safetensors.torch import save_file

    from anytron.engines import read_hf_config
    from anytron.verification import random_sequences, transformers_logits
    from anytron_verl.configuration import compose, model_directory, ranks_of

    section = compose(path, overrides)
    model = model_directory(section)
    dtype = section.actor.megatron.dtype
    batch = random_sequences(read_hf_config(model).get_text_config().vocab_size)
    tensors = {"tokens": batch.tokens, "logits": transformers_logits(model, batch, dtype)}
    save_file(tensors, directory / EXPECTED)
    (directory / FACTS).write_text(json.dumps({"ranks": ranks_of(section), "dtype": dtype}), encoding="utf-8")


def compute(path: Path, directory: Path, overrides: Sequence[str], *, alone: bool) -> None:
    """Build verl's engines on this rank, and score the sequences; without ``alone``, also make the checks."""
    import torch
    from safetensors.torch import load_file, save_file
    from verl.utils.distributed import initialize_global_process_group_ray

    from anytron.sequences import RaggedBatch
    from anytron.verification import LENGTHS, check_scores, random_sequences
    from anytron_verl import process
    from anytron_verl.configuration import compose
    from anytron_verl.scoring import ScoringEngine

    section = compose(path, overrides)
    process.stack().platform.runtime().set_device(int(os.environ["LOCAL_RANK"]))
    initialize_global_process_group_ray(timeout_second=600)
    given = load_file(directory / EXPECTED)
    drawn = random_sequences(len(given["logits"][0]))
    batch = RaggedBatch(torch.tensor(LENGTHS), given["tokens"], drawn.response_mask)
    packed = bool(section.model.get("use_remove_padding", False))
    own = ScoringEngine(section, packed=packed, alone=alone, trains=not alone)
    if alone:
        save_file({"log_probs": own.score(batch.lengths, batch.tokens).contiguous()}, directory / ALONE)
        return
    other = ScoringEngine(section, packed=not packed, alone=False, trains=False)
    recorded = load_file(directory / ALONE)["log_probs"] if (directory / ALONE).exists() else None
    results = check_scores(
        own.score,
        batch,
        given["logits"],
        dtype=section.actor.megatron.dtype,
        padded=other.score,
        single=None if recorded is None else lambda _lengths, _tokens: recorded,
        gradients=own.gradients,
    )
    answer = {"has_outputs": own.has_outputs, "results": [one.as_json() for one in results]}
    file = directory / f"results-{os.environ['RANK']}.json"
    file.write_text(json.dumps(answer), encoding="utf-8")
    torch.distributed.barrier()


def main(what: str, path: str, directory: str, *overrides: str) -> None:
    """Run one of the three programs of this module, which ``what`` names."""
    if what == "expected":
        expected(Path(path), Path(directory), overrides)
    else:
        compute(Path(path), Path(directory), overrides, alone=what == "alone")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # nothing is left to end: threads of process groups would wait for each other
