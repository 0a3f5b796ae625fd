"""Charts of all measures: the function with the name of a measure draws its result."""

import re

from looped_recipes.common.chart import Bars, Chart, Line, Matrix, named, on_one_scale, ordered
from looped_recipes.common.words import counted


def over_loops(title: str, y: str, curves: dict[str, list], loops, trained: int | None = None, **options) -> Chart:
    """Return a chart of one or more quantities with a value for every loop."""
    lines = [Line(name, list(zip(loops, values)), named(i)) for i, (name, values) in enumerate(curves.items())]
    marks = {"as trained": trained} if trained else {}
    return Chart(title, "loops", y, lines, marks=marks, whole_x=True, **options)


def spread(*series) -> bool:
    """Return whether these series need a logarithmic axis."""
    values = [value for one in series for value in one if value is not None]
    return bool(values) and min(values) > 0 and max(values) > 20 * min(values)


def powers(title: str, x: str, y: str, at: list, curves: list[tuple[str, list, str]], theory: list[Line]) -> Chart:
    return Chart(
        title,
        x,
        y,
        [Line(name, list(zip(at, values)), color) for name, values, color in curves] + theory,
        log_x=True,
        log_y=True,
        x_ticks=list(at),
    )


# Growth over N


ARRANGED = {"looped": "shared layers", "unshared": "layers of their own", "model": "the model as it is"}
RULE_NAMES = {"none": "no scaling", "sqrt": "1/√N", "linear": "1/N", "factored": "1/(N√L)"}
UNCLEAR = 0.25  # misfit of an exponent: half of what tells two theories apart


def rule_name(rule: str, result: dict) -> str:
    """Return the factor of a rule; "factored" counts layers in units of the config's reference."""
    reference = result.get("residual_reference_layers", 1)
    return RULE_NAMES[rule] if rule != "factored" or reference == 1 else f"1/(N√(L/{reference:g}))"


def hundredths(value: float) -> str:
    """Format a cosine or an exponent."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def power_of_n(fit: dict) -> str:
    """Return a fitted power of N with its standard error: the line's misfit, which does not tell how seeds differ."""
    if fit["slope"] is None or fit["standard_error"] > UNCLEAR:
        return "no power of N"
    return f"N^{hundredths(fit['slope'])} ± {fit['standard_error']:.2f} (misfit)"


def growth(curves: list, slope: dict, loops: list, title: str, y: str) -> Chart:
    """Draw a line for every step, and the theory's slope through the first value."""
    steps = [(f"step {i}", curve, ordered(i, len(curves))) for i, curve in enumerate(curves)]
    theory = slope["theory"]
    lines = []
    if theory is not None and curves[0][0] is not None:
        line = [(n, curves[0][0] * (n / loops[0]) ** theory) for n in loops]
        lines = [Line(f"theory: N^{theory:g}", line, "c7", dashed=True)]
    return powers(f"{title}: {power_of_n(slope['first_step'])}", "loops N", y, loops, steps, lines)


def residual_norm(result: dict) -> list:
    charts = []
    for arrangement in ("looped", "unshared"):
        for rule, curves in result.get(arrangement, {}).items():
            title = f"{rule_name(rule, result)}, {ARRANGED[arrangement]}"
            charts.append(growth(curves["R"], curves["slope"], result["loops"], title, "‖h‖/√d"))
    return on_one_scale(charts)


def update_size(result: dict) -> list:
    y = "RMS change of the state by a step"
    charts = [
        growth(curves["update"], curves["slope"], result["loops"], rule_name(rule, result), y)
        for rule, curves in result["looped"].items()
    ]
    return on_one_scale(charts)


def cosine_of(result: dict, name: str) -> list:
    return (
        [Matrix(f"Cosine of increments, {ARRANGED[name]}", "loop", result[name]["cosine"])] if name in result else []
    )


def loop_cosine(result: dict) -> list:
    return cosine_of(result, "model")


def loop_cosine_fresh(result: dict) -> list:
    return cosine_of(result, "looped") + cosine_of(result, "unshared")


def layer_name(name: str) -> str:
    """Return the name of a block, stage or branch in words; layers count from 1."""
    words = re.sub(r"core[_.](\d+)", lambda match: f"layer {int(match[1]) + 1}", name.removeprefix("model."))
    words = re.sub(r"prelude[_.](\d+)", lambda match: f"prelude layer {int(match[1]) + 1}", words)
    return words.replace("lm_head", "head").replace("self_attn", "attention").replace("mlp", "MLP").replace(".", ", ")


def premises(result: dict) -> list:
    overlaps = {"what goes in": "activation_overlap", "what comes out": "residual_overlap"}
    charts = [
        Bars(
            f"Overlap of loops: {words}",
            "1: all loops add the same",
            {layer_name(name): b[key] for name, b in result["branches"].items()},
            levels={"orthogonal": result["loops_orthogonal"]},
            ends=(1.0,),
        )
        for words, key in overlaps.items()
    ]
    gains = {layer_name(name): b["gain"] for name, b in result["branches"].items()}
    return [*charts, Bars("Gain of the branches", "‖WU‖ / ‖U‖", gains)]


# The models of the theorems


def exponents(title: str, x: str, y: str, at: list, curves: dict[str, tuple[list, float | None]]) -> Chart:
    """Draw the curves, each with a line of the theory's exponent through its last value."""
    colors = [ordered(i, len(curves)) for i in range(len(curves))]
    lines = [(name, values, color) for (name, (values, _)), color in zip(curves.items(), colors)]
    theory = [
        Line("", [(n, values[-1] * (n / at[-1]) ** power) for n in at], color, dashed=True)
        for (values, power), color in zip(curves.values(), colors)
        if power is not None and values[-1] is not None
    ]
    return powers(title, x, y, at, lines, theory)


def theorem_1(result: dict) -> list:
    return [
        exponents(
            f"Sum of residuals, {'one matrix' if name == 'shared' else 'a matrix for each loop'}; dashed: theory",
            "loops N",
            "‖Σr‖²/d",
            result["loops"],
            {a: (found["sum_squared"], found["slope_of_sum_squared"]["theory"]) for a, found in of_alphas.items()},
        )
        for name, of_alphas in result["arrangements"].items()
    ]


def theorem_2(result: dict) -> list:
    curves = {alpha: (found["change"], found["slope"]["theory"]) for alpha, found in result["alphas"].items()}
    return [exponents("What one update changes; dashed: theory", "loops N", "RMS", result["loops"], curves)]


def theorem_3(result: dict) -> list:
    total = {(cell["layers"], cell["loops"]): cell["total_squared"] for cell in result["cells"]}
    layers, loops = result["layers"], result["loops"]
    title = "Sum of all branches; dashed: theory"
    over_n = {f"L = {at}": ([total[at, n] for n in loops], 2.0) for at in layers}
    over_l = {f"N = {n}": ([total[at, n] for at in layers], 1.0) for n in loops}
    return [
        exponents(title, "loops N", "‖ΣG‖²/d", loops, over_n),
        exponents(title, "layers L", "‖ΣG‖²/d", layers, over_l),
    ]


# Learning rates


def lr_transfer(result: dict) -> list:
    charts = []
    for panel in result["panels"]:
        lines, best = [], []
        for i, (n, curve) in enumerate(panel["curves"].items()):
            points = list(zip(result["rates"], curve["loss"]))
            lines.append(Line(f"N = {n}", points, ordered(i, len(panel["curves"]))))
            known = [(loss, rate) for rate, loss in points if loss is not None]
            best += [(rate, loss) for loss, rate in [min(known)]] if known else []
        title = f"{rule_name(panel['rule'], result)}, {counted(panel['layers'], 'layer')}"
        lines.append(
            Line(
                "best rate tried",
                best,
                "c7",
                joined=False,
            )
        )
        charts.append(Chart(title, "learning rate", "held-out loss", lines, log_x=True, x_ticks=result["rates"]))
    return on_one_scale(charts)


# One model over its loops


def norm_trajectory(result: dict) -> list:
    norms = result["norm"]
    chart = over_loops("Norm of the state", "‖h‖", {"": norms}, result["loop"], result["trained_loops"])
    chart.log_y = spread(norms[1:])
    return [chart]


def depth_curve(result: dict, beside: dict[str, dict] | None = None) -> list:
    """Draw loss and norms over depth; if there are other models, also the exit gap of each model against its norm."""
    loops, trained = result["loop"], result["trained_loops"]
    before, after = result["norm_before"], result["norm_after"]
    norms = {"after a loop": before} | ({} if before[:-1] == after else {"as the next loop gets it": after})
    charts = [
        over_loops("Loss at every depth", "cross-entropy", {"": result["ce"]}, loops, trained),
        over_loops("Norm of the state", "‖h‖", norms, loops, trained, log_y=spread(before, after)),
    ]
    if beside:
        models = {"this model": result, **beside}
        dots = [
            Line(name, [(one["exit_gap"], one["final_norm"])], named(i), joined=False)
            for i, (name, one) in enumerate(models.items())
        ]
        charts.append(
            Chart(
                "Cost of exiting at once, and scale", "loss of 1 loop minus loss as trained", "‖h‖", dots, log_y=True
            )
        )
    return charts


def spectral(result: dict) -> list:
    bars = {"radius of A": result["A"]["spectral_radius"], "norm of A": result["A"]["spectral_norm"]}
    bars["norm of B"] = result["B"]["spectral_norm"]
    if "C" in result:
        bars |= {"norm of C": result["C"]["spectral_norm"], "expansion by C": result["C"]["expansion"]}
    loops = range(len(result["A"]["expansion"]))
    expansion = {"": result["A"]["expansion"]}
    return [
        Bars(
            "The linear maps of a loop", "A meets the state, B the input, C the coda", bars, levels={"stable below": 1}
        ),
        over_loops("What A does to the states that occur", "‖Ah‖ / ‖h‖", expansion, loops),
    ]


STAGES = {
    "start": "start of the loop",
    "injected": "after the injection",
    "gated": "after the gate",
    "input": "input of the loops",
}


def stage_name(stage: str) -> str:
    return STAGES.get(stage, layer_name(stage))


def state_dynamics(result: dict) -> list:
    loops, norms = result["loop"], result["stage_norms"]
    curves = {"norm of the state": result["state_norm"], "its change in a loop": result["change"]}
    stages = [
        Line(stage_name(stage), [(t, norms[t - 1][i]) for t in loops], ordered(i, len(result["stages"])))
        for i, stage in enumerate(result["stages"])
    ]
    prelude = {stage_name(name): value for name, value in result["prelude"].items()}
    return [
        over_loops("The state and its change", "norm", curves, loops, log_y=spread(*curves.values())),
        Chart("Norms inside the loops", "loops", "norm", stages, log_y=spread(*norms), whole_x=True),
    ] + ([Bars("Norms before the first loop", "norm", prelude)] if len(prelude) > 1 else [])


def sensitivity(result: dict) -> list:
    growth, loops = {"": result["growth"]}, result["loop"]
    return [over_loops("A small change of the state", "times as large", growth, loops, result["trained_loops"])]


def gradient_norms(result: dict) -> list:
    lines = [
        Line(layer_name(name), list(zip(result["step"], block["norm"])), named(i))
        for i, (name, block) in enumerate(result["blocks"].items())
    ]
    log = spread(*(block["norm"] for block in result["blocks"].values()))
    return [Chart("Gradients of blocks", "step", "gradient norm", lines, log_y=log, whole_x=True)]


# Readouts


def radial_gradient(result: dict) -> list:
    loops, words = result["loop"], {"": result["margin"]}
    return [
        over_loops("How much of the gradient is along the state", "fraction r", {"": result["r"]}, loops, log_y=True),
        over_loops("What scale does to the loss", "dL / dlog‖H‖", {"": result["g"]}, loops),
        over_loops("How sure the readout is", "top logit minus second", words, loops),
    ]


def scale_sweep(result: dict) -> list:
    line = Line("", list(zip(result["alpha"], result["ce"])))
    return [Chart("Loss of a rescaled state", "scale α", "cross-entropy", [line], True, marks={"as it is": 1.0})]


CLAMPS = {"freeze": "scale held", "remove_radial": "radial part left out"}


def radial_clamp(result: dict) -> list:
    return [
        Bars(
            "Cost of clamping",
            "change of cross-entropy",
            {words: result[n]["delta_ce"] for n, words in CLAMPS.items()},
            ends=(0.01,),  # rounding is not drawn as a cost
        ),
        Bars(
            "Norm under the clamp", "‖H‖, as it is: 1", {words: result[n]["norm_ratio"] for n, words in CLAMPS.items()}
        ),
    ]


def update_decomposition(result: dict) -> list:
    loops = result["loop"]
    scale = Line("measured", list(zip(loops, result["scale"])))
    lemma = [(k + 1, value) for k, value in zip(loops, result["predicted_next_scale"])]
    turns = {"across the state": result["b_perp"], "turn times scale (lemma 2)": result["turn_times_scale"]}
    updates = {"along the state": result["a_rad"], "whole update": result["b"]}
    return [
        Chart("Scale", "loops", "RMS", [scale, Line("lemma 2", lemma, "c1", dashed=True)], whole_x=True),
        over_loops("Updates", "RMS", updates, loops),
        over_loops("Turning", "RMS", turns, loops),
    ]


KINDS = {"white_space": "white space", "special": "special tokens"}


def token_norms(result: dict) -> list:
    groups = {"all tokens": result}
    groups |= {KINDS.get(name, name): n for name, n in result.get("classes", {}).items() if n["tokens"] > 1}
    names = {"median": "median", "mean": "mean", "p99": "99th percentile", "max": "largest"}
    log = spread([group[key] for group in groups.values() for key in names])
    charts = [
        Bars(f"Norms of {group}", "‖H‖ of a token", {words: found[key] for key, words in names.items()}, log=log)
        for group, found in groups.items()
    ]
    return on_one_scale(charts)


def future_signal(result: dict) -> list:
    """Draw a line for each loop k over the number of loops between k and a loss."""
    count = len(result["loop"])
    sizes = [
        Line(f"loop {k}", list(enumerate(values)), ordered(i, count))
        for i, (k, values) in enumerate(zip(result["loop"], result["size"]))
    ]
    constants = [
        Line(f"loop {k}", list(enumerate(values, start=1)), ordered(i, count))
        for i, (k, values) in enumerate(zip(result["loop"], result["constant"]))
    ]
    x = "loops later"
    return [
        Chart("What losses see of a loop's scale", x, "size", sizes, log_y=spread(*result["size"]), whole_x=True),
        Chart("The constant of the bound", x, "size · scale / loops later", constants, whole_x=True),
    ]


def exit_weighted(result: dict) -> list:
    losses = {"of mixed logits": "ce", "mean over exits": "expected_ce", "last loop alone": "last_ce"}
    return [
        Bars("Loss", "cross-entropy", {words: result[key] for words, key in losses.items()}),
        Bars("Where tokens exit", "share", {f"loop {k}": p for k, p in zip(result["loop"], result["exit"])}),
        Chart(
            "Loss of mixed logits at every depth",
            "loops",
            "cross-entropy",
            [Line("", list(zip(result["loop"], result.get("ce_at_depth", []))))],
            whole_x=True,
        ),
    ]


def training(series: dict[str, dict]) -> list:
    """Draw the same quantity over training steps, from a run's metrics.jsonl."""
    lines = []
    for i, (name, points) in enumerate(series.items()):
        of, _, part = name.partition("/")  # gradient_norm/core.0.mlp, or state_change
        color = ordered(i, len(series)) if "/loop_" in name else named(i)
        lines.append(Line(layer_name(part).replace("_", " "), list(zip(points["step"], points["value"])), color))
    y = of.replace("_", " ") if lines else ""
    log = spread(*(points["value"] for points in series.values()))
    return [Chart("While the model trained", "step", y, lines, log_y=log)]
