"""Tables and sentences about the weights of a text."""

from collections.abc import Mapping, Sequence

from tfidf_tune.analysis import (
    MOST_PIECES,
    TERM_FREQUENCIES,
    FrequencyBand,
    PartStatistics,
    SplitStatistics,
    TermFrequency,
    TokenStatistics,
    WordPart,
)
from tfidf_tune.report._document import Column, Table, Value
from tfidf_tune.report._shown_tokens import readable

_TF_WORDS: Mapping[TermFrequency, str] = {"count": "raw counts", "log": "1 + ln count", "binary": "idf alone"}
_PART_NAMES: Mapping[WordPart, str] = {
    "start": "starts a word",
    "continuation": "continues a word",
    "other": "no word (punctuation, spaces, end of text)",
}
_WEIGHT_COLUMNS = tuple(Column(f"weight, {form}", ".2f") for form in TERM_FREQUENCIES)
_NEUTRAL = 0.02  # a change of share by less than 2 % is called none


def token_table(
    name: str,
    title: str,
    statistics: Sequence[TokenStatistics],
    texts: Mapping[int, str],
    notes: tuple[str, ...] = (),
) -> Table:
    """Tabulate tokens.

    Args:
        name (str): of the table.
        title (str): of the table.
        statistics (Sequence[TokenStatistics]): one a row.
        texts (Mapping[int, str]): token id -> text.
        notes (tuple[str, ...]): below the table. Default: none

    Returns:
        Table: token, id, occurrences, blocks with it, mean count in its block, mean IDF, mean weight by TF form.
    """
    columns = (
        Column("token"),
        Column("id"),
        Column("count"),
        Column("blocks"),
        Column("mean tf", ".2f"),
        Column("mean idf", ".2f"),
        *_WEIGHT_COLUMNS,
    )
    rows = tuple(
        (
            readable(texts[token.token_id], mark_spaces=True),
            token.token_id,
            token.count,
            token.num_blocks,
            token.mean_count,
            token.mean_idf,
            *_by_form(token.mean_weights),
        )
        for token in statistics
    )
    return Table(name, title, columns, rows, notes)


def band_tables(bands: Sequence[FrequencyBand]) -> tuple[Table, Table]:
    """Tabulate the shares and the weights of frequency bands, the TF forms side by side.

    Args:
        bands (Sequence[FrequencyBand]): the bands.

    Returns:
        tuple[Table, Table]: shares of tokens and weight in percent; mean and median weights.
    """
    shares = Table(
        "frequency_bands",
        "Who holds the weight, by frequency in this text",
        (
            Column("frequency rank"),
            Column("% of tokens", ".1f"),
            *(Column(f"% of weight, {form}", ".1f") for form in TERM_FREQUENCIES),
        ),
        tuple(
            (
                band_name(band),
                100 * band.token_share,
                *(100 * band.weight_shares[form] for form in TERM_FREQUENCIES),
            )
            for band in bands
        ),
        notes=(
            "Rank 1 is the most frequent token of this text. A share of the weight above the share of tokens: these "
            "tokens count more than under plain cross-entropy.",
        ),
    )
    weights = Table(
        "frequency_band_weights",
        "Weight of a token, by frequency in this text",
        (
            Column("frequency rank"),
            *(Column(f"mean, {form}", ".2f") for form in TERM_FREQUENCIES),
            *(Column(f"median, {form}", ".2f") for form in TERM_FREQUENCIES),
        ),
        tuple((band_name(band), *_by_form(band.mean_weights), *_by_form(band.median_weights)) for band in bands),
    )
    return shares, weights


def band_name(band: FrequencyBand) -> str:
    """Name a band by its ranks."""
    return f"{band.first_rank} to {band.last_rank}"


def word_tables(parts: Sequence[PartStatistics], splits: Sequence[SplitStatistics]) -> tuple[Table, Table]:
    """Tabulate tokens by their part in a word, and words by their number of tokens.

    Args:
        parts (Sequence[PartStatistics]): by part.
        splits (Sequence[SplitStatistics]): by number of pieces.

    Returns:
        tuple[Table, Table]: the two tables.
    """
    of_parts = Table(
        "word_parts",
        "Tokens that start a word and tokens that continue one",
        (Column("token"), Column("% of tokens", ".1f"), Column("mean idf", ".2f"), *_WEIGHT_COLUMNS),
        tuple(
            (_PART_NAMES[part.part], 100 * part.token_share, part.mean_idf, *_by_form(part.mean_weights))
            for part in parts
        ),
    )
    of_splits = Table(
        "split_words",
        "Words by their number of tokens",
        (
            Column("tokens of the word"),
            Column("words"),
            Column("idf, tokens", ".2f"),
            Column("idf, word", ".2f"),
            *_WEIGHT_COLUMNS,
        ),
        tuple(
            (
                _pieces_name(split.num_pieces),
                split.num_words,
                split.piece_idf,
                split.word_idf,
                *_by_form(split.mean_weights),
            )
            for split in splits
        ),
        notes=(
            "idf, tokens: mean over the word's tokens. idf, word: what the word would have if it were one token. "
            "A word is a run of letters and digits; words at the ends of a block are left out.",
        ),
    )
    return of_parts, of_splits


def findings(
    form: TermFrequency,
    bands: Sequence[FrequencyBand],
    parts: Sequence[PartStatistics],
    splits: Sequence[SplitStatistics],
) -> tuple[str, ...]:
    """Say in words what was found, for the chosen TF form first.

    Args:
        form (TermFrequency): the chosen TF form.
        bands (Sequence[FrequencyBand]): the bands.
        parts (Sequence[PartStatistics]): by part of a word.
        splits (Sequence[SplitStatistics]): by number of pieces.

    Returns:
        tuple[str, ...]: sentences.
    """
    forms = (form, *(other for other in TERM_FREQUENCIES if other != form))
    return (
        *(_band_sentence(bands[0], each) for each in forms),
        *_part_sentence({part.part: part for part in parts}, form),
        *_split_sentence({split.num_pieces: split for split in splits}, form),
    )


def _band_sentence(band: FrequencyBand, form: TermFrequency) -> str:
    ratio = band.weight_shares[form] / band.token_share
    effect = "lift" if ratio > 1 + _NEUTRAL else "lower" if ratio < 1 - _NEUTRAL else "hardly change"
    verb = (
        effect if form == "count" else {"lift": "lifts", "lower": "lowers", "hardly change": "hardly changes"}[effect]
    )
    return (
        f"With tf={form}, the {band.last_rank} most frequent tokens hold {100 * band.token_share:.1f} % of the tokens "
        f"and {100 * band.weight_shares[form]:.1f} % of the weight: {_TF_WORDS[form]} {verb} frequent tokens here."
    )


def _part_sentence(parts: Mapping[WordPart, PartStatistics], form: TermFrequency) -> tuple[str, ...]:
    if not {"start", "continuation"} <= parts.keys():
        return ()
    start, continuation = (parts[part].mean_weights[form] for part in ("start", "continuation"))
    return (
        f"Tokens that start a word weigh {start:.2f} on average, tokens that continue one {continuation:.2f} "
        f"(tf={form}).",
    )


def _split_sentence(splits: Mapping[int, SplitStatistics], form: TermFrequency) -> tuple[str, ...]:
    if not {1, 2} <= splits.keys():
        return ()
    whole, split = splits[1], splits[2]
    hidden = split.word_idf - split.piece_idf
    effect = "the split hides that they are rare" if hidden > 0 else "the split does not hide how rare they are"
    return (
        f"Words of two tokens would have a mean idf of {split.word_idf:.2f} if they were one token; their tokens have "
        f"{split.piece_idf:.2f}: {effect}. These tokens weigh {split.mean_weights[form]:.2f} on average, words of "
        f"one token {whole.mean_weights[form]:.2f} (tf={form}).",
    )


def _by_form(values: Mapping[TermFrequency, float]) -> tuple[Value, ...]:
    return tuple(values[form] for form in TERM_FREQUENCIES)


def _pieces_name(num_pieces: int) -> str:
    return f"{num_pieces} or more" if num_pieces == MOST_PIECES else str(num_pieces)
