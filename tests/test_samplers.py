"""Depths and noise of a step: distributions, and being a function of (seed, step, row) alone."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from looped_recipes.engine.balance import balanced_ranks
from looped_recipes.settings.curriculum import curriculum
from modeling_looped import SAMPLERS, depths_of_step, initial_state_of_step
from modeling_looped.samplers import truncated_normal_

from .helpers import tiny_model


NUM_STEPS, NUM_ROWS = 300, 20


def draws(sampler: str, mean: float, **arguments) -> list[int]:
    return [
        depth
        for step in range(NUM_STEPS)
        for depth in depths_of_step(sampler, mean, seed=3, step=step, rows=range(NUM_ROWS), **arguments)
    ]


def assert_distributed(samples: list[int], probability: dict[int, float]):
    """Every frequency within five standard errors of its probability, and nothing outside the support."""
    assert math.isclose(sum(probability.values()), 1, abs_tol=1e-6)
    found = Counter(samples)
    assert set(found) <= set(probability)
    for value, p in probability.items():
        error = math.sqrt(p * (1 - p) / len(samples))
        assert abs(found[value] / len(samples) - p) <= 5 * error + 1e-9, f"depth {value}"


def poisson_pmf(rate: float, count: int) -> float:
    return math.exp(-rate + count * math.log(rate) - math.lgamma(count + 1)) if rate else float(count == 0)


def lognormal_poisson_pmf(mean: float, count: int, sigma: float = 0.5) -> float:
    """The integral over the rate, by the trapezoid rule in z = (ln rate - mu) / sigma."""
    points = [-8 + 0.01 * i for i in range(1601)]
    rates = [math.exp(math.log(mean) - sigma**2 / 2 + sigma * z) for z in points]
    return sum(
        poisson_pmf(rate, count) * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) * 0.01
        for rate, z in zip(rates, points)
    )


def test_poisson_is_clipped_at_one_loop():
    expected = {depth: poisson_pmf(3, depth) for depth in range(1, 30)}
    expected[1] += poisson_pmf(3, 0)
    assert_distributed(draws("poisson", 3), expected)


def test_poisson_lognormal_is_that_of_the_huginn_paper():
    expected = {depth: lognormal_poisson_pmf(6, depth - 1) for depth in range(1, 150)}
    assert_distributed(draws("poisson_lognormal", 6), expected)


def test_uniform_has_the_mean_and_every_depth_alike():
    assert_distributed(draws("uniform", 4), {depth: 1 / 7 for depth in range(1, 8)})


def test_fixed_is_the_mean():
    assert set(draws("fixed", 5)) == {5}


@pytest.mark.parametrize(
    "sampler, expected",
    [
        ("fixed", {8: 1.0}),
        ("poisson", {4 + n: poisson_pmf(4, n) for n in range(40)}),
        ("poisson_lognormal", {5 + n: lognormal_poisson_pmf(4, n) for n in range(100)}),
        ("uniform", {4 + n: 1 / 9 for n in range(9)}),
    ],
)
def test_prefix_draws_the_loops_before_the_window(sampler, expected):
    assert_distributed(draws(sampler, 8, split="prefix", backprop_loops=4), expected)


@pytest.mark.parametrize("sampler", ["fixed", "poisson", "uniform"])
def test_a_prefix_of_no_loops_is_no_loops(sampler):
    """mean = k, where Parcae's appendix H compares the two splits: algorithm 3 is then a constant depth."""
    assert set(draws(sampler, 8, split="prefix", backprop_loops=8)) == {8}


def test_total_split_ignores_the_window():
    assert draws("poisson", 8, backprop_loops=4) == draws("poisson", 8)


def test_maximum_cuts():
    free, cut = draws("poisson", 4), draws("poisson", 4, maximum=5)
    assert cut == [min(depth, 5) for depth in free] and max(free) > 5


@pytest.mark.parametrize("sampler", sorted(set(SAMPLERS) - {"fixed"}))
def test_one_depth_per_batch_or_one_per_row(sampler):
    batches = [depths_of_step(sampler, 8, 0, step, range(16), per="batch") for step in range(20)]
    assert all(len(set(batch)) == 1 for batch in batches)
    assert len({batch[0] for batch in batches}) > 3  # another one at the next step
    assert len(set(depths_of_step(sampler, 8, 0, 0, range(16), per="sequence"))) > 3


@given(
    sampler=st.sampled_from(sorted(SAMPLERS)),
    per=st.sampled_from(["sequence", "micro_batch", "batch"]),
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    cut=st.integers(0, 12),
)
def test_depths_do_not_depend_on_how_the_step_is_cut(sampler, per, seed, step, cut):
    def draw(rows):
        return depths_of_step(sampler, 6, seed, step, rows, per, rows_per_draw=5 if per == "micro_batch" else None)

    rows = list(range(12))
    whole = draw(rows)
    assert whole == draw(rows[:cut]) + draw(rows[cut:])
    assert draw(rows[::-1]) == whole[::-1]


def test_rows_of_a_micro_batch_share_a_depth_and_micro_batches_do_not():
    """A step of 256 rows in micro-batches of 32, as Parcae's baseline trains: eight draws, each a Poisson's."""
    firsts = []
    for step in range(NUM_STEPS):
        depths = depths_of_step("poisson", 6, 0, step, range(256), per="micro_batch", rows_per_draw=32)
        assert all(depths[row] == depths[row - row % 32] for row in range(256))
        firsts += depths[::32]
    expected = {depth: poisson_pmf(6, depth) for depth in range(1, 40)}
    expected[1] += poisson_pmf(6, 0)
    assert_distributed(firsts, expected)


def ramp(step: int, length: int, shape: str) -> float:
    return step / length if shape == "linear" else 1 - (1 - step / length) ** 0.5


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_curriculum_is_that_of_the_formula(shape):
    """t = 12 loops without gradients and s = 8 with, over 1000 steps: ceil(f t), max(1, ceil(f s))."""
    for step in range(0, 1000, 7):
        f = ramp(step, 1000, shape)
        t, s = math.ceil(f * 12), max(1, math.ceil(f * 8))
        assert curriculum(shape, "forward", 1000, step, 20, 8) == (t + 8, 8)
        assert curriculum(shape, "backward", 1000, step, 20, 8) == (12 + s, s)
        assert curriculum(shape, "both", 1000, step, 20, 8) == (t + s, s)
    for target in ("forward", "backward", "both"):
        assert curriculum(shape, target, 1000, 1000, 20, 8) == curriculum(shape, target, 1000, 10**6, 20, 8) == (20, 8)


def test_curriculum_by_hand():
    assert [curriculum("linear", "forward", 4, step, 8, 4)[0] for step in range(6)] == [4, 5, 6, 7, 8, 8]
    assert [curriculum("linear", "both", 4, step, 8, 4) for step in range(5)] == [
        (1, 1),
        (2, 1),
        (4, 2),
        (6, 3),
        (8, 4),
    ]
    # 1 - sqrt(1 - p) is 0, 0.13, 0.29, 0.5: later than linear
    assert [curriculum("sqrt", "forward", 4, step, 8, 4)[0] for step in range(5)] == [4, 5, 6, 6, 8]


def test_curriculum_where_every_loop_has_gradients():
    assert [curriculum("linear", "backward", 4, step, 8, None) for step in (0, 1, 2, 4)] == [
        (1, None),
        (2, None),
        (4, None),
        (8, None),
    ]


def test_drawing_leaves_the_global_generators_alone():
    model = tiny_model(injection="add", state_init="normal")
    torch.manual_seed(0)
    before = torch.get_rng_state()
    depths_of_step("poisson_lognormal", 8, 0, 0, range(8))
    initial_state_of_step(model, 0, 0, [0, 1], 4)
    assert torch.equal(torch.get_rng_state(), before)


def test_depths_are_these_on_every_machine():
    """Written down once: a change here would make resumed runs differ from what they resume."""
    assert depths_of_step("poisson", 8, 0, 0, range(8)) == GOLDEN["poisson"]
    assert depths_of_step("poisson_lognormal", 8, 0, 0, range(8)) == GOLDEN["poisson_lognormal"]
    assert depths_of_step("uniform", 8, 0, 0, range(8)) == GOLDEN["uniform"]


GOLDEN = {
    "poisson": [8, 6, 11, 6, 10, 6, 6, 12],
    "poisson_lognormal": [7, 6, 6, 4, 11, 4, 4, 15],
    "uniform": [5, 13, 2, 6, 12, 9, 3, 8],
}


def test_initial_state_is_a_function_of_seed_step_and_row():
    model = tiny_model(injection="add", state_init="normal", state_init_std=0.3)
    state = initial_state_of_step(model, seed=1, step=2, rows=range(6), length=50)
    assert state.shape == (6, 50, 32)
    assert torch.equal(state[4:], initial_state_of_step(model, 1, 2, [4, 5], 50))
    assert torch.equal(state[[5, 0]], initial_state_of_step(model, 1, 2, [5, 0], 50))
    others = torch.cat(
        [
            state,
            initial_state_of_step(model, seed=2, step=2, rows=range(6), length=50),
            initial_state_of_step(model, seed=1, step=3, rows=range(6), length=50),
        ]
    )
    correlation = torch.corrcoef(others.flatten(1)) - torch.eye(18)
    assert correlation.abs().max() < 0.12  # 1600 numbers a row: five standard errors
    # a normal of deviation 0.3 cut at three of them has deviation 0.2960
    assert abs(others.std().item() - 0.2960) < 0.01 and others.abs().max() <= 0.9


class ReadsNothing(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation is not torch.ops.aten._local_scalar_dense.default, "a GPU would be waited for"
        return operation(*args, **(kwargs or {}))


def test_noise_is_cut_without_reading_it():
    generator = torch.Generator().manual_seed(0)
    with ReadsNothing():
        noise = truncated_normal_(torch.empty(100_000, dtype=torch.float64), 0.3, generator)
    edges = torch.linspace(-3, 3, 13, dtype=torch.float64)
    below = torch.stack([(noise / 0.3 < edge).double().mean() for edge in edges])
    expected = 0.5 + torch.special.erf(edges / math.sqrt(2)) / (2 * math.erf(3 / math.sqrt(2)))
    torch.testing.assert_close(below, expected, rtol=0, atol=0.008)
    assert noise.abs().max() <= 0.9


def test_a_model_without_noise_says_so():
    with pytest.raises(ValueError, match="state_init='normal'"):
        initial_state_of_step(tiny_model(injection="add", state_init="zeros"), 0, 0, [0], 4)


@given(depths=st.lists(st.integers(1, 40), min_size=0, max_size=48), num_processes=st.integers(1, 6))
def test_ranks_get_equally_many_rows_and_about_equally_many_loops(depths, num_processes):
    depths = depths[: len(depths) // num_processes * num_processes]
    ranks = balanced_ranks(depths, num_processes)
    assert sorted(row for rank in ranks for row in rank) == list(range(len(depths)))
    assert {len(rank) for rank in ranks} == {len(depths) // num_processes}
    loops = [sum(depths[row] for row in rank) for rank in ranks]
    assert max(loops) - min(loops) <= max(depths, default=0)
    for rank in ranks:
        assert [depths[row] for row in rank] == sorted((depths[row] for row in rank), reverse=True)


@given(depths=st.lists(st.integers(1, 9), min_size=24, max_size=24), num_processes=st.sampled_from([1, 2, 3, 4, 6]))
def test_a_row_goes_to_the_process_with_the_fewest_loops_that_has_room(depths, num_processes):
    room, expected = len(depths) // num_processes, [[] for _ in range(num_processes)]
    for row in sorted(range(len(depths)), key=lambda row: -depths[row]):
        with_room = [rows for rows in expected if len(rows) < room]
        min(with_room, key=lambda rows: sum(depths[row] for row in rows)).append(row)
    assert balanced_ranks(depths, num_processes) == expected


def test_compute_of_ranks_is_within_a_few_percent_in_practice():
    for step in range(20):
        depths = depths_of_step("poisson_lognormal", 8, 0, step, range(256))
        loops = [sum(depths[row] for row in rank) for rank in balanced_ranks(depths, 8)]
        assert max(loops) <= 1.02 * sum(loops) / len(loops)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"sampler": "gaussian"}, "sampler must be one of fixed, poisson.*'gaussian'"),
        ({"per": "row"}, "per must be one of sequence, micro_batch, batch, got 'row'"),
        ({"per": "micro_batch"}, "needs rows_per_draw, how many rows share a depth; got None"),
        ({"split": "middle"}, "split must be one of total, prefix, got 'middle'"),
        ({"mean": 0.5}, "at least 1, got 0.5"),
        ({"mean": math.inf}, "at least 1, got inf"),
        ({"maximum": 0}, "at least 1, got 0"),
        ({"split": "prefix"}, "set backprop_loops"),
        ({"split": "prefix", "backprop_loops": 9}, "backprop_loops=9 and mean=8"),
        (
            {"split": "prefix", "backprop_loops": 4, "maximum": 3},
            "backprop_loops=4 loops, more than the maximum depth 3",
        ),
        ({"sampler": "uniform", "mean": 2.2}, "'uniform'.*4.4.*multiple of 0.5"),
        ({"sampler": "fixed", "mean": 2.5}, "'fixed'.*2.5.*multiple of 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    arguments = {"sampler": "poisson", "mean": 8, "seed": 0, "step": 0, "rows": [0], **arguments}
    with pytest.raises(ValueError, match=message):
        depths_of_step(**arguments)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="10 rows.*4 processes"):
        balanced_ranks([1] * 10, 4)
