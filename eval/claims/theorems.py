"""Exponents of theorems 1 and 3 of the residual scaling paper on their own models, one seed at a time."""

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

    def total(layers: int, loops: int) -> float:
        return of_stack(seed, stack_width, layers, loops, 1.0)["total_squared"]

    over_loops = [total(LAYERS[-1], n) for n in STACKED_LOOPS]
    over_layers = [total(layers, STACKED_LOOPS[-1]) for layers in LAYERS]
    third = {
        "over_loops": over_loops,
        "over_layers": over_layers,
        "slope_over_loops": slope(STACKED_LOOPS, over_loops),
        "slope_over_layers": slope(LAYERS, over_layers),
    }
    return {"width": width, "loops": LOOPS, "layers": LAYERS, "theorem_1": first, "theorem_3": third}
