"""Which passages a probe file should have."""

from dataclasses import dataclass

from tfidf_tune._checks import check_at_least, require_choice
from tfidf_tune.corpus.sources import SampleBy

PASSAGES = ("duplicates", "near-duplicates", "random")


@dataclass(frozen=True)
class ProbeSpec:
    """The passages that a probe file should have.

    Args:
        sources (tuple[str, ...]): the training text, each as for :func:`load_documents`.
        column (str): the column that holds the text, also in ``controls_source``. Default: "text"
        controls_source (str | None): text that the model was not trained on. Default: None, the
            embedded corpus, or in an audit the text that the run of the model held out
        controls_column (str | None): the column that holds the text in ``controls_source``.
            Default: None, ``column``
        num_targets (int): passages of the training text. Default: 100
        num_controls (int): passages that it does not contain. Default: 100
        block_size (int): tokens in a passage. Default: 256
        passages (str): "duplicates" for the most frequent passages, completed with random ones;
            "near-duplicates" the same with copies that differ in some words; "random" for random
            ones only. Default: "duplicates"
        min_repeats (int): occurrences from which on a passage is a duplicate. Default: 2
        seed (int): decides which passages are drawn. Default: 0
        sample_by (Literal["line", "paragraph", "document"] | None): what a document of a ``.txt``
            file is, also in ``controls_source``, see :func:`load_documents`. Default: None,
            "document", or in an audit of a model that a run of the recipes wrote, what it was in
            training
        allow_fewer (bool): take fewer targets and controls, at least one target, if there are no
            more. Default: False
        held_out (str | None): a probe file, whose controls the model was not trained on: no target
            overlaps a place of theirs in ``sources``. Default: None, for audits that of the run
            that wrote the model; "" for none
        holdout (str | None): the manifest of ``tfidf-tune data holdout`` in place of sources: what
            was trained on has the targets, what was held out the controls, as many. Default: None
        without_eos (bool): no passage has EOS inside, where a server would end its answer. Default:
            False

    Raises:
        ValueError: If a number is out of range, ``passages`` is unknown or no source is given.
    """

    sources: tuple[str, ...]
    column: str = "text"
    controls_source: str | None = None
    num_targets: int = 100
    num_controls: int = 100
    block_size: int = 256
    passages: str = "duplicates"
    min_repeats: int = 2
    seed: int = 0
    sample_by: SampleBy | None = None
    allow_fewer: bool = False
    held_out: str | None = None
    without_eos: bool = False
    holdout: str | None = None
    controls_column: str | None = None

    @property
    def document_is(self) -> SampleBy:
        """What a document of a ``.txt`` file is."""
        return self.sample_by or "document"

    def __post_init__(self) -> None:
        if not self.sources and self.holdout is None:
            raise ValueError("no source is given: name at least one file of training text")
        if self.holdout is not None and (self.sources or self.controls_source):
            raise ValueError(
                f"the holdout {self.holdout} has the text of targets and controls: name no other "
                "text and no --controls beside --holdout"
            )
        require_choice("passages", self.passages, PASSAGES)
        check_at_least(0, num_controls=self.num_controls, seed=self.seed)
        check_at_least(1, num_targets=self.num_targets)
        check_at_least(2, block_size=self.block_size, min_repeats=self.min_repeats)
