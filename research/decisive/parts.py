"""The parts of the experiment, and where their files are."""

from pathlib import Path
from typing import NamedTuple

from research.decisive import texts
from research.decisive.texts import SMALL, SMOLLM2, Sizes

HERE = Path(__file__).parent
INPUTS = Path("runs/decisive/inputs")
RECORDS = Path("research/results")


class Part(NamedTuple):
    """What is trained by one command."""

    inputs: str  # a folder, of which the parts of the small models share one
    sizes: Sizes | None = None  # of the passages; None for natural text
    text: texts.Part = "registered"
    records: str = "decisive.jsonl"


PARTS = {
    "development": Part("development", SMALL, "development", "decisive_development.jsonl"),
    "rates": Part("development", SMALL, "development", "decisive_development.jsonl"),
    "small": Part("small", SMALL),
    "early": Part("small", SMALL),
    "middle": Part("small", SMALL),
    "smollm2": Part("smollm2", SMOLLM2),
    "natural": Part("natural"),
}
