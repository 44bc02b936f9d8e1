"""The memorization probe once more, as one function: all passages and prefix lengths, without BOS
and the harness.
"""

from functools import partial

from tfidf_tune.probe import check_passages, decoding
from tfidf_tune.probe.attacks import PREFIX_LENGTHS
from tfidf_tune.probe.loading import require_known_ids
from tfidf_tune.probe.memorization import compare_continuation
from tfidf_tune.probe.prompts import cut_passage


def probe(
    model,
    tokenizer,
    passages,
    *,
    prefix_lengths=PREFIX_LENGTHS,
    max_new_tokens=128,
    batch_size=64,
    offset=0,
):
    """Return a ``ProbeSample`` for each prefix length and passage, ordered by prefix length.

    A completion is asked for once, from its own prompt; its ``prefix_length`` is 0.
    """
    check_passages(tokenizer, passages, offset + max(prefix_lengths))
    for passage in passages:
        require_known_ids(model, passage.token_ids)
    model.eval()
    asked = []
    for number, prefix_length in enumerate(prefix_lengths):
        asked += [
            (passage, prefix_length)
            for passage in passages
            if passage.num_prompt is None or number == 0
        ]
    divided = [cut_passage(passage, length, max_new_tokens, offset) for passage, length in asked]
    prompts, references = zip(*divided, strict=True)
    # Decoding stops at EOS, unless one of the references has it.
    ends = [decoding.end_of(reference, tokenizer.eos_id) for reference in references]
    made = decoding.continue_prompts(
        partial(
            decoding.greedy_continuations, model, eos_id=None if None in ends else tokenizer.eos_id
        ),
        prompts,
        [len(reference) for reference in references],
        batch_size=batch_size,
    )
    samples = []
    for (passage, length), reference, ids, end in zip(asked, references, made, ends, strict=True):
        generated = decoding.before_eos(ids, end)
        is_completion = passage.num_prompt is not None
        samples.append(
            compare_continuation(
                passage_id=passage.id,
                kind=passage.kind,
                offset=0 if is_completion else offset,
                prefix_length=0 if is_completion else length,
                generated_ids=generated,
                reference_ids=reference,
                generated_text=tokenizer.decode(generated),
                reference_text=tokenizer.decode(reference),
            )
        )
    return samples
