"""What an audit did and what its result does not say, for readers who decide about a model."""

from typing import TYPE_CHECKING

from tfidf_tune.report._document import Section
from tfidf_tune.report._wording import prompt_length

if TYPE_CHECKING:
    import pandas as pd

_HOW = {
    "": "the model continued it, always by the most probable token",
    "greedy": "the model continued it, always by the most probable token",
    "offset": "the same with prompts from the middle of the passage",
    "truncated": "the same without the first half of the longest prompt",
    "noise": "the same with a part of the prompt's tokens replaced by others",
    "chat": "a user's message asked to continue the longest prompt word for word",
    "sampling": "continuations of the longest prompt were drawn at random, and the best of them counts",
}


def method_and_limits(samples: "pd.DataFrame", *, show_passages: bool, has_likelihoods: bool) -> Section:
    """Describe an audit from its samples."""
    numbers = samples.groupby("kind")["passage_id"].nunique()
    lengths = " and ".join(str(prompt_length(length)) for length in sorted(set(samples["prefix_length"])))
    ways = [f"{name or 'greedy'}: {_HOW[name]}" for name in samples["attack"].unique()]
    controls = int(numbers.get("control", 0))
    paragraphs = [
        f"Asked. {numbers['target']} passages of the text in question (targets) and {controls} of text that the model "
        f"cannot have seen (controls). The model was given the beginning of a passage, {lengths} tokens, and its "
        f"answer was compared with what follows in the passage, up to {samples['length'].max()} tokens. "
        f"{len(samples):,} prompts. Ways of asking: {'; '.join(ways)}.",
        "Compared. The longest run of tokens that an answer shares with its passage (LMS) and whether the answer is "
        "the passage word for word. Controls show what fluent text shares by chance."
        + (
            " From the likelihood of the passages: how probable it is that a sample is the passage word for word, and "
            "whether the model finds targets more likely than controls (membership inference)."
            if has_likelihoods
            else " Likelihoods were not measured: the model gave none."
        ),
        "What a finding says. A passage that is recited word for word, and that no common source explains, can be "
        "obtained from the model by anybody who can prompt it. The audit does not decide whether a text is personal, "
        "confidential or protected, and not how it came into the training data.",
        "What it does not say. Nothing recited is not proof that nothing is memorized: other prompts, more samples, "
        "other passages, further training of the model, or access to its weights can reveal more. An upper bound holds "
        "for passages that were chosen in the same way, from the same text. If the most repeated passages were chosen, "
        "it is a bound for those; rare passages are recited less often as a rule.",
        "Controls. A difference between targets and controls can also come from a difference between the texts. "
        "Controls should have the same authors, subjects and time as the targets.",
        (
            "Text. Passages are shown in full."
            if show_passages
            else "Text. Passages are shown as short excerpts. The probe file and the folder of the evaluation have "
            "them in full: protect those files like the text itself."
        ),
    ]
    return Section("method", "Method and limits", tuple(paragraphs))
