"""What several tests share.

- ``references``: formulas once more, slow and in float64, as the truth that code is compared with;
- ``fakes``: models, tokenizers, text, runs and a server, small enough for any test;
- ``processes``: recipes, commands, ranks and a browser, started as processes or forked;
- ``docs_snippets``, ``operations``, ``refusals``: code of the pages, operations of a call, runs
  that must not begin.
"""
