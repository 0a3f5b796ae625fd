"""Charts of the demo, made from demo.json alone."""

from looped_recipes.common.chart import Bars, Chart, Line, ordered, stacked
from looped_recipes.common.words import counted


def hardest(found: dict) -> str:
    """Return the number of hops of the questions that the one-loop model answers least often."""
    return min(found["control"], key=found["control"].get)


def hops_named(hops: str) -> str:
    return counted(hops, "hop")


def points(by_loops: dict[str, float], times: float = 1) -> list[tuple[float, float]]:
    return [(int(loops), times * value) for loops, value in by_loops.items()]


def accuracy_chart(found: dict) -> Chart:
    accuracy, hops = found["accuracy"], hardest(found)
    lines = [
        Line(hops_named(each), points(after, 100), ordered(i, len(accuracy)))
        for i, (each, after) in enumerate(accuracy.items())
    ]
    return Chart(
        "Right answers after so many loops",
        "loops",
        "right answers, %",
        lines,
        levels={f"model with one loop, {hops_named(hops)}": round(100 * found["control"][hops])},
        whole_x=True,
        ends=(0, 100),
    )


def exits_chart(found: dict) -> Bars:
    taken = {hops_named(hops): loops for hops, loops in found["exit_loops"].items()}
    colors = {name: ordered(i, len(taken)) for i, name in enumerate(taken)}
    sure = f"{found['certainty']:.0%}".replace("%", " %")
    return Bars(
        f"Loops until {sure} sure of the answer", "loops, on average", taken, colors, {"without exits": found["loops"]}
    )


def depth_chart(found: dict) -> Chart:
    return Chart(
        "Text: bits per byte, less is better",
        "loops",
        "bits per byte",
        [Line("held-out text", points(found["bits_per_byte"]))],
        marks={"trained": found["loops"]},
        whole_x=True,
    )


def picture(found: dict) -> str:
    """Draw the two charts of the questions, for a README."""
    return stacked([accuracy_chart(found), exits_chart(found)], columns=2)
