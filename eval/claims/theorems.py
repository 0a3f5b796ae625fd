"""Exponents of theorems 1, 3 and 6 of the residual scaling paper, on the models that these describe, for one seed."""

from collections.abc import Sequence

from looped_eval.diagnose.theorems import gaussian, matrices, of_stack, sums_of_residuals

from .slope import slope


LOOPS = (1, 2, 4, 8, 16, 32, 64)
LAYERS = (1, 2, 4, 8, 16)
STACKED_LOOPS = (1, 2, 4, 8)


def theorems(seed: int, width: int = 512, stack_width: int = 128) -> dict:
    first = {"shared": {}, "independent": {}}
    for name, found in first.items():
        rows = [
            sums_of_residuals(
                matrices(seed, 1 if name == "shared" else n, 1, width, width).expand(n, -1, -1, -1),
                gaussian(1000 + seed, width),
                1 / n,
            )
            for n in LOOPS
        ]
        found["sum_squared"] = [row["sum_squared"] for row in rows]
        found["slope"] = slope(LOOPS, found["sum_squared"])
        found["slope_of_R"] = slope(LOOPS, [row["R"] for row in rows])

    over_loops = [of_stack(seed, stack_width, LAYERS[-1], n, 1.0) for n in STACKED_LOOPS]
    over_layers = [of_stack(seed, stack_width, layers, STACKED_LOOPS[-1], 1.0) for layers in LAYERS]

    def of_both(number: str, layers: Sequence[int]) -> dict:
        loops_of, layers_of = [row[number] for row in over_loops], [row[number] for row in over_layers[-len(layers) :]]
        return {
            "over_loops": loops_of,
            "over_layers": layers_of,
            "slope_over_loops": slope(STACKED_LOOPS, loops_of),
            "slope_over_layers": slope(layers, layers_of),
        }

    third, sixth = of_both("total_squared", LAYERS), of_both("C_1", LAYERS[1:])  # C_1 needs two layers
    numbers = {"theorem_1": first, "theorem_3": third, "theorem_6": sixth}
    return {"width": width, "loops": LOOPS, "layers": LAYERS, **numbers}
