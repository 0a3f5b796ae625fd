"""Charts: values stand where the scale says, labels have room, every value can be read."""

import math
import re
from xml.etree import ElementTree

import pytest

from looped_eval.common.curves import chance_of
from looped_eval.common.findings import best_depth
from looped_recipes.common.axis import Axis, alike, width_of, written
from looped_recipes.common.chart import MANY, Bars, Chart, Line, Matrix, on_one_scale, ordered, save_charts, thinned
from looped_recipes.common.chart_style import GROUND, NAMED, RAMP, STEPS, between


def parsed(chart) -> ElementTree.Element:
    return ElementTree.fromstring(chart.svg())


def titles(chart) -> list[str]:
    return [node.text for node in parsed(chart).iter("title")]


@pytest.mark.parametrize(
    "value, words",
    [
        (0, "0"),
        (2.02, "2.02"),
        (1500, "1,500"),
        (0.00031, "0.00031"),
        (3.14159e-7, "3.14×10⁻⁷"),
        (1e15, "10¹⁵"),
        (-0.5, "−0.5"),
        (12.3456, "12.35"),
        (100, "100"),
        (float("nan"), "not a number"),
    ],
)
def test_numbers_are_written_as_people_do(value, words):
    assert written(value) == words


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("low, high", [(1e-9, 3e-9), (1, 2.5), (0.02, 8e5), (1e15, 6.4e16), (2.01, 2.02), (5, 5)])
def test_ticks_have_room_and_stand_where_their_labels_say(low, high, log):
    axis = Axis([low, high], 30, 350, log)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 7
    for (a, first), (b, second) in zip(ticks, ticks[1:]):
        assert b - a >= (width_of(first) + width_of(second)) / 2
    assert len({words for _, words in ticks}) == len(ticks)
    assert all(30 <= place <= 350 for place, _ in ticks)
    for value in (low, high):  # linear in the value, or in its logarithm
        scale = math.log10 if log else float
        share = (scale(value) - axis.low) / (axis.high - axis.low)
        assert axis.place(value) == pytest.approx(30 + 320 * share) and 30 <= axis.place(value) <= 350


def test_loops_are_whole_numbers():
    for depths in ([1, 2], [1, 8], [1, 64], [3]):
        assert all(re.fullmatch(r"\d+", words) for _, words in Axis(depths, 30, 350, whole=True).ticks())
    known = Axis([1, 64], 30, 350, log=True, at=[1, 2, 4, 8, 16, 32, 64]).ticks()
    assert [words for _, words in known] == ["1", "2", "4", "8", "16", "32", "64"]


def test_a_chart_says_every_value_and_leaves_out_what_is_none():
    lines = [
        Line("a<b", [(1, 2.0), (2, None), (3, math.inf), (4, 2.5)], errors=[0.5, None, None, None]),
        Line("no", []),
    ]
    chart = Chart("t & t", "loops", "loss", lines, levels={"chance": 0.25}, marks={"as trained": 3})
    assert titles(chart) == ["chance: 0.25", "as trained: 3", "a<b: loops 1, loss 2 ± 0.5", "a<b: loops 4, loss 2.5"]
    words = [node.text for node in parsed(chart).iter("text")]
    assert {"t & t", "a<b", "chance (0.25)", "as trained (3)"} <= set(words) and "no" not in words
    assert Chart("", "x", "y", [Line("", [(0, 1), (1, 2)])], log_x=True).shown()[0].points == [(1, 2)]
    assert Chart("", "x", "y", [Line("a", [(1, -1.0)])], log_y=True).is_empty and Bars("", "", {"a": None}).is_empty


def test_a_long_line_keeps_its_extremes():
    points = [(x, math.sin(x / 7)) for x in range(5000)]
    points[1234] = (1234, 9.0)
    kept = thinned(points)
    assert len(kept) <= MANY + 2 and (1234, 9.0) in kept and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1] and set(kept) <= set(points)


def test_bars_and_a_matrix_show_their_values():
    assert titles(Bars("b", "y", {"one": 1.0, "less": -0.5, "none": None})) == ["one: 1", "less: −0.5"]
    widths = [float(bar.get("width")) for bar in parsed(Bars("b", "y", {"one": 1.0, "three": 3.0})).iter("rect")]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    matrix = Matrix("m", "loop", [[1, -0.25], [-0.25, 1]])
    assert "loop 2 and 1: −0.25" in titles(matrix)
    assert [each.text for each in parsed(matrix).iter("text")].count("−0.25") == 2  # a finger has no pointer
    large = parsed(Matrix("m", "loop", [[0.5] * 12] * 12))
    assert "0.50" not in [each.text for each in large.iter("text")]
    assert titles(Matrix("m", "loop", [[1, None], [None, math.nan]]))[-1:] == ["loop 1 and 1: 1"]
    assert Matrix("m", "loop", [[None, None], [None, None]]).is_empty


def light(color) -> float:
    values = between([color, color], 0) if isinstance(color, str) else color
    red, green, blue = (c / 12.92 if (c := v / 255) <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_are_seen_and_those_of_loops_are_in_order(theme):
    paper = light(GROUND[theme]["paper"])

    def contrast(color):
        low, high = sorted([light(color), paper])
        return (high + 0.05) / (low + 0.05)

    shades = [between(RAMP[theme], i / (STEPS - 1)) for i in range(STEPS)]
    against = [contrast(shade) for shade in shades]
    assert against == sorted(against) and against[0] > 2.9
    assert all(contrast(color) > 4 for color in NAMED[theme])
    assert [ordered(i, 4) for i in range(4)] == ["q0", "q4", "q7", "q11"] and ordered(0, 1) == "q0"


def test_charts_of_one_quantity_have_one_scale():
    low, high = on_one_scale([Chart("", "x", "y", [Line("", [(0, a), (1, b)])]) for a, b in ((1, 2), (5, 9))])

    def heights(chart):
        return [float(dot.get("cy")) for dot in parsed(chart).iter("circle") if dot.get("class") == "dot"]

    per_unit = [(a - b) / n for (a, b), n in ((heights(low), 1), (heights(high), 4))]
    assert per_unit[0] == pytest.approx(per_unit[1], rel=0.02)
    few, many = on_one_scale([Bars("", "", {"a": 1.0}), Bars("", "", {"a": 4.0})])
    widths = [float(next(parsed(bars).iter("rect")).get("width")) for bars in (few, many)]
    assert widths[1] == pytest.approx(4 * widths[0], rel=0.02)


def test_a_picture_of_its_own_holds_all_that_is_not_empty(tmp_path):
    save_charts(
        [Chart("a", "x", "y", [Line("", [(1, 2)])]), Bars("b", "y", {}), Bars("c", "y", {"k": 1})], tmp_path / "x.svg"
    )
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    inside = root.findall("{*}svg")
    assert [svg.get("aria-label") for svg in inside] == ["a", "c"]
    tops, heights = ([float(svg.get(key)) for svg in inside] for key in ("y", "height"))
    assert tops[0] + heights[0] < tops[1] and tops[1] + heights[1] < float(root.get("viewBox").split()[3])


def test_the_best_depth_in_words():
    assert best_depth({1: 2.5, 2: 2.02, 4: 2.035}, 4, "bits") == (
        "2 loops are best here: 2.020 bits; 4 loops as trained cost 0.015; 1 loop costs 0.480."
    )
    assert (
        best_depth({1: 2.5, 2: 2.02}, 2, "bits")
        == "2 loops are best here: 2.020 bits, as trained; 1 loop costs 0.480."
    )
    assert best_depth({1: 2.0}, None, "bits") == "1 loop is best here: 2.000 bits."


def test_depths_that_are_the_same_are_not_ranked():
    same = best_depth({1: 3.9262, 2: 3.9258, 3: 3.9259}, 3, "bits")
    assert same == "1 loop is enough here: 3.926 bits; 3 loops as trained are no better."
    assert best_depth({1: 2.5, 2: 2.0006, 4: 2.0}, 4, "bits") == (
        "2 loops are enough here: 2.001 bits; 4 loops as trained are no better; 1 loop costs 0.499."
    )


def test_numbers_that_are_read_together_have_as_many_digits():
    assert alike([2.3, 2.31, 2.32]) == ["2.30", "2.31", "2.32"]
    assert alike([0, 20, 100]) == ["0", "20", "100"] and alike([0, 0.5, 1]) == ["0", "0.5", "1.0"]
    assert alike([9.842, 17.16], 3) == ["9.8", "17.2"] and alike([-0.5, 0.25]) == ["−0.50", "0.25"]
    assert alike([0.0012, 350]) == ["0.0012", "350"] and alike([1e-9, 2e-9]) == ["10⁻⁹", "2×10⁻⁹"]


@pytest.mark.parametrize("values", [[1153834.5, 1153877.0], [1.02e8, 1.04e8], [1.02e-5, 1.04e-5], [9.9e5, 1.01e6]])
def test_labels_of_large_and_small_numbers_are_the_numbers(values):
    ticks = Axis(values, 30, 350).ticks(room=26)
    assert len(ticks) > 2
    axis = Axis(values, 30, 350)
    for place, words in ticks:
        head, _, power = words.replace(",", "").replace("10", "1×10", words.startswith("10")).partition("×10")
        power = power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789"))
        assert axis.place(float(f"{head}e{power or 0}")) == pytest.approx(place, abs=0.5), words


def test_what_has_no_place_on_an_axis_is_left_out():
    points = [(1, 2.0), (2, 4.0), (4, 3.0)]
    line = Line("a", points, errors=[math.inf, math.nan, 0.5])
    places = {"zero": 0, "far": math.inf, "none": math.nan, "seen": 2.5}
    for log in (True, False):
        chart = Chart("", "x", "y", [line], log_x=log, log_y=log, levels=places, marks=places)
        shown = [] if log else ["zero: 0"]
        said = ["a: x 1, y 2", "a: x 2, y 4", "a: x 4, y 3 ± 0.5"]
        assert titles(chart) == [*shown, "seen: 2.5", *shown, "seen: 2.5", *said]
        assert "nan" not in chart.svg() and "inf" not in chart.svg()
        bars = Bars("", "y", {"a": 1.0, "b": 3.0}, levels=places, log=log)
        assert titles(bars) == ["a: 1", "b: 3", *shown, "seen: 2.5"]


def test_chance_is_that_of_the_task():
    assert chance_of("piqa acc") == 0.5 and chance_of("piqa bits") is None and chance_of("unheard acc") is None
    assert chance_of("hop acc", {"hop": {"metadata": {"chance": 0.2}}}) == 0.2
    assert chance_of("hop acc", {"hop": {"metadata": {"chance": "a half"}}}) is None
