from probe_fakes import llama, recited, unseen  # noqa: F401
