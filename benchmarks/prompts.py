"""Loading the prompts of a large file: the first start, which tokenises them, and a later one, which maps them.

Each start is a process that loads the prompts of a JSON-lines file (conversations of one message) as a run does: read,
rendered by a chat template, tokenised, filtered, and checked against the reward ``exact_match``.
Seconds and memory begin when libraries and tokenizer are loaded. Memory is what the process has allocated; files that
are mapped are not counted.

    python benchmarks/prompts.py [--json] [--prompts 10000 100000] [--words 100] [--model DIRECTORY]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness import argument_parser, progress, report

END = "</s>"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
START = """
import json, sys, time
from pathlib import Path
import transformers
from anytron.config.data import DataSection
from anytron.config.scoring import RewardSection
from anytron.task.data.mixture import load_mixture
from anytron.task.rewards.scoring import RewardSum

def allocated():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10

tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
data = DataSection(source="jsonl", options={"path": sys.argv[2], "chat": True}, cache_dir=sys.argv[3])
before, begin = allocated(), time.perf_counter()
mixture = load_mixture(
    data, tokenizer, seed=0, vocab_size=len(tokenizer), context_length=None, max_new_tokens=1
)
RewardSum.from_config([RewardSection(function="exact_match")]).check(mixture.tables)
mixture.draw(1024)
print(json.dumps([time.perf_counter() - begin, allocated() - before, sum(mixture.tables[0].lengths)]))
"""


def write_tokenizer(folder):
    words = [END, "<user>", "<assistant>", *(f"w{number}" for number in range(1000))]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, chat_template=TEMPLATE)
    whole.save_pretrained(folder)
    return folder


def write_prompts(file, count, words):
    with file.open("w") as rows:
        for row in range(count):
            text = " ".join(f"w{(row * 7 + word * word) % 1000}" for word in range(words))
            rows.write(json.dumps({"prompt": f"{row} {text}", "answer": str(row)}) + "\n")


def main():
    parser = argument_parser(__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[10_000, 100_000], help="numbers of prompts")
    parser.add_argument("--words", type=int, default=100, help="number of words in each prompt")
    parser.add_argument("--model", type=Path, help="directory with a tokenizer; default: one of 1000 words")
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or write_tokenizer(Path(folder, "tokenizer"))
        for count in arguments.prompts:
            file, kept = Path(folder, f"{count}.jsonl"), Path(folder, f"kept-{count}")
            write_prompts(file, count, arguments.words)
            row = {}
            for start in ("first", "later"):
                progress(f"{count} prompts, {start} start")
                command = [sys.executable, "-W", "ignore", "-c", START, str(model), str(file), str(kept)]
                found = subprocess.run(command, stdout=subprocess.PIPE, check=True)
                seconds, memory, tokens = json.loads(found.stdout)
                row |= {f"{start}_s": seconds, f"{start}_mb": memory / 1e6}
            size = sum(one.stat().st_size for one in kept.rglob("*") if one.is_file()) if kept.exists() else 0
            rows[f"{count} prompts"] = row | {
                "tokens_each": tokens / count,
                "file_mb": file.stat().st_size / 1e6,
                "kept_mb": size / 1e6,
            }
    report({"prompts": rows}, as_json=arguments.json)


if __name__ == "__main__":
    main()
