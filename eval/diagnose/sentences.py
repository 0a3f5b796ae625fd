"""Sentences that say what each measure found. Every function takes a result as in the JSON."""

import math

from looped_eval.common.findings import best_depth
from looped_recipes.common.axis import written
from looped_recipes.common.optimum import in_words, shift
from looped_recipes.common.words import counted

from .figures import hundredths, layer_name, power_of_n, rule_name


NOTHING = 1e-4  # limit for losses and sizes of about 1; less is rounding, or negligible
STILL = 0.05  # norms within this share of the last one stand still


def times(value: float) -> str:
    return f"{value:.2f} times" if 0.1 <= value < 10 else f"{written(value, 3)} times"


def share(value: float) -> str:
    return "less than 1 %" if value < 0.005 else f"{100 * value:.0f} %"


def amount(value: float) -> str:
    return f"less than {NOTHING:g}" if abs(value) < NOTHING else written(value, 3)


def depth_curve(result: dict) -> str:
    known = {k: ce for k, ce in zip(result["loop"], result["ce"]) if ce is not None}
    return (
        best_depth(known, result["trained_loops"], "cross-entropy")
        if known
        else "The loss is not a number at any depth."
    )


def norm_trajectory(result: dict) -> str:
    growth = result["growth"]
    if growth is None:
        return "The norm of the state is not finite."
    norms = result["norm"][1:]
    count, last = len(norms), norms[-1]
    if count == 1:
        return f"After its one loop the state has the norm {written(last)}."
    how = "stays of one size" if 0.8 < growth < 1.25 else "grows" if growth > 1 else "falls"
    still = next(k for k in range(count) if all(abs(norm - last) <= STILL * last for norm in norms[k:])) + 1
    until = sorted(norms[:still], reverse=growth < 1)
    if how != "stays of one size" and still <= count / 2 and norms[:still] == until:
        how += f" until loop {still} and then stays of one size"
    return f"The norm of the state {how}: after {counted(count, 'loop')} it is {times(growth)} that after the first."


def state_dynamics(result: dict) -> str:
    last = result["change"][-1]
    ratio = last / result["change"][0]
    how = "settles" if ratio < 0.1 else "slows down" if ratio < 0.5 else "goes on moving"
    moves = "hardly moves it" if ratio < NOTHING else f"moves it {times(ratio)} as far as the first"
    return (
        f"Over {counted(len(result['loop']), 'loop')} the state {how}: the last {moves}, by "
        f"{share(last / result['state_norm'][-1])} of its norm."
    )


def spectral(result: dict) -> str:
    radius = result["A"]["spectral_radius"]
    sense = "below 1: it forgets" if radius < 0.999 else "1: it keeps" if radius < 1.001 else "above 1: it amplifies"
    return f"The injection's map of the state has the spectral radius {written(radius)}, {sense} what came before."


def sensitivity(result: dict) -> str:
    if result["exponent"] is None:
        return "Small changes of the state are gone after a loop, or the state is not finite."
    factor = math.exp(result["exponent"])
    how = "forget" if factor < 0.99 else "keep" if factor < 1.01 else "amplify"
    return f"Later loops {how} small changes of the state: each multiplies them by {written(factor)}."


def gradient_norms(result: dict) -> str:
    known = {
        name: block["oscillation"] for name, block in result["blocks"].items() if block["oscillation"] is not None
    }
    if not known:
        return "The gradients are zero, missing or not finite."
    worst = max(known, key=known.get)
    factor = math.exp(known[worst])
    return f"From step to step gradients typically change by a factor of {factor:.2f}, most in {layer_name(worst)}."


def loop_cosine(result: dict) -> str:
    off = result["model"]["off_diagonal"]
    how = (
        "push the same way" if off["mean"] > 0.2 else "undo each other" if off["mean"] < -0.2 else "go their own ways"
    )
    return f"The loops of this model {how}: the mean cosine between their increments is {hundredths(off['mean'])}."


def loop_cosine_fresh(result: dict) -> str:
    shared, apart = (
        hundredths(result[name]["off_diagonal"]["mean"]) if name in result else None for name in ("looped", "unshared")
    )
    beside = f", with layers of their own {apart}" if apart else ""
    return f"With shared layers the mean cosine between loops is {shared}{beside}."


def premises(result: dict) -> str:
    whole, orthogonal = result["increment_overlap"], result["loops_orthogonal"]
    branches = [branch["residual_overlap"] for branch in result["branches"].values()]
    return (
        f"What a branch adds overlaps between loops by {min(branches):.2f} to {max(branches):.2f}, and what a whole "
        f"loop adds by {whole:.2f}, where 1 is all alike and {orthogonal:.2f} is orthogonal."
    )


def radial_gradient(result: dict) -> str:
    last = result["final_r"]
    sees = "does not see" if last < NOTHING else "sees"
    return f"The last readout {sees} the state's scale: {written(last, 2)} of its gradient is along the state."


def scale_sweep(result: dict) -> str:
    low, high = min(result["alpha"]), max(result["alpha"])
    flat = result["ce_range"] < 0.01
    what = "does not matter to the readout" if flat else "matters to the readout"
    return (
        f"The state's scale {what}: between α = {low:g} and {high:g} the loss changes by {amount(result['ce_range'])}."
    )


def radial_clamp(result: dict) -> str:
    held = result["freeze"]
    cost = held["delta_ce"]
    how = f"{'costs' if cost >= 0 else 'gains'} {amount(abs(cost))} in cross-entropy"
    return f"Holding the scale of the first loop {how}, at {times(held['norm_ratio'])} the norm."


def update_decomposition(result: dict) -> str:
    table = result["table"]
    growth, update = table["measured_increment"], table["b"]
    how = "grows by" if growth > 0 else "falls by"
    if update < NOTHING:
        return f"Once settled, the state stays where it is: updates are of size {written(update, 2)}."
    return (
        f"Once settled, the state's scale {how} {written(abs(growth), 3)} in each loop, of updates of size "
        f"{written(update, 3)}: {share(table['a_rad_size'] / update)} of them is along the state."
    )


def token_norms(result: dict) -> str:
    of_kinds = [of_kind["mean"] for of_kind in result.get("classes", {}).values()]
    if result["mean"] > 2 * result["median"]:
        how = "a few tokens carry it"
    elif result["std"] > result["mean"] / 2 or (of_kinds and max(of_kinds) > 2 * min(of_kinds)):
        how = "tokens differ"
    else:
        how = "tokens are alike"
    return (
        f"The median token has the norm {written(result['median'])}, the mean {written(result['mean'])}, the largest "
        f"{written(result['max'])}: {how}."
    )


def future_signal(result: dict) -> str:
    if len(result["loop"]) == 1:
        return "With one loop there is no later loss."
    own, later = result["largest_immediate"], result["largest_future"]
    if max(own, later) < NOTHING:
        return "No loss sees the scale of any loop: neither its own nor those of later loops change with it."
    return (
        f"The scale of a loop moves its own loss by up to {amount(own)} for each unit of log scale, and those of "
        f"later loops by up to {amount(later)}."
    )


def exit_weighted(result: dict) -> str:
    mean = sum(k * p for k, p in zip(result["loop"], result["exit"]))
    return (
        f"The gate exits after {mean:.2f} of {result['num_loops']} loops in the mean; mixed by it the loss is "
        f"{result['ce']:.3f}, that of the last loop alone {result['last_ce']:.3f}."
    )


def exponents(result: dict, what: str) -> str:
    parts = []
    for rule, curves in result["looped"].items():
        theory, found = curves["slope"]["theory"], power_of_n(curves["slope"]["first_step"])
        parts.append(f"{found} under {rule_name(rule, result)}" + ("" if theory is None else f" (theory {theory:g})"))
    reason = result.get("no_theory")
    return f"{what} goes as {', '.join(parts)}." + (f" {reason[0].upper()}{reason[1:]}." if reason else "")


def residual_norm(result: dict) -> str:
    return exponents(result, "With shared layers the norm of the state")


def update_size(result: dict) -> str:
    return exponents(result, "What an optimizer step changes")


def between(optima: dict[str, dict]) -> str:
    """Say how far it is from the first of these best rates to the last, and where there is none."""
    known = [at for at, found in optima.items() if found.get("lr") is not None]
    if len(optima) == 1:
        ((at, found),) = optima.items()
        return f"the best rate at {at} is {in_words(found)}"
    if len(known) < 2:
        why = "; ".join(f"{at}: {found['why']}" for at, found in optima.items() if at not in known)
        return f"best rates cannot be compared ({why})"
    moved = shift(optima[known[0]], optima[known[-1]])
    interval = "[{:+.2f}, {:+.2f}]".format(*moved["interval"]) if moved["interval"] else "(no interval)"
    far = f"{moved['octaves']:+.2f} octaves {interval}".replace("-", "−")
    missing = ", ".join(at for at in optima if at not in known)
    return f"the best rate moves by {far} from {known[0]} to {known[-1]}" + (f"; none at {missing}" if missing else "")


def lr_transfer(result: dict) -> str:
    groups: dict[str, dict] = {}  # over N or, where there is one N, over L
    for panel in result["panels"]:
        rule, layers = rule_name(panel["rule"], result), panel["layers"]
        over_n = len(panel["curves"]) > 1
        for n, curve in panel["curves"].items():
            where, at = (counted(layers, "layer"), f"N = {n}") if over_n else (f"N = {n}", f"L = {layers}")
            groups.setdefault(f"{rule}, {where}", {})[at] = curve["optimum"]
    words = "; ".join(f"{where}: {between(optima)}" for where, optima in groups.items())
    return f"{words[0].upper()}{words[1:]}."


def of_alphas(by_alpha: dict, key: str) -> str:
    slopes = [(alpha.replace("alpha=", "α = "), found[key]["deep"]["slope"]) for alpha, found in by_alpha.items()]
    return ", ".join(f"N^{hundredths(slope)} at {alpha}" for alpha, slope in slopes if slope is not None)


def theorem_1(result: dict) -> str:
    arrangements = result["arrangements"]
    shared, apart = (of_alphas(arrangements[n], "slope_of_sum_squared") for n in ("shared", "independent"))
    return f"The sum of residuals grows as {shared} with one matrix, as {apart} with a matrix for each loop."


def theorem_2(result: dict) -> str:
    return f"One update changes the state by {of_alphas(result['alphas'], 'slope')}."


def theorem_3(result: dict) -> str:
    over_n, over_l = (
        [fit["deep"]["slope"] for name, fit in result[key].items() if name != "theory"]
        for key in ("slope_over_loops", "slope_over_layers")
    )
    n, layers = (f"{min(found):.2f} to {max(found):.2f}" for found in (over_n, over_l))
    return f"The sum of all branches grows with exponents {n} over N (theory 2) and {layers} over L (theory 1)."
