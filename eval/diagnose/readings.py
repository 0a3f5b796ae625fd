"""What every measure is called, how it is read, and the sentence that says what it found."""

import math
from collections.abc import Callable
from typing import NamedTuple

from looped_eval.common.findings import best_depth
from looped_eval.common.page import Explanation
from looped_recipes.common.axis import written
from looped_recipes.common.words import counted

from .figures import RULE_NAMES, layer_name


class Reading(NamedTuple):
    title: str
    finding: Callable[[dict], str]
    explanation: Explanation
    fresh: bool = False  # of models that the measure makes anew from the config


NOTHING = 1e-4  # of losses and sizes of about 1: less is rounding, or not worth a word


def times(value: float) -> str:
    return f"{value:.2f} times" if 0.1 <= value < 10 else f"{written(value, 3)} times"


def share(value: float) -> str:
    return "less than 1 %" if value < 0.005 else f"{100 * value:.0f} %"


def hundredths(value: float) -> str:
    """Of a cosine or an exponent."""
    return f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def amount(value: float) -> str:
    return f"less than {NOTHING:g}" if abs(value) < NOTHING else written(value, 3)


# Findings


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
    count = len(result["norm"]) - 1
    if count == 1:
        return f"After its one loop the state has the norm {written(result['norm'][-1])}."
    how = "stays of one size" if 0.8 < growth < 1.25 else "grows" if growth > 1 else "falls"
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


def gradient_norms(result: dict) -> str:
    known = {
        name: block["oscillation"] for name, block in result["blocks"].items() if block["oscillation"] is not None
    }
    if not known:
        return "The gradients are zero or not finite."
    worst = max(known, key=known.get)
    factor = math.exp(known[worst])
    return f"From step to step gradients change by a factor of {factor:.2f} as a rule, most in {layer_name(worst)}."


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
    growth, update = table["a_rad"], table["b"]
    how = "grows by" if growth > 0 else "falls by"
    if update < NOTHING:
        return f"Once settled, the state stays where it is: updates are of size {written(update, 2)}."
    return (
        f"Once settled, the state's scale {how} {written(abs(growth), 3)} in each loop, of updates of size "
        f"{written(update, 3)}: {share(abs(growth) / update)} of them is along the state."
    )


def token_norms(result: dict) -> str:
    ratio = result["mean"] / result["median"]
    how = "a few tokens carry it" if ratio > 2 else "tokens are alike"
    return (
        f"The median token has the norm {written(result['median'])}, the mean {written(result['mean'])}, the largest "
        f"{written(result['max'])}: {how}."
    )


def future_signal(result: dict) -> str:
    if result["largest_future"] is None:
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


def exponents(by_rule: dict, what: str) -> str:
    parts = []
    for rule, curves in by_rule.items():
        slope, theory = curves["slope"]["first_step"]["slope"], curves["slope"]["theory"]
        found = "no power of N" if slope is None else f"N^{hundredths(slope)}"
        parts.append(f"{found} under {RULE_NAMES[rule]}" + ("" if theory is None else f" (theory {theory:g})"))
    return f"{what} goes as {', '.join(parts)}."


def residual_norm(result: dict) -> str:
    return exponents(result["looped"], "With shared layers the norm of the state")


def update_size(result: dict) -> str:
    return exponents(result["looped"], "What an optimizer step changes")


def lr_transfer(result: dict) -> str:
    parts = []
    for panel in result["panels"]:
        best = {n: curve["optimum"].get("lr") for n, curve in panel["curves"].items()}
        known = {n: rate for n, rate in best.items() if rate is not None}
        where = f"{RULE_NAMES[panel['rule']]}, {panel['layers']} layer{'s' * (panel['layers'] != 1)}"
        if len(known) < 2:
            parts.append(f"{where}: the best rates lie at the ends of those tried, so they cannot be compared")
            continue
        moved = abs(math.log2(max(known.values()) / min(known.values())))
        parts.append(f"{where}: the best rate moves by {moved:.1f} octaves over N = {', '.join(known)}")
    words = "; ".join(parts)
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


# How each is read


SCALE_PAPER = "Readout Blind Spot"
READINGS = {
    "depth_curve": Reading(
        "Loss over depth",
        depth_curve,
        Explanation(
            "Cross-entropy of held-out text after every loop, up to twice the trained depth.",
            "It falls until the trained depth and does not rise much beyond it; a flat curve makes no use of loops.",
            f"{SCALE_PAPER}, table 11: 1 loop costs 0.00 beside 4 with normed readouts at every loop, 0.03 to 0.04 "
            "with raw ones, and 4 to 37 where only the last loop is trained.",
        ),
    ),
    "norm_trajectory": Reading(
        "Norm over loops",
        norm_trajectory,
        Explanation(
            "The norm of the state before the first loop and after each.",
            "It stays of one size, also beyond the trained depth.",
            f"{SCALE_PAPER}, table 2: after 4 loops 15 to 83 where a loss sees the scale, 5,674 to 56,051 where "
            "none does.",
        ),
    ),
    "state_dynamics": Reading(
        "State and change",
        state_dynamics,
        Explanation(
            "How far each loop moves the state, and its norm at every stage of a loop.",
            "Changes shrink with every loop: the state settles, and more loops do no harm.",
            "Parcae, figures 11 and 20 to 22, draws the same over its models.",
        ),
    ),
    "spectral": Reading(
        "Injection",
        spectral,
        Explanation(
            "The loop's linear maps h → A h + B e and, into the coda, C h.",
            "A spectral radius of A below 1: what came before fades, and the state cannot explode by it.",
            "Parcae, figure 3: runs whose radius exceeds 1 diverge.",
        ),
    ),
    "loop_cosine": Reading(
        "Directions of loops",
        loop_cosine,
        Explanation(
            "Cosines between what different loops add to the state.",
            "No loop undoes another. The more alike they are, the faster the state grows without residual scaling.",
            "Residual Scaling, figures 6 and 8: after training positive for most pairs of loops.",
        ),
    ),
    "premises": Reading(
        "Overlap of branches",
        premises,
        Explanation(
            "How much what attention and MLP add agrees between loops, and how their last matrix scales it.",
            "Theorem 1 holds where loops overlap whatever their number; theorem 3 where layers do not.",
            "Residual Scaling proves the overlap for ReLU networks without norms, and gives no value for others.",
        ),
    ),
    "radial_gradient": Reading(
        "What readouts see of scale",
        radial_gradient,
        Explanation(
            "The part of each readout's gradient that points along the state.",
            "Above about 0.01; or, where it is 0, a norm or a penalty that holds the scale, as this loss cannot.",
            f"{SCALE_PAPER}, table 3: 5·10⁻⁹ to 9·10⁻⁹ with a normed readout, 0.047 to 0.072 with a raw one.",
        ),
    ),
    "scale_sweep": Reading(
        "Loss of a rescaled state",
        scale_sweep,
        Explanation(
            "Cross-entropy of the last readout when the state is multiplied by α.",
            "Flat with a norm before the head; a valley at α = 1 without one.",
            f"{SCALE_PAPER}, table 6, from α = 0.1 to 1: 8.50 to 8.50 with a norm, 11.02 to 98.36 without.",
        ),
    ),
    "radial_clamp": Reading(
        "What growth of scale is worth",
        radial_clamp,
        Explanation(
            "Loss when every token keeps the scale of its first loop, or only what turns the state is added.",
            "No cost: then predictions do not hang on a growing norm.",
            f"{SCALE_PAPER}, table 4: 0.0004 to 0.0055, at 0.40 to 0.55 times the norm.",
        ),
    ),
    "update_decomposition": Reading(
        "Updates along and across",
        update_decomposition,
        Explanation(
            "What each of 30 loops adds, along the state and across it.",
            "Small updates that mostly turn the state; a large part along it only makes it longer.",
            f"{SCALE_PAPER}, table 12, 44M, loss at every loop: 0.27 along the state of 0.28 with a raw readout, "
            "258 of 258 with a normed one.",
        ),
    ),
    "token_norms": Reading(
        "Norms of tokens",
        token_norms,
        Explanation(
            "The norm of the last state, token by token, and by what the token is.",
            "Mean and median are close, and no kind of token stands out.",
            f"{SCALE_PAPER}, table 10, 44M, loss at every loop: median 8 and mean 42 with a raw readout, 2,986 and "
            "63,347 with a normed one.",
        ),
    ),
    "future_signal": Reading(
        "What later losses see",
        future_signal,
        Explanation(
            "How the loss after a loop, and those after later loops, change with the state's scale.",
            "Some signal, or a norm or penalty: only then is the scale trained.",
            f"{SCALE_PAPER}, equation 4, bounds it by a constant times the loops between over the scale.",
        ),
    ),
    "exit_weighted": Reading(
        "The exit gate",
        exit_weighted,
        Explanation(
            "Loss of the logits mixed by the exit gate's probabilities, and where the gate exits.",
            "Mixed logits are no worse than the last loop's, and exits are not all at one loop.",
            f"{SCALE_PAPER}, table 6: 4.987 in training at 1.4 billion parameters, beside 8.50 of the last loop "
            "alone on other text.",
        ),
    ),
    "gradient_norms": Reading(
        "Gradients",
        gradient_norms,
        Explanation(
            "Gradients of single blocks before clipping, over a few optimizer steps of a copy.",
            "Of one size in all blocks, and steady from step to step.",
            "Fully Looped Transformer, figures 2 and 7: they oscillate in a looped transformer of 12 loops that "
            "collapses.",
        ),
    ),
    "residual_norm": Reading(
        "Norm over the number of loops",
        residual_norm,
        Explanation(
            "The norm of the last state of models of N loops, in their first optimizer steps.",
            "It does not grow with N: then a model can be made deeper at the same settings.",
            "Residual Scaling, theorem 1 and figure 2: N^1, N^0.5 and N^0 under no scaling, 1/√N and 1/N.",
        ),
        fresh=True,
    ),
    "update_size": Reading(
        "Updates over the number of loops",
        update_size,
        Explanation(
            "How far one optimizer step moves the last state of models of N loops.",
            "It does not grow with N: then one learning rate serves every depth.",
            "Residual Scaling, theorem 2 and figure 4: N^1, N^0.5 and N^0 under no scaling, 1/√N and 1/N.",
        ),
        fresh=True,
    ),
    "loop_cosine_fresh": Reading(
        "Directions of loops, fresh",
        loop_cosine_fresh,
        Explanation(
            "Cosines between what passes add, with the same layers in each pass and with layers of their own.",
            "Alike with shared layers, orthogonal with layers of their own: this is why looped models grow faster.",
            "Residual Scaling, figure 3: dense and positive with shared layers, none without.",
        ),
        fresh=True,
    ),
    "lr_transfer": Reading(
        "Learning rates",
        lr_transfer,
        Explanation(
            "Held-out loss of short runs over the learning rate, for several N.",
            "The best rate stays where it is when N grows.",
            "Residual Scaling, figure 5, 12 layers: it moves with N under 1/√N, and stays under 1/N.",
        ),
        fresh=True,
    ),
    "theorem_1": Reading(
        "Theorem 1",
        theorem_1,
        Explanation(
            "Growth of the sum of residuals in the theorem's own model, residual scale N^-α.",
            "Exponents as in theory where the theorem's premises hold.",
            "Residual Scaling: N^2 with one matrix for α ≥ 1, N^1 with a matrix for each loop for α ≥ 1/2.",
        ),
        fresh=True,
    ),
    "theorem_2": Reading(
        "Theorem 2",
        theorem_2,
        Explanation(
            "What one update of the shared matrix changes in the theorem's own model.",
            "Exponents as in theory where the theorem's premises hold.",
            "Residual Scaling: at most N^(1-α) for α ≥ 1.",
        ),
        fresh=True,
    ),
    "theorem_3": Reading(
        "Theorem 3",
        theorem_3,
        Explanation(
            "Growth of the sum of all branches over loops and layers in the theorem's own model.",
            "Exponents as in theory.",
            "Residual Scaling: L N².",
        ),
        fresh=True,
    ),
}
