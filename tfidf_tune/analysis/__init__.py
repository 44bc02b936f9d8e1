"""How much a fine-tuned model recites, and at which price: probe, metrics, evaluations read back and compared."""

from tfidf_tune.analysis._bootstrap import ENOUGH_UNITS, MIN_UNITS, NUM_RESAMPLES, SEED, Interval, bootstrap_interval
from tfidf_tune.analysis._comparison import Comparison, Reduction, compare_objectives, own_interval
from tfidf_tune.analysis._equal_perplexity import Bracket, EqualPerplexity
from tfidf_tune.analysis._floor import Floor, lms_floor
from tfidf_tune.analysis._frontier import (
    Frontier,
    FrontierCurve,
    FrontierPoint,
    SeedDifference,
    perplexity_of,
    trace_frontiers,
)
from tfidf_tune.analysis._harness import read_runs
from tfidf_tune.analysis._measures import (
    ANSWER_MEASURES,
    CONTROL_LMS,
    DOWNSTREAM_MEASURES,
    LMS,
    PERPLEXITY,
    SUMMARY_MEASURES,
    Measure,
)
from tfidf_tune.analysis._metrics import (
    longest_memorized_substring,
    longest_memorized_substrings,
    longest_prefix_match,
    longest_prefix_matches,
    rouge_l,
    rouge_scores,
)
from tfidf_tune.analysis._model_runs import ModelRuns, group_runs, last_evaluations
from tfidf_tune.analysis._models import load_model
from tfidf_tune.analysis._perplexity import token_perplexity
from tfidf_tune.analysis._probe import ProbeTokenizer, check_passages, compare_continuation, greedy_continuations, probe
from tfidf_tune.analysis._provenance import describe_machine
from tfidf_tune.analysis._records import RunRecord, load_records, provenance_of, read_records, records_of, write_records
from tfidf_tune.analysis._runs import AnswerScore, BlockScore, Evaluation, Run, SummaryScore
from tfidf_tune.analysis._samples import ProbeSample, read_samples, write_samples
from tfidf_tune.analysis._seed_estimates import SeedEstimate, over_seeds
from tfidf_tune.analysis._summary import MemorizationSummary, summarize
from tfidf_tune.analysis._token_weights import (
    TERM_FREQUENCIES,
    TermFrequency,
    WeightedBlocks,
    read_blocks,
    typical_blocks,
    weigh_blocks,
)
from tfidf_tune.analysis._verdicts import BETTER, NO_DIFFERENCE, VERDICTS, WORSE, verdict
from tfidf_tune.analysis._vocabulary import require_known_ids
from tfidf_tune.analysis._weight_statistics import (
    FrequencyBand,
    TokenStatistics,
    frequency_bands,
    most_weighted,
    token_statistics,
)
from tfidf_tune.analysis._word_pieces import (
    MOST_PIECES,
    PartStatistics,
    SplitStatistics,
    WordPart,
    part_statistics,
    split_statistics,
    token_texts,
)

__all__ = [
    "ANSWER_MEASURES",
    "BETTER",
    "CONTROL_LMS",
    "DOWNSTREAM_MEASURES",
    "ENOUGH_UNITS",
    "LMS",
    "MIN_UNITS",
    "MOST_PIECES",
    "NO_DIFFERENCE",
    "NUM_RESAMPLES",
    "PERPLEXITY",
    "SEED",
    "SUMMARY_MEASURES",
    "TERM_FREQUENCIES",
    "VERDICTS",
    "WORSE",
    "AnswerScore",
    "BlockScore",
    "Bracket",
    "Comparison",
    "EqualPerplexity",
    "Evaluation",
    "Floor",
    "FrequencyBand",
    "Frontier",
    "FrontierCurve",
    "FrontierPoint",
    "Interval",
    "Measure",
    "MemorizationSummary",
    "ModelRuns",
    "PartStatistics",
    "ProbeSample",
    "ProbeTokenizer",
    "Reduction",
    "Run",
    "RunRecord",
    "SeedDifference",
    "SeedEstimate",
    "SplitStatistics",
    "SummaryScore",
    "TermFrequency",
    "TokenStatistics",
    "WeightedBlocks",
    "WordPart",
    "bootstrap_interval",
    "check_passages",
    "compare_continuation",
    "compare_objectives",
    "describe_machine",
    "frequency_bands",
    "greedy_continuations",
    "group_runs",
    "last_evaluations",
    "lms_floor",
    "load_model",
    "load_records",
    "longest_memorized_substring",
    "longest_memorized_substrings",
    "longest_prefix_match",
    "longest_prefix_matches",
    "most_weighted",
    "over_seeds",
    "own_interval",
    "part_statistics",
    "perplexity_of",
    "probe",
    "provenance_of",
    "read_blocks",
    "read_records",
    "read_runs",
    "read_samples",
    "records_of",
    "require_known_ids",
    "rouge_l",
    "rouge_scores",
    "split_statistics",
    "summarize",
    "token_perplexity",
    "token_statistics",
    "token_texts",
    "trace_frontiers",
    "typical_blocks",
    "verdict",
    "weigh_blocks",
    "write_records",
    "write_samples",
]
