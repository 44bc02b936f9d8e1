"""``tfidf-tune weights``."""

import argparse
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tfidf_tune._printing import say
from tfidf_tune.commands import whole_number

if TYPE_CHECKING:
    from tfidf_tune.analysis._token_weights import WeightedBlocks

_LARGEST_CAP = 1e38  # weights are float32
_EXAMPLE = "tfidf-tune weights my_texts.jsonl --tokenizer EleutherAI/pythia-1.4b"


def main(arguments: list[str]) -> None:
    """Show the weights that TF-IDF gives the tokens of a text.

    Args:
        arguments (list[str]): of the command line, after ``tfidf-tune weights``.

    Raises:
        FileNotFoundError: If a file or the tokenizer's folder is missing.
        ValueError: If an option does not fit, a file cannot be read, or the text does not fill one block.
    """
    options = _parser().parse_args(arguments)
    if options.tokenizer is None:
        raise ValueError(
            "--tokenizer is missing: name the tokenizer of the model that you fine-tune, a hub id or a folder with "
            f"tokenizer.json or tokenizer.model. For example: {_EXAMPLE}"
        )
    from rich.console import Console

    from tfidf_tune.analysis._token_weights import read_blocks, typical_blocks, weigh_blocks
    from tfidf_tune.analysis._weight_statistics import token_texts
    from tfidf_tune.data import hf_tokenizer
    from tfidf_tune.report import require_report_folder, terminal_text
    from tfidf_tune.report._weights import print_block, weights_report, write_weights
    from tfidf_tune.weighting import TFIDFWeighting

    folder = options.output_dir.expanduser()
    require_report_folder(folder)
    # Refuse wrong settings before a long text is read.
    TFIDFWeighting(num_batches=min(options.num_batches, 1), tf=options.tf, max_weight=options.max_weight)
    tokenizer = hf_tokenizer(options.tokenizer)
    blocks = read_blocks(
        tokenizer,
        options.files,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        column=options.column,
    )
    weighted = weigh_blocks(
        blocks,
        vocab_size=tokenizer.vocab_size,
        batch_size=options.batch_size,
        num_batches=options.num_batches,
        max_weight=options.max_weight,
        shuffle=options.shuffle,
        seed=options.seed,
    )
    rows = _rows(weighted, options.block, len(blocks)) if options.block else typical_blocks(weighted, options.show)
    weights = weights_report(
        weighted,
        token_texts(tokenizer, weighted.blocks),
        partial(tokenizer.decode, skip_special_tokens=False),
        options.tf,
        rows,
        min_count=options.min_count,
        provenance=_settings(options, len(blocks)),
    )
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    for block in weights.blocks:
        print_block(block, options.tf, console)
        console.print()
    say(terminal_text(replace(weights.report, figures=())))
    write_weights(weights, folder)
    say(f"Page, picture, plot and tables: {folder / 'index.html'}, tokens.png, figures/ and tables/ beside it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfidf-tune weights",
        description="Show the weights that TF-IDF gives the tokens of your own text in the first epoch of training.",
        epilog=f"example: {_EXAMPLE}",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help=".txt, .jsonl or .parquet file or a folder of them; or embedded"
    )
    parser.add_argument("--tokenizer", metavar="PATH_OR_HUB_ID", help="tokenizer of the model that you fine-tune")
    parser.add_argument("--column", default="text", help="column that holds the text; default: %(default)s")
    parser.add_argument(
        "--block-size", type=whole_number(), default=256, help="tokens in a block; default: %(default)s"
    )
    parser.add_argument("--num-blocks", type=whole_number(1), metavar="N", help="the first N blocks; default: all")
    parser.add_argument(
        "--batch-size", type=whole_number(1), default=8, help="blocks in a mini-batch; default: %(default)s"
    )
    parser.add_argument(
        "--num-batches", type=whole_number(), default=16, help="mini-batches in the window of idf; default: %(default)s"
    )
    parser.add_argument(
        "--tf",
        choices=("count", "log", "binary"),
        default="count",
        help="form of the term frequency that is colored and ranked; default: %(default)s, the paper's",
    )
    parser.add_argument("--max-weight", type=_cap, help="cap of the weights, 1 or more; default: none")
    parser.add_argument(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="blocks in the shuffled order of training, or in that of the text; default: shuffled",
    )
    parser.add_argument(
        "--seed", type=whole_number(-(2**63), 2**63 - 1), default=42, help="of the shuffled order; default: %(default)s"
    )
    parser.add_argument(
        "--min-count", type=whole_number(1), default=10, help="rank tokens that occur so often; default: %(default)s"
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--show",
        type=whole_number(1),
        default=1,
        metavar="K",
        help="show K blocks, the first with a full window; default: 1",
    )
    shown.add_argument("--block", type=int, action="append", metavar="I", help="show block I, from 0; may be repeated")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/weights"), help="default: %(default)s")
    return parser


def _cap(text: str) -> float:
    number = float(text)
    if _LARGEST_CAP < number < math.inf:
        raise argparse.ArgumentTypeError(f"{number:g} is above {_LARGEST_CAP:g}: leave it out for no cap")
    return number


def _rows(weighted: "WeightedBlocks", wanted: list[int], num_blocks: int) -> list[int]:
    """Find the blocks that a user asks for by their numbers in the text."""
    row_of = {int(index): row for row, index in enumerate(weighted.indices)}
    for index in wanted:
        if not 0 <= index < num_blocks:
            raise ValueError(f"--block {index}: the text has the blocks 0 to {num_blocks - 1}")
        if index not in row_of:
            raise ValueError(
                f"--block {index} is in the last, incomplete mini-batch, which training leaves out: name another "
                "block, or another --seed or --batch-size"
            )
    return [row_of[index] for index in wanted]


def _settings(options: argparse.Namespace, num_blocks: int) -> list[tuple[str, str]]:
    order = f"shuffled as in the first epoch of a run with seed {options.seed}" if options.shuffle else "as in the text"
    return [
        ("text", ", ".join(options.files)),
        ("tokenizer", options.tokenizer),
        ("blocks", f"{num_blocks} of {options.block_size} tokens, {options.batch_size} a mini-batch, {order}"),
        ("tf, num_batches", f"{options.tf}, {options.num_batches}"),
        ("max_weight", "none" if options.max_weight is None else f"{options.max_weight:g}"),
    ]
