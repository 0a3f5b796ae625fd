"""Title and explanation of every measure. The functions with its name in sentences.py and figures.py describe and draw
its result."""

from typing import NamedTuple

from looped_eval.common.page import Explanation


class Reading(NamedTuple):
    title: str
    explanation: Explanation
    fresh: bool = False  # measured on new models made from the config


SCALE_PAPER = "Readout Blind Spot"
READINGS = {
    "depth_curve": Reading(
        "Loss over depth",
        Explanation(
            "Cross-entropy of held-out text after every loop, up to twice the trained depth.",
            "It falls until the trained depth and does not rise much beyond it; a flat curve makes no use of loops.",
            f"{SCALE_PAPER}, table 11: 1 loop costs 0.00 beside 4 with normed readouts at every loop, 0.03 to 0.04 "
            "with raw ones, and 4 to 37 where only the last loop is trained.",
        ),
    ),
    "norm_trajectory": Reading(
        "Norm over loops",
        Explanation(
            "The norm of the state before the first loop and after each.",
            "It stays of one size, also beyond the trained depth.",
            f"{SCALE_PAPER}, table 2: after 4 loops 15 to 83 where a loss sees the scale, 5,674 to 56,051 where "
            "none does.",
        ),
    ),
    "state_dynamics": Reading(
        "State and change",
        Explanation(
            "How far each loop moves the state, and its norm at every stage of a loop.",
            "Changes shrink with every loop: the state settles, and more loops do no harm.",
            "Parcae, figures 11 and 20 to 22, draws the same over its models.",
        ),
    ),
    "spectral": Reading(
        "Injection",
        Explanation(
            "The loop's linear maps h → A h + B e and, into the coda, C h.",
            "A spectral radius of A below 1: what came before fades, and the state cannot explode by it.",
            "Parcae, figure 3: runs whose radius exceeds 1 diverge.",
        ),
    ),
    "sensitivity": Reading(
        "Small changes",
        Explanation(
            "What each loop multiplies a small change of the state by, in the direction where it grows most.",
            "Below 1: loops forget small errors and come to the same state again. Above 1 they do not settle.",
            "The spectral radius of a linear loop is this number; Parcae holds that of its injection below 1.",
        ),
    ),
    "loop_cosine": Reading(
        "Directions of loops",
        Explanation(
            "Cosines between what different loops add to the state.",
            "No loop undoes another. The more alike they are, the faster the state grows without residual scaling.",
            "Residual Scaling, figures 6 and 8: after training positive for most pairs of loops.",
        ),
    ),
    "premises": Reading(
        "Overlap of branches",
        Explanation(
            "How much what attention and MLP add agrees between loops, and how their last matrix scales it.",
            "Theorem 1 holds where loops overlap whatever their number; theorem 3 where layers do not.",
            "Residual Scaling proves the overlap for ReLU networks without norms, and gives no value for others.",
        ),
    ),
    "radial_gradient": Reading(
        "What readouts see of scale",
        Explanation(
            "The part of each readout's gradient that points along the state.",
            "Above about 0.01; or, where it is 0, a norm or a penalty that holds the scale, as this loss cannot.",
            f"{SCALE_PAPER}, table 3: 5·10⁻⁹ to 9·10⁻⁹ with a normed readout, 0.047 to 0.072 with a raw one.",
        ),
    ),
    "scale_sweep": Reading(
        "Loss of a rescaled state",
        Explanation(
            "Cross-entropy of the last readout when the state is multiplied by α.",
            "Flat with a norm before the head; a valley at α = 1 without one.",
            f"{SCALE_PAPER}, table 6, from α = 0.1 to 1: 8.50 to 8.50 with a norm, 11.02 to 98.36 without.",
        ),
    ),
    "radial_clamp": Reading(
        "What growth of scale is worth",
        Explanation(
            "Loss when every token keeps the scale of its first loop, or only what turns the state is added.",
            "No cost: then predictions do not hang on a growing norm.",
            f"{SCALE_PAPER}, table 4: 0.0004 to 0.0055, at 0.40 to 0.55 times the norm.",
        ),
    ),
    "update_decomposition": Reading(
        "Updates along and across",
        Explanation(
            "What each of 30 loops adds, along the state and across it.",
            "Small updates that mostly turn the state; a large part along it only makes it longer.",
            f"{SCALE_PAPER}, table 12, 44M, loss at every loop: 0.27 along the state of 0.28 with a raw readout, "
            "258 of 258 with a normed one.",
        ),
    ),
    "token_norms": Reading(
        "Norms of tokens",
        Explanation(
            "The norm of the last state, token by token, and by what the token is.",
            "Mean and median are close, and no kind of token stands out.",
            f"{SCALE_PAPER}, table 10, 44M, loss at every loop: median 8 and mean 42 with a raw readout, 2,986 and "
            "63,347 with a normed one.",
        ),
    ),
    "future_signal": Reading(
        "What later losses see",
        Explanation(
            "How the loss after a loop, and those after later loops, change with the state's scale.",
            "Some signal, or a norm or penalty: only then is the scale trained.",
            f"{SCALE_PAPER}, equation 4, bounds it by a constant times the loops between over the scale.",
        ),
    ),
    "exit_weighted": Reading(
        "The exit gate",
        Explanation(
            "Loss of the logits mixed by the exit gate's probabilities, and where the gate exits.",
            "Mixed logits are no worse than the last loop's, and exits are not all at one loop.",
            f"{SCALE_PAPER}, table 6: 4.987 at 1.4 billion parameters, beside 8.50 of the last loop's logits, on "
            "4,096 tokens of WikiText-103.",
        ),
    ),
    "gradient_norms": Reading(
        "Gradients",
        Explanation(
            "Gradients of single blocks before clipping, over a few optimizer steps of a copy.",
            "Of one size in all blocks, and steady from step to step.",
            "Fully Looped Transformer, figures 2 and 7: they oscillate in a looped transformer of 12 loops that "
            "collapses.",
        ),
    ),
    "residual_norm": Reading(
        "Norm over the number of loops",
        Explanation(
            "The norm of the last state of models of N loops, in their first optimizer steps.",
            "It does not grow with N: then a model can be made deeper at the same settings.",
            "Residual Scaling, theorem 1 and figure 2, of loops that only add to the state: N^1, N^0.5 and N^0 under "
            "no scaling, 1/√N and 1/N.",
        ),
        fresh=True,
    ),
    "update_size": Reading(
        "Updates over the number of loops",
        Explanation(
            "How far one optimizer step moves the last state of models of N loops.",
            "It does not grow with N: then one learning rate serves every depth.",
            "Residual Scaling, theorem 2 and figure 4, of loops that only add to the state: N^1, N^0.5 and N^0 under "
            "no scaling, 1/√N and 1/N.",
        ),
        fresh=True,
    ),
    "loop_cosine_fresh": Reading(
        "Directions of loops, fresh",
        Explanation(
            "Cosines between what passes add, with the same layers in each pass and with layers of their own.",
            "Alike with shared layers, orthogonal with layers of their own: this is why looped models grow faster.",
            "Residual Scaling, figure 3: dense and positive with shared layers, none without.",
        ),
        fresh=True,
    ),
    "lr_transfer": Reading(
        "Learning rates",
        Explanation(
            "Held-out loss of short runs over the learning rate, for several N.",
            "The best rate stays where it is when N grows.",
            "Residual Scaling, figure 5, 12 layers: it moves with N under 1/√N, and stays under 1/N.",
        ),
        fresh=True,
    ),
    "theorem_1": Reading(
        "Theorem 1",
        Explanation(
            "Growth of the sum of residuals in the theorem's own model, residual scale N^-α.",
            "Exponents as in theory where the theorem's premises hold.",
            "Residual Scaling: N^2 with one matrix for α ≥ 1, N^1 with a matrix for each loop for α ≥ 1/2.",
        ),
        fresh=True,
    ),
    "theorem_2": Reading(
        "Theorem 2",
        Explanation(
            "What one update of the shared matrix changes in the theorem's own model.",
            "Exponents as in theory where the theorem's premises hold.",
            "Residual Scaling: at most N^(1-α) for α ≥ 1.",
        ),
        fresh=True,
    ),
    "theorem_3": Reading(
        "Theorem 3",
        Explanation(
            "Growth of the sum of all branches over loops and layers in the theorem's own model.",
            "Exponents as in theory.",
            "Residual Scaling: L N².",
        ),
        fresh=True,
    ),
}
