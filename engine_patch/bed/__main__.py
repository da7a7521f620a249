"""Write the model folders of the 27B-cost bed.

    python -m ddtree_engine.bed OUT

OUT/target and OUT/drafter then go to a server as `--model-path` and `--speculative-draft-model-path`, with
SGLANG_EXTERNAL_MODEL_PACKAGE=ddtree_engine.bed.sglang_models in its environment.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ddtree_engine.bed.folders import beds_of, write_folders
from ddtree_engine.reference import pair_path
from ddtree_engine.reference.errors import InputError


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 written, 2 the pair does not fit."""
    parser = argparse.ArgumentParser(prog="python -m ddtree_engine.bed", description=(__doc__ or "").strip())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("out", type=Path, help="folder to write target/ and drafter/ into")
    parser.add_argument("--pair", type=Path, default=pair_path(), help="small pair (default: the shipped)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights that no output depends on")
    options = parser.parse_args(argv)
    try:
        beds = beds_of(options.pair)
        write_folders(options.out, options.pair, beds, options.seed)
    except (InputError, OSError) as error:
        print(f"ddtree_engine.bed: {error}", file=sys.stderr)
        return 2
    places = ", ".join(map(str, beds.target.places))
    print(f"{options.out}: the pair's layers are layers {places} of the target")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
