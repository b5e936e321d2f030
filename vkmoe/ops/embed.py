"""Fetches the embedding row of a token, and makes what the first norm needs of it.

Shader: embed.comp. Twin: vkmoe/reference/matvec.py.
"""

from __future__ import annotations

from vkmoe.gpu.kernels import kernel
from vkmoe.gpu.program import TensorRef, memory_range
from vkmoe.ops.context import OpContext
from vkmoe.ops.matvec import Matrix
from vkmoe.ops.norms import NormOutput

__all__ = ["embed"]

EMBED = kernel(
    "embed",
    "r:params w:hidden w:gained w:partials",
    "address:embeddings address:gain u32:n_vocab u32:row_bytes u32:n_blocks",
    "workgroup_size",
)
CHUNK_WEIGHTS = 32  # what one lane unpacks


def embed(op: OpContext, embeddings: Matrix, params: TensorRef, output: NormOutput) -> int:
    """Append hidden = embeddings[params.token]; gained = hidden * gain.

    Returns its number of partials.
    """
    n_groups = -(-(embeddings.n_columns // CHUNK_WEIGHTS) // op.tuning.workgroup_size)
    op.append(
        EMBED.dispatch(
            f"embed.{embeddings.type.lower()}",
            {"workgroup_size": op.tuning.workgroup_size},
            {
                "params": params,
                "hidden": output.hidden,
                "gained": output.gained,
                "partials": output.partials,
            },
            {
                "embeddings": embeddings.address,
                "gain": output.gain,
                "n_vocab": embeddings.n_rows,
                "row_bytes": embeddings.row_bytes,
                "n_blocks": embeddings.n_blocks,
            },
            (n_groups, 1, 1),
            op.label,
            memory_reads=(embeddings.memory, memory_range(output.gain, 4 * embeddings.n_columns)),
        )
    )
    return output.n_partials(n_groups)
