"""The nine tasks of the readout paper (table 7), with the prompts of its release.

Each row of a dataset becomes `prompt`, `choices` and `gold`. The log-likelihood of " " + choice is scored; scores that
use lengths count the tokenizer's tokens.
"""

from datasets import Dataset


QUESTION = "Question: {}\nAnswer:"


def asked(prompt: str, choices: list[str], gold: int) -> dict:
    return {"prompt": prompt, "choices": choices, "gold": gold}


def items(dataset: Dataset, of_row, is_item=lambda row: True) -> Dataset:
    kept = [of_row(number, row) for number, row in enumerate(dataset) if is_item(row)]
    return Dataset.from_list(kept)


def lettered(dataset: Dataset, question: str) -> Dataset:
    """ARC, OpenBookQA, CommonsenseQA: choices are their texts, not their letters."""

    def of_row(_, row):
        labels = [str(label) for label in row["choices"]["label"]]
        return asked(QUESTION.format(row[question]), row["choices"]["text"], labels.index(str(row["answerKey"])))

    return items(dataset, of_row, lambda row: str(row["answerKey"]) in map(str, row["choices"]["label"]))


def arc(dataset: Dataset) -> Dataset:
    return lettered(dataset, "question")


def commonsense_qa(dataset: Dataset) -> Dataset:
    return lettered(dataset, "question")


def openbookqa(dataset: Dataset) -> Dataset:
    return lettered(dataset, "question_stem")


def piqa(dataset: Dataset) -> Dataset:
    def of_row(_, row):
        return asked(QUESTION.format(row["goal"]), [row["sol1"], row["sol2"]], int(row["label"]))

    return items(dataset, of_row)


def boolq(dataset: Dataset) -> Dataset:
    def of_row(_, row):
        prompt = f"Passage: {row['passage']}\n" + QUESTION.format(row["question"] + "?")
        return asked(prompt, ["no", "yes"], int(row["label"]))

    return items(dataset, of_row)


def hellaswag(dataset: Dataset) -> Dataset:
    """Use the raw text, with its brackets."""

    def of_row(_, row):
        ending = row["ctx_b"][:1].upper() + row["ctx_b"][1:]
        return asked(f"{row['ctx_a']} {ending}".strip(), row["endings"], int(row["label"]))

    return items(dataset, of_row, lambda row: row["label"] not in ("", None))


def winogrande(dataset: Dataset) -> Dataset:
    """Choose between both complete sentences, after a prompt that is the same for all rows."""

    def of_row(_, row):
        sentences = [row["sentence"].replace("_", row[option]) for option in ("option1", "option2")]
        return asked("Complete the sentence:", sentences, int(row["answer"]) - 1)

    return items(dataset, of_row)


def sciq(dataset: Dataset) -> Dataset:
    """Ask without the supporting passage. The position of the right answer rotates from row to row."""

    def of_row(number, row):
        choices = [row[name] for name in ("correct_answer", "distractor1", "distractor2", "distractor3")]
        shift = number % 4
        choices = choices[shift:] + choices[:shift]
        return asked(QUESTION.format(row["question"]), choices, choices.index(row["correct_answer"]))

    return items(dataset, of_row)
