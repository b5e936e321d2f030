"""Makes the day's synthetic model, and says how large it is.

python -m bench.gpu_day_parts.model qwen3-30b-a3b FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tools.make_synthetic_model import PRESETS, make

MIX, SEED = "q4_k_m", 0


def main() -> None:
    """Write the file; the last line printed is one JSON document."""
    preset, out = sys.argv[1], Path(sys.argv[2])
    make(preset, out, None, MIX, SEED)
    shape = PRESETS[preset]
    document = {
        "model": f"synthetic {preset}, {MIX}",
        "file_bytes": out.stat().st_size,
        "n_layers": shape.n_layers,
        "n_experts": shape.n_experts,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
