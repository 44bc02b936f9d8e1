"""A training loop in plain PyTorch, once with cross-entropy and once with TF-IDF weights.

    python examples/own_loop.py
    python examples/own_loop.py --model MODEL --texts my_texts.jsonl --steps 500

Without arguments: a tiny Llama of random weights, on text of Python's documentation. Needs `pip
install '.[all]'`.
"""

import argparse
import tempfile
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tfidf_tune import CrossEntropyLoss, TFIDFCrossEntropyLoss
from tfidf_tune.data import hf_tokenizer, load_documents, text_blocks, train_embedded_tokenizer
from tfidf_tune.weighting import shift_labels

Loss = CrossEntropyLoss | TFIDFCrossEntropyLoss


def main() -> None:
    """Train under both losses from the same start, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: a tiny model of random weights")
    parser.add_argument(
        "--texts", default="embedded", help="file, folder or hub id; default: text in the package"
    )
    parser.add_argument("--steps", type=int, default=30, help="default: %(default)s")
    parser.add_argument(
        "--lr",
        type=float,
        default=3e-3,
        help="a pretrained model needs about 2e-5; default: %(default)s",
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model_folder = options.model or make_tiny(folder)
        blocks = text_blocks(
            hf_tokenizer(model_folder), load_documents(options.texts), 64, 8 * options.steps
        )
        batches = torch.from_numpy(blocks).long().split(8)
        print(
            "loss                    cross-entropy: first batch, last batch    weights: mean, std"
        )
        for loss_fn in (CrossEntropyLoss(), TFIDFCrossEntropyLoss(num_batches=16)):
            model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
            print(
                f"{type(loss_fn).__name__:<24}{train(model.train(), loss_fn, batches, options.lr)}"
            )


def train(model: torch.nn.Module, loss_fn: Loss, batches: Sequence[torch.Tensor], lr: float) -> str:
    """Train on each batch once; return the columns of the table."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    cross_entropies = []
    for tokens in batches:  # [b, s]
        # Labels are shifted here: label i is token i + 1. `loss_fn(logits, labels)` alone returns
        # the loss.
        terms = loss_fn.terms(model(input_ids=tokens).logits, shift_labels(tokens))
        terms.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        # Without weights, so that the losses can be compared.
        cross_entropies.append(terms.cross_entropy.item())
    weights = terms.weights[:, :-1]  # the last position of a row has no label
    return f"{cross_entropies[0]:>28.3f}{cross_entropies[-1]:>12.3f}{weights.mean():>17.3f}{weights.std():>7.3f}"


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
