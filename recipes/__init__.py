"""Recipes, installed as `tfidf_tune.recipes`: `tune run tfidf_tune/recipes/full_finetune.py
--config ...`.
"""

import os
import signal
import sys

# Under torchrun, or as the program that torchtune runs, and not imported by a user's program.
_IS_RUN = "TORCHELASTIC_RUN_ID" in os.environ or sys.argv[0].startswith("tfidf_tune.recipes.")
if _IS_RUN and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # The imports of a recipe take seconds. Until they are done, Ctrl-C ends the process without a
    # traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
