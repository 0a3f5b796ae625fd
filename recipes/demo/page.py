"""The page of the demo, made from demo.json alone."""

from html import escape
from pathlib import Path

from looped_eval.common.page import Charts, Commands, Finding, Section, Table, Text, to_html
from looped_recipes.common.command_line import typed
from looped_recipes.common.words import counted, percent
from looped_recipes.demo.picture import accuracy_chart, depth_chart, exits_chart, hardest, hops_named


SETTLED = 0.005  # bits per byte: depths that differ by less count as equal


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def after_loops(by_loops: dict[str, float]) -> str:
    """Return e.g. "30 % after 1 loop, 98 % after 2 loops and 100 % after 3 loops or more"."""
    shares = [percent(value) for value in by_loops.values()]
    settled = next(i for i in range(len(shares)) if len(set(shares[i:])) == 1)
    words = [f"{share} after {counted(loop, 'loop')}" for loop, share in zip(by_loops, shares[: settled + 1])]
    return listed(words) + (" or more" if settled < len(shares) - 1 else "")


def answers(found: dict) -> str:
    hops = hardest(found)
    return (
        f"The hardest questions here are those of {counted(hops, 'hop')}: a model with one loop answers "
        f"{percent(found['control'][hops])} of them; the looped model, with as many parameters and the same training "
        f"questions, answers {after_loops(found['accuracy'][hops])}."
    )


def exits(found: dict) -> str:
    hops, loops = hardest(found), found["exit_loops"]
    taken = listed([f"{loops[each]:.1f} for {counted(each, 'hop')}" for each in loops])
    right = percent(found["exit_accuracy"][hops])
    return (
        f"If a question stops as soon as its answer is {percent(found['certainty'])} sure, the mean number of loops "
        f"is {taken}; {right} of those of {counted(hops, 'hop')} are then right."
    )


def finding(found: dict) -> str:
    """Return the results on the questions, in words."""
    return f"{answers(found)} {exits(found)}"


def text_finding(found: dict) -> str:
    bits, trained = {int(loop): value for loop, value in found["bits_per_byte"].items()}, found["loops"]
    best = min(bits, key=bits.get)
    same = [loop for loop in sorted(bits) if bits[loop] - bits[best] < SETTLED]  # as good as the best
    words = (
        f"On text the model needs {bits[1]:.3f} bits per byte after the first loop and {bits[trained]:.3f} after the "
        f"{counted(trained, 'loop')} that it was trained with"
    )
    if len(same) > 1 and same == [loop for loop in sorted(bits) if loop >= same[0]]:
        return f"{words}; after {counted(same[0], 'loop')} or more it is the same within {SETTLED}."
    return (
        f"{words}." if trained in same else f"{words}; the least is {bits[best]:.3f}, after {counted(best, 'loop')}."
    )


def path_of(question: str) -> str:
    """Return the hops that a question asks for: "ab bc ; a2" asks for a → b → c."""
    pairs, _, asked = question.partition(" ; ")
    follows, path = dict(pairs.split()), [asked[0]]
    for _ in range(int(asked[1:])):
        path.append(follows[path[-1]])
    return " → ".join(path)


def example(found: dict) -> Table:
    told, rows = found["example"], []
    for loop, (answer, sure) in enumerate(told["answers"], start=1):
        is_right = "right" if answer == told["right"] else "wrong"
        stops = "sure enough to stop here" if loop == told["exit"] and sure >= found["certainty"] else ""
        rows.append([counted(loop, "loop"), f"{answer}, {is_right}", percent(sure), stops])
    return Table(["after", "answer", "sure", ""], rows)


def numbers(found: dict) -> Table:
    """Return a table with a column for each number of hops, so that it is narrow."""
    hops = list(found["accuracy"])
    rows = [
        [f"right after {counted(loop, 'loop')}", *(percent(found["accuracy"][each][loop]) for each in hops)]
        for loop in found["accuracy"][hops[0]]
    ]
    rows += [
        [words, *(percent(found[name][each]) for each in hops)]
        for words, name in (("right, model with one loop", "control"), ("right with exits", "exit_accuracy"))
    ]
    rows.append(["loops with exits", *(f"{found['exit_loops'][each]:.2f}" for each in hops)])
    return Table(["", *map(hops_named, hops)], rows)


class Written(Text):
    """Text that keeps its line breaks, such as what the text model wrote."""

    def html(self) -> str:
        return f"<pre>{escape(self.words.rstrip())}</pre>"


def opening(found: dict) -> list:
    """Return an explanation of hops, the charts, and the results with exits."""
    question = found["example"]["question"]
    asked = question.partition(" ; ")[2]
    words = (
        f"A hop is one step of a question. “{question[:2]}” says that {question[1]} follows {question[0]}, and "
        f"“{asked}” asks for what stands {asked[1:]} further than {asked[0]}: “{question}” goes {path_of(question)}. "
        "Every hop needs the one before it."
    )
    return [Text(words), Charts([accuracy_chart(found), exits_chart(found)]), Text(exits(found))]


def questions(found: dict) -> list:
    question = found["example"]["question"]
    words = f"One that the model has not seen, {path_of(question)}, and what it says after every loop:"
    return [Text(words), Written(question), example(found)]


def of_text(found: dict) -> list:
    blocks = [
        Finding(text_finding(found)),
        Text(
            f"It has {found['parameters']:,} parameters and was trained for {found['steps']:,} steps. So little shows "
            "that loops work on text, not what they are good for there: what it writes looks like Python and means "
            "nothing."
        ),
        Charts([depth_chart(found)]),
    ]
    for depth, words in found["samples"].items():
        blocks += [Text(f"Written with {counted(depth, 'loop')}:"), Written(words)]
    return blocks


def measured(found: dict) -> list:
    hops = found["hops"]
    error = 200 * (0.25 / hops["questions"]) ** 0.5
    return [
        Text(
            f"Both models of questions have one layer and {hops['parameters']:,} parameters, and were trained for "
            f"{hops['steps']:,} steps; with one loop that takes "
            f"{percent(hops['control_flops'] / hops['training_flops'])} of the operations. They were asked "
            f"{hops['questions']} new questions of each kind, so that a share is known within {error:.0f} points; "
            "guessing is right in 14 %."
        ),
        numbers(hops),
        Text(f"{found['command']}, commit {found['commit']}, {found['hardware']}."),
    ]


def next_commands(output: Path) -> list[tuple[str, str]]:
    """Return the commands to try next, each with what it does."""
    given = [] if output == Path("runs/demo") else ["--output", output]
    return [
        (typed("looped demo --ask", *given), "questions, and the answer after every loop"),
        (typed("looped chat", output / "final"), "let the text model complete what you type"),
        (typed("looped report", output), "the text model's training on one page"),
        ("looped own-text my.txt", "a looped model of your own text beside a plain one"),
    ]


def page(found: dict, output: Path = Path("runs/demo")) -> str:
    hops = found["hops"]
    sections = [
        Section("A question, loop by loop", questions(hops)),
        Section("Text", of_text(found["text"])),
        Section("Try it", [Commands(next_commands(output))]),
        Section("How it was measured", measured(found)),
    ]
    return to_html("What loops are for", sections, [answers(hops)], opening=opening(hops))
