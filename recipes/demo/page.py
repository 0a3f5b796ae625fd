"""The page of the demo, made from what is in demo.json alone."""

from html import escape

from looped_eval.common.page import Charts, Finding, Section, Table, Text, document
from looped_recipes.common.words import counted, percent
from looped_recipes.demo.picture import accuracy_chart, depth_chart, exits_chart, hardest


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def answers(found: dict) -> str:
    hops = hardest(found)
    after, alone = found["accuracy"][hops], percent(found["control"][hops])
    answered = listed([f"{percent(value)} after {counted(loop, 'loop')}" for loop, value in after.items()])
    return (
        f"Of questions of {counted(hops, 'hop')}, its worst, a model with one loop answers {alone}; the looped model, "
        f"with as many parameters and the same training questions, answers {answered}."
    )


def exits(found: dict) -> str:
    hops, loops = hardest(found), found["exit_loops"]
    taken = listed([f"{loops[each]:.1f} for {counted(each, 'hop')}" for each in loops])
    right = percent(found["exit_accuracy"][hops])
    return (
        f"Where a question stops as soon as its answer is {percent(found['certainty'])} sure, it takes so many loops "
        f"on average: {taken}; {right} of those of {counted(hops, 'hop')} are then right."
    )


def finding(found: dict) -> str:
    """What was seen of the questions, from the numbers."""
    return f"{answers(found)} {exits(found)}"


def text_finding(found: dict) -> str:
    bits, trained = found["bits_per_byte"], str(found["loops"])
    best = min(bits, key=bits.get)
    return (
        f"On text the model of {counted(trained, 'loop')} needs {bits['1']:.3f} bits per byte after the first loop "
        f"and {bits[trained]:.3f} after the last; the least is {bits[best]:.3f}, after {counted(best, 'loop')}."
    )


def example(found: dict) -> Table:
    told, rows = found["example"], []
    for loop, (answer, sure) in enumerate(told["answers"], start=1):
        is_right = "yes" if answer == told["right"] else "no"
        rows.append([str(loop), answer, is_right, percent(sure), "stops here" if loop == told["exit"] else ""])
    return Table(["loops", "answer", "right", "sure", ""], rows)


def accuracy_table(found: dict) -> Table:
    loops = list(next(iter(found["accuracy"].values())))
    rows = [
        [hops, *(f"{at[loop]:.2f}" for loop in loops)]
        + [f"{found[name][hops]:.2f}" for name in ("control", "exit_loops", "exit_accuracy")]
        for hops, at in found["accuracy"].items()
    ]
    head = ["hops", *(counted(loop, "loop") for loop in loops)]
    return Table([*head, "one-loop model", "loops with exits", "right with exits"], rows)


class Written(Text):
    """What the text model wrote, line by line."""

    def html(self) -> str:
        return f"<pre>{escape(self.words.rstrip())}</pre>"


def sections(hops: dict, text: dict) -> list[Section]:
    question = hops["example"]["question"]
    questions = [
        Text(
            "“cd” says that d follows c; “h2” asks what stands two steps after h. Every hop needs the one before it, "
            f"and the model has 1 layer, applied up to {counted(hops['loops'], 'time')}."
        ),
        Text(f"One that it has not seen, “{question}”, whose answer is {hops['example']['right']}:"),
        example(hops),
        Text(
            f"Accuracy on {hops['questions']} questions of each kind; guessing scores 0.14. Both models have "
            f"{hops['parameters']:,} parameters and were trained for {hops['steps']:,} steps; with one loop that "
            f"takes {percent(hops['control_flops'] / hops['training_flops'])} of the operations."
        ),
        accuracy_table(hops),
    ]
    of_text = [
        Text(
            f"{text_finding(text)} It has {text['parameters']:,} parameters and was trained for {text['steps']:,} "
            "steps: what it writes looks like Python and means nothing."
        ),
        Charts([depth_chart(text)]),
    ]
    for depth, words in text["samples"].items():
        of_text += [Text(f"Written with {counted(depth, 'loop')}:"), Written(words)]
    return [Section("The questions", questions), Section("Text", of_text)]


def page(found: dict) -> str:
    hops = found["hops"]
    title = "What loops are for"
    first = [Finding(answers(hops)), Text(exits(hops)), Charts([accuracy_chart(hops), exits_chart(hops)])]
    parts = [f"<h1>{title}</h1>", *(part.html() for part in (*first, *sections(hops, found["text"])))]
    made_by = f"{found['command']} · commit {found['commit']} · {found['hardware']}"
    return document(title, "\n".join([*parts, f"<footer>{escape(made_by)}</footer>"]))
