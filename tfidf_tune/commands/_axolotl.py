"""``axolotl tfidf-tune COMMAND``: the command line as a command of Axolotl's, which are click's."""

import sys

import click

from tfidf_tune import cli


@click.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tfidf_tune(arguments: tuple[str, ...]) -> None:
    """Audit and compare models, as the command tfidf-tune does."""
    sys.argv = ["tfidf-tune", *arguments]
    cli.main()
