"""A fork server with all imports, which take seconds, for processes that tests start."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tfidf_tune.recipes.full_finetune", "tfidf_tune.recipes.lora_finetune", "peft"])
