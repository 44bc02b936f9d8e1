"""Which passages are measured: how they are chosen, put into training text, and carried to an
evaluation.
"""

from tfidf_tune.passages.arrival import CanaryCheck, check_canaries
from tfidf_tune.passages.canaries import InjectedCanaries
from tfidf_tune.passages.choosing import MadeProbe, make_probe
from tfidf_tune.passages.probe_file import Passage, read_probe_file, write_probe_file
from tfidf_tune.passages.probe_spec import ProbeSpec

__all__ = [
    "CanaryCheck",
    "InjectedCanaries",
    "MadeProbe",
    "Passage",
    "ProbeSpec",
    "check_canaries",
    "make_probe",
    "read_probe_file",
    "write_probe_file",
]
