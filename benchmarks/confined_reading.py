"""What reading in a confined process adds to a run's start: the model directory, and prompts by their number.

``confined`` is what a run does: a child process reads prompts, and plain data come back; a model directory is tried out
in a child before this process loads it, and its tokenizer is used there meanwhile. ``here`` does without a child. The
tokenizer has so many words. Of a first start, in a process that has not imported transformers, this import is a part.

    python benchmarks/confined_reading.py [--json] [--words 150000] [--prompts 1000 20000] [--turns 5]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config

from anytron.config.data import DataSection
from anytron.config.schema import ModelSection
from anytron.task.data.examination import examined
from anytron.task.data.pretrained import load_hf_config, load_tokenizer
from anytron.task.data.prompts import tokenize
from anytron.task.data.reading import read_files
from anytron.task.data.sources import load_prompts
from harness import argument_parser, in_turn, progress, report, timed

END = "<eos>"
FIRST_START = """
import time
from contextlib import nullcontext
from anytron.config.schema import ModelSection
from anytron.run.preflight import prepare
from anytron.task.data.examination import examined
from anytron.task.data.pretrained import load_hf_config, load_tokenizer
model, begin = ModelSection(path={path!r}), time.perf_counter()
with {around}:
    load_hf_config(model)
    load_tokenizer(model)
print(time.perf_counter() - begin)
"""


def write_model(folder, words):
    vocabulary = {f"w{number}": number for number in range(words)} | {END: words}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    Qwen3Config(vocab_size=words + 1).save_pretrained(folder)
    return ModelSection(path=str(folder))


def write_prompts(file, count):
    rows = (
        {"prompt": " ".join(f"w{(row + word) % 1000}" for word in range(100)), "answer": row} for row in range(count)
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSection(source="jsonl", options={"path": str(file)})


def first_start(model, way):
    program = FIRST_START.format(path=model.path, around="examined(model)" if way == "confined" else "nullcontext()")
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", program], stdout=subprocess.PIPE, check=True)
    return float(found.stdout)


def compared(confined, here, turns):
    return compared_seconds({"confined": lambda: timed(confined)[0], "here": lambda: timed(here)[0]}, turns)


def compared_seconds(ways, turns):
    seconds = in_turn(ways, turns)
    median = {way: statistics.median(found) for way, found in seconds.items()}
    return {
        "confined_s": median["confined"],
        "here_s": median["here"],
        "added_s": median["confined"] - median["here"],
        "ratio": median["confined"] / median["here"],
    }


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--words", type=int, default=150_000, help="tokens of the model's tokenizer")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 20_000], help="numbers of prompts")
    parser.add_argument("--turns", type=int, default=5, help="measurements of each way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder, "model"), arguments.words)
        tokenizer = load_tokenizer(model)
        progress("the model directory")

        def load():
            load_hf_config(model)
            load_tokenizer(model)

        def try_out_and_load():
            with examined(model):
                load()

        first = {way: partial(first_start, model, way) for way in ("confined", "here")}
        rows = {
            "model directory, first start": compared_seconds(first, arguments.turns),
            "model directory": compared(try_out_and_load, load, arguments.turns),
        }
        for count in arguments.prompts:
            progress(f"{count} prompts")
            source = write_prompts(Path(folder, f"{count}.jsonl"), count)
            read = partial(tokenize, vocab_size=len(tokenizer))
            rows[f"{count} prompts"] = compared(
                lambda source=source, read=read: list(read_files(source, "data", read, tokenizer, None)),
                lambda source=source, read=read: list(read(load_prompts(source, "data"), tokenizer, None)),
                arguments.turns,
            )
    report({"reading": rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
