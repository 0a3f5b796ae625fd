"""Two models over the same questions: scores by hand, intervals against all resamples there are."""

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch
from lm_eval.tasks import TaskManager
from scipy.stats import norm as normal
from scipy.stats import t as student
from scipy.stats import ttest_ind, ttest_rel

from looped_eval import statistics
from looped_eval.common.samples import Item, Question, gold_indices, length_in, read_samples
from looped_eval.harness.command import results_by_depth
from looped_eval.harness.looped_lm import LoopedLM
from looped_eval.statistics import compare, compare_seeds, item_scores, paired_bootstrap
from modeling_looped import LoopedForCausalLM
from tests.helpers import tiny_tokenizer
from tests.helpers_harness import save_model_and_tokenizer, task_configs, task_documents


def item(task="t", doc_id=0, gold=0, log_likelihoods=(-1.0, -2.0), lengths=(1, 1)) -> Item:
    return Item(task, doc_id, f"hash{doc_id}", gold, np.array(log_likelihoods), np.array(lengths, dtype=float))


def test_scores_of_an_item():
    scores = item_scores(item(gold=2, log_likelihoods=(-4.0, -9.0, -6.0), lengths=(1, 3, 4)))
    # per token: -4, -3, -1.5
    total = math.exp(-4) + math.exp(-3) + math.exp(-1.5)
    assert scores == pytest.approx(
        {
            "accuracy": 0.0,
            "normalised_accuracy": 1.0,
            "candidate_nll": 8.5 / 3,
            "gold_nll": 1.5 + math.log(total),
            "gold_margin": 1.5,
            "gold_probability": math.exp(-1.5) / total,
        }
    )


def test_probabilities_of_very_unlikely_candidates():
    scores = item_scores(item(gold=1, log_likelihoods=(-9000.0, -9001.0)))
    assert scores["gold_probability"] == pytest.approx(1 / (1 + math.e)) and scores["gold_margin"] == -1


@pytest.mark.parametrize("level", [0.5, 0.8, 0.9])
@pytest.mark.some(1)
def test_interval_against_every_resample(level):
    """Of five items there are 5^5 resamples, all equally likely: their quantiles are the interval, once it is widened
    as Student's interval of five items is wider than a normal one with the standard deviation over n."""
    first = np.array([0.3, -1.0, 0.2, 0.55, 2.0])
    second = np.array([0.1, 0.5, 0.25, 1.0, 1.9])
    differences = second - first
    means = sorted(differences[list(drawn)].mean() for drawn in itertools.product(range(5), repeat=5))
    wider = math.sqrt(5 / 4) * student.ppf((1 + level) / 2, 4) / normal.ppf((1 + level) / 2)
    found = paired_bootstrap(first, second, level, resamples=40_000)
    found = [differences.mean() + (end - differences.mean()) / wider for end in found]
    for value, share in zip(found, ((1 - level) / 2, (1 + level) / 2)):
        # between the exact quantiles at four standard errors of 40,000 draws to either side
        slack = 4 * math.sqrt(share * (1 - share) / 40_000)
        low, high = (np.quantile(means, share + side * slack) for side in (-1, 1))
        assert low - 1e-12 <= value <= high + 1e-12


def test_pairs_are_kept_together():
    """Scores that vary a lot and always differ by the same amount: the change is certain."""
    first = np.random.default_rng(0).normal(scale=10, size=50)
    assert paired_bootstrap(first, first + 0.25) == pytest.approx((0.25, 0.25))
    with pytest.raises(ValueError, match="got 2 and 3"):
        paired_bootstrap(first[:2], first[:3])


def test_interval_of_many_items_is_the_normal_one():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 2000))
    low, high = paired_bootstrap(first, second, resamples=4000)
    error = 1.96 * (second - first).std() / math.sqrt(2000)
    middle = (second - first).mean()
    assert (middle - low, high - middle) == pytest.approx((error, error), rel=0.1)


def test_an_interval_over_tasks_is_that_of_the_mean_of_their_means():
    rng = np.random.default_rng(2)
    tasks = np.array(["many"] * 1800 + ["few"] * 200)
    first, second = rng.normal(size=(2, 2000)) * np.where(tasks == "few", 3.0, 1.0)
    low, high = paired_bootstrap(first, second, resamples=4000, tasks=tasks)
    of_tasks = [(second - first)[tasks == task] for task in ("many", "few")]
    middle = sum(of.mean() for of in of_tasks) / 2
    error = 1.96 * math.sqrt(sum(of.var() / len(of) for of in of_tasks)) / 2
    assert (middle - low, high - middle) == pytest.approx((error, error), rel=0.1)


def test_each_task_takes_a_degree_of_freedom():
    """Of the 16 resamples of two items of two tasks one has the lowest mean and one the highest, 6 % of draws each."""
    first, second, tasks = np.zeros(4), np.array([0.0, 1.0, 0.0, 1.0]), np.array(list("aabb"))
    reach = 0.5 * math.sqrt(2) * student.ppf(0.975, 4 - 2) / normal.ppf(0.975)
    assert paired_bootstrap(first, second, tasks=tasks) == pytest.approx((0.5 - reach, 0.5 + reach), rel=1e-6)


def test_a_task_of_few_items_widens_the_interval():
    """Welch's interval of a - (-b), of means of 8 and 500 items: next to all scatter is that of the 8."""
    few, many = normal.ppf((np.arange(8) + 0.5) / 8), normal.ppf((np.arange(500) + 0.5) / 500)
    welch = ttest_ind(few, -many, equal_var=False).confidence_interval(0.95)
    found = paired_bootstrap(np.zeros(508), np.append(few, many), tasks=np.repeat([0, 1], [8, 500]), resamples=4000)
    assert found == pytest.approx((welch.low / 2, welch.high / 2), rel=0.05)
    assert paired_bootstrap(np.zeros(6), np.ones(6), tasks=np.repeat([0, 1], [2, 4])) == (1, 1)


def test_accuracy_over_tasks_and_scores_over_items():
    """Of two tasks, one has one item and the other three; the order of the items is no matter."""
    first = [item("a", 0, gold=1)] + [item("b", i) for i in range(3)]
    second = [item("b", i, log_likelihoods=(-1.0, -1.5 - i)) for i in (2, 0, 1)] + [item("a", 0, gold=0)]
    second[-1] = item("a", 0, gold=1, log_likelihoods=(-2.0, -1.0))
    result = compare(first, second, level=0.5, resamples=100)
    assert result["items"] == 4 and result["tasks"] == ["a", "b"]
    assert (result["accuracy"]["first"], result["accuracy"]["second"]) == (0.5, 1.0)  # (0 + 1) / 2, not 3 / 4
    assert result["gold_margin"]["first"] == pytest.approx((-1 + 1 + 1 + 1) / 4)
    assert result["gold_margin"]["second"] == pytest.approx((1 + 0.5 + 1.5 + 2.5) / 4)
    # a task of a single item does not tell how its items differ
    half = paired_bootstrap(np.array([-1.0, 1, 1, 1]), np.array([1, 0.5, 1.5, 2.5]), level=0.5, resamples=100)
    assert result["accuracy"]["interval"] is None and result["gold_margin"]["interval"] == pytest.approx(half)
    for sides in ((first, second[1:]), (first[:3], second)):
        with pytest.raises(ValueError, match="1 items are in one of the two only, e.g. doc_id 2 of b"):
            compare(*sides)


def said_of(pairs: list[tuple[tuple, tuple]]) -> str:
    """Return the sentence on two models with these log-likelihoods of a right and a wrong candidate."""
    sides = [[item(doc_id=i, log_likelihoods=pair[side]) for i, pair in enumerate(pairs)] for side in (0, 1)]
    result = compare(*sides, resamples=200)
    statistics.table(result)
    return statistics.difference_in_words(result)


def test_few_items_have_no_verdict():
    better, draw = ((-1.0, -2.0), (-1.0, -2.1)), np.random.default_rng(0)
    assert said_of([better]) == "No verdict from 1 item of 1 task: gold_nll of the second less the first is -0.0259."
    few = [((-1.0, -2.0), (-1.0, -2.1 - noise)) for noise in draw.uniform(0, 0.01, 20)]
    assert said_of(few[:19]).startswith("No verdict from 19 items of 1 task, fewer than 20 items: gold_nll of the")
    assert said_of(few).startswith("The second has the lower gold_nll: gold_nll of the second less the first lies in")
    assert said_of([(b, a) for a, b in few]).startswith("The first has the lower gold_nll")
    assert said_of([better] * 11 + [better[::-1]] * 11).startswith("Neither is clearly better")


def test_an_accuracy_that_says_the_opposite_is_named():
    """Where the first is right the second is a little wrong, and where both are wrong the first is so by far more."""
    both_wrong, second_wrong = ((-9.0, -1.0), (-1.5, -1.0)), ((-1.0, -1.1), (-1.1, -1.0))
    assert said_of([both_wrong] * 20).count("lower") == 1
    said = said_of([both_wrong] * 20 + [second_wrong] * 10)
    assert said.startswith("The second has the lower gold_nll: ")
    assert "But it has the lower accuracy, which of the second less the first lies in [-0." in said


@pytest.mark.filterwarnings("error")
def test_a_candidate_without_probability_has_no_difference():
    pairs = [((-1.0, -math.inf), (-1.0, -math.inf))] * 2 + [((-1.0, -2.0), (-1.5, -2.0))] * 20
    sides = [[item(doc_id=i, log_likelihoods=pair[side]) for i, pair in enumerate(pairs)] for side in (0, 1)]
    result = compare(*sides, resamples=100)
    assert result["candidate_nll"] == {"first": math.inf, "second": math.inf, "change": None, "interval": None}
    assert "| candidate nll | inf | inf | – | – |" in statistics.table(result)
    assert "first has the lower gold_nll" in statistics.difference_in_words(result)
    assert "infinite gold_nll" in said_of([((-math.inf, -1.0), (-1.0, -2.0))] * 30)
    finite, infinite = ([item(doc_id=i, log_likelihoods=(-1.0, low)) for i in range(2)] for low in (-2.0, -math.inf))
    assert compare(finite, infinite, resamples=100)["candidate_nll"]["change"] is None  # of the second alone


def asked(target, candidates, acc=None, likeliest=0, contexts=None, **doc) -> Question:
    contexts = ["q"] * len(candidates) if contexts is None else contexts
    arguments = {f"gen_args_{i}": {"arg_0": a, "arg_1": b} for i, (a, b) in enumerate(zip(contexts, candidates))}
    sample = {"doc_id": 7, "target": target, "doc": doc, "arguments": arguments}
    sample |= {} if acc is None else {"acc": acc}
    return Question(sample, candidates, np.eye(len(candidates))[likeliest])


def test_which_candidate_is_right():
    assert gold_indices("t", [asked(" d", [" c", " d"])]) == [1]
    assert gold_indices("t", [asked("1", [" c", " d"])]) == [1]
    assert gold_indices("t", [asked("7", [" 8", " 7"])]) == [1]  # a text, though it looks like an index
    assert gold_indices("t", [asked("5", [" c", " d"], gold=0)]) == [0]
    with pytest.raises(ValueError, match="t: doc_id 7: target '5' is none of the 2"):
        gold_indices("t", [asked("5", [" c", " d"])])


def test_targets_among_digits_are_what_the_logged_accuracy_says():
    """Candidates 1, 0 and a target 1: the first by its text, the second by its index."""
    digits = [" 1", " 0"]
    by_text, by_index = asked("1", digits, acc=1.0), asked("1", digits, acc=0.0)
    unsaid = asked("0", digits, acc=0.0, likeliest=0)  # what the other question of the task says holds here, too
    assert gold_indices("t", [by_text, unsaid]) == [0, 1]
    assert gold_indices("t", [by_index, asked("0", digits, acc=1.0)]) == [1, 0]
    with pytest.raises(ValueError, match="t: the acc that lm-eval logged is not that of"):
        gold_indices("t", [by_text, by_index])
    with pytest.raises(ValueError, match="t: the right candidate may be .* text .* index .*no logged acc tells"):
        gold_indices("t", [asked("1", digits)])
    assert gold_indices("t", [asked("1", [" 0", " 1"])]) == [1]  # the same either way


def test_a_gold_of_the_document_is_one_reading_among_others():
    """It may be counted from 1 and go beyond the candidates, or be another field that has this name."""
    texts = [" c", " d", " e"]
    from_1 = [asked("0", texts, gold=1), asked("1", texts, gold=2), asked("2", texts, gold=3)]
    assert gold_indices("t", from_1) == [0, 1, 2]
    other = [asked(" c", texts, acc=1.0, gold=2), asked(" d", texts, acc=0.0, gold=2)]
    assert gold_indices("t", other) == [0, 1]
    by_gold = [asked("none", texts, acc=0.0, gold=2), asked("none", texts, acc=1.0, likeliest=1, gold=1)]
    assert gold_indices("t", by_gold) == [2, 1]
    with pytest.raises(ValueError, match="t: the acc that lm-eval logged is not that of .*`gold`, counted from 0"):
        gold_indices("t", [asked("none", texts, acc=1.0, gold=2)])
    with pytest.raises(ValueError, match="t: the right candidate may be .*index is the target or .*`gold`.*no logged"):
        gold_indices("t", [asked("0", texts, gold=1)])


def test_contexts_that_are_chosen():
    def chosen(**more) -> Question:
        return asked(" end", [" end", " end"], contexts=["She", "He"], **more)

    assert gold_indices("t", [chosen(answer="2"), chosen(answer="1")]) == [1, 0]
    assert gold_indices("t", [chosen(answer=0), chosen(answer=1)]) == [0, 1]
    assert gold_indices("t", [chosen(acc=1.0, likeliest=1, answer=1)]) == [1]
    with pytest.raises(ValueError, match="t: contexts are chosen here, and its documents have no `answer`"):
        gold_indices("t", [chosen()])


def test_a_question_with_the_same_answer_twice_is_one_among_others():
    assert gold_indices("t", [asked("1", [" yes", " no"]), asked("0", [" yes", " yes"])]) == [1, 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What lm-eval writes of a model at one loop and at four, and the model."""
    folder = tmp_path_factory.mktemp("runs")
    for name, config in task_configs(folder).items():
        (folder / f"{name}.yaml").write_text(json.dumps({**config, "num_fewshot": 0}))
    model = save_model_and_tokenizer(folder / "model")
    lm = LoopedLM(model, num_loops=[1, 4], batch_size=4, device="cpu")
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    options = {"tasks": ["choice", "letter", "rolling"], "task_manager": manager, "bootstrap_iters": 0}
    results = results_by_depth(lm, {"pretrained": model}, {"output_path": str(folder / "out")}, **options)
    return folder / "out", model, results


def test_samples_of_lm_eval(runs, tmp_path, capsys):
    """Against the model itself, in float64, and the accuracies that lm-eval found."""
    out, folder, results = runs
    output = tmp_path / "new/statistics.json"
    arguments = [str(out / "loops_1"), str(out / "loops_4"), "--tokenizer", folder, "--output", str(output)]
    found = statistics.main([*arguments, "--resamples", "1000"])
    assert json.loads(output.read_text())["items"] == found["items"] == 18
    assert "| gold margin |" in capsys.readouterr().out

    model, tokenizer = LoopedForCausalLM.from_pretrained(folder), tiny_tokenizer()
    for side, depth in (("first", 1), ("second", 4)):
        nlls = []
        for task in ("choice", "letter"):
            for row in task_documents()[task]:
                of_item = []
                for choice in row["choices"]:
                    context = tokenizer(row["question"])["input_ids"]
                    answer = tokenizer(f" {choice}")["input_ids"]
                    ids = torch.tensor((context + answer)[-65:])
                    with torch.no_grad():
                        log_p = model(ids[None, :-1], num_loops=depth).logits[0].double().log_softmax(-1)
                    of_item.append(-log_p[-len(answer) :].gather(-1, ids[-len(answer) :, None]).mean().item())
                nlls.append(sum(of_item) / 3)
        assert found["candidate_nll"][side] == pytest.approx(sum(nlls) / 18, rel=1e-5)
        accuracies = [results[depth]["results"][task]["acc,none"] for task in ("choice", "letter")]
        assert found["accuracy"][side] == pytest.approx(sum(accuracies) / 2)
    change = found["candidate_nll"]
    assert change["interval"][0] < change["change"] < change["interval"][1]


def sample_line(gold: int, wrong: str = "-2.0") -> str:
    """As lm-eval writes it, of a question with two candidates."""
    sample = {
        "doc_id": 0, "doc_hash": "x", "doc": {"gold": gold}, "target": str(gold),
        "arguments": {f"gen_args_{i}": {"arg_0": "a", "arg_1": f" {i}"} for i in range(2)},
        "filtered_resps": [["-1.0", "False"], [wrong, "False"]],
    }  # fmt: skip
    return json.dumps(sample) + "\n"


def test_candidates_that_are_asked_again_without_context(tmp_path):
    """lm-eval's acc_mutual_info asks them; here they are no further candidates."""
    sample = json.loads(sample_line(0))
    sample["arguments"] |= {f"gen_args_{i + 2}": {"arg_0": "", "arg_1": f" {i}"} for i in range(2)}
    sample["filtered_resps"] += [["-0.5", "False"], ["-0.1", "False"]]
    (tmp_path / "again.jsonl").write_text(json.dumps(sample) + "\n")
    (tmp_path / "once.jsonl").write_text(sample_line(0))
    (again,), (once,) = (read_samples(tmp_path / f"{name}.jsonl", len) for name in ("again", "once"))
    assert item_scores(again) == item_scores(once) and item_scores(again)["accuracy"] == 1


def test_a_text_may_hold_what_ends_lines_elsewhere(tmp_path):
    """Lines of JSON end at a line feed alone; lm-eval writes other separators of lines into them as they are."""
    sample = json.loads(sample_line(1))
    sample["doc"]["question"] = "one\u2028two\u2029three\u0085four\x1cfive"
    lines = [json.dumps({**sample, "doc_id": number}, ensure_ascii=False) for number in range(2)]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert [item.gold for item in read_samples(tmp_path / "samples.jsonl", len)] == [1, 1]


def test_a_diverged_model_has_no_accuracy(tmp_path):
    """Its log-likelihoods are no numbers, and the largest of them is none. A candidate may have no probability."""
    file = tmp_path / "samples.jsonl"
    file.write_text(sample_line(0, wrong="-inf"))
    (found,) = read_samples(file, len)
    assert found.log_likelihoods.tolist() == [-1.0, -math.inf]
    file.write_text(sample_line(0) + sample_line(0, wrong="nan"))
    with pytest.raises(ValueError, match="samples.jsonl, doc_id 0: the log-likelihood of a candidate is nan"):
        read_samples(file, len)


def test_an_item_of_several_filters_is_one(tmp_path):
    """lm-eval logs it under each; the first is read."""
    of_filters = [json.dumps({**json.loads(sample_line(0, wrong)), "filter": wrong}) for wrong in ("-2.0", "-0.5")]
    other = sample_line(0).replace('"x"', '"y"')
    (tmp_path / "samples.jsonl").write_text("\n".join([*of_filters, other]))
    found = read_samples(tmp_path / "samples.jsonl", len)
    assert [(item.doc_hash, item.log_likelihoods.tolist()) for item in found] == [("x", [-1, -2]), ("y", [-1, -2])]


def test_lines_that_are_no_samples_are_named(tmp_path):
    """Records of another tool, no record at all, a line that was cut; blank lines say nothing."""
    file, sample = tmp_path / "samples.jsonl", json.loads(sample_line(0))
    file.write_text(sample_line(0) + "\n\n")
    assert len(read_samples(file, len)) == 1
    lacking = [{k: v for k, v in sample.items() if k != key} for key in ("arguments", "doc_hash", "filtered_resps")]
    wrong = [*map(json.dumps, [*lacking, {"id": 1, "pred": "A"}, [1, 2], 3]), sample_line(0)[:40]]
    for line in wrong:
        file.write_text(f"{sample_line(0)}\n{line}\n")
        with pytest.raises(ValueError, match="samples.jsonl, line 3 is no sample that lm-eval logs"):
            read_samples(file, len)


def test_lengths_in_the_tokens_of_a_run(tmp_path, monkeypatch):
    """A run's folder names its model's tokenizer; a folder that is not there is not looked for on the Hub."""
    run = tmp_path / "runs/demo"
    save_model_and_tokenizer(run / "final")
    assert length_in(str(run))("a b c") == length_in(str(run / "final"))("a b c") == 3
    monkeypatch.chdir(tmp_path)
    for name in ("runs/nosuch", "./nosuch", "no/such/run"):
        with pytest.raises(ValueError, match=f"there is no tokenizer folder '{name}'"):
            length_in(name)
    (tmp_path / "runs/unfinished").mkdir()
    with pytest.raises(ValueError, match="can not load tokenizer 'runs/unfinished': .*name a folder that holds a tok"):
        length_in("runs/unfinished")


def test_files_that_were_renamed_are_of_tasks_of_these_names(tmp_path):
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_text(sample_line(0))
    (tmp_path / "more").mkdir()
    (tmp_path / "more/first.jsonl").write_text(sample_line(0) + sample_line(0).replace('"x"', '"y"'))
    with pytest.raises(ValueError, match="2 items .* doc_id 0 of first: .* name, samples_TASK_TIME.jsonl: keep"):
        statistics.main([str(tmp_path / f"{name}.jsonl") for name in ("first", "second")])
    with pytest.raises(ValueError, match="1 items .* doc_id 0 of first: .* a --limit or with the same$"):
        statistics.main([str(tmp_path / f"{name}.jsonl") for name in ("first", "more/first")])


def test_items_that_were_asked_otherwise(tmp_path, capsys):
    """Other prompts are told, and other candidates or answers refused. What acc_mutual_info asks is no prompt."""

    def samples(name: str, candidates=(" c", " d"), contexts="aaa", gold=0) -> str:
        asked = zip(contexts, candidates)
        arguments = {f"gen_args_{i}": {"arg_0": context, "arg_1": text} for i, (context, text) in enumerate(asked)}
        responses = [[str(-1.0 - i), "False"] for i in range(len(candidates))]
        sample = {**json.loads(sample_line(gold)), "arguments": arguments, "filtered_resps": responses}
        (tmp_path / name).mkdir()
        (tmp_path / name / "samples_t_2026-01-01T10-00-00.jsonl").write_text(json.dumps(sample) + "\n")
        return str(tmp_path / name)

    one, again = samples("one"), samples("again", (" c", " d", " c", " d"), ("a", "a", "", ""))
    others = [samples("shots", contexts=["b a", "b a"]), samples("template", ("c", "d"))]
    for second, count in ((again, 0), *((other, 1) for other in others)):
        assert statistics.main([one, second])["other_prompts"] == count
        assert ("Of 1 item, 1 had other prompts in one of the two" in capsys.readouterr().out) == bool(count)
    assert statistics.main([f"{one},{again}", ",".join(others)])["other_prompts"] == 1
    assert "Of 1 item, 1 had other prompts" in capsys.readouterr().out

    for second, message in (
        (samples("order", (" d", " c")), r"\['d', 'c'\], of which 0 is: "),
        (samples("more", (" c", " d", " e")), r"\['c', 'd', 'e'\], of which 0 is: "),
        (samples("key", gold=1), r"\['c', 'd'\], of which 1 is: evaluate both by the same version of the task$"),
    ):
        with pytest.raises(
            ValueError, match=rf"1 of 1 .* doc_id 0 of t: \['c', 'd'\], of which 0 is right, .*{message}"
        ):
            statistics.main([one, second])


def test_folders_without_choices(runs, tmp_path):
    out = runs[0]
    with pytest.raises(ValueError, match="run lm-eval with --log_samples"):
        read_samples(tmp_path, len)
    (rolling,) = (out / "loops_1").rglob("samples_rolling_*.jsonl")
    with pytest.raises(ValueError, match="no multiple-choice samples"):
        read_samples(rolling, len)
    with pytest.raises(ValueError, match="--level must lie between 0 and 1, .* got 1.5"):
        statistics.main([str(out), str(out), "--level", "1.5"])
    with pytest.raises(ValueError, match="--resamples be at least 1,000, .* got 0.95 and 999"):
        statistics.main([str(out), str(out), "--resamples", "999"])


def test_one_depth_of_several_is_to_be_named(tmp_path):
    for depth in (9, 10):
        folder = tmp_path / f"out/loops_{depth}/model"
        folder.mkdir(parents=True)
        (folder / "samples_choice_2026-01-01T10-00-00.jsonl").write_text(sample_line(gold=0))
    with pytest.raises(ValueError, match="several depths: name one of .*out/loops_9, .*out/loops_10$"):
        read_samples(tmp_path / "out", len)
    assert len(read_samples(tmp_path / "out/loops_9", len)) == 1


def test_the_newest_of_equal_calls_is_that_of_the_latest_time(tmp_path):
    for time, gold in (("2026-01-02T09-00-00.5", 1), ("2026-01-01T10-00-00.25", 0)):
        (tmp_path / f"samples_choice_{time}.jsonl").write_text(sample_line(gold))
        results = {"config": {"model_args": {"pretrained": "a"}}, "n-shot": {"choice": 0}}
        (tmp_path / f"results_{time}.json").write_text(json.dumps(results))
    (found,) = read_samples(tmp_path, len)
    assert (found.task, found.gold) == ("choice", 1)


def test_one_seed_of_several_is_to_be_named(tmp_path):
    """Not the newest is taken, nor are seeds said to be depths; folders of different tasks are read together."""
    for seed in ("s0", "s1"):
        for depth in (1, 4):
            folder = tmp_path / f"A/{seed}/loops_{depth}/model"
            folder.mkdir(parents=True)
            (folder / "samples_choice_2026-01-01T10-00-00.jsonl").write_text(sample_line(gold=0))
    shutil.copytree(tmp_path / "A/s0/loops_1", tmp_path / "B/s0")
    shutil.copytree(tmp_path / "A/s1/loops_1", tmp_path / "B/s1")
    for side in "AB":
        with pytest.raises(ValueError, match=f"/{side} holds samples of several runs: name one of .*/s0, .*/s1$"):
            read_samples(tmp_path / side, len)
    with pytest.raises(ValueError, match="/s1 holds samples of several depths: name one of .*/loops_1, .*/loops_4$"):
        read_samples(tmp_path / "A/s1", len)
    (old,) = (tmp_path / "B/s1").rglob("*.jsonl")
    old.rename(old.with_name("samples_other_2026-01-01T10-00-00.jsonl"))
    assert [item.task for item in read_samples(tmp_path / "B", len)] == ["choice", "other"]


@pytest.mark.parametrize("change", [{"model_args": {"exit_threshold": 0.9}}, {"shots": 5}])
def test_calls_with_other_arguments_are_not_taken_for_repeated_ones(tmp_path, change):
    for time, call in (("2026-01-01T10-00-00", {}), ("2026-01-02T10-00-00", change)):
        call = {"model_args": {"exit_threshold": 0.5}, "shots": 0, **call}
        (tmp_path / f"samples_choice_{time}.jsonl").write_text(sample_line(gold=0))
        results = {"config": {"model_args": call["model_args"]}, "n-shot": {"choice": call["shots"]}}
        (tmp_path / f"results_{time}.json").write_text(json.dumps(results))
    with pytest.raises(ValueError, match="several runs: name one of .*choice_2026-01-01.*jsonl, .*2026-01-02.*jsonl$"):
        read_samples(tmp_path, len)


@pytest.mark.parametrize("seeds, level", [(2, 0.95), (4, 0.8)])
def test_over_seeds_against_scipy(seeds, level):
    """Two tasks, of which one has a quarter of the items: accuracies weigh both equally. Items are in any order."""
    rng = np.random.default_rng(seeds)
    tasks = ["a"] * 10 + ["b"] * 30
    drawn = rng.normal(-2, 1, size=(2, seeds, 40, 2))  # of the right candidate and a wrong one
    sides = [[[item(tasks[i], i, 0, of_seed[i]) for i in rng.permutation(40)] for of_seed in side] for side in drawn]
    result = compare_seeds(*sides, level=level)
    right, gap = drawn[..., 0] > drawn[..., 1], drawn[..., 1] - drawn[..., 0]
    expected = {
        "accuracy": (right[..., :10].mean(-1) + right[..., 10:].mean(-1)) / 2,
        "gold_nll": np.log1p(np.exp(gap)).mean(-1),
    }
    for name, (first, second) in expected.items():
        assert result[name]["interval"] == pytest.approx(ttest_rel(second, first).confidence_interval(level))
        assert result[name]["change"] == pytest.approx(second.mean() - first.mean())
        assert result[name]["first_seeds"] == pytest.approx(first) and result[name]["second"] == pytest.approx(
            second.mean()
        )
    assert f"| 40 items of 2 tasks, {seeds} seeds each | first |" in statistics.table(result)
    assert f"This is over {seeds} seeds, on these items." in statistics.difference_in_words(result)
    sides[1][1].pop()
    with pytest.raises(ValueError, match="1 items are in one of the two only"):
        compare_seeds(*sides)


def test_one_trained_model_a_side_does_not_tell_how_seeds_differ(tmp_path, capsys):
    """Both seeds of the second model are better on all items, by amounts that are as unlike as the seeds are."""
    for name, wrong in {"a0": -1.1, "a1": -1.2, "b0": -1.2, "b1": -3.0}.items():
        lines = [sample_line(0, str(wrong - i / 1000)).replace('"x"', f'"{i}"') for i in range(20)]
        (tmp_path / f"{name}/m").mkdir(parents=True)
        (tmp_path / f"{name}/m/samples_t_2026-01-01T10-00-00.jsonl").write_text("".join(lines))
    a0, a1, b0, b1 = (str(tmp_path / name) for name in ("a0", "a1", "b0", "b1"))
    for pair in ((a0, b0), (a1, b1)):
        statistics.main([*pair, "--resamples", "1000"])
        said = capsys.readouterr().out
        assert (
            "The second has the lower gold_nll" in said and "This is of these trained models, not over seeds." in said
        )
    result = statistics.main([f"{a0},{a1}", f"{b0},{b1}"])
    said = capsys.readouterr().out
    assert "Neither is clearly better" in said and "not over seeds" not in said and result["seeds"] == 2
    for wrong, message in (
        ([f"{a0},{a1}", b0], "in pairs, got 2 and 1: name as many"),
        ([f"{a0},{a1}"], "in pairs, got 2: name as many of a second"),
        ([f"{a0},{a0}", f"{b0},{b1}"], "a0 names one folder twice"),
        ([f"{a0},", f"{b0},"], "has an empty name between commas"),
    ):
        with pytest.raises(ValueError, match=message):
            statistics.main(wrong)


@pytest.mark.filterwarnings("error")
def test_a_seed_without_probability_leaves_no_difference_over_seeds():
    sides = [[[item(doc_id=i, log_likelihoods=(-1.0, low)) for i in range(20)] for low in (-2.0, -math.inf)]] * 2
    result = compare_seeds(*sides)
    assert result["candidate_nll"]["change"] is None and result["candidate_nll"]["first"] == math.inf
    assert result["gold_nll"]["change"] == 0 and "| candidate nll | inf | inf | – | – |" in statistics.table(result)
