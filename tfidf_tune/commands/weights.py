"""``tfidf-tune weights``."""

import argparse
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune._printing import say
from tfidf_tune.commands import add_text, whole_number

if TYPE_CHECKING:
    import pandas as pd


def main(arguments: list[str]) -> None:
    """Show the weights that TF-IDF gives the tokens of a text."""
    parser = argparse.ArgumentParser(
        prog="tfidf-tune weights",
        description="Show the weights that TF-IDF gives the tokens of your own text in the first "
        "epoch of training.",
        epilog="example: tfidf-tune weights my_texts.jsonl --tokenizer EleutherAI/pythia-1.4b",
    )
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help=".txt, .jsonl or .parquet file or a folder of them; or embedded",
    )
    add(
        "--tokenizer",
        required=True,
        metavar="PATH_OR_HUB_ID",
        help="tokenizer of the model that you fine-tune: a hub id, or a folder with its files",
    )
    add_text(parser)
    # The first token of a block is never a label.
    add(
        "--block-size",
        type=whole_number(2),
        default=256,
        help="tokens in a block; default: %(default)s",
    )
    add("--num-blocks", type=whole_number(1), metavar="N", help="the first N blocks; default: all")
    add(
        "--batch-size",
        type=whole_number(1),
        default=8,
        help="blocks in a mini-batch; default: %(default)s",
    )
    add(
        "--num-batches",
        type=whole_number(1),
        default=16,
        help="mini-batches in the idf window; default: %(default)s",
    )
    add(
        "--tf",
        choices=("count", "log", "binary"),
        default="count",
        help="form of the term frequency that the page begins with; default: %(default)s, the "
        "paper's",
    )
    add("--max-weight", type=float, help="cap of the weights, 1 or more; default: none")
    add(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="blocks in the shuffled order of training, or in the order of the text; default: "
        "shuffled",
    )
    seeds = whole_number(-(2**63), 2**63 - 1)
    add("--seed", type=seeds, default=42, help="of the shuffled order; default: %(default)s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--show",
        type=whole_number(1),
        default=1,
        metavar="K",
        help="show K blocks, the first with a full window; default: 1",
    )
    which.add_argument(
        "--block",
        type=int,
        action="append",
        metavar="I",
        help="show block I, from 0; may be repeated",
    )
    add("--output-dir", type=Path, default=Path("runs/weights"), help="default: %(default)s")
    options = parser.parse_args(arguments)
    from tfidf_tune._tokenizer import encode_texts
    from tfidf_tune.commands._weights_view import (
        shown_tokens,
        token_texts,
        tokens_section,
        weigh_blocks,
        weights_report,
    )
    from tfidf_tune.corpus.sources import warn_of_short_documents
    from tfidf_tune.data import hf_tokenizer, load_documents
    from tfidf_tune.data.text import blocks_and_lengths
    from tfidf_tune.report import require_report_folder, terminal_text, write_report
    from tfidf_tune.weighting import TFIDFWeighting

    folder = options.output_dir.expanduser()
    require_report_folder(folder)
    # Refuses a wrong setting before a long text is read.
    TFIDFWeighting(num_batches=1, max_weight=options.max_weight)
    tokenizer = hf_tokenizer(options.tokenizer)
    documents = [  # raises for a missing file
        load_documents(source, column=options.column, sample_by=options.sample_by)
        for source in options.files
    ]
    encoded = encode_texts(tokenizer, chain.from_iterable(documents))
    blocks, lengths = blocks_and_lengths(
        encoded, options.block_size, options.num_blocks, tokenizer.eos_id
    )
    if len(options.files) == 1:
        warn_of_short_documents(options.files[0], options.sample_by, lengths)
    if not len(blocks):
        raise ValueError(
            f"{', '.join(map(repr, options.files))} has fewer tokens than one block of "
            f"{options.block_size}: lower --block-size, or name more text"
        )
    tokens = weigh_blocks(
        blocks,
        vocab_size=tokenizer.vocab_size,
        batch_size=options.batch_size,
        num_batches=options.num_batches,
        max_weight=options.max_weight,
        shuffle=options.shuffle,
        seed=options.seed,
    )
    texts = token_texts(tokenizer, blocks)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    chosen = _chosen_blocks(tokens, options, len(blocks))
    shown = [shown_tokens(tokens, block, texts, decode) for block in chosen]
    order = "as in the text"
    if options.shuffle:
        order = f"shuffled as in the first epoch of a run with seed {options.seed}"
    sizes = f"{len(blocks)} of {options.block_size} tokens, {options.batch_size} a mini-batch"
    max_weight = "none" if options.max_weight is None else f"{options.max_weight:g}"
    settings = {
        "text": ", ".join(options.files),
        "tokenizer": options.tokenizer,
        "blocks": f"{sizes}, {order}",
        "tf, num_batches": f"{options.tf}, {options.num_batches}",
        "max_weight": max_weight,
    }
    report = weights_report(
        tokens, options.tf, num_batches=options.num_batches, provenance=settings
    )
    write_report(report, folder, **tokens_section(shown, options.tf))
    say(terminal_text(report))
    say(f"The page with colored tokens: {folder / 'index.html'}")


def _chosen_blocks(
    tokens: "pd.DataFrame", options: argparse.Namespace, num_blocks: int
) -> list[int]:
    """Return the blocks of ``--block``, or the first ones with a full window (if none, of the
    latest mini-batches).
    """
    if not options.block:
        is_full = tokens["step"] >= min(options.num_batches, tokens["step"].max())
        first: list[int] = tokens["block"][is_full].unique()[: options.show].tolist()
        return first
    unknown = sorted({*options.block} - {*tokens["block"]})
    if unknown:
        raise ValueError(f"--block {unknown[0]}: the text has the blocks 0 to {num_blocks - 1}")
    return list(options.block)
