"""Generated tasks in which depth matters: nothing to download, and every document a function of (task, split, number).

p-hop induction     which symbol is p steps further, when each pair says what follows what (after Sanford et al.)
permutation         which object lies at a place, after so many swaps
row                 who stands at a place in a row of four, after so many moves: English sentences
addition            two numbers, all carries at once: the sum is written from its first digit
story               where somebody is who followed somebody who joined somebody who went home: English sentences

Answers are balanced, so that whoever does not read the document is right as often as chance. lm-eval calls the
functions that its YAML names; `documents` gives the same tasks as text to train on, of another split.
"""

import random
import zlib
from collections.abc import Iterator

from datasets import Dataset, DatasetDict


SYMBOLS = "abcdefghijklmnopqrstuvwxyz"
SEED = 1  # of the questions that are evaluated


def check(**settings: int):
    """Fewer hops than symbols, so that no walk closes its cycle; at most as many symbols as letters, or as digits."""
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
    """Random numbers for a question that is evaluated; seeded by a string, they are the same on every machine."""
    return random.Random(f"{task} test {SEED} {number}")


def for_text(task: str, seed: int, number: int) -> random.Random:
    """Random numbers for a document to train on: others than those of any question, whatever the seed."""
    return random.Random(f"{task} train {seed} {number}")


# p-hop induction


def draw_cycle(rng: random.Random, symbols: int, hops: int, answer: int | None = None) -> tuple[list[str], str, str]:
    """An order in which each symbol is followed by the next, the last by the first; where the walk starts and ends."""
    start, *others = rng.sample(SYMBOLS[:symbols], symbols)
    if answer is not None:  # the others in order, counted round, so that answers are balanced
        place, wanted = hops - 1, others.index(sorted(others)[answer % len(others)])
        others[place], others[wanted] = others[wanted], others[place]
    return [start, *others], start, others[hops - 1]


def pairs(rng: random.Random, cycle: list[str]) -> str:
    """`ac cb ba`: a is followed by c, and so on; every pair once, in any order."""
    found = [symbol + following for symbol, following in zip(cycle, [*cycle[1:], cycle[0]])]
    rng.shuffle(found)
    return " ".join(found)


def p_hop_question(number: int, hops: int, symbols: int = 8) -> dict:
    rng = for_question(f"p_hop {symbols} {hops}", number)
    cycle, start, answer = draw_cycle(rng, symbols, hops, answer=number)
    choices = sorted(set(cycle) - {start})
    return {"text": f"{pairs(rng, cycle)} ; {start}{hops}", "choices": choices, "answer": choices.index(answer)}


def p_hop_text(number: int, hops: int, symbols: int, questions: int, seed: int) -> str:
    """The pairs, and `questions` questions of 1 to `hops` hops with their answers."""
    rng = for_text(f"p_hop {symbols} {hops}", seed, number)
    cycle, _, _ = draw_cycle(rng, symbols, hops)
    asked = []
    for _ in range(questions):
        place, steps = rng.randrange(symbols), rng.randint(1, hops)
        asked.append(f"{cycle[place]}{steps} {cycle[(place + steps) % symbols]}")
    return f"{pairs(rng, cycle)} ; " + " ".join(asked)


# permutation tracking


def swap_source(swaps: list[tuple[int, int]], place: int) -> int:
    """Where the object that lies at `place` after the swaps lay before them: swaps are followed backwards."""
    for first, second in reversed(swaps):
        place = second if place == first else first if place == second else place
    return place


def draw_swaps(rng: random.Random, symbols: int, swaps: int) -> tuple[list[tuple[int, int]], int, int]:
    """Swaps, a place, and the place from which its object came: each equally often, also where swaps are few."""
    place, source = rng.randrange(symbols), rng.randrange(symbols)
    while True:
        drawn = [tuple(rng.sample(range(symbols), 2)) for _ in range(swaps)]
        if swap_source(drawn, place) == source:
            return drawn, place, source


def draw_permutation(
    rng: random.Random, swaps: int, symbols: int, answer: int
) -> tuple[list[str], list[tuple[int, int]], int]:
    """Objects, swaps, and a place. In the end the object number `answer`, counted round in their order, lies there."""
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
    """1 to `swaps` swaps, and `questions` places, each with the object that lies there in the end."""
    rng = for_text(f"permutation {symbols} {swaps}", seed, number)
    swaps = rng.randint(1, swaps)
    objects, drawn, asked = draw_permutation(rng, swaps, symbols, answer=rng.randrange(symbols))
    others = rng.sample([place for place in range(symbols) if place != asked], questions - 1)
    answers = [objects[swap_source(drawn, place)] for place in (asked, *others)]
    more = "".join(f" {place + 1} {answer}" for place, answer in zip(others, answers[1:]))
    return f"{permutation_prompt(objects, drawn, asked)} {answers[0]}{more}"


# a row of persons

STANDS = "first second third last".split()
AROUND = 5  # persons of whom four stand in the row: with all twelve small models take twice as long to learn it
MOVES = {  # what is told, and where each of the four stood before
    "the first two swap": (1, 0, 2, 3),
    "the middle two swap": (0, 2, 1, 3),
    "the last two swap": (0, 1, 3, 2),
    "the outer two swap": (3, 1, 2, 0),
    "the two halves swap": (2, 3, 0, 1),
    "the row turns round": (3, 2, 1, 0),
}


def row_source(moves: list[str], place: int) -> int:
    """Where the person who stands at `place` after the moves stood before them: moves are followed backwards."""
    for move in reversed(moves):
        place = MOVES[move][place]
    return place


def is_held_out(row: list[str]) -> bool:
    """One order in five is only evaluated: with one move there are too few rows to meet none twice by chance."""
    return zlib.crc32(" ".join(row).encode()) % 5 == 0


def draw_row(
    rng: random.Random, moves: int, split: str, answer: int | None = None
) -> tuple[list[str], list[str], int]:
    """Four persons, their moves, and a place. Who stands there in the end came from each place equally often, also
    where moves are few. answer: who that is, the number of one of the four in alphabetical order, counted round.
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
    """1 to `moves` moves, and `questions` places, each with the person who stands there in the end."""
    rng = for_text(f"row {moves}", seed, number)
    row, told, asked = draw_row(rng, rng.randint(1, moves), "train")
    others = rng.sample([place for place in range(len(row)) if place != asked], questions - 1)
    answers = [row[row_source(told, place)] for place in (asked, *others)]
    more = "".join(f" , {STANDS[place]} {answer}" for place, answer in zip(others, answers[1:]))
    return f"{row_prompt(row, told, asked)} {answers[0]}{more}"


# addition


def spaced(value: int, width: int) -> str:
    """`0 8 5`: a digit a word, so that no tokenizer hides where the carries go."""
    return " ".join(f"{value:0{width}d}")


def draw_sum(rng: random.Random, digits: int) -> tuple[str, int]:
    first, second = (rng.randrange(10 ** (digits - 1), 10**digits) for _ in range(2))
    return f"{spaced(first, digits)} + {spaced(second, digits)} =", first + second


def addition_question(number: int, digits: int) -> dict:
    """Four sums that differ at two digits, of which any one looks as likely as the others."""
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
COMPANIES = 3  # of a story, each at its own place


def draw_story(
    rng: random.Random, relations: int, answer: int | None = None
) -> tuple[str, list[list[str]], list[str]]:
    """The sentences, in any order; the persons of each company, the n-th of whom is n sentences away from the place;
    and the places of the companies. answer: the place of the first company, as the number of one of the three in
    alphabetical order, counted round.
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
    """Where somebody is who is so many sentences away from a place, in a story with companies of `depth` persons."""
    rng = for_question(f"story {depth} {relations}", number)
    story, companies, places = draw_story(rng, depth, answer=number)
    choices = sorted(places)
    return {
        "text": f"{story} where is {companies[0][relations - 1]} ?",
        "choices": choices,
        "answer": choices.index(places[0]),
    }


def story_text(number: int, relations: int, questions: int, seed: int) -> str:
    """A story, and where `questions` of its persons are."""
    rng = for_text(f"story {relations}", seed, number)
    story, companies, places = draw_story(rng, relations)
    everybody = [(person, place) for company, place in zip(companies, places) for person in company]
    asked = [f"{person} ? {place}" for person, place in rng.sample(everybody, questions)]
    return f"{story} where is " + " , ".join(asked)


# what lm-eval calls, with everything that the YAML's metadata and dataset_kwargs hold


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
