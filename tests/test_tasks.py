"""The tasks: answers by brute force, chance as stated, nothing downloaded, and all that the papers name exists."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager
from lm_eval.tasks.wikitext import preprocess_wikitext

from looped_eval.tasks import generate, generators
from looped_eval.tasks.text import process_results
from tests.helpers import quick_and_slow
from tests.helpers_harness import AnsweringModel


FOLDER = Path(__file__).parent.parent / "eval" / "tasks"
CHOICES = [
    "looped_p_hop_1",
    "looped_p_hop_2",
    "looped_p_hop_3",
    "looped_p_hop_4",
    "looped_permutation_1",
    "looped_permutation_2",
    "looped_permutation_4",
    "looped_permutation_8",
    "looped_row_1",
    "looped_row_2",
    "looped_row_3",
    "looped_row_4",
    "looped_addition_2",
    "looped_addition_4",
    "looped_story_1",
    "looped_story_2",
    "looped_story_3",
    "looped_story_4",
]


@pytest.fixture(scope="module")
def offline():
    return TaskManager(include_path=str(FOLDER), include_defaults=False)


def documents(manager, name: str) -> list[dict]:
    return list(manager.load(name)["tasks"][name].test_docs())


# answers


def p_hop_answer(text: str) -> str:
    pairs, question = text.split(" ; ")
    follows = dict(pair for pair in pairs.split())
    symbol = question[0]
    for _ in range(int(question[1:])):
        symbol = follows[symbol]
    return symbol


def permutation_answer(text: str) -> str:
    state, _, rest = text.partition(" : ")
    state, (swaps, place) = state.split(), rest.split(" ; ")
    for first, second in swaps.split():
        first, second = int(first) - 1, int(second) - 1
        state[first], state[second] = state[second], state[first]
    return state[int(place) - 1]


def row_answer(text: str) -> str:
    """Everybody moves, one sentence after the other."""
    start, *told, asked = text.split(" . ")
    a, b, c, d = start.split()
    for sentence in told:
        match sentence.split():
            case "the", "first", "two", "swap":
                a, b = b, a
            case "the", "middle", "two", "swap":
                b, c = c, b
            case "the", "last", "two", "swap":
                c, d = d, c
            case "the", "outer", "two", "swap":
                a, d = d, a
            case "the", "two", "halves", "swap":
                a, b, c, d = c, d, a, b
            case "the", "row", "turns", "round":
                a, b, c, d = d, c, b, a
            case other:
                raise AssertionError(other)
    return dict(first=a, second=b, third=c, last=d)[asked.removeprefix("now ")]


def addition_answer(text: str) -> str:
    first, second = text.removesuffix("=").replace(" ", "").split("+")
    return " ".join(str(int(first) + int(second)).zfill(len(first) + 1))


def story_answer(text: str) -> str:
    """Everybody goes where the other one goes, again and again until all are somewhere."""
    *sentences, question = text.split(" . ")
    places, others = {}, {}
    for person, verb, rest in (sentence.split() for sentence in sentences):
        (places if verb == "went" else others)[person] = rest
    while not others.keys() <= places.keys():
        places |= {person: places[other] for person, other in others.items() if other in places}
    return places[question.removeprefix("where is ").removesuffix(" ?")]


ANSWERS = {
    "p_hop": p_hop_answer,
    "permutation": permutation_answer,
    "row": row_answer,
    "addition": addition_answer,
    "story": story_answer,
}


@pytest.mark.parametrize("name", CHOICES)
def test_answers(offline, name):
    answer = ANSWERS[name.removeprefix("looped_").rpartition("_")[0]]
    for document in documents(offline, name):
        assert document["choices"][document["answer"]] == answer(document["text"])
        assert len(set(document["choices"])) == len(document["choices"])


@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_p_hop_walks_a_cycle_of_all_symbols(hops):
    """So an answer never repeats on the way, and no walk is shorter than it says; 4 of 8 is as far back as forth."""
    for number in range(50):
        text = generators.p_hop_question(number, hops)["text"]
        start = text.split(" ; ")[1][0]
        walk = [p_hop_answer(f"{text.split(' ; ')[0]} ; {start}{steps}") for steps in range(1, 9)]
        assert sorted(walk) == list("abcdefgh") and walk[-1] == start


# chance


def evaluate(manager, model: LM, tasks: list[str]) -> dict:
    found = simple_evaluate(model, tasks=tasks, task_manager=manager, bootstrap_iters=0, log_samples=False)
    return found["results"]


@pytest.mark.parametrize("name", quick_and_slow(CHOICES, "looped_p_hop_2", "looped_permutation_4"))
def test_who_does_not_read_scores_chance_exactly(offline, name):
    results = evaluate(offline, AnsweringModel(), [name])
    stated = yaml.safe_load((FOLDER / f"{name.removeprefix('looped_')}.yaml").read_text().replace("!function", ""))
    assert results[name]["acc,none"] == pytest.approx(stated["metadata"]["chance"], abs=1e-9)


@pytest.mark.parametrize("kind", quick_and_slow(ANSWERS))
def test_who_reads_scores_one(offline, kind):
    names = [name for name in CHOICES if kind in name]
    results = evaluate(offline, AnsweringModel(ANSWERS[kind]), names)
    assert [results[name]["acc,none"] for name in names] == [1.0] * len(names)


def test_written_sums_are_matched_whatever_follows_them(offline):
    results = evaluate(offline, AnsweringModel(addition_answer), ["looped_addition_written"])
    assert results["looped_addition_written"]["exact_match,first_digits"] == 1.0
    wrong = AnsweringModel(lambda text: addition_answer(text)[::-1])
    palindromes = sum(
        answer == answer[::-1]
        for answer in (addition_answer(document["text"]) for document in documents(offline, "looped_addition_written"))
    )
    results = evaluate(offline, wrong, ["looped_addition_written"])
    assert results["looped_addition_written"]["exact_match,first_digits"] == palindromes / 100


def test_ignoring_the_swaps_is_chance(offline):
    """The object that lay at the place from the start is no better guess than another, however few the swaps."""
    for swaps in (1, 2, 4, 8):
        found = documents(offline, f"looped_permutation_{swaps}")
        still = sum(
            d["text"].split(" : ")[0].split()[int(d["text"][-1]) - 1] == d["choices"][d["answer"]] for d in found
        )
        assert abs(still / len(found) - 0.2) < 0.1  # four standard deviations of 250 draws


def test_a_story_is_as_many_sentences_deep_as_it_says():
    """Back from the person who is asked about to the place."""
    for relations in (1, 2, 3, 4):
        for number in range(50):
            *sentences, question = generators.story_question(number, relations)["text"].split(" . ")
            says = {one: (verb, rest) for one, verb, rest in (sentence.split() for sentence in sentences)}
            steps, (verb, rest) = 1, says[question.split()[2]]
            while verb != "went":
                steps, (verb, rest) = steps + 1, says[rest]
            assert steps == relations and len(says) == 12


def test_a_row_has_as_many_moves_as_it_says_and_no_place_is_likelier():
    for moves in (1, 2, 3, 4):
        came_from = Counter()
        for number in range(252):
            question = generators.row_question(number, moves)
            row, *told, asked = question["text"].split(" . ")
            assert len(told) == moves and sorted(row.split()) == question["choices"]
            came_from[row.split().index(question["choices"][question["answer"]])] += 1
            came_from["stayed"] += row_answer(f"{row} . {asked}") == row_answer(question["text"])
        assert all(abs(came_from[place] - 63) < 28 for place in (0, 1, 2, 3, "stayed"))  # four standard deviations


def test_every_place_after_the_moves_is_asked_for_once():
    for text in generators.documents("row", 50):
        _, asked = text.split(" now ")
        assert sorted(asked.replace(" , ", " ").split()[::2]) == ["first", "last", "second", "third"]


def test_every_place_after_the_swaps_is_asked_for_once():
    for text in generators.documents("permutation", 50, swaps=4, symbols=3, questions=3):
        start, asked = text.split(" ; ")
        words = asked.split()
        assert sorted(words[::2]) == ["1", "2", "3"] and sorted(words[1::2]) == ["a", "b", "c"]
        for place, found in zip(words[::2], words[1::2]):
            assert permutation_answer(f"{start} ; {place}") == found


def test_sums_give_nothing_away():
    """The four are corners of a rectangle, of which the right one is any."""
    ranks = Counter()
    for number in range(400):
        question = generators.addition_question(number, digits=3)
        values = [int(choice.replace(" ", "")) for choice in question["choices"]]
        low, second, third, high = sorted(values)
        assert low + high == second + third
        assert all(word.isdigit() for choice in question["choices"] for word in choice.split())
        ranks[sorted(values).index(values[question["answer"]])] += 1
    assert all(abs(ranks[rank] - 100) < 40 for rank in range(4))  # four and a half standard deviations


# text to train on


@pytest.mark.parametrize("task", generators.DEFAULTS)
def test_training_text_is_answered_right_and_is_not_what_is_evaluated(task):
    evaluated = {
        "p_hop": {generators.p_hop_question(n, h)["text"].split(" ; ")[0] for h in range(1, 5) for n in range(252)},
        "permutation": {generators.permutation_question(n, s)["text"] for s in (4, 8) for n in range(250)},
        "addition": {generators.addition_question(n, 4)["text"] for n in range(252)},
        "row": {generators.row_question(n, m)["text"].split(" . ")[0] for m in range(1, 5) for n in range(252)},
        "story": {generators.story_question(n, 4)["text"].split(" where is ")[0] for n in range(252)},
    }[task]
    seen = Counter()
    for text in generators.documents(task, 2000):
        if task == "p_hop":
            pairs, questions = text.split(" ; ")
            asked = questions.split()
            for question, answer in zip(asked[::2], asked[1::2]):
                assert p_hop_answer(f"{pairs} ; {question}") == answer
                seen[question[1]] += 1
            assert pairs not in evaluated
        elif task == "row":
            told, questions = text.split(" now ")
            for question in questions.split(" , "):
                place, person = question.split()
                assert row_answer(f"{told} now {place}") == person
            assert told.split(" . ")[0] not in evaluated
        elif task == "story":
            told, questions = text.split(" where is ")
            for question in questions.split(" , "):
                person, place = question.split(" ? ")
                assert story_answer(f"{told} where is {person} ?") == place
            assert told not in evaluated
        else:
            prompt, answer = text.rsplit(" ", 1) if task == "permutation" else text.split(" = ")
            prompt += " =" if task == "addition" else ""
            assert ANSWERS[task](prompt) == answer
            assert prompt not in evaluated
    if task == "p_hop":
        assert set(seen) == set("1234") and max(seen.values()) < 1.1 * min(seen.values())


def test_generated_file(tmp_path, capsys, monkeypatch):
    def interrupted(*args, **settings):
        yield "a text"
        raise KeyboardInterrupt

    path = generate.main(["p_hop", "hops=2", "symbols=5", "--documents", "3", "--output", str(tmp_path / "a.jsonl")])
    texts = [json.loads(line)["text"] for line in path.read_text().splitlines()]
    assert texts == list(generators.documents("p_hop", 3, 0, hops=2, symbols=5))
    again = generate.main(["p_hop", "--seed", "1", "--documents", "3", "--output", str(tmp_path / "b.jsonl")])
    assert len({*texts, *again.read_text().splitlines()}) == 6
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(generate, "documents", interrupted)
        generate.main(["p_hop", "--output", str(tmp_path / "c.jsonl")])
    for bad in ("hop=2", "hops", "hops=two", "hops=0", "hops=8"):
        with pytest.raises(SystemExit, match=bad):
            generate.main(["p_hop", bad, "--output", str(tmp_path / "c.jsonl")])
    for task, bad in (
        ("permutation", "questions=6"),
        ("story", "relations=5"),
        ("row", "questions=5"),
        ("story", "questions=13"),
    ):
        with pytest.raises(SystemExit, match=f"{task}: {bad} must be at least 1 and at most"):
            generate.main([task, bad, "--output", str(tmp_path / "c.jsonl")])
    assert not (tmp_path / "c.jsonl").exists()


def test_documents_never_change():
    """Scores of different times are only comparable on the same documents."""
    assert generators.p_hop_question(0, 2)["text"] == "cd fa ec bh hf ge ag db ; h2"
    assert generators.permutation_question(0, 4)["text"] == "a b d c e : 34 45 31 53 ; 5"
    assert (
        generators.row_question(0, 2)["text"]
        == "anna emil ben dora . the row turns round . the first two swap . now last"
    )
    assert generators.addition_question(0, 4)["text"] == "1 7 7 4 + 3 7 2 5 ="
    assert generators.story_question(0, 2)["text"].endswith("gina . where is emil ?")


# the corpus


def test_corpus_is_held_out_and_counted_in_bytes(offline):
    from looped_recipes.data.embedded import embedded_documents
    from looped_recipes.data.part_files import HeldOut

    texts = [document["text"] for document in documents(offline, "looped_corpus")]
    held_out = [text for text in embedded_documents() if text in HeldOut(fraction=0.05)]
    assert len(texts) == len(held_out) > 10
    assert all(full.startswith(text) and 0 < len(text) < 6000 for text, full in zip(texts, held_out))
    results = evaluate(offline, AnsweringModel(), ["looped_corpus"])["looped_corpus"]
    assert results["bits_per_byte,none"] == pytest.approx(8)
    assert results["byte_perplexity,none"] == pytest.approx(256)


@pytest.mark.parametrize("text", ["a b", " a  b\n", "é\n"])
def test_words_and_bytes_are_counted_as_lm_eval_counts_those_of_wikitext(text):
    assert process_results({"text": text}, (-2.0,)) == preprocess_wikitext.process_results({"page": text}, (-2.0,))


# what papers report


@pytest.fixture(scope="module")
def all_tasks():
    """lm-eval's own too, which are many to read."""
    return TaskManager(include_path=str(FOLDER))


def members(entry) -> list[tuple[str, dict]]:
    config = yaml.safe_load(entry.yaml_path.read_text())
    return [(item, {}) if isinstance(item, str) else (item["task"], item) for item in config["task"]]


@pytest.mark.slow
def test_groups_name_tasks_that_exist(all_tasks):
    index = all_tasks.task_index
    groups = [name for name in all_tasks.all_groups if index[name].yaml_path.parent == FOLDER]
    assert len(groups) == 11
    for group in groups:
        for task, _ in members(index[group]):
            assert task in all_tasks.all_tasks, (group, task)


@pytest.mark.slow
def test_papers_lists(all_tasks):
    index = all_tasks.task_index
    nine = "boolq winogrande commonsense_qa sciq piqa arc_easy arc_challenge hellaswag openbookqa".split()
    assert [name for name, _ in members(index["readout_nine_lm_eval"])] == nine
    released = [f"readout_{name}" for name in nine]
    assert [name for name, _ in members(index["readout_nine_as_released"])] == released
    shots = {name: item["num_fewshot"] for name, item in members(index["fully_looped_six_lm_eval"])}
    ten = {"piqa": 10, "hellaswag": 10, "arc_easy": 10, "arc_challenge": 10}
    assert shots == {"lambada_openai": 0, "openbookqa": 0, **ten}
    six = "hellaswag arc_challenge arc_easy piqa boolq sciq".split()
    assert [name for name, _ in members(index["parcae_zero_shot"])] == six
    own = set(itertools.chain(nine, shots, six))
    assert all(str(FOLDER) not in str(index[name].yaml_path) for name in own)  # lm-eval's, not ours
