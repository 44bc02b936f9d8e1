"""The Trainer of transformers with TF-IDF weights, and a monitor that measures memorization while
it trains.

    python examples/trainer_with_monitor.py
    python examples/trainer_with_monitor.py --model MODEL --texts my_texts.jsonl --lr 2e-5 --steps 500

Passages (canaries) are put into the training text many times; the monitor asks the model for them,
and for passages that were not put in (controls). Without arguments: a tiny Llama of random weights,
on text of Python's documentation. Needs `pip install '.[all]' accelerate`.
"""

import argparse
import tempfile
from itertools import islice

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from tfidf_tune.data import load_documents, train_embedded_tokenizer
from tfidf_tune.integrations.monitor import MemorizationCallback
from tfidf_tune.integrations.transformers import TokenWeightingTrainer
from tfidf_tune.passages import InjectedCanaries
from tfidf_tune.weighting import TFIDFWeighting, UniformWeighting


def main() -> None:
    """Train, and print what the monitor measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: a tiny model of random weights")
    parser.add_argument(
        "--texts", default="embedded", help="file, folder or hub id; default: text in the package"
    )
    parser.add_argument(
        "--weighting", choices=["uniform", "tfidf"], default="tfidf", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=5e-3, help="default: %(default)s")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_folder = options.model or make_tiny(folder)
        tokenizer = AutoTokenizer.from_pretrained(model_folder)
        canaries = InjectedCanaries(tokenizer, num_targets=4, repeats=30, block_size=64)
        texts = Dataset.from_dict({"text": [*islice(load_documents(options.texts), 40)]})
        texts = canaries.inject(texts, column="text")
        canaries.write_probe_file(f"{folder}/probe.jsonl")
        rows = texts.map(
            lambda row: tokenizer(row["text"], truncation=True, max_length=72),
            remove_columns="text",
        )
        args = TrainingArguments(
            f"{folder}/run",
            max_steps=options.steps,
            learning_rate=options.lr,
            per_device_train_batch_size=16,
            lr_scheduler_type="constant",
            logging_steps=options.steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        trainer = TokenWeightingTrainer(
            AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32),
            args,
            train_dataset=rows,
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            processing_class=tokenizer,
            weighting={"tfidf": TFIDFWeighting, "uniform": UniformWeighting}[options.weighting](),
        )
        monitor = MemorizationCallback(
            f"{folder}/probe.jsonl",
            every_n_steps=20,
            trainer=trainer,
            prefix_length=16,
            max_new_tokens=32,
        )
        trainer.add_callback(monitor)
        print(canaries.check(trainer))
        trainer.train()
    print("Longest run of tokens recited, of 32:\nstep   canaries   controls")
    for entry in trainer.state.log_history:
        if "memorization_target_lms" in entry:
            target, control = entry["memorization_target_lms"], entry["memorization_control_lms"]
            print(f"{entry['step']:>4}{target:>11.1f}{control:>11.1f}")


def make_tiny(folder: str) -> str:
    """Write a Llama of random weights with a tokenizer."""
    train_embedded_tokenizer(folder, vocab_size=1024)
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 336,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=1024, **sizes)).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
