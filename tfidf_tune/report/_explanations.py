"""What every report on memorization has to explain, in the same words."""

LMS_EXPLAINED = (
    "LMS, the longest memorized substring, is the longest run of tokens that a continuation shares with the passage"
)
TEXT_PROMPTS = (
    "prompts were text, so that responses were tokenized again, each in the way nearest to its passage: LMS and prefix "
    "match are approximate, a little too high or too low, even where no token id was lost; `tfidf-tune eval` is exact."
)
