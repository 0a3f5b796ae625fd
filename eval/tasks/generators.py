"""Generated tasks in which depth matters. Nothing is downloaded: a document is a function of (task, split, number).

p-hop induction     which symbol is p steps further, if pairs state what follows each symbol (after Sanford et al.)
permutation         which object lies at a place after a number of swaps
row                 who stands at a place in a row of four after a number of moves: English sentences
addition            the sum of two numbers; it is written from its first digit, so all carries are needed at once
story               where a person is who followed a person who joined a person who went home: English sentences

Answers are balanced, so that answers made without reading the document are right as often as guesses. lm-eval calls
the functions that its YAML names; `documents` gives the same tasks as text to train on, from another split.
"""

import random
import zlib
from collections.abc import Iterator

from datasets import Dataset, DatasetDict


SYMBOLS = "abcdefghijklmnopqrstuvwxyz"
SEED = 1  # of the evaluated questions


def check(**settings: int):
    """Refuse settings out of range: hops must be fewer than symbols, so that no walk closes its cycle; symbols at most
    as many as letters (or, for permutations, digits 1 to 9); questions at most as many as different ones exist."""
    symbols = settings.get("symbols")
    most = {
        "hops": None if symbols is None else symbols - 1,
        "symbols": 9 if "swaps" in settings else len(SYMBOLS),
        "depth": len(PERSONS) // COMPANIES,
    }
    most["relations"] = settings.get("depth", most["depth"])
    if "swaps" in settings:
        most["questions"] = symbols
    if "moves" in settings:
        most["questions"] = len(STANDS)
    if "relations" in settings:
        most["questions"] = COMPANIES * settings["relations"]
    least = {"symbols": 2}
    for name, value in settings.items():
        low, high = least.get(name, 1), most.get(name)
        if value < low or (high is not None and value > high):
            raise ValueError(f"{name}={value} must be at least {low}" + (f" and at most {high}" if high else ""))


def for_question(task: str, number: int) -> random.Random:
    """Return the random generator of an evaluated question. A string as seed gives the same numbers everywhere."""
    return random.Random(f"{task} test {SEED} {number}")


def for_text(task: str, seed: int, number: int) -> random.Random:
    """Return the random generator of a training document; whatever the seed, it differs from that of any question."""
    return random.Random(f"{task} train {seed} {number}")


# p-hop induction


def draw_cycle(rng: random.Random, symbols: int, hops: int, answer: int | None = None) -> tuple[list[str], str, str]:
    """Return the symbols as a cycle (the first follows the last), and the symbols where the walk starts and ends.

    answer: the end, as an index into the symbols other than the start in alphabetical order, modulo their number.
    """
    start, *others = rng.sample(SYMBOLS[:symbols], symbols)
    if answer is not None:  # balances the answers
        place, wanted = hops - 1, others.index(sorted(others)[answer % len(others)])
        others[place], others[wanted] = others[wanted], others[place]
    return [start, *others], start, others[hops - 1]


def pairs(rng: random.Random, cycle: list[str]) -> str:
    """Return pairs such as `ac cb ba` (c follows a, and so on): every pair once, in random order."""
    found = [symbol + following for symbol, following in zip(cycle, [*cycle[1:], cycle[0]])]
    rng.shuffle(found)
    return " ".join(found)


def p_hop_question(number: int, hops: int, symbols: int = 8) -> dict:
    rng = for_question(f"p_hop {symbols} {hops}", number)
    cycle, start, answer = draw_cycle(rng, symbols, hops, answer=number)
    choices = sorted(set(cycle) - {start})
    return {"text": f"{pairs(rng, cycle)} ; {start}{hops}", "choices": choices, "answer": choices.index(answer)}


def p_hop_text(number: int, hops: int, symbols: int, questions: int, seed: int) -> str:
    """Return the pairs, then `questions` questions of 1 to `hops` hops with their answers."""
    rng = for_text(f"p_hop {symbols} {hops}", seed, number)
    cycle, _, _ = draw_cycle(rng, symbols, hops)
    asked = []
    for _ in range(questions):
        place, steps = rng.randrange(symbols), rng.randint(1, hops)
        asked.append(f"{cycle[place]}{steps} {cycle[(place + steps) % symbols]}")
    return f"{pairs(rng, cycle)} ; " + " ".join(asked)


# permutation tracking


def swap_source(swaps: list[tuple[int, int]], place: int) -> int:
    """Follow the swaps backwards: return where the object that lies at `place` after them lay before."""
    for first, second in reversed(swaps):
        place = second if place == first else first if place == second else place
    return place


def draw_swaps(rng: random.Random, symbols: int, swaps: int) -> tuple[list[tuple[int, int]], int, int]:
    """Return swaps, a place, and the place from which its object came. Every such source is equally likely, even with
    few swaps."""
    place, source = rng.randrange(symbols), rng.randrange(symbols)
    while True:
        drawn = [tuple(rng.sample(range(symbols), 2)) for _ in range(swaps)]
        if swap_source(drawn, place) == source:
            return drawn, place, source


def draw_permutation(
    rng: random.Random, swaps: int, symbols: int, answer: int
) -> tuple[list[str], list[tuple[int, int]], int]:
    """Return objects, swaps, and a place where in the end the object number `answer` (in alphabetical order, modulo
    `symbols`) lies."""
    drawn, place, source = draw_swaps(rng, symbols, swaps)
    objects = rng.sample(SYMBOLS[:symbols], symbols)
    wanted = objects.index(SYMBOLS[answer % symbols])
    objects[source], objects[wanted] = objects[wanted], objects[source]
    return objects, drawn, place


def permutation_prompt(objects: list[str], swaps: list[tuple[int, int]], place: int) -> str:
    moves = " ".join(f"{first + 1}{second + 1}" for first, second in swaps)
    return f"{' '.join(objects)} : {moves} ; {place + 1}"


def permutation_question(number: int, swaps: int, symbols: int = 5) -> dict:
    rng = for_question(f"permutation {symbols} {swaps}", number)
    objects, drawn, place = draw_permutation(rng, swaps, symbols, answer=number)
    choices = list(SYMBOLS[:symbols])
    answer = objects[swap_source(drawn, place)]
    return {"text": permutation_prompt(objects, drawn, place), "choices": choices, "answer": choices.index(answer)}


def permutation_text(number: int, swaps: int, symbols: int, questions: int, seed: int) -> str:
    """Return 1 to `swaps` swaps, then `questions` places, each with the object that lies there in the end."""
    rng = for_text(f"permutation {symbols} {swaps}", seed, number)
    swaps = rng.randint(1, swaps)
    objects, drawn, asked = draw_permutation(rng, swaps, symbols, answer=rng.randrange(symbols))
    others = rng.sample([place for place in range(symbols) if place != asked], questions - 1)
    answers = [objects[swap_source(drawn, place)] for place in (asked, *others)]
    more = "".join(f" {place + 1} {answer}" for place, answer in zip(others, answers[1:]))
    return f"{permutation_prompt(objects, drawn, asked)} {answers[0]}{more}"


# a row of persons

STANDS = "first second third last".split()
AROUND = 5  # persons of whom four are in a row; with all twelve, small models take twice as long to learn the task
MOVES = {  # sentence -> the place where each of the four stood before
    "the first two swap": (1, 0, 2, 3),
    "the middle two swap": (0, 2, 1, 3),
    "the last two swap": (0, 1, 3, 2),
    "the outer two swap": (3, 1, 2, 0),
    "the two halves swap": (2, 3, 0, 1),
    "the row turns round": (3, 2, 1, 0),
}


def row_source(moves: list[str], place: int) -> int:
    """Follow the moves backwards: return where the person who stands at `place` after them stood before."""
    for move in reversed(moves):
        place = MOVES[move][place]
    return place


def is_held_out(row: list[str]) -> bool:
    """Return whether a row is only evaluated, never trained on, which holds for one order in five. There are so few
    rows that with one move random rows of both splits would coincide."""
    return zlib.crc32(" ".join(row).encode()) % 5 == 0


def draw_row(
    rng: random.Random, moves: int, split: str, answer: int | None = None
) -> tuple[list[str], list[str], int]:
    """Return four persons, their moves, and a place. The person who stands there in the end comes from each place with
    equal probability, even with few moves.

    answer: that person, as an index into the four in alphabetical order, modulo 4.
    """
    place, source = rng.randrange(len(STANDS)), rng.randrange(len(STANDS))
    while row_source(told := rng.choices(list(MOVES), k=moves), place) != source:
        pass
    while True:
        row = rng.sample(PERSONS[:AROUND], len(STANDS))
        if answer is not None:
            wanted = row.index(sorted(row)[answer % len(row)])
            row[source], row[wanted] = row[wanted], row[source]
        if is_held_out(row) == (split == "test"):
            return row, told, place


def row_prompt(row: list[str], moves: list[str], place: int) -> str:
    return " . ".join([" ".join(row), *moves, f"now {STANDS[place]}"])


def row_question(number: int, moves: int) -> dict:
    rng = for_question(f"row {moves}", number)
    row, told, place = draw_row(rng, moves, "test", answer=number)
    choices, answer = sorted(row), row[row_source(told, place)]
    return {"text": row_prompt(row, told, place), "choices": choices, "answer": choices.index(answer)}


def row_text(number: int, moves: int, questions: int, seed: int) -> str:
    """Return 1 to `moves` moves, then `questions` places, each with the person who stands there in the end."""
    rng = for_text(f"row {moves}", seed, number)
    row, told, asked = draw_row(rng, rng.randint(1, moves), "train")
    others = rng.sample([place for place in range(len(row)) if place != asked], questions - 1)
    answers = [row[row_source(told, place)] for place in (asked, *others)]
    more = "".join(f" , {STANDS[place]} {answer}" for place, answer in zip(others, answers[1:]))
    return f"{row_prompt(row, told, asked)} {answers[0]}{more}"


# addition


def spaced(value: int, width: int) -> str:
    """Return a number such as `0 8 5`: each digit is a word, so that no tokenizer merges digits."""
    return " ".join(f"{value:0{width}d}")


def draw_sum(rng: random.Random, digits: int) -> tuple[str, int]:
    first, second = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return f"{spaced(first, digits)} + {spaced(second, digits)} =", first + second


def addition_question(number: int, digits: int) -> dict:
    """Return a question with four choices that differ at two digits, so that none of them looks likelier."""
    rng = for_question(f"addition {digits}", number)
    text, total = draw_sum(rng, digits)
    steps = [rng.choice([-1, 1]) * 10**place for place in rng.sample(range(digits), 2)]
    choices = sorted({total, total + steps[0], total + steps[1], total + sum(steps)})
    rng.shuffle(choices)
    place, answer = choices.index(total), number % 4
    choices[place], choices[answer] = choices[answer], choices[place]
    return {"text": text, "choices": [spaced(choice, digits + 1) for choice in choices], "answer": answer}


def addition_text(number: int, digits: int, seed: int) -> str:
    rng = for_text(f"addition {digits}", seed, number)
    text, total = draw_sum(rng, digits)
    return f"{text} {spaced(total, digits + 1)}"


# stories

PERSONS = "anna ben carl dora emil fred gina hans iris jack kate leo".split()
PLACES = "abroad ashore downtown home outside upstairs".split()
VERBS = "followed joined accompanied".split()
COMPANIES = 3  # groups of persons in a story, each at another place


def draw_story(
    rng: random.Random, relations: int, answer: int | None = None
) -> tuple[str, list[list[str]], list[str]]:
    """Return the sentences in random order, the persons of each company, and the places of the companies.

    The n-th person of a company is n sentences away from the place. answer: the place of the first company, as an
    index into the three places in alphabetical order, modulo 3.
    """
    persons, places = rng.sample(PERSONS, COMPANIES * relations), rng.sample(PLACES, COMPANIES)
    if answer is not None:
        wanted = places.index(sorted(places)[answer % COMPANIES])
        places[0], places[wanted] = places[wanted], places[0]
    companies = [persons[start : start + relations] for start in range(0, len(persons), relations)]
    sentences = []
    for company, place in zip(companies, places):
        sentences.append(f"{company[0]} went {place} .")
        sentences += [f"{one} {rng.choice(VERBS)} {other} ." for other, one in zip(company, company[1:])]
    rng.shuffle(sentences)
    return " ".join(sentences), companies, places


def story_question(number: int, relations: int, depth: int = 4) -> dict:
    """Ask for the place of a person who is `relations` sentences away from it, in companies of `depth` persons."""
    rng = for_question(f"story {depth} {relations}", number)
    story, companies, places = draw_story(rng, depth, answer=number)
    choices = sorted(places)
    return {
        "text": f"{story} where is {companies[0][relations - 1]} ?",
        "choices": choices,
        "answer": choices.index(places[0]),
    }


def story_text(number: int, relations: int, questions: int, seed: int) -> str:
    """Return a story, then the places of `questions` of its persons."""
    rng = for_text(f"story {relations}", seed, number)
    story, companies, places = draw_story(rng, relations)
    everybody = [(person, place) for company, place in zip(companies, places) for person in company]
    asked = [f"{person} ? {place}" for person, place in rng.sample(everybody, questions)]
    return f"{story} where is " + " , ".join(asked)


# functions that lm-eval calls with all keys of the YAML's metadata and dataset_kwargs


def _test_split(question, size: int, **settings) -> DatasetDict:
    check(**settings)
    return DatasetDict(test=Dataset.from_list([question(number, **settings) for number in range(size)]))


def p_hop(hops: int, size: int, symbols: int = 8, **_) -> DatasetDict:
    return _test_split(p_hop_question, size, hops=hops, symbols=symbols)


def permutation(swaps: int, size: int, symbols: int = 5, **_) -> DatasetDict:
    return _test_split(permutation_question, size, swaps=swaps, symbols=symbols)


def row(moves: int, size: int, **_) -> DatasetDict:
    return _test_split(row_question, size, moves=moves)


def addition(digits: int, size: int, **_) -> DatasetDict:
    return _test_split(addition_question, size, digits=digits)


def story(relations: int, size: int, depth: int = 4, **_) -> DatasetDict:
    return _test_split(story_question, size, relations=relations, depth=depth)


# text to train on

TEXTS = {
    "p_hop": p_hop_text,
    "permutation": permutation_text,
    "row": row_text,
    "addition": addition_text,
    "story": story_text,
}
DEFAULTS = {
    "p_hop": {"hops": 4, "symbols": 8, "questions": 12},
    "permutation": {"swaps": 8, "symbols": 5, "questions": 1},
    "row": {"moves": 4, "questions": 4},
    "addition": {"digits": 4},
    "story": {"relations": 4, "questions": 8},
}


def documents(task: str, count: int, seed: int = 0, **settings) -> Iterator[str]:
    settings = {**DEFAULTS[task], **settings}
    check(**settings)
    for number in range(count):
        yield TEXTS[task](number, seed=seed, **settings)
