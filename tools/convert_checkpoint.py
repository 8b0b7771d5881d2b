"""Convert checkpoints: ``python -m tools.convert_checkpoint hf-to-megatron SOURCE TARGET``.

The same as ``megarl convert``, and no more.
"""

from __future__ import annotations

import sys

from rich.console import Console

from megarl.convert import main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:], Console()))
    except KeyboardInterrupt:
        sys.exit(130)
