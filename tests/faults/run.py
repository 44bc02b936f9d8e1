"""Prints how runs end that must not begin, that are broken on purpose, and that are killed.

    python tests/faults/run.py
    python tests/faults/run.py --only kill --num-kills 10

Exit code 1 if a row fails. Run from any folder; needs neither network nor GPU. Rows with a full disk need the right to
mount one.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports a Hugging Face library
sys.path[:0] = [str(folder) for folder in (Path(__file__).parent, Path(__file__).parents[1])]

import tfidf_tune  # noqa: E402, F401  # isort: skip  (first, because it keeps torchao's import message quiet)

import torch  # noqa: E402
from bad_inputs import bad_input_table  # noqa: E402
from broken_runs import broken_run_table  # noqa: E402
from fault_tables import failing_rows, printed  # noqa: E402
from kills import kill_table  # noqa: E402
from workers import import_recipes  # noqa: E402

TABLES = ("bad-input", "fault", "kill")


def main() -> None:
    """Make the tables and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=TABLES, help="tables to make")
    parser.add_argument("--num-kills", type=int, default=50, help="SIGKILLs of each kind of run; default: 50")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import_recipes()
    make = {
        "bad-input": bad_input_table,
        "fault": broken_run_table,
        "kill": partial(kill_table, num_kills=options.num_kills),
    }
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        os.environ["TFIDF_TUNE_CACHE"] = str(folder / "cache")
        num_failing = 0
        for name in options.only:
            table = make[name](folder / name)
            print(printed([table]), flush=True)
            num_failing += failing_rows(table)
    if num_failing:
        sys.exit(1)


if __name__ == "__main__":
    main()
