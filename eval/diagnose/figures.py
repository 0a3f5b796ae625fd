"""One figure for every measure: `draw_<measure>(result, path)` writes a PNG of what the measure returned."""

from looped_recipes.common.canvas import canvas


def colour(i: int, count: int):
    from matplotlib import colormaps

    return colormaps["viridis"](i / max(1, count - 1))


def legend(axis):
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def log_if_positive(axis, *series):
    values = [value for one in series for value in one if value is not None]
    if values and min(values) > 0:
        axis.set_yscale("log")


def at_least_a_decade(axis):
    low, high = axis.get_ylim()
    if high < 10 * low:
        middle = (low * high) ** 0.5
        axis.set_ylim(middle / 10**0.5, middle * 10**0.5)


def draw_growth(panels: list[tuple[str, dict, dict]], loops, label: str, path):
    """Curves over N, one per step, beside the theory's slope through the first point."""
    with canvas(path, len(panels)) as axes:
        for axis, (title, curves, slope) in zip(axes, panels):
            for step, curve in enumerate(curves):
                axis.plot(loops, curve, marker=".", color=colour(step, len(curves)))
            if slope["theory"] is not None:
                line = [curves[0][0] * (n / loops[0]) ** slope["theory"] for n in loops]
                axis.plot(loops, line, "--", color="gray", label=f"theory: slope {slope['theory']:g}")
            fitted = slope["first_step"]["slope"]
            measured = "no fit" if fitted is None else f"slope {fitted:.2f}"
            axis.set(xscale="log", yscale="log", xlabel="N", ylabel=label, title=f"{title}: {measured}")
            at_least_a_decade(axis)
            legend(axis)


def draw_residual_norm(result: dict, path):
    panels = [
        (f"{arrangement}, {rule}", curves["R"], curves["slope"])
        for arrangement in ("looped", "unshared")
        for rule, curves in result.get(arrangement, {}).items()
    ]
    draw_growth(panels, result["loops"], "R", path)


def draw_update_size(result: dict, path):
    panels = [(rule, curves["update"], curves["slope"]) for rule, curves in result["looped"].items()]
    draw_growth(panels, result["loops"], "RMS change of h_N", path)


def draw_loop_cosine(result: dict, path):
    names = [name for name in ("model", "looped", "unshared") if name in result]
    with canvas(path, len(names)) as axes:
        for axis, name in zip(axes, names):
            edges = (0.5, len(result[name]["cosine"]) + 0.5)
            image = axis.imshow(result[name]["cosine"], vmin=-1, vmax=1, cmap="RdBu_r", extent=(*edges, *edges[::-1]))
            axis.set(title=name, xlabel="loop", ylabel="loop")
        axes[-1].figure.colorbar(image, ax=list(axes), label="cosine of increments")


def draw_premises(result: dict, path):
    names = list(result["branches"])
    with canvas(path, 2) as (left, right):
        for key in ("activation_overlap", "residual_overlap"):
            left.plot(range(len(names)), [result["branches"][name][key] for name in names], marker=".", label=key)
        left.axhline(result["loops_orthogonal"], linestyle=":", color="gray", label="orthogonal loops")
        left.set(xlabel="branch", ylabel="overlap of loops", ylim=(0, 1.05))
        for key in ("gain", "spectral_norm", "Y_squared"):
            right.plot(range(len(names)), [result["branches"][name][key] for name in names], marker=".", label=key)
        right.set(xlabel="branch")
        legend(left)
        legend(right)


def draw_exponents(axis, x, curves: dict[str, tuple[list, float | None]], label: str, xlabel: str):
    """Curves over N or L in logarithms, each with the theory's exponent from its last point back."""
    for i, (name, (values, theory)) in enumerate(curves.items()):
        axis.plot(x, values, marker=".", color=colour(i, len(curves)), label=name)
        if theory is not None:
            line = [values[-1] * (at / x[-1]) ** theory for at in x]
            axis.plot(x, line, "--", color=colour(i, len(curves)), alpha=0.5)
    axis.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=label)
    at_least_a_decade(axis)
    legend(axis)


def draw_theorem_1(result: dict, path):
    with canvas(path, len(result["arrangements"])) as axes:
        for axis, (name, of_alphas) in zip(axes, result["arrangements"].items()):
            curves = {
                alpha: (found["sum_squared"], found["slope_of_sum_squared"]["theory"])
                for alpha, found in of_alphas.items()
            }
            draw_exponents(axis, result["loops"], curves, "||sum r||^2 / d", "N")
            axis.set_title(name)


def draw_theorem_2(result: dict, path):
    with canvas(path) as (axis,):
        curves = {alpha: (found["change"], found["slope"]["theory"]) for alpha, found in result["alphas"].items()}
        draw_exponents(axis, result["loops"], curves, "rms change of h_N", "N")


def draw_theorem_3(result: dict, path):
    total = {(cell["layers"], cell["loops"]): cell["total_squared"] for cell in result["cells"]}
    layers, loops = result["layers"], result["loops"]
    with canvas(path, 2) as (left, right):
        over_loops = {f"L = {at}": ([total[at, n] for n in loops], 2.0) for at in layers}
        over_layers = {f"N = {n}": ([total[at, n] for at in layers], 1.0) for n in loops}
        draw_exponents(left, loops, over_loops, "||sum G||^2 / d", "N")
        draw_exponents(right, layers, over_layers, "||sum G||^2 / d", "L")


def draw_norm_trajectory(result: dict, path):
    with canvas(path) as (axis,):
        axis.plot(result["loop"], result["norm"], marker=".")
        axis.axvline(result["trained_loops"], linestyle=":", color="gray")
        axis.set(xlabel="loop", ylabel="||h||")


def draw_lr_transfer(result: dict, path):
    with canvas(path, len(result["panels"])) as axes:
        for axis, panel in zip(axes, result["panels"]):
            for i, (n, curve) in enumerate(panel["curves"].items()):
                colours = colour(i, len(panel["curves"]))
                points = [(rate, loss) for rate, loss in zip(result["rates"], curve["loss"]) if loss is not None]
                if points:
                    axis.plot(*zip(*points), marker=".", color=colours, label=f"N = {n}")
                    best = min(points, key=lambda p: p[1])
                    axis.plot(*best, marker="*", markersize=12, color=colours)
                    if curve["optimum"].get("interval"):
                        axis.plot(curve["optimum"]["interval"], [best[1]] * 2, color=colours, alpha=0.4, linewidth=4)
            title = f"{panel['rule']}, {panel['layers']} layers"
            axis.set(xscale="log", xlabel="learning rate", ylabel="held-out loss", title=title)
            legend(axis)


def draw_radial_gradient(result: dict, path):
    with canvas(path, 3) as (left, middle, right):
        left.plot(result["loop"], result["r"], marker="o")
        left.set(xlabel="loop", ylabel="radial fraction r", yscale="log")
        middle.plot(result["loop"], result["g"], marker="o")
        middle.set(xlabel="loop", ylabel="dL / dlog ||H||")
        right.plot(result["loop"], result["entropy"], marker="o", label="entropy")
        right.plot(result["loop"], result["margin"], marker="o", label="logit margin")
        right.set(xlabel="loop")
        legend(right)


def draw_scale_sweep(result: dict, path):
    with canvas(path) as (axis,):
        axis.plot(result["alpha"], result["ce"], marker="o")
        axis.set(xscale="log", xlabel="alpha", ylabel="cross-entropy of alpha H_K")
        axis.set_ylim(top=max(result["ce"]) + 0.1, bottom=min(result["ce"]) - 0.1)


def draw_radial_clamp(result: dict, path):
    names = ["unclamped", "freeze", "remove_radial"]
    with canvas(path, 2) as (left, right):
        left.bar(names, [result[name]["ce"] for name in names])
        left.set(ylabel="cross-entropy")
        right.bar(names, [result[name]["norm_ratio"] for name in names])
        right.set(ylabel="norm ratio")


def draw_update_decomposition(result: dict, path):
    loops = result["loop"]
    with canvas(path, 3) as (left, middle, right):
        left.plot(loops, result["scale"], label="s")
        left.plot([k + 1 for k in loops], result["predicted_next_scale"], ":", label="s + a_rad of the loop before")
        left.set(xlabel="loop", ylabel="scale")
        middle.plot(loops, result["a_rad"], label="a_rad")
        middle.plot(loops, result["b"], label="|b|")
        middle.set(xlabel="loop", ylabel="update")
        right.plot(loops, result["b_perp"], label="|b_perp|")
        right.plot(loops, result["turn_times_scale"], ":", label="|u' - u| s")
        right.set(xlabel="loop", ylabel="turn")
        for axis in (left, middle, right):
            legend(axis)


def draw_token_norms(result: dict, path):
    names = ["median", "mean", "p99", "max"]
    groups = {"all": result, **result.get("classes", {})}
    with canvas(path) as (axis,):
        for i, (group, found) in enumerate(groups.items()):
            places = [place + i / (len(groups) + 1) for place in range(len(names))]
            axis.bar(places, [found[name] for name in names], 1 / (len(groups) + 1), label=group.replace("_", " "))
        axis.set(ylabel="||H_K|| of a token", xticks=range(len(names)), xticklabels=names)
        legend(axis)


def draw_future_signal(result: dict, path):
    """Against t, a curve for each loop k."""
    with canvas(path, 2) as (left, right):
        for i, (k, sizes, constants) in enumerate(zip(result["loop"], result["size"], result["constant"])):
            shade = colour(i, len(result["loop"]))
            left.plot(range(len(sizes)), sizes, marker="o", color=shade, label=f"k = {k}")
            right.plot(range(1, len(constants) + 1), constants, marker="o", color=shade)
        left.set(xlabel="t", ylabel="|dL_(k+t) / dlog s_k|")
        log_if_positive(left, *result["size"])
        right.set(xlabel="t", ylabel="the same times s_k / t")
        legend(left)


def draw_exit_weighted(result: dict, path):
    with canvas(path, 2) as (left, right):
        losses = {"of mixed logits": "ce", "mixed": "expected_ce", "last loop": "last_ce"}
        left.bar(list(losses), [result[name] for name in losses.values()])
        left.set(ylabel="cross-entropy")
        right.bar(result["loop"], result["exit"])
        right.set(xlabel="loop", ylabel="exit probability")


def draw_depth_curve(result: dict, path, beside: dict[str, dict] | None = None):
    """Loss and norms over depth; and every model's exit gap against its norm (readout, figure 1)."""
    with canvas(path, 3) as (left, middle, right):
        left.plot(result["loop"], result["ce"], marker=".")
        left.axvline(result["trained_loops"], linestyle=":", color="gray")
        left.set(xlabel="loops K", ylabel="cross-entropy")
        middle.plot(result["loop"], result["norm_before"], marker=".", label="before the norm between loops")
        middle.plot(result["loop"][:-1], result["norm_after"], marker=".", label="after")
        middle.set(xlabel="loop", ylabel="||h||")
        log_if_positive(middle, result["norm_before"], result["norm_after"])
        legend(middle)
        draw_quadrant(right, {"this model": result, **(beside or {})})


def draw_quadrant(axis, results: dict[str, dict]):
    for name, result in results.items():
        axis.plot(result["exit_gap"], result["final_norm"], "o", label=name)
    gaps = [result["exit_gap"] for result in results.values()]
    axis.set_xscale("symlog", linthresh=0.1)
    axis.set(yscale="log", xlabel="CE(1) - CE(N)", ylabel="||H_N||", xlim=(min(0, *gaps) - 0.01, max(0, *gaps) + 0.01))
    at_least_a_decade(axis)
    axis.legend(fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1))


def draw_spectral(result: dict, path):
    bars = {"radius of A": result["A"]["spectral_radius"], "norm of A": result["A"]["spectral_norm"]}
    bars["norm of B"] = result["B"]["spectral_norm"]
    if "C" in result:
        bars |= {"norm of C": result["C"]["spectral_norm"], "expansion of C": result["C"]["expansion"]}
    with canvas(path, 2) as (left, right):
        left.bar(list(bars), list(bars.values()))
        left.axhline(1, linestyle=":", color="gray")
        left.tick_params(axis="x", rotation=30)
        points = [(i, value) for i, value in enumerate(result["A"]["expansion"]) if value is not None]
        if points:
            right.plot(*zip(*points), marker="o")
        right.set(xlabel="loop", ylabel="||A h|| / ||h||")


def draw_state_dynamics(result: dict, path):
    with canvas(path, 3) as (left, middle, right):
        left.plot(result["loop"], result["state_norm"], label="||h_T||")
        left.plot(result["loop"], result["change"], label="||h_T - h_(T-1)||")
        left.set(xlabel="T")
        log_if_positive(left, result["state_norm"], result["change"])
        for t, norms in enumerate(result["stage_norms"]):
            middle.plot(result["stages"], norms, color=colour(t, len(result["stage_norms"])))
        middle.set(ylabel="norm by stage, dark: first loop")
        right.plot(list(result["prelude"]), list(result["prelude"].values()), marker="o")
        right.set(ylabel="norm in the prelude")
        for axis in (middle, right):
            axis.tick_params(axis="x", rotation=30)
        legend(left)


def draw_gradient_norms(result: dict, path):
    with canvas(path) as (axis,):
        for name, block in result["blocks"].items():
            steadiness = "" if block["oscillation"] is None else f" ({block['oscillation']:.2f})"
            axis.plot(result["step"], block["norm"], label=name + steadiness)
        log_if_positive(axis, *(block["norm"] for block in result["blocks"].values()))
        axis.set(xlabel="step", ylabel="gradient norm (oscillation)")
        legend(axis)


def draw_training(series: dict[str, dict], path):
    """What a run's metrics.jsonl says of the same quantity over its steps."""
    with canvas(path) as (axis,):
        for name, points in series.items():
            axis.plot(points["step"], points["value"], label=name)
        log_if_positive(axis, *(points["value"] for points in series.values()))
        axis.set(xlabel="step")
        legend(axis)
