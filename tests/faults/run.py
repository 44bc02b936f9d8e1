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

TABLES = ("bad-input", "fault", "kill")


def main() -> None:
    """Make the tables and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=TABLES, help="tables to make")
    parser.add_argument("--num-kills", type=int, default=50, help="SIGKILLs of each kind of run; default: 50")
    options = parser.parse_args()
    # Here, because every process that is started imports this file anew.
    import tfidf_tune  # noqa: F401  # isort: skip  (first, because it keeps torchao's import message quiet)
    import torch
    from bad_inputs import bad_input_table
    from broken_runs import broken_run_table
    from fault_tables import failing_rows, printed
    from kills import kill_table

    torch.set_num_threads(1)
    make = {
        "bad-input": bad_input_table,
        "fault": broken_run_table,
        "kill": partial(kill_table, num_kills=options.num_kills),
    }
    num_failing = 0
    with tempfile.TemporaryDirectory(prefix="faults") as name:
        folder = Path(name)
        os.environ["TFIDF_TUNE_CACHE"] = str(folder / "cache")
        for table_name in options.only:
            table = make[table_name](folder / table_name)
            print(printed([table]), flush=True)
            num_failing += failing_rows(table)
    if num_failing:
        sys.exit(1)


if __name__ == "__main__":
    main()
