"""Audit a model from Python: does it recite these texts more than texts that it never saw?

    python examples/audit_from_python.py
    python examples/audit_from_python.py --model MODEL --texts training.jsonl --controls held_out.jsonl

Without arguments: a tiny Llama that is trained here 50 times on each of 12 texts. Needs `pip
install '.[all]'`.
"""

import argparse
import json
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tfidf_tune.audit import AuditSpec, audit
from tfidf_tune.data import load_documents, train_embedded_tokenizer
from tfidf_tune.passages import ProbeSpec


def main() -> None:
    """Audit, and print the verdict and the passages that are recited most."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id; default: a tiny model that recites")
    parser.add_argument("--texts", help="what it was trained on; needed with --model")
    parser.add_argument(
        "--controls",
        help="text of the same kind that it never saw; default: what its run held out, "
        "else Python's documentation",
    )
    parser.add_argument("--output-dir", default="runs/example_audit", help="default: %(default)s")
    options = parser.parse_args()
    if bool(options.model) != bool(options.texts):
        parser.error("--model and --texts belong together")
    with tempfile.TemporaryDirectory() as folder:
        if not options.model:
            options.model, options.texts, options.controls = make_reciting(Path(folder))
        passages = ProbeSpec(
            (options.texts,),
            controls_source=options.controls,
            num_targets=12,
            num_controls=12,
            block_size=48,
            allow_fewer=True,
        )
        spec = AuditSpec(
            model=options.model,
            passages=passages,
            prefix_lengths=(16,),
            max_new_tokens=32,
            limits="recited=0",
            output_dir=options.output_dir,
            overwrite=True,
        )
        result = audit(spec, lambda text: print(text, file=sys.stderr))
    print(result.report.verdict)
    for kind in ("target", "control"):
        recited = [
            f"{one['lms']} of {one['of']}"
            for one in result.summary["passages"]
            if one["kind"] == kind
        ]
        print(f"Tokens in a row that it recites of each {kind}: {', '.join(recited)}")
    print(
        f"Limits that are exceeded: {', '.join(result.exceeded) or 'none'}. The report: "
        f"{result.page}"
    )
    if not result.exceeded and result.unproven:
        print(f"No all-clear: {result.unproven}")


def make_reciting(folder: Path) -> tuple[str, str, str]:
    """Train a Llama on 12 texts; return its folder, the texts, and 12 others."""
    documents = [text[:200] for text in islice(load_documents("embedded"), 24)]
    for name, part in (("training", documents[:12]), ("held_out", documents[12:])):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in part)
        )
    tokenizer = AutoTokenizer.from_pretrained(
        train_embedded_tokenizer(folder / "model", vocab_size=1024)
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 336,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=1024, eos_token_id=tokenizer.eos_token_id, **sizes)
    )
    batch = tokenizer(documents[:12], padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(50):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    return str(folder / "model"), str(folder / "training.jsonl"), str(folder / "held_out.jsonl")


if __name__ == "__main__":
    main()
