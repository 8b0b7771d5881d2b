"""Convert checkpoints: ``python -m tools.convert_checkpoint hf-to-megatron SOURCE TARGET``.

The same as ``megarl convert``, and no more.
"""

from __future__ import annotations

import gc
import sys

from rich.console import Console


def main() -> int:
    """Do what the command line says; return the exit code."""
    gc.disable()  # see `megarl.convert`, which is imported faster without collections
    from megarl.convert import main as convert_main

    return convert_main(sys.argv[1:], Console())


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
