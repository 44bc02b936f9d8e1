"""The tables of an audit that follow from the likelihoods of passages: how well each score tells
targets from controls, and how likely they are.
"""

import pandas as pd

from tfidf_tune.audit._headline import Headline
from tfidf_tune.audit._true_positives import FEWEST_CONTROLS
from tfidf_tune.report.document import Table, tabulate
from tfidf_tune.results.membership_table import ATTACKS, TPR, auc_header

_COLUMNS = (
    ("Score", "score", ""),
    ("AUC", "auc", ".2f"),
    ("95 % from", "low", ".2f"),
    ("95 % to", "high", ".2f"),
)


def likelihood_tables(
    likelihoods: Table, headline: Headline, num_controls: int
) -> tuple[Table, Table]:
    """Divide the row of one model, which is too wide for a page, into a table with a row for each
    score, the headline first, and a table of all else.

    Args:
        likelihoods (Table): of :func:`~tfidf_tune.results.membership_table.membership_table`.
        headline (Headline): the score that decides.
        num_controls (int): with fewer than 100, a note says why true positives are left out.
    """
    frame = likelihoods.frame
    if frame.empty:
        return likelihoods, likelihoods
    about_nll, about_auc, _, about_exposure, about_extracted, intervals = likelihoods.notes

    rows = []
    headers = list(TPR)
    for attack in sorted(ATTACKS, key=lambda attack: attack != headline.score):
        header = auc_header(attack)
        headers += [header, f"{header} from", f"{header} to"]
        if header not in frame:
            continue
        # Without an interval, as of a single passage, its columns are missing.
        auc, low, high = frame.iloc[0].reindex(headers[-3:])
        is_headline = attack == headline.score
        score = f"{attack} (headline)" if is_headline else attack
        rows.append({"score": score, "auc": auc, "low": low, "high": high})
    notes = [about_auc, intervals]
    if headline.score is not None:
        notes.insert(
            0,
            "Headline: the score that decides about membership, by the kind of targets, whatever "
            f"the scores are: {headline.reason}.",
        )
    if num_controls < FEWEST_CONTROLS:
        notes.append(
            "True positives at 1 % false positives are left out: 1 % takes "
            f"{FEWEST_CONTROLS} controls, and there are {num_controls}."
        )
    membership = tabulate("membership", "Membership inference", pd.DataFrame(rows), _COLUMNS, notes)
    rest = Table(
        "likelihood",
        "Likelihood of the passages",
        frame.drop(columns=headers, errors="ignore"),
        [about_nll, about_exposure, about_extracted, intervals],
        likelihoods.formats,
    )
    return membership, rest.without_lone_model()
