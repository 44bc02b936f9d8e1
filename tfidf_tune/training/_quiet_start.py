"""Lets Ctrl-C end a process of torchrun or torchtune's command without a traceback while it imports the recipe.

There is nothing to clean up yet. ``tfidf-tune`` and a started recipe handle signals themselves; other processes that
import this package are not affected.
"""

import os
import signal
import sys

if ("TORCHELASTIC_RUN_ID" in os.environ or sys.argv[0].startswith("tfidf_tune.recipes.")) and signal.getsignal(
    signal.SIGINT
) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
