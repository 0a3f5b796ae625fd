"""Warnings of divergence during training, from norms and spectra that grow before a looped model fails."""

import statistics
from collections.abc import Callable, Sequence

import torch

from looped_recipes.common.measures import (
    gradient_norm,
    spectral_radius,
    token_correlation,
    token_rms,
    watched_blocks,
)
from modeling_looped.tensors import on_device


LIMITS = {  # metric: (largest value, largest ratio to the median of the last measurements), None for no limit
    "residual_norm": (1e4, 20),
    "state_change": (1e4, 20),
    "first_mlp_gradient_norm": (None, 50),
    "spectral_radius": (1.0, None),
}
RECENT = 5  # measurements in the reference; not the first ones: norms grow far above those in a sound run too
SETTLED = 0.01  # fraction of the state's norm: growth from smaller changes by the last loop is noise, not a warning


class StateNorms:
    """Mean norms of the states of a step over all its rows, for any split into micro batches and processes.

    The state of a row that runs fewer loops than the deepest of the step counts as unchanged after its last loop.
    change: the norm of the update by each row's last loop. likeness: correlation of the tokens of a row after it.
    """

    def __init__(self, deepest: int, device):
        self.rms = torch.zeros(deepest, dtype=torch.float64, device=device)  # sum over tokens for each loop
        zeros = (torch.zeros(1, dtype=torch.float64, device=device) for _ in range(4))
        self.change, self.num_tokens, self.likeness, self.num_rows = zeros
        self.width = 0

    def add(self, states: Sequence[torch.Tensor], first: torch.Tensor, depths: list[int]):
        """Add a micro batch. states: after every loop, [rows, length, hidden] each. first: h_0. depths: loops of every
        row."""
        deepest = len(self.rms)
        norms = [token_rms(state).double().sum() for state in states]
        self.rms += torch.stack([*norms, *[norms[-1]] * (deepest - len(norms))])
        moved = [token_rms(after - before).double().sum(1) for before, after in zip([first, *states], states)]
        is_last = [[loop == depth for depth in depths] for loop in range(1, len(states) + 1)]
        self.change += (torch.stack(moved) * on_device(is_last, first.device)).sum()
        self.num_tokens += states[0][..., 0].numel()
        self.likeness += token_correlation(states[-1]).double().sum()
        self.num_rows += len(states[-1])
        self.width = states[0].shape[-1]

    def metrics(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return the means. reduce: sums a tensor over processes, so all processes call this method."""
        sums = torch.cat([self.rms, self.change, self.num_tokens, self.likeness, self.num_rows])
        *norms, change, num_tokens, likeness, num_rows = reduce(sums).tolist()
        norms = [norm / num_tokens for norm in norms]
        metrics = {f"residual_norm/loop_{k}": norm for k, norm in enumerate(norms, start=1)}
        metrics["residual_norm"], metrics["token_correlation"] = norms[-1], likeness / num_rows
        # ||H_k||, not divided by sqrt d, as in the figures of the Fully Looped Transformer
        metrics |= {f"state_norm/loop_{k}": norm * self.width**0.5 for k, norm in enumerate(norms, start=1)}
        return metrics | ({"state_change": change / num_tokens} if len(norms) > 1 else {})


class Monitor:
    """Keeps the last measurements of each metric, and warns once whenever a metric leaves its range."""

    def __init__(self):
        self.history: dict[str, list[float]] = {}
        self.warned: set[str] = set()

    def state_dict(self) -> dict:
        return {"history": self.history, "warned": sorted(self.warned)}

    def load_state_dict(self, state: dict):
        self.history, self.warned = dict(state["history"]), set(state["warned"])

    def measure_weights(self, model) -> dict[str, float]:
        """Measure gradient norms and spectra, after the backward pass and before clipping. `model` is the unwrapped
        causal LM."""
        metrics = {}
        metrics["first_mlp_gradient_norm"] = gradient_norm((list(model.model.prelude) + list(model.model.core))[0].mlp)
        metrics |= {f"gradient_norm/{name}": gradient_norm(block) for name, block in watched_blocks(model).items()}
        metrics["spectral_radius"] = spectral_radius(model.model.injection)
        return {key: value for key, value in metrics.items() if value is not None}

    def warnings(self, metrics: dict[str, float]) -> list[str]:
        """Record the metrics of a step, and return messages about those that have just left their range."""
        messages = []
        for name, (limit, factor) in LIMITS.items():
            if name not in metrics:
                continue
            value, recent = metrics[name], self.history.setdefault(name, [])
            least = SETTLED * metrics.get("residual_norm", 0.0) if name == "state_change" else 1e-8
            too_large = limit is not None and value >= limit
            grown = factor and len(recent) == RECENT and value > factor * max(statistics.median(recent), least)
            if (too_large or grown) and name not in self.warned:
                grew = f"is more than {factor} times the median of its last {RECENT} measurements"
                reason = f"reached {limit:g}" if too_large else grew
                messages.append(
                    f"{name} = {value:.4g} {reason}: the loop may be diverging. Lower the learning rate, or control "
                    "the state (norm_penalty, inter_loop_norm, injection='diagonal', residual_scaling)."
                )
                self.warned.add(name)
            elif not (too_large or grown):
                self.warned.discard(name)
            self.history[name] = [*recent, value][-RECENT:]
        return messages
