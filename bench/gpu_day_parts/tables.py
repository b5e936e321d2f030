"""Tables of a GPU day: one JSON document and one Markdown text from the records of its steps.

Owns the ratios and shares. Both are written anew after each step, so they may lack any of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu_day_parts.steps import OK, Record
from tools.llama_cpp_shaders import SDIST

TARGET_SHARE = 0.75  # of the copy's bandwidth: less is marked
ENOUGH_BYTES = 4 << 20  # of a dispatch; in less, its start is most of its time
OWN, RIVAL, KERNELS = "vkmoe", "llama.cpp", "kernels"  # what the names of steps begin with
PROMPTS = "matmul"  # in the names of kernels that compute more than they read


def write_tables(records: Sequence[Record], out: Path) -> None:
    """Write day.json and day.md into `out`, each at once and whole."""
    found = document(records)
    for name, text in (("day.json", json.dumps(found, indent=1)), ("day.md", markdown(found))):
        partial = out / f".{name}"
        partial.write_text(text + "\n")
        partial.replace(out / name)


def document(records: Sequence[Record]) -> dict[str, Any]:
    """Return what the day found: the device, decode speeds with ratios, kernels, all steps."""
    results = {record.step: record.result for record in records if record.status == OK}
    runs = [result for step, result in results.items() if step.startswith(f"{KERNELS} ")]
    kernels = [run["results"] for run in runs]
    copies = [found["roofline"]["rows"][0]["value"]["median"] for found in kernels]
    copy = median(copies) if copies else None
    card = next(iter(runs), results.get("transfer") or {}).get("card")
    return {
        "benchmark": "gpu_day",
        "device": results.get("devices"),
        "card": card,
        "rival": f"{RIVAL} of {SDIST}",
        "model": results.get("make the model"),
        "selftest": results.get("selftest"),
        "canary": results.get("canary"),
        "validation": results.get("validation"),
        "laws": results.get("laws"),
        "plan": results.get("plan"),
        "copy_gb_per_s": copy,
        "latency_mode": kernels[0]["roofline"]["latency_mode"] if kernels else None,
        "decode": [_decode(record, results, copy) for record in _decodes(records)],
        "prompts": _prompts(results) or None,
        "kernels": [_kernel(kernel) for found in kernels for kernel in found["kernels"]],
        "transfer": (results.get("transfer") or {}).get("results"),
        "steps": [_without_result(record) for record in records],
    }


def _without_result(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record._asdict().items() if key != "result"}


def _decodes(records: Sequence[Record]) -> Iterator[Record]:
    for record in records:
        if record.step.startswith((f"{OWN} ", f"{RIVAL} ")):
            yield record


def _decode(record: Record, results: dict[str, Any], copy: float | None) -> dict[str, Any]:
    """One side's speed; ours beside llama.cpp's with the same share of experts on the device."""
    speed = (record.result or {}).get("tokens_per_second")
    same = record.step.replace(OWN, RIVAL).partition(",")[0]
    rival = results.get(same) if record.step.startswith(OWN) else None
    resident = results.get(f"{OWN} resident")
    gb_per_s = speed * resident["bytes_per_token"] / 1e9 if speed and resident else None
    return {
        "what": record.step,
        "command": record.command,
        "status": record.status,
        "tokens_per_second": speed,
        "ratio": speed / rival["tokens_per_second"] if speed and rival else None,
        "gb_per_s": gb_per_s,
        "share_of_copy": gb_per_s / copy if gb_per_s and copy else None,
        "details": record.result,
    }


def _prompts(results: dict[str, Any]) -> dict[str, float]:
    """Both sides' speeds, by what they are called."""
    found: dict[str, float] = {}
    for step in ("prompts", f"prompts of {RIVAL}"):
        found |= (results.get(step) or {}).get("tokens_per_second", {})
    return found


def _kernel(kernel: dict[str, Any]) -> dict[str, Any]:
    speed = kernel["gb_per_s"]
    return {
        "variant": kernel["variant"],
        "shape": kernel["shape"],
        "bytes": kernel["bytes_read"],
        "us": kernel["us"]["median"],
        "gb_per_s": speed["median"] if speed else None,
        "share_of_copy": kernel["share_of_memory"],
    }


def markdown(found: dict[str, Any]) -> str:
    """Return the document as tables for people."""
    tables = _decode_table, _prompt_table, _kernel_table, _step_table
    return "\n\n".join(filter(None, [_head(found), *(table(found) for table in tables)]))


def _head(found: dict[str, Any]) -> str:
    device, card = found["device"] or {}, found["card"] or {}
    lines = [f"# GPU day: {device.get('name', 'no device found')}"]
    model, copy = found["model"] or {}, found["copy_gb_per_s"]
    token_bytes = next((row["details"]["bytes_per_token"] for row in found["decode"]
                        if "bytes_per_token" in (row["details"] or {})), None)  # fmt: skip
    facts = {
        "driver": " ".join(device[key] for key in ("driver_name", "driver_info")) if device else "",
        "date": card.get("date"),
        "vkmoe": card and f"{card['vkmoe']}, commit {card['commit']}",
        RIVAL: found["rival"],
        "cpu": card and f"{card['cpu']}, {card['cores']} cores",
        "model": model and f"{model['model']}, {model['file_bytes'] / 1e9:.2f} GB",
        "a token reads": token_bytes and f"{token_bytes / 1e6:.0f} MB of weights",
        "copy within device memory": copy and f"{copy:.0f} GB/s, read plus written",
        "selftest": (s := found["selftest"]) and f"all {s['n_cases']} cases agree with NumPy",
        "kernels compared first": (c := found["canary"]) and _seconds(c["seconds"]),
        "validation layer": (v := found["validation"]) and v["said"],
        "tests of the law": (laws := found["laws"]) and laws["said"],
    }
    return "\n".join([*lines, "", *(f"- {key}: {value}" for key, value in facts.items() if value)])


def _seconds(seconds: dict[str, float]) -> str:
    return "; ".join(f"{what} {value:.2f} s" for what, value in seconds.items())


def _decode_table(found: dict[str, Any]) -> str:
    rows = [
        (
            row["what"], _number(row["tokens_per_second"]), _number(row["ratio"]),
            _number(row["gb_per_s"]), _percent(row["share_of_copy"]),
            row["status"] if row["status"] != OK else _remark(row["details"]),
            f"`{row['command']}`",
        )
        for row in found["decode"]
    ]  # fmt: skip
    heads = ("decode", "tok/s", f"of {RIVAL}'s", "GB/s of weights", "of copy", "", "command")
    return _table(heads, rows, right=range(1, 5))


def _prompt_table(found: dict[str, Any]) -> str:
    speeds = found["prompts"] or {}
    rows = []
    for what, speed in speeds.items():
        rival = speeds.get(what.replace(OWN, RIVAL)) if what.startswith(OWN) else None
        rows.append((what, _number(speed), _number(speed / rival if rival else None)))
    heads = ("prompt, and tokens behind it", "tok/s", f"of {RIVAL}'s")
    return _table(heads, rows, right=(1, 2))


def _remark(details: dict[str, Any]) -> str:
    return f"{details['n_cpu_moe']} layers' experts on the CPU" if details.get("n_cpu_moe") else ""


def _kernel_table(found: dict[str, Any]) -> str:
    rows = []
    for row in found["kernels"]:
        share = row["share_of_copy"]
        waits_for_memory = PROMPTS not in row["variant"] and row["bytes"] >= ENOUGH_BYTES
        slow = share is not None and share < TARGET_SHARE and waits_for_memory
        mark = f"below {TARGET_SHARE:.0%}" if slow else ""
        cells = (_number(row["us"]), _number(row["gb_per_s"]), _percent(share), mark)
        rows.append((row["variant"], row["shape"], *cells))
    heads = ("kernel", "shape", "us", "GB/s", "of copy", "")
    return _table(heads, rows, right=range(2, 5))


def _step_table(found: dict[str, Any]) -> str:
    rows = [
        (step["step"], step["status"], _number(step["seconds"]), _number(step["limit_s"]),
         (step["why"].splitlines() or [""])[-1].replace("|", "/"))
        for step in found["steps"]
    ]  # fmt: skip
    return _table(("step", "", "seconds", "limit", "why"), rows, right=(2, 3))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    if not rows:
        return ""
    rule = ["---:" if index in right else "---" for index in range(len(heads))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rule, *rows))


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"
