"""Tasks for lm-evaluation-harness, and a model of it that takes token ids."""

from tfidf_tune.tasks._requests import save_token_ids_tokenizer
from tfidf_tune.tasks.evaluation import (
    MODEL_NAME,
    SERVER_NAME,
    VLLM_NAME,
    evaluate,
    register_model,
    tasks_folder,
)

__all__ = [
    "MODEL_NAME",
    "SERVER_NAME",
    "VLLM_NAME",
    "evaluate",
    "register_model",
    "save_token_ids_tokenizer",
    "tasks_folder",
]
