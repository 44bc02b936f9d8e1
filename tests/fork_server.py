"""The fork server of a test process: what it forks need not do the imports, which take seconds."""

import multiprocessing

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tfidf_tune.recipes.full_finetune", "tfidf_tune.recipes.lora_finetune", "peft"])
