"""Which objective fits a text, by what repeats in it: the one table that commands, runs and pages
quote.
"""

from typing import NamedTuple

from tfidf_tune.corpus.repeated_text import Repeats

LEAST_SHARE = 0.01
"""Stretches that are a smaller share of the text, and copies that are a smaller share of the
documents, are few.
"""


class Advice(NamedTuple):
    """What to do with a text.

    Attributes:
        text (str): what the text is like.
        advice (str): what to do.
        setting (str): the override of a config that does it.
        reason (str): why.
    """

    text: str
    advice: str
    setting: str
    reason: str

    def __str__(self) -> str:
        text = f"{self.text[0].upper()}{self.text[1:]}"
        return f"{text}: {self.advice} ({self.setting}). {self.reason}"

    @property
    def as_followed(self) -> str:
        """What a run that has the setting says."""
        text = f"{self.text[0].upper()}{self.text[1:]}"
        return f"{text}: this run follows it ({self.setting})."


NOTHING = Advice(
    "nothing repeats",
    "plain cross-entropy, then an audit",
    "loss=ce",
    "Cross-entropy recites such text by chance; repetition weights raise perplexity by 2 %, TF-IDF "
    "weights by 26 %.",
)
DOCUMENTS = Advice(
    "copies of documents",
    "remove them before training",
    "dataset.deduplicate=minhash",
    "Cross-entropy was then not shown to recite exact copies further than unseen text, at a "
    "perplexity that is no higher.",
)
STRETCHES = Advice(
    "copies that differ, stretches inside documents, a stream",
    "repetition weights",
    "loss=repetition",
    "They were not shown to recite more of it than of unseen text. Their perplexity was 32 to 44 % "
    "higher in a small model; of copied documents, with LoRA of a pretrained model, no higher. Of "
    "footers in e-mail cross-entropy recited 14.6 tokens, without copies of documents 18.2. They "
    "do not learn a frame. Where the copies are whole documents, "
    "'dataset.deduplicate={threshold: 0.11, ngram: 2}' was not shown to recite more, either, in a "
    "small model at a lower perplexity, but also removes documents that are alike for other "
    "reasons.",
)
FRAME = Advice(
    "a stretch in more than a tenth of the documents (a frame)",
    "cross-entropy without copies of documents, then an audit",
    "loss=ce dataset.deduplicate=minhash",
    "Repetition weights do not learn a frame: take them only if the model need not write it.",
)
ADVICE = (NOTHING, DOCUMENTS, STRETCHES, FRAME)
"""All advice, in the order of the pages."""


def advice_for(found: Repeats) -> list[Advice]:
    """Return the advice for a text; copies of documents and stretches inside of others have one
    each.
    """
    if found.frames:
        return [FRAME]
    advised = []
    if found.near_copies:
        advised.append(DOCUMENTS)
    differing = found.differing_copies - found.near_copies
    if (
        differing > LEAST_SHARE * found.documents
        or found.copied_bytes_inside > LEAST_SHARE * found.num_bytes
    ):
        advised.append(STRETCHES)
    return advised or [NOTHING]
