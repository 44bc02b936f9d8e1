"""Every wrong config, data file and checkpoint, with the message that it has to end in."""

from pathlib import Path

from bad_checkpoints import BAD_CHECKPOINTS
from bad_configs import BAD_CONFIGS
from bad_data import BAD_DATA
from fault_tables import Tried, fault_table
from refusals import Site, make_materials, try_row

from tfidf_tune.report import Table

BAD_INPUTS = {"config": BAD_CONFIGS, "data": BAD_DATA, "checkpoint": BAD_CHECKPOINTS}


def bad_input_table(folder: Path) -> Table:
    """Try every row in a folder of its own below ``folder``."""
    checkpoint, text_file = make_materials(folder / "materials")
    tried = []
    for kind, rows in BAD_INPUTS.items():
        for number, row in enumerate(rows):
            ended = try_row(row, Site(folder / f"{kind}{number}", checkpoint, text_file))
            tried.append(Tried((kind, *ended.cells), ended.problems))
    return fault_table("bad_inputs", "Bad input", ("input", "what is wrong", "message"), tried)
