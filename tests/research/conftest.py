from helpers.fakes.probe import llama, recited, unseen  # noqa: F401
