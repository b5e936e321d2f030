"""This module measures decoding: tokens per second of a loaded model, beside what memory allows.

It owns greedy decoding with a clock, the count of bytes a token reads, and the checks before it:
every kernel of the model's program against its twin, finite logits, and the same tokens twice.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vkmoe.batch import TopLogits
from vkmoe.bench.clock import Clock, Memory, Roofline, WrongResultError
from vkmoe.bench.defaults import REPEATS, TOKENS
from vkmoe.bench.environment import show_card
from vkmoe.bench.measure import MIN_REPEATS, Output, Row, document, percentile, summarise
from vkmoe.choices import Layout
from vkmoe.config import EngineConfig
from vkmoe.devices import open_device
from vkmoe.engine import Engine
from vkmoe.errors import UsageError
from vkmoe.experts.decide.settings import sizing_line
from vkmoe.facts import DeviceInfo
from vkmoe.generate.text.tokenizer import Tokenizer
from vkmoe.kernels.family import Variant
from vkmoe.llm import demo_model_path, read_tokenizer
from vkmoe.mode_trial import choose_mode
from vkmoe.models import ModelFile, open_model
from vkmoe.modes import Hybrid
from vkmoe.quants import device_row_bytes
from vkmoe.selftest.suite import run_variant, variants_of
from vkmoe.weights.mapped import mapped_bytes, spans_in_file
from vkmoe.weights.placer import Progress
from vkmoe.weights.sizes import weight_bytes

PROMPT = '''\
def count_words(path):
    """Return how often each word occurs in a file."""
    counts = {}
'''
# Of the largest logit, where other experts are computed by the CPU the second time: its products
# are of 8-bit activations.
MOST_APART = 0.05
EXPLANATION = (
    "A line is the median [95 % interval] of repeats. Each decodes the next tokens of one text,",
    "a submit for each token, from its logits to the choice of the next. The share is of what the",
    "roofline allows: a token's bytes at the speed of memory, and an empty submit.",
)


@dataclass(frozen=True)
class DecodeChoice:
    """Says how much is decoded."""

    tokens: int | None = None  # of a repeat; None: as `quick` has it, as of `repeats`
    repeats: int | None = None
    quick: bool = False  # fewer tokens, fewer repeats

    @property
    def n_tokens(self) -> int:
        return TOKENS.chosen(self.tokens, self.quick)

    @property
    def n_repeats(self) -> int:
        return REPEATS.chosen(self.repeats, self.quick)


class TokenBytes(NamedTuple):
    """Counts the bytes of weights that one decoded token reads, as the device has them."""

    trunk: int  # attention, router, gains, output head, one row of the embeddings
    experts: int  # the routed experts it uses

    @property
    def total(self) -> int:
        return self.trunk + self.experts


def run(
    model: str | None, config: EngineConfig, choice: DecodeChoice, output: Output
) -> dict[str, Any]:
    """Measure the roofline, load the model (None: the demo), check, then decode.

    Raises UsageError where the text does not fit the context, WrongResultError, ModelFileError,
    GpuErrors.
    """
    path = demo_model_path() if model is None else Path(model)
    with open_model(path) as file:
        tokenizer = read_tokenizer(file)
        prompt = tokenizer.encode(PROMPT)
        model_bytes = sum(tensor.n_bytes for tensor in file.file.tensors.values())
    needed = len(prompt) + choice.n_tokens * choice.n_repeats
    _check_context(needed, config.ctx_size or file.spec.context_length)
    output.known({"model": path.name, "tokens": choice.n_tokens})
    card, roofline, info = _roofline(config, output)
    with open_model(path) as file:
        sizes = token_bytes(file, info.layout)
    least_s = 1e-6 * (roofline.least_us(sizes.total) + roofline.submit.value.median)
    output.say(f"model: {path.name}, {model_bytes / 1e6:,.0f} MB of weights")
    if model is None:
        output.say("  the built-in demo, far smaller than a model one would use: --model FILE")
    output.say(
        f"  a token reads {sizes.total / 1e6:,.1f} MB of them (trunk {sizes.trunk / 1e6:,.1f}, "
        f"experts {sizes.experts / 1e6:,.1f}): the roofline allows {1 / least_s:,.1f} tok/s"
    )
    with _opened(path, replace(config, device=str(info.index)), tokenizer, output) as engine:
        _check_context(needed, engine.ctx_size)
        checks = _check(engine, prompt, choice.n_tokens, output)
        found = _measure(engine, prompt, choice, output)
    share = found["rows"][0].value.median * least_s
    for line in ("", *EXPLANATION, found["rows"][0].line(f"{share:.0%}")):
        output.say(line)
    found |= {"model": path.name, "model_bytes": model_bytes, "checks": checks}
    found |= {"bytes_per_token": sizes.total, "share_of_roofline": share}
    found |= {"prompt": len(prompt), "tokens": choice.n_tokens, "context": engine.ctx_size}
    return document("decode", card, {"roofline": roofline.document(), **found})


def _opened(path: Path, config: EngineConfig, tokenizer: Tokenizer, output: Output) -> Engine:
    """Load the model as a run would, with experts computed where they were measured to be best.

    No tokens are guessed ahead: how many are right depends on the text.
    """
    config = replace(config, draft="none")
    loading = _loading(output)
    with open_model(path) as file:
        chosen = choose_mode(file, config, tokenizer.encode, loading)
    engine = Engine(path, config, loading, choice=chosen)
    if chosen is not None:
        output.say(f"experts: {chosen.mode} ({chosen.reason})")
    if engine.plan.sizing is not None:
        output.say(sizing_line(engine.plan.sizing))
    return engine


def token_bytes(model: ModelFile, layout: Layout = "planes") -> TokenBytes:
    """Count trunk - embeddings + one row + experts * used / all, from the file's own tensors."""
    spec, tensors = model.spec, model.tensors
    if layout == "planes":
        sizes, kind = weight_bytes(tensors), tensors.embeddings.type
        trunk, experts = sizes.trunk, sizes.experts
    else:  # read where the file is mapped, but for what is copied
        sizes, kind = mapped_bytes(tensors), tensors.embeddings.type
        experts = sum(map(sum, spans_in_file(tensors)))
        trunk = sizes.mapped + sizes.copied - experts
    row_bytes = device_row_bytes(kind, spec.width, layout)
    tied = tensors.output is tensors.embeddings
    trunk += row_bytes - (0 if tied else spec.n_vocab * row_bytes)
    used = experts * spec.experts.n_used // spec.experts.n_experts if spec.experts else 0
    return TokenBytes(trunk, used)


def greedy(
    engine: Engine, token: int, position: int, n_tokens: int
) -> tuple[list[int], list[float]]:
    """Decode from `token` at `position` on: it and `n_tokens` more, and the seconds of each."""
    tokens, seconds = [token], []
    for step in range(n_tokens):
        started = time.perf_counter()
        top = engine.run_token(tokens[-1], position + step)
        assert top is not None
        tokens.append(best(top))
        seconds.append(time.perf_counter() - started)
    return tokens, seconds


def best(top: TopLogits) -> int:
    """Return the token with the largest logit."""
    return int(top.ids[0])


# ----- checking and measuring -----


def _roofline(config: EngineConfig, output: Output) -> tuple[dict[str, Any], Roofline, DeviceInfo]:
    """Measure it before the model takes the memory; return the card and the device's facts too."""
    with open_device(config.device, n_threads=config.threads) as device:
        card = show_card(device, config.threads, output)
        with Clock(device, MIN_REPEATS, Memory.of(device.info)) as clock:
            output.progress("measuring the roofline")
            roofline = clock.roofline()
        roofline.show(output)
        output.known({"device": card["device"], "clock": roofline.latency_mode})
        return card, roofline, device.info


def _loading(output: Output) -> Progress:
    return lambda done, total: output.progress(f"loading, {done / max(total, 1):.0%}")


def _check_context(needed: int, ctx_size: int) -> None:
    if needed > ctx_size:
        raise UsageError(
            f"the text has {needed} tokens, the context {ctx_size}",
            "raise --ctx-size, or lower --tokens or --repeats",
        )


def _check(
    engine: Engine, prompt: Sequence[int], n_tokens: int, output: Output
) -> dict[str, int | bool]:
    """Compare kernels with their twins, and a text with itself; this warms up too."""
    used = {command.variant for command in engine.program().dispatches()}
    variants = sorted(used & {variant.name for variant in variants_of(engine.device.info)})
    n_cases = 0
    for name in variants:
        output.progress(f"checking {name}")
        for case in run_variant(Variant.parse(name), engine.device, engine.tuning):
            n_cases += 1
            if not case.ok:
                raise WrongResultError(f"{case.name} is wrong: {case.where}")
    output.progress("decoding twice")
    alike = repeats(engine, prompt, n_tokens)
    output.say(f"checked: {n_cases} cases of {len(variants)} kernels agree with NumPy; {alike}")
    if others := sorted(used.difference(variants)):
        output.say(f"not compared, for want of a case: {', '.join(others)}")
    return {"kernels": len(variants), "cases": n_cases, "repeats_itself": _keeps_bits(engine)}


def _keeps_bits(engine: Engine) -> bool:
    """Say whether a text has the same bits whatever came before it."""
    return not isinstance(engine.plan.mode, Hybrid)


def repeats(engine: Engine, prompt: Sequence[int], n_tokens: int) -> str:
    """Decode a text twice, and say how alike both are. Raises WrongResultError.

    Where the CPU computes what has no slot, slots have moved by the second time, and the last bits
    with them: then the logits behind the prompt must be near, and texts may part.
    """
    prompts, ends = [], []
    for _ in range(2):
        top = engine.run_tokens(prompt, 0)
        prompts.append(engine.full_logits().copy())
        tokens, _ = greedy(engine, best(top), len(prompt), n_tokens)
        logits = engine.full_logits()
        if not np.isfinite(logits).all() or logits.std() == 0:
            raise WrongResultError(f"{engine.spec.name} computes no finite logits")
        ends.append((tokens, logits.tobytes()))
    if _keeps_bits(engine):
        if ends[0] != ends[1]:
            raise WrongResultError("the same text gives other tokens or logits the second time")
        return f"{n_tokens} tokens repeat themselves to the last bit"
    apart = float(np.abs(prompts[0] - prompts[1]).max() / np.abs(prompts[0]).max())
    if apart > MOST_APART:
        raise WrongResultError(
            f"the same prompt's logits differ by {apart:.2g} of the largest the second time"
        )
    return f"a prompt's logits repeat themselves within {apart:.1e} of the largest"


def _measure(
    engine: Engine, prompt: Sequence[int], choice: DecodeChoice, output: Output
) -> dict[str, Any]:
    """Decode one text, piece by piece."""
    token, position = best(engine.run_tokens(prompt, 0)), len(prompt)
    speeds: list[float] = []
    every: list[float] = []
    before = engine.profiler.served().total if engine.profiler else None
    for index in range(choice.n_repeats):
        output.progress(f"repeat {index + 1} of {choice.n_repeats}")
        tokens, seconds = greedy(engine, token, position, choice.n_tokens)
        token, position = tokens[-1], position + choice.n_tokens
        speeds.append(len(seconds) / sum(seconds))
        every += [1e3 * took for took in seconds]
    note = f"a token p50 {percentile(every, 50):.1f} ms, p99 {percentile(every, 99):.1f} ms"
    found: dict[str, Any] = {"values": speeds}
    if before is not None and engine.profiler is not None:
        after = engine.profiler.served().total
        found["hit_rate"] = (after.n_hits - before.n_hits) / (after.n_uses - before.n_uses)
        note += f"; {found['hit_rate']:.1%} of used experts on the device"
    rows = [Row("decode", summarise(speeds), "tok/s", "host_wall", note)]
    return {"rows": rows, **found}
