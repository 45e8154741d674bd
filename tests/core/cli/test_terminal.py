"""Whatever a user's file has in it, the terminal shows it and does not obey it."""

import ast
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from anytron.base.terminal import VisibleStream
from anytron.cli import main
from anytron.cli.output import VisibleConsole
from anytron.cli.progress import make_progress

ROOT = Path(__file__).parents[3]
EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b1A\u202etxt[/red]"
QWEN3 = {
    "model_type": "qwen3", "vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8,
}  # fmt: skip


def obeyed(text):
    """Find what a terminal would obey, colours apart."""
    return {one for one in text if one != "\n" and not one.isprintable()}


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


def model(write, **changes):
    return str(Path(write("model/config.json", QWEN3 | changes)).parent)


def of_a_model(write, command, **changes):
    directory = model(write, **changes)
    keys = ["model.config=null", f"model.path={directory}", "model.tokenizer=null"]
    return [*command, str(ROOT / "examples/grpo_sort.yaml"), *keys]


def run_directory(write):
    metrics = {"step": 1, "time": 0.0, f"reward/{EVIL}": 1.0, "reward/mean": 0.5}
    path = Path(write("run/metrics.jsonl", json.dumps(metrics) + "\n"))
    write("run/samples.jsonl", json.dumps({"step": 1, "prompt": EVIL, "response": EVIL, "reward": 1.0}) + "\n")
    write("run/config.yaml", (ROOT / "examples/grpo_sort.yaml").read_text(encoding="utf-8"))
    write("run/run.json", {"failure": EVIL})
    return str(path.parent)


PLACES = {
    "a model type": lambda write: of_a_model(write, ["train"], model_type=EVIL),
    "a model type, config show": lambda write: of_a_model(write, ["config", "show"], model_type=EVIL),
    "a model type, plan": lambda write: of_a_model(write, ["plan"], model_type=EVIL),
    "a model type, verify": lambda write: of_a_model(write, ["verify"], model_type=EVIL),
    "a field of a model": lambda write: of_a_model(write, ["config", "show"], hidden_act=EVIL),
    "a key": lambda write: ["train", write("run.yaml", json.dumps({EVIL: 1}))],
    "a value": lambda write: ["train", write("run.yaml", json.dumps({"model": EVIL}))],
    "a name of the YAML file": lambda write: ["config", "show", write(f"{EVIL.replace('/', '')}.yaml", "a: 1")],
    "an override": lambda write: ["config", "show", str(ROOT / "examples/grpo_sort.yaml"), f"{EVIL}=1"],
    "a word of the command line": lambda write: [EVIL],
    "an option": lambda write: ["train", f"--{EVIL}"],
    "a platform": lambda write: ["conformance", EVIL],
    "a plugin's option": lambda write: ["conformance", "cpu", EVIL],
    "data": lambda write: [
        "data", "show", str(ROOT / "examples/grpo_sort.yaml"), "data.options=null",
        f"data.source={write('rows.jsonl', json.dumps({EVIL: EVIL}))}",
    ],
    "a manifest": lambda write: ["checkpoint", "verify", str(Path(write("c/manifest.json", {EVIL: EVIL})).parent)],
    "a checkpoint's file": lambda write: ["checkpoint", "list", str(Path(write(f"step_1{EVIL[:3]}/x", "")).parents[1])],
    "a run, watched": lambda write: ["watch", run_directory(write), "--once"],
    "a run, reported": lambda write: ["report", run_directory(write)],
    "a run, exported": lambda write: ["checkpoint", "export", run_directory(write), f"out{EVIL[:3]}"],
    "a model, asked": lambda write: ["chat", model(write, model_type=EVIL)],
    "an update, replayed": lambda write: ["replay", str(Path(write(f"bad{EVIL[:3]}/x", "")).parent)],
    "a new platform": lambda write: ["new-platform", EVIL],
}  # fmt: skip


@pytest.mark.some(7)
@pytest.mark.parametrize("place", PLACES)
def test_no_command_obeys_what_it_reads(place, write, tmp_path, monkeypatch, capfd):
    arguments = PLACES[place](write)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["anytron", *arguments])
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with pytest.raises(SystemExit):
        main.run()
    shown = "".join(capfd.readouterr())
    assert shown
    assert obeyed(shown) == set()


WAYS = """
import logging, sys, warnings
sys.path[:0] = {path!r}
evil = {evil!r}
if {visible}:
    from anytron.base.terminal import make_output_visible
    make_output_visible()
logging.basicConfig()
import typer
print(evil)
print(evil, file=sys.stderr)
typer.echo(evil)
typer.echo(evil, err=True)
sys.stdout.writelines([evil])
warnings.warn(evil)
logging.warning(evil)
raise ValueError(evil)
"""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii:backslashreplace"])
@pytest.mark.parametrize("visible", [True, False])
def test_nor_does_anything_else_that_a_process_writes(visible, encoding):
    program = WAYS.format(path=sys.path, evil=EVIL, visible=visible)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, env={"PYTHONIOENCODING": encoding}, check=False
    )
    assert done.returncode == 1
    for written in (done.stdout, done.stderr):
        text = written.decode()
        assert text.count("owned") >= 3
        assert (obeyed(text) == set()) is visible  # without it, a terminal obeys


def of_a_console(console_of, terminal):
    """Print through every means of a console; return the text without rich's own codes, which are few."""
    output = io.StringIO()
    console = console_of(output, force_terminal=terminal, width=400, legacy_windows=False)
    table = Table("a")
    table.add_row(EVIL)
    for one in (EVIL, Text(EVIL), Text.assemble((EVIL, "bold")), Text("a link", "link http://owned"), table):
        console.print(one)
    console.log(EVIL)
    with Live(console=console, auto_refresh=False) as live:
        live.update(Text(EVIL), refresh=True)
    with make_progress(console, shown=True) as progress:
        progress.start(1, [EVIL], {EVIL: EVIL})
        progress.part(EVIL)
        progress.step({"step": 1})
        progress.note(EVIL)
        progress.warn(EVIL)
    return output.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_nor_does_a_console(terminal):
    text = of_a_console(VisibleConsole, terminal)
    assert text.count("owned") >= 8
    assert not {"\x07", "\x9b", "\u202e"} & set(text)
    assert "\r\\x9b" not in text  # rich itself returns to the start of a line
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    if not terminal:
        assert obeyed(text) == set()


def test_rich_alone_obeys():
    text = of_a_console(lambda file, **options: Console(file=file, markup=False, **options), terminal=False)
    assert "\x1b]0;owned" in text


def test_markup_in_a_name_is_text():
    output = io.StringIO()
    VisibleConsole(output).print("runs/[/b][red]x")
    assert output.getvalue() == "runs/[/b][red]x\n"


def test_a_stream_has_no_way_past():
    stream = VisibleStream(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert not hasattr(stream, "buffer")
    assert stream.write("\x1b\u202e") == 2
    stream.flush()
    assert stream.stream.buffer.getvalue() == b"\\x1b\\u202e"


def consoles(tree):
    """Yield the lines on which a console of rich's is made."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Console":
            yield node.lineno


def test_every_console_of_the_product_is_a_visible_one():
    files = [path for top in ("core", "backends", "plugins") for path in (ROOT / top).rglob("*.py")]
    made = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if "tests" not in path.parts
        for line in consoles(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert made == set()
    assert list(consoles(ast.parse("a = 1\nConsole(stderr=True)"))) == [2]


def test_nor_does_a_command_of_a_plugin(monkeypatch, capfd):
    monkeypatch.syspath_prepend(ROOT / "plugins/swift")
    from anytron_swift.cli import main as swift

    monkeypatch.setattr(sys, "argv", ["anytron-swift", EVIL])
    with pytest.raises(SystemExit):
        swift()
    shown = "".join(capfd.readouterr())
    assert shown.count("owned") == 1
    assert obeyed(shown) == set()


WRITTEN_AS_IT_IS = {
    "plugins/verl/anytron_verl/loading.py": "JSON, which another process reads",
    "plugins/ascend/simulator/anytron_ascend_simulator/__main__.py": "a tool for tests: its own names and numbers",
    "plugins/ascend/simulator/anytron_ascend_simulator/activation.py": "what torch_npu has printed, less one line",
}


def raw(text):
    """Yield the lines on which something that is not in the source is written past all consoles."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    for call in calls:
        written = ast.unparse(call.func) in ("print", "sys.stdout.write", "sys.stderr.write")
        if written and not all(isinstance(one, ast.Constant) or ast.unparse(one).isupper() for one in call.args):
            yield call.lineno


def test_plugins_print_through_the_command_line():
    """Their processes do not make all output visible, as those of ``anytron`` do."""
    sources = {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in (ROOT / "plugins").rglob("*.py")
        if "tests" not in path.parts
    }
    assert {name for name, text in sources.items() if any(raw(text))} == set(WRITTEN_AS_IT_IS)
    assert list(raw("sys.stderr.write(USAGE)\nprint('a')\nsys.stderr.write(f'error: {error}')")) == [3]
