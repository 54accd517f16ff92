"""The verbs, and the only place that exits.

Nothing heavy is imported before a verb needs it, so that `--help` and a mistake answer at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dtrain import __version__

EXIT_CODES = (
    "Exit codes: 0 finished; 1 the run failed (the first cause is the last line); 2 a mistake in the "
    "command, the layout or the machine, nothing was started; 130 or 143 stopped by Ctrl-C or SIGTERM, a "
    "checkpoint written (a second Ctrl-C stops at once, without one)."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train transformers with every parallelism from one layout file.",
    epilog=EXIT_CODES,
)

LayoutFile = Annotated[str, typer.Argument(metavar="LAYOUT", help="A layout file, as in layouts/.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values in place of the file's, as in run.steps=10 optim.lr=1e-4."),
]


@contextmanager
def _one_line(code: int = 2) -> Iterator[None]:
    """What dtrain raises for a person becomes one line and this exit code."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "dtrain":
            raise
        typer.echo(str(error), err=True)
        raise typer.Exit(code) from None


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


@app.callback()
def _dtrain(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


@app.command(epilog=EXIT_CODES)
def run(
    layout: LayoutFile,
    overrides: Overrides = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Give parameters that what is read lacks their initial values.")
    ] = False,
    allow_extra: Annotated[
        bool, typer.Option("--allow-extra", help="Leave out tensors that the model does not have.")
    ] = False,
) -> None:
    """Train. Starts the processes of one machine itself; inside torchrun or srun it is one of theirs."""
    from dtrain import launch

    asked = {"missing-tensors": allow_missing, "extra-tensors": allow_extra}
    allow = [name for name, wanted in asked.items() if wanted]
    raise typer.Exit(launch.start(layout, overrides or [], quiet, allow=allow))


@app.command()
def show(layout: LayoutFile, overrides: Overrides = None) -> None:
    """Print where every parameter and activation lies, the pipeline's stages and the groups of ranks."""
    with _one_line():
        from dtrain.layout import load

        loaded = load(layout, overrides or [])
        from dtrain.show import show as page

        typer.echo(page(loaded))


@app.command(
    epilog="Exit codes: 0 fits (or its memory is unknown, as a CPU's is); 1 an illegal layout; 2 a wrong command; "
    "3 does not fit. What only this machine lacks (GPUs, files, disk) is a note."
)
def plan(
    words: Annotated[
        list[str],
        typer.Argument(metavar="LAYOUT... [KEY=VALUE]...", help="A layout file, or several to compare; and overrides."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one object, see layouts/README.md.")] = False,
    trace_to: Annotated[str | None, typer.Option("--trace", help="Write the step's timeline for Perfetto.")] = None,
    html_to: Annotated[str | None, typer.Option("--html", help="Write a page with pictures.")] = None,
) -> None:
    """Predict whether a layout fits, how fast it is and what it sends, without a GPU."""
    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    if not files:
        raise typer.BadParameter("needs a layout file, as in layouts/", param_hint="LAYOUT")
    for path, option in ((trace_to, "--trace"), (html_to, "--html")):
        if path and len(files) > 1:
            raise typer.BadParameter(f"{path} is of one layout, not of {len(files)}", param_hint=option)
    with _one_line(1):
        import json

        from rich.console import Console

        from dtrain.layout import check_place, load, room_notes
        from dtrain.layout.shapes import shape_notes
        from dtrain.plan.advice import advise
        from dtrain.plan.compare import compare
        from dtrain.plan.html import html
        from dtrain.plan.predict import predict
        from dtrain.plan.report import page, report
        from dtrain.plan.trace import trace
        from dtrain.program.lower import store_tree
        from dtrain.show import parameter_table

        loaded = [load(file, overrides) for file in files]
        notes = [[*shape_notes(x), *check_place(x), *room_notes(x)] for x in loaded]
        made = [predict(x) for x in loaded]
        advice = [advise(p) for p in made] if as_json or len(made) == 1 else []
        if trace_to:
            _write(trace_to, json.dumps(trace(made[0])))
        if html_to:
            placement = parameter_table(made[0].plan, store_tree(made[0].plan.job))
            _write(html_to, html(made[0], files[0], placement, notes[0], advice[0]))
        if as_json:
            objects = [report(*one) for one in zip(made, files, notes, advice, strict=True)]
            typer.echo(json.dumps(objects[0] if len(objects) == 1 else {"layouts": objects}, indent=2))
        else:
            console = Console(highlight=False)
            if not console.is_terminal:
                console.width = max(console.width, 120)
            one = page(made[0], notes[0], advice[0]) if len(made) == 1 else compare(files, made)
            console.print(one)
    raise typer.Exit(3 if any(p.fits is False for p in made) else 0)


def _write(path: str, text: str) -> None:
    from pathlib import Path

    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"{path} cannot be written: {error.strerror}") from None


@app.command()
def verify(layout: LayoutFile, overrides: Overrides = None) -> None:
    """Shrink a layout, run it on simulated ranks and compare every tensor with one device."""
    with _one_line():
        from dtrain.layout import load

        loaded = load(layout, overrides or [])
        from dtrain.verify import main as check

        equal = check(loaded)
    raise typer.Exit(0 if equal else 1)


@app.command("import")
def import_(
    source: Annotated[str, typer.Argument(metavar="HF_FOLDER", help="config.json and safetensors.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="OUT/step-0 becomes a checkpoint of the weights.")],
    allow_missing: Annotated[bool, typer.Option(help="Give tensors that the folder lacks initial values.")] = False,
    allow_extra: Annotated[bool, typer.Option(help="Leave out tensors that the model does not have.")] = False,
) -> None:
    """Make a checkpoint of a Hugging Face folder (Llama 3, GPT-2, BERT), and print the model as a layout says it."""
    with _one_line():
        from pathlib import Path

        from dtrain.convert import import_folder

        for line in import_folder(Path(source), Path(out), allow_missing, allow_extra):
            typer.echo(line)


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="step-N, or a run's folder: its latest.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="A new folder for transformers.")],
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; by default the run's.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's file or folder; by default the run's.")] = None,
    shard: Annotated[str, typer.Option(help="The size of a file of weights, at most.")] = "5GB",
) -> None:
    """Make a Hugging Face folder of a checkpoint, one tensor in memory at a time."""
    from dtrain.hardware import parse_size
    from dtrain.hf import DTYPES

    if precision not in (None, *DTYPES.values()):
        raise typer.BadParameter(f"{precision!r}; allowed: {', '.join(DTYPES.values())}", param_hint="--precision")
    try:
        size = parse_size(shard)
    except ValueError as error:
        raise typer.BadParameter(f"{shard!r} {error}", param_hint="--shard") from None
    with _one_line():
        from pathlib import Path

        from dtrain.convert import export as write

        named = Path(tokenizer) if tokenizer else None
        for line in write(Path(checkpoint), Path(out), precision, named, size):
            typer.echo(line)


@app.command(
    epilog="Exit codes: 0 done; 1 a process failed (the first cause is the last line); 2 a mistake in the command, the "
    "model or the machine, nothing was started."
)
def sample(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="step-N, a run's folder (its latest), or a Hugging Face folder.")
    ],
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="What the text begins with; may be repeated.")],
    max_tokens: Annotated[int, typer.Option(help="Tokens that follow a prompt, at most.", min=1)] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; 1 draws as learned.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Draw from the K likeliest tokens only.", min=1)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that have this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Another seed draws another text.")] = 0,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel processes; by default the launcher's, or 1.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; by default the model's.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's file or folder; by default the model's.")] = None,
    model_file: Annotated[str | None, typer.Option(help="Where a model of your own is written.")] = None,
) -> None:
    """Generate text with a trained model."""
    if not 0 <= temperature < math.inf:
        raise typer.BadParameter(f"{temperature}; give a number from 0", param_hint="--temperature")
    if temperature == 0:
        for value, option in ((top_k, "--top-k"), (top_p, "--top-p")):
            if value is not None:
                raise typer.BadParameter(f"{value} needs a --temperature above 0, to draw at all", param_hint=option)
    if top_p is not None and not 0 < top_p <= 1:
        raise typer.BadParameter(f"{top_p}; give a probability above 0 and up to 1", param_hint="--top-p")
    _check_model_options(precision, tp)
    from dtrain import launch
    from dtrain.generate import Choice

    how = Choice(temperature, top_k, top_p, seed)
    options = {"tokenizer": tokenizer, "file": model_file, "precision": precision}
    raise typer.Exit(launch.sample(source, prompt, max_tokens, how, tp, options))


@app.command(
    "eval",
    epilog="Exit codes: 0 done; 1 a process failed (the first cause is the last line); 2 a mistake in the command, the "
    "model, the text or the machine, nothing was started.",
)
def eval_(
    source: Annotated[
        str, typer.Argument(metavar="MODEL", help="step-N, a run's folder (its latest), or a Hugging Face folder.")
    ],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="A file of text, .gz and .zst too, or its URL.")],
    stride: Annotated[int, typer.Option(help="Tokens that each window predicts; the rest is context.", min=1)] = 32,
    seq: Annotated[int | None, typer.Option(help="Tokens of a window; by default what the model was made for.")] = None,
    batch: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 8,
    wikitext: Annotated[
        bool, typer.Option("--wikitext", help="Undo WikiText's tokenisation, and count its own tokens as words.")
    ] = False,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel processes; by default the launcher's, or 1.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp16 or fp64; by default the model's.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer's file or folder; by default the model's.")] = None,
    model_file: Annotated[str | None, typer.Option(help="Where a model of your own is written.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tell a model's perplexity on a text: per token, and per word, which does not depend on the tokenizer."""
    _check_model_options(precision, tp)
    from dtrain import launch
    from dtrain.evaluate import How

    options = {"tokenizer": tokenizer, "file": model_file, "precision": precision}
    raise typer.Exit(launch.evaluate(source, text, How(seq, stride, batch, wikitext, as_json), tp, options))


def _check_model_options(precision: str | None, tp: int | None) -> None:
    if precision not in (None, "fp32", "bf16", "fp16", "fp64"):
        raise typer.BadParameter(f"{precision!r}; allowed: fp32, bf16, fp16, fp64", param_hint="--precision")
    if tp is not None and tp < 1:
        raise typer.BadParameter(f"{tp}; give a number of processes from 1", param_hint="--tp")


# ------------------------------------------------------------------------------------------ dtrain checkpoint ...

checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, in one process.")
app.add_typer(checkpoint_app, name="checkpoint")
CheckpointFolder = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="step-N, or a run's folder: its latest.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one object.")]


@checkpoint_app.command("ls", epilog="Exit codes: 0 all are whole; 1 some are not; 2 there is none.")
def checkpoint_ls(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A run's folder.")], as_json: AsJson = False
) -> None:
    """List a run's checkpoints: when, how large, whole or what is wrong. Sizes are looked at, not content."""
    with _one_line():
        import json
        from pathlib import Path

        from dtrain.checkpoint import look

        found = look.listed(Path(folder))
        typer.echo(json.dumps(look.as_json(found), indent=2) if as_json else "\n".join(look.list_lines(found)))
    raise typer.Exit(1 if any(c.wrong for c in found) else 0)


@checkpoint_app.command("show", epilog="Exit codes: 0 printed; 2 it cannot be read.")
def checkpoint_show(checkpoint: CheckpointFolder, as_json: AsJson = False) -> None:
    """Print what a checkpoint says of itself, and its tensors."""
    with _one_line():
        import json
        from pathlib import Path

        from dtrain.checkpoint import look, read

        path = look.resolve(Path(checkpoint))
        record, tensors = read(path), look.held(path)
        if as_json:
            values = {"path": path, "record": record, "tensors": tensors}
            typer.echo(json.dumps(look.as_json(values), indent=2))
        else:
            typer.echo("\n".join(look.show_lines(path, record, tensors)))


@checkpoint_app.command("verify", epilog="Exit codes: 0 every byte is what was written; 1 damaged; 2 there is none.")
def checkpoint_verify(checkpoint: CheckpointFolder, as_json: AsJson = False) -> None:
    """Read every byte of a checkpoint and compare it with the checksums that were written."""
    with _one_line():
        import json
        from pathlib import Path

        from dtrain.checkpoint import look, problems

        path = look.resolve(Path(checkpoint))
        found = problems(path)
        if as_json:
            typer.echo(json.dumps({"path": str(path), "problems": found}, indent=2))
        else:
            typer.echo("\n".join([f"{path}: {line}" for line in found] or [f"{path}: whole"]))
    raise typer.Exit(1 if found else 0)


@checkpoint_app.command("diff", epilog="Exit codes: 0 no difference; 1 they differ; 2 one cannot be read.")
def checkpoint_diff(a: CheckpointFolder, b: CheckpointFolder, as_json: AsJson = False) -> None:
    """Compare two checkpoints: keys of their records, and tensors with their largest difference."""
    with _one_line():
        import json
        from pathlib import Path

        from dtrain.checkpoint import look

        one, other = look.resolve(Path(a)), look.resolve(Path(b))
        found = look.compared(one, other)
        typer.echo(
            json.dumps(look.as_json({"a": one, "b": other, "same": found.same, **vars(found)}), indent=2)
            if as_json
            else "\n".join(look.diff_lines(one, other, found))
        )
    raise typer.Exit(0 if found.same else 1)


# ------------------------------------------------------------------------------------------------ dtrain data ...

data_app = typer.Typer(no_args_is_help=True, help="Pack texts into token files, and look at what a model will see.")
app.add_typer(data_app, name="data")


@data_app.command("pack")
def data_pack(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A file, a quoted glob, a saved dataset or a URL.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="OUT.bin, OUT.idx and OUT.json are written.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="As under data: in a layout: tokenizer, field, bos, eos, chat, bad."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that tokenise; 0: one a core.", min=0)] = 0,
    hold_out: Annotated[float, typer.Option(help="Share of documents, by their hash, for OUT-valid.")] = 0.0,
    wikitext: Annotated[bool, typer.Option("--wikitext", help="Undo the tokenisation of WikiText's files.")] = False,
) -> None:
    """Tokenise texts once, in parallel, into Megatron's format with a manifest. Goes on where it was stopped."""
    with _one_line():
        import os

        from dtrain.data import DataError
        from dtrain.data.pack import options, pack
        from dtrain.layout.reader import Where, override

        values: dict[str, object] = {}
        where: Where = {"": "the command"}
        for setting in settings or []:
            if "=" not in setting:
                raise DataError(f"{setting}: is no KEY=VALUE; quote a glob, or the shell makes its files arguments")
            override(values, where, setting)
        asked = options([source], values, hold_out, wikitext)
        try:
            made = pack(out, asked, workers or os.cpu_count() or 1, typer.echo)
        except KeyboardInterrupt:
            typer.echo("stopped; the same command goes on from here", err=True)
            raise typer.Exit(130) from None
        for name, m in zip((out, f"{out}-valid"), made, strict=False):
            left = "".join(f", {n:,} left out ({why})" for why, n in m.left_out.items())
            typer.echo(
                f"{name}: {m.documents:,} documents, {m.tokens:,} tokens in {m.dtype}, highest id {m.highest:,}{left}"
            )


@data_app.command("show")
def data_show(
    layout: LayoutFile,
    overrides: Overrides = None,
    samples: Annotated[int, typer.Option(help="How many training samples to print.", min=0)] = 2,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compare every byte of packed files with their manifest.")
    ] = False,
) -> None:
    """Print what a layout reads: counts, lengths, and samples with document edges and what is to be learnt."""
    with _one_line():
        from dtrain.data.show import show as lines
        from dtrain.layout import load
        from dtrain.plan import plan
        from dtrain.train import data_config

        for line in lines(data_config(plan(load(layout, overrides or []))), samples, whole):
            typer.echo(line)


def main() -> None:
    app(prog_name="dtrain")


if __name__ == "__main__":
    main()
