"""What the Vulkan validation layer said during a command, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vkmoe.cli.notes import note
from vkmoe.errors import VkmoeError

if TYPE_CHECKING:
    from vkmoe.llm import LLM

__all__ = ["validated"]


@contextmanager
def validated(llm: LLM, quiet: bool) -> Iterator[None]:
    """Print the layer's messages when the block ends, also by an error, which stays the error.

    Raises VkmoeError when there were messages and nothing else went wrong.
    """
    try:
        yield
    except BaseException:
        _report(llm, quiet)
        raise
    n_messages = _report(llm, quiet)
    if n_messages:
        raise VkmoeError(
            f"the validation layer reported {n_messages} message{'s' if n_messages > 1 else ''}",
            "this is a bug in vkmoe or in the driver; report it with the messages above",
        )


def _report(llm: LLM, quiet: bool) -> int:
    messages = llm.engine.device.validation_messages()
    for message in messages:
        note("validation: " + " ".join(message.split()))
    if not messages and not quiet:
        note("validation: no messages")
    return len(messages)
