"""Reads the flags of llama-server, so that a command line written for it starts `vkmoe serve`.

Flags of another name become vkmoe's. Flags that have nothing to do here, because vkmoe plans it by
itself or has no such thing to tune, are left out. A flag that would change answers or protect the
server, and that vkmoe does not have, stays and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from vkmoe.catalogue import quant_of

_RENAMED = {
    "--alias": ("-a",),
    "--api-prefix": (),
    "--cache-type-k": (),
    "--cpu-moe": ("-cmoe",),
    "--draft-model": ("-md", "--model-draft", "--spec-draft-model"),
    "--gpu-layers": ("-ngl", "--n-gpu-layers"),
    "--kv-unified": ("-kvu",),
    "--max-tokens": ("--predict", "--n-predict"),
    "--mirostat-eta": ("--mirostat-lr",),
    "--mirostat-tau": ("--mirostat-ent",),
    "--model": ("-hfr", "--hf-repo"),
    "--no-webui": ("--no-ui",),
    "--reasoning": ("-rea",),
    "--seed": ("-s",),
    "--temp": ("--temperature",),
    "--timeout": ("-to",),
    "--typical-p": ("--typical",),
    "--webui": ("--ui",),
}
_NEW_NAMES = {old: new for new, olds in _RENAMED.items() for old in olds}
# Flags without a value.
_IDLE = frozenset(
    """
    --agent --backend-sampling --backend_sampling --cache-idle-slots --cache-prompt
    --check-tensors --cont-batching --context-shift --direct-io --embedding --embeddings --escape
    --jinja --kv-offload --log-disable --log-prefix --log-timestamps --mlock --mmap
    --models-autoload --no-agent --no-cache-idle-slots --no-cache-prompt --no-cont-batching
    --no-context-shift --no-direct-io --no-escape --no-host --no-jinja --no-kv-offload
    --no-kv-unified --no-log-prefix --no-log-timestamps --no-mmap --no-mmproj --no-mmproj-auto
    --no-models-autoload --no-op-offload --no-perf --no-reasoning-preserve --no-repack
    --no-skip-chat-parsing --no-ui-mcp-proxy --no-warmup --no-webui-mcp-proxy --op-offload --perf
    --props --reasoning-preserve --repack --reuse-port --spec-default --swa-full --ui-mcp-proxy
    --warmup --webui-mcp-proxy -bs -cb -kvo -nkvo -no-kvu -nocb -nr
    """.split()  # noqa: SIM905  (a list of words reads best as text)
)
_IDLE_WITH_VALUE = frozenset(
    """
    --cache-reuse --checkpoint-min-step --cpu-mask --cpu-mask-batch --cpu-range --cpu-range-batch
    --cpu-strict --cpu-strict-batch --ctx-checkpoints --defrag-thold --draft --draft-max
    --draft-min --draft-n --draft-n-min --draft-p-min --draft-p-split --keep --lazy-mode
    --load-mode --log-colors --log-file --log-verbosity --main-gpu --numa
    --override-tensor --poll --poll-batch --prio --prio-batch --reasoning-budget-message
    --sampler-seq --samplers --sampling-seq --slot-prompt-similarity --spec-draft-n-max
    --spec-draft-n-min --spec-draft-ngl --spec-draft-p-min --spec-draft-p-split --spec-type
    --split-mode --sse-ping-interval --swa-checkpoints --tensor-split --threads-batch
    --threads-http --tools --tools-runtime --ui-config --verbosity --webui-config -C -Cb -Cr -Crb
    -cms -ctxcp -dt -lm -lv -lzm -mg -ngld -ot -sm -sps -tb -ts
    """.split()  # noqa: SIM905
)
_MAY_HAVE_VALUE = {"-fa": ("on", "off", "auto", "0", "1"), "--flash-attn": ("on", "off", "auto")}
_ALL_LAYERS = ("-1", "all", "auto")  # of --gpu-layers: as by default
_ROWS = 512  # of a batch: llama-server's --ubatch-size, unless --batch-size is less


class Translated(NamedTuple):
    """Holds a command line for vkmoe, and the flags that were left out of it."""

    words: list[str]
    idle: list[str]


def translated(words: Sequence[str]) -> Translated:
    """Translate the words behind `vkmoe serve`. Those that are vkmoe's own stay as they are."""
    kept: list[str] = []
    idle: list[str] = []
    rows = file = ""
    left = list(words)
    while left:
        word, is_joined, value = left.pop(0).partition("=")
        if not word.startswith("-"):
            kept.append(word + is_joined + value)
            continue
        flag = _NEW_NAMES.get(word, word)
        if is_joined:
            left.insert(0, value)
        following = left[0] if left else ""
        if flag in ("-b", "--batch-size"):
            rows = left.pop(0) if left else ""
        elif flag in ("-hff", "--hf-file"):
            file = left.pop(0) if left else ""
        elif flag == "--gpu-layers" and following in _ALL_LAYERS:
            left.pop(0)
        elif flag == "--reasoning-budget" and following in ("0", "-1"):
            kept += ["--reasoning", "off"] if left.pop(0) == "0" else []
        elif flag in _IDLE_WITH_VALUE or following in _MAY_HAVE_VALUE.get(flag, ()):
            idle.append(word)
            del left[:1]
        elif flag in _IDLE or flag in _MAY_HAVE_VALUE:
            idle.append(word)
        else:
            kept.append(flag)
            if is_joined:
                kept.append(left.pop(0))
    if rows.isdigit() and int(rows) < _ROWS and not {"-ub", "--ubatch-size"} & set(kept):
        kept += ["--ubatch-size", rows]
    if file:
        kept = [_with_quant(word, before, file) for before, word in pairwise(["", *kept])]
    return Translated(kept, idle)


def _with_quant(word: str, before: str, file: str) -> str:
    """Return a word; a repository's name gets the quant of the file that is meant."""
    is_name = before in ("-m", "-hf", "--model") and ":" not in word
    return f"{word}:{quant_of(Path(file))}" if is_name else word
