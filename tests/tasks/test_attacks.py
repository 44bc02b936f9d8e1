"""Ways of asking for a passage: their prompts, and what a budget buys."""

import json
import re
from importlib.resources import files

import pytest

from tfidf_tune.commands import audit
from tfidf_tune.passages import read_probe_file
from tfidf_tune.probe import planned_attacks, within_budget
from tfidf_tune.probe.attacks import ATTACKS
from tfidf_tune.tasks.memorization import documents

SETTINGS = {"prefix_lengths": (8, 5), "offsets": (3, 4), "num_samples": 4}
ALL = ("greedy", "offset", "truncated", "noise", "chat", "sampling")


def plan(names=ALL, budget=None, **settings):
    made = within_budget(planned_attacks(names, **SETTINGS | settings), budget, num_passages=10)
    return [(one.name, one.prefix_length, one.offset, one.num_requests) for one in made]


def test_each_attack_has_its_prompts_in_the_given_order():
    assert plan() == [
        ("greedy", 5, 0, 1),
        ("greedy", 8, 0, 1),
        ("offset", 5, 3, 1),
        ("offset", 5, 4, 1),
        ("truncated", 4, 4, 1),
        ("noise", 8, 0, 1),
        ("chat", 8, 0, 1),
        ("sampling", 8, 0, 4),
    ]
    # Of an odd length the second half of the prompt, too, which ends where the whole prompt does.
    assert plan(("truncated",), prefix_lengths=(9,)) == [("truncated", 5, 4, 1)]
    assert plan(("sampling", "greedy"))[0] == ("sampling", 8, 0, 4)
    (noise,) = planned_attacks(["noise"], **SETTINGS, prompt_noise=0.3)
    assert noise.prompt_noise == 0.3
    (sampling,) = planned_attacks(["sampling"], **SETTINGS, temperature=0.5, top_k=7)
    assert sampling.generation == {
        "num_samples": 4,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 7,
    }


@pytest.mark.parametrize("budget", [10, 19, 20, 39, 75, 95, 105, 109, 110, 1000])
def test_a_budget_is_spent_on_whole_rounds_over_the_passages(budget):
    made = plan(budget=budget)
    complete = plan()
    spent = sum(10 * number for *_, number in made)
    assert spent <= budget
    assert [one[:3] for one in made] == [one[:3] for one in complete[: len(made)]]
    rest = complete[len(made) :]
    assert not rest or budget - spent < 10  # another prompt for all passages does not fit
    assert all(
        one == other for one, other in zip(made, complete, strict=False) if one[0] != "sampling"
    )


def test_wrong_plans_are_refused():
    for settings, message in (
        ({"names": ["greedy", "magic"]}, "attacks is 'magic': possible are greedy, offset"),
        ({"names": ["greedy", "greedy"]}, "at most once"),
        ({"names": []}, "at least one"),
        (
            {"budget": 9},
            "a budget of 9 requests does not cover one prompt of each of 10 passages: raise it",
        ),
        ({"prompt_noise": 0.0}, "prompt_noise is 0.0: the share of a prompt's tokens to replace"),
        ({"offsets": (-1,)}, "offsets must be a whole number of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            plan(**settings)


def test_the_prompts_are_those_parts_of_the_passages(llama, probe_file, tokenizers, monkeypatch):
    turns = []

    def apply_chat_template(self, messages, **options):
        turns.append((messages[-1]["content"], options["add_generation_prompt"]))
        return [7, 8, 9]

    monkeypatch.setattr("tfidf_tune.data.HFTokenizer.apply_chat_template", apply_chat_template)
    attacks = [vars(one) for one in planned_attacks(ALL, **SETTINGS)]
    settings = {
        "pretrained": str(llama),
        "prompts": "token_ids",
        "probe_file": str(probe_file),
        "max_new_tokens": 6,
    }
    docs = list(documents(**settings, attacks=attacks)["test"])
    passages = {one.id: one.token_ids for one in read_probe_file(probe_file)}
    assert len(docs) == len(attacks) * len(passages)
    for doc in docs:
        ids = passages[doc["passage_id"]]
        start = doc["offset"]
        end = start + doc["prefix_length"]
        changed = sum(a != b for a, b in zip(doc["prompt_ids"], ids[start:end], strict=True))
        assert (changed == 1) if doc["attack"] == "noise" else not changed
        assert doc["reference_ids"] == ids[end : end + 6]
        asked = [7, 8, 9] if doc["attack"] == "chat" else doc["prompt_ids"]
        assert doc["request"] == " ".join(["token_ids:", *map(str, asked)])
        assert bool(doc.get("generation")) == (doc["attack"] == "sampling")
        assert bool(doc.get("messages")) == (doc["attack"] == "chat")
    assert len(turns) == len(passages)
    for text, generates in turns:
        assert generates
        assert text.startswith("Continue the following text word for word")


def test_an_offset_leaves_a_token_of_every_passage_to_compare(llama, probe_file):
    shortest = min(len(one.token_ids) for one in read_probe_file(probe_file))

    def references(offset):
        attacks = [
            vars(one)
            for one in planned_attacks(["offset"], prefix_lengths=(8, 5), offsets=(0, offset))
        ]
        settings = {"pretrained": str(llama), "prompts": "token_ids", "probe_file": str(probe_file)}
        return [doc["reference_ids"] for doc in documents(**settings, attacks=attacks)["test"]]

    assert min(map(len, references(shortest - 6))) == 1
    with pytest.raises(ValueError, match=rf"has {shortest} tokens, no more than .*{shortest}"):
        references(shortest - 5)


def test_chat_needs_a_template(llama, probe_file):
    attacks = [vars(one) for one in planned_attacks(["chat"], **SETTINGS)]
    settings = {
        "pretrained": str(llama),
        "prompts": "token_ids",
        "probe_file": str(probe_file),
        "max_new_tokens": 6,
    }
    with pytest.raises(ValueError, match="chat_template is not set"):
        documents(**settings, attacks=attacks)


def test_the_schema_and_the_help_name_every_attack(capsys):
    schema = json.loads(
        files("tfidf_tune.audit").joinpath("audit.schema.json").read_text(encoding="utf-8")
    )

    with pytest.raises(SystemExit):
        audit.main(["--help"])

    assert schema["properties"]["attacks"]["items"]["enum"] == [*ATTACKS]
    assert f"ways of asking, in this order: {', '.join(ATTACKS)};" in " ".join(
        capsys.readouterr().out.split()
    )
