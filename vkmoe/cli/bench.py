"""This module is `vkmoe bench`: how fast kernels, transfers and decoding are on this device.

It owns what is asked, and where the report goes: the table, one document, a picture, a comparison.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkmoe.bench import defaults
from vkmoe.cli.notes import note
from vkmoe.cli.options import ModelChoice, check_plot, config_options
from vkmoe.config import EngineConfig
from vkmoe.errors import UsageError
from vkmoe.option_fields import option

if TYPE_CHECKING:
    from vkmoe.bench.measure import Output


def _numbers(text: str) -> tuple[float, ...] | None:
    """Read sizes between commas; None for none. Raises UsageError."""
    try:
        sizes = tuple(float(word) for word in text.split(",") if word.strip())
    except ValueError:
        sizes = (0.0,)
    if not all(0 < size < float("inf") for size in sizes):
        raise UsageError(f"{text!r} is no list of sizes", "write positive numbers, such as 0.25,1")
    return sizes or None


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@dataclass(frozen=True)
class Report:
    """Says what is wanted beside the table."""

    as_json: bool = option(
        False, "Print one JSON document on stdout; the table goes to stderr.", "--json"
    )
    plot: str | None = option(None, "Draw the figures too, as PNG, SVG or PDF.", metavar="FILE")
    compare: str | None = option(
        None,
        "Compare with an earlier run, of which FILE holds the --json document.",
        metavar="FILE",
    )
    any_device: bool = option(
        False, "Compare with a run on another device or by another clock too."
    )


@dataclass(frozen=True)
class Effort:
    """Says how much is measured."""

    repeats: int | None = option(None, f"Take every figure so often. {defaults.REPEATS}", minimum=2)
    quick: bool = option(
        False, "Measure less where nothing else is asked: under half a minute on two cores."
    )


@dataclass(frozen=True)
class Filters:
    """Says which kernels are run."""

    family: str = option("", "Only these kernels: matvec,embed.", metavar="NAMES")
    type: str = option("", "Only these types of weights or caches: Q4_K,MXFP4.", metavar="NAMES")
    model: str = option(
        defaults.MODEL,
        "Shapes of these models, between commas; a GGUF file for its shapes and types; all.",
        "-m",
        "--model",
        metavar="NAMES",
    )
    mapping: Literal["own", "all"] = option(
        "own", "Variants that this device would choose, or all that it can run."
    )
    shape: str = option("", "Only shapes with this in their text: head.")
    largest_mib: float | None = option(
        None, f"Leave larger matrices out. {defaults.LARGEST_MIB}", minimum=0.001
    )


@dataclass(frozen=True)
class Amounts:
    """Says how much the parts of `vkmoe bench transfer` measure."""

    submits: int | None = option(None, f"Empty submits. {defaults.SUBMITS}", minimum=1)
    dispatches: int | None = option(
        None, f"Dispatches in a submit. {defaults.DISPATCHES}", minimum=1
    )
    copy_mib: str = option(
        "", f"Sizes of copies. {defaults.COPY_MIB}", metavar="SIZES", check=_numbers
    )
    read_mib: str = option(
        "", f"Matrices in each memory type. {defaults.READ_MIB}", metavar="SIZES", check=_numbers
    )


@dataclass(frozen=True)
class Length:
    """Says how long a text `vkmoe bench decode` generates."""

    tokens: int | None = option(
        None, f"Decode so many in each repeat. {defaults.TOKENS}", minimum=1
    )


def bench(context: typer.Context) -> None:
    """Measure this device, and how far vkmoe is from what the device allows.

    \b
    vkmoe bench kernels                       every kernel in the shapes of a real model
    vkmoe bench transfer                      submits, dispatches, copies, reads of memory
    vkmoe bench decode model.gguf             tokens per second (without a file: the demo model)
    vkmoe bench kernels --json > before.json  keep a run, and later
    vkmoe bench kernels --compare before.json say what became faster or slower
    vkmoe bench transfer --plot speeds.png    a picture

    Each writes a card of the machine and the roofline first: how fast a GPU copies its own memory,
    or the threads of a CPU read theirs, what an empty dispatch and an empty submit cost, how fast
    a GPU reaches host memory. Then come the figures, each with its distance from that. Results are
    checked before they are timed; a wrong one ends the run. Figures are medians with the 95 %
    interval of the median. Close other programs first: on a CPU every one of them takes part.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@config_options
def kernels(
    *,
    which: Filters,
    config: Annotated[EngineConfig, ("device", "threads", "tuning")],
    effort: Effort,
    report: Report,
) -> None:
    """Check every kernel against NumPy in the shapes of real models, then time it.

    Shapes are those of one model, and of another for kernels that it has no use for. That takes
    minutes on CPU cores; --quick runs Q4_K alone (of a file its own types), without large matrices.
    Models: olmoe-1b-7b, qwen3-30b-a3b, mixtral-8x7b, qwen1.5-moe-a2.7b, gpt-oss-20b,
    gpt-oss-120b, deepseek-v2-lite, qwen3.6-35b-a3b, gemma-4-26b-a4b; and tiny, which only tries
    whether it runs.
    """
    from vkmoe.bench.kernels import KernelChoice, run

    choice = KernelChoice(
        families=_words(which.family),
        types=_words(which.type),
        models=_words(which.model),
        all_mappings=which.mapping == "all",
        shape=which.shape,
        largest_mib=which.largest_mib,
        repeats=effort.repeats,
        quick=effort.quick,
        tuning=config.tuning,
        threads=config.threads,
    )
    _report(report, "kernels", lambda output: run(config.device, choice, output))


@config_options
def transfer(
    *,
    parts: Annotated[list[str] | None, typer.Argument(metavar="[PART...]", hidden=True)] = None,
    amounts: Amounts,
    config: Annotated[EngineConfig, ("device",)],
    effort: Effort,
    report: Report,
) -> None:
    """Time what the engine's design rests on: submits, dispatches, copies and reads of memory.

    \b
    submit    an empty submit, the ways to wait for it, and how late each wakes up
    dispatch  a dispatch of one workgroup, with and without a barrier
    copies    host to device on each queue, and back, by size
    link      reads of host memory in place beside copies
    reads     the matvec with its weights in each type of memory

    Name some of these parts to run them alone. For the CPU as a device there is nothing to measure
    here: it reads weights where the file is mapped.
    """
    from vkmoe.bench.transfer import TransferChoice, run

    choice = TransferChoice(
        parts or (),
        effort.repeats,
        amounts.submits,
        amounts.dispatches,
        _numbers(amounts.copy_mib),
        _numbers(amounts.read_mib),
        effort.quick,
    )
    _report(report, "transfer", lambda output: run(config.device, choice, output))


@config_options
def decode(
    *,
    context: typer.Context,
    which: ModelChoice,
    length: Length,
    config: EngineConfig,
    effort: Effort,
    report: Report,
) -> None:
    """Time greedy decoding of a model, one token per submit, beside what its memory allows.

    Without MODEL the built-in demo model is used, whose few megabytes say little of large ones.
    Every kernel that the model uses is compared with NumPy first, and a text must come out the
    same twice. All options of a model's run apply: --expert-cache 6GiB measures with that.
    """
    from vkmoe.bench.decode import DecodeChoice, run

    chosen = which.path(context)
    choice = DecodeChoice(length.tokens, effort.repeats, effort.quick)
    _report(report, "decode", lambda output: run(chosen, config, choice, output))


# ----- the report -----


def _report(wanted: Report, benchmark: str, run: Callable[[Output], dict[str, Any]]) -> None:
    """Run a benchmark; then compare, print the document and draw, as far as wanted.

    What cannot be compared is refused as soon as it is known; what was measured is printed always.
    """
    from vkmoe.bench.compare import check_alike, compare, read_document

    earlier = None
    if wanted.compare is not None:
        earlier = read_document(Path(wanted.compare), benchmark)
    if wanted.plot is not None:
        check_plot(wanted.plot, [wanted.compare] if wanted.compare else [])

    def known(facts: Mapping[str, Any]) -> None:
        if earlier is not None:
            check_alike(facts, earlier, wanted.any_device)

    with _output(wanted.as_json, known) as output:
        document = run(output)
        try:
            if earlier is not None:
                document["comparison"] = compare(document, earlier, wanted.any_device, output)
        finally:
            if wanted.as_json:
                typer.echo(json.dumps(document, allow_nan=False))
    if wanted.plot is not None:
        from vkmoe.bench.plot import draw

        draw(document, Path(wanted.plot))
        note(f"the plot is in {wanted.plot}")


@contextmanager
def _output(as_json: bool, known: Callable[[Mapping[str, Any]], None]) -> Iterator[Output]:
    """Make the output of a benchmark; what is under way is shown on a terminal alone."""
    from vkmoe.bench.measure import Output

    shown = sys.stderr.isatty()

    def progress(text: str) -> None:
        if shown:
            sys.stderr.write(f"\r\x1b[K{text[:78]}")
            sys.stderr.flush()

    def say(line: str) -> None:
        progress("")
        typer.echo(line, err=as_json)

    try:
        yield Output(say, progress, known)
    finally:
        progress("")
