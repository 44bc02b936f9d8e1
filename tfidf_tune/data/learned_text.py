"""The text of rows that a model learns to write, as fine-tuning on chats reads them."""

from collections.abc import Iterator

from tfidf_tune.corpus.sources import SampleBy, TextSource, load_rows
from tfidf_tune.data.rows import Formatting, Text, answers, read_row, without_none

_WITHOUT_TEMPLATE = Formatting(template=None, as_chat=None, system=None)


def has_conversations(source: str) -> bool:
    """Return whether the first row of a source is a conversation, or a prompt
    with its completion.
    """
    for row in load_rows(TextSource(source), {}, None):
        name, _ = read_row(row.columns, row.place, None, _WITHOUT_TEMPLATE)
        return name not in ("text", "empty")
    return False


def learned_texts(source: str, *, sample_by: SampleBy = "line") -> Iterator[tuple[str, str]]:
    """Yield the place of each row, and what is learned of it: all answers, the completion of a
    prompt, or the text.
    """
    for row in load_rows(TextSource(source, sample_by=sample_by), {}, None):
        values = row.columns if row.line else without_none(row.columns)
        _, content = read_row(values, row.place, None, _WITHOUT_TEMPLATE)
        if isinstance(content, Text):
            yield row.place, content.completion
        else:
            yield row.place, "\n".join(answers(content))
