"""Divergence monitor: what grows or vanishes before a looped model fails, watched while it trains."""

import statistics

from recipes.common.measures import (
    gradient_norm,
    mean_norm,
    residual_norms,
    spectral_radius,
    state_change,
    watched_blocks,
)


LIMITS = {  # metric: (absolute limit, factor over its own early median)
    "residual_norm": (1e4, 20.0),
    "state_change": (1e4, 20.0),
    "first_mlp_gradient_norm": (None, 50.0),
    "spectral_radius": (1.0, None),
}
EARLY = 5  # measurements that make the reference


class Monitor:
    """Collects the metrics and warns, once per metric and time it leaves its range."""

    def __init__(self):
        self.history: dict[str, list[float]] = {}
        self.warned: set[str] = set()

    def state_dict(self) -> dict:
        return {"history": self.history, "warned": sorted(self.warned)}

    def load_state_dict(self, state: dict):
        self.history, self.warned = dict(state["history"]), set(state["warned"])

    def measure(self, model, loop_hidden_states) -> dict[str, float]:
        """Call after the backward pass and before clipping. `model` is the bare causal LM; states may be none."""
        norms = residual_norms(loop_hidden_states)
        metrics = {f"residual_norm/loop_{k}": norm for k, norm in enumerate(norms, start=1)}
        metrics["residual_norm"] = norms[-1] if norms else None
        # the same without the division by sqrt d: ||H_k||, as the Fully Looped Transformer's figures show it
        metrics |= {f"state_norm/loop_{k}": mean_norm(state) for k, state in enumerate(loop_hidden_states, start=1)}
        metrics["state_change"] = state_change(loop_hidden_states)
        metrics["first_mlp_gradient_norm"] = gradient_norm((list(model.model.prelude) + list(model.model.core))[0].mlp)
        metrics |= {f"gradient_norm/{name}": gradient_norm(block) for name, block in watched_blocks(model).items()}
        metrics["spectral_radius"] = spectral_radius(model.model.injection)
        return {key: value for key, value in metrics.items() if value is not None}

    def warnings(self, metrics: dict[str, float]) -> list[str]:
        """Messages about metrics that have just left their range."""
        messages = []
        for name, (limit, factor) in LIMITS.items():
            if name not in metrics:
                continue
            value, early = metrics[name], self.history.setdefault(name, [])
            reference = statistics.median(early) if len(early) == EARLY else None
            too_large = limit is not None and value >= limit
            grown = factor is not None and reference is not None and value > factor * max(reference, 1e-8)
            if (too_large or grown) and name not in self.warned:
                reason = (
                    f"reached {limit:g}"
                    if too_large
                    else f"is {value / max(reference, 1e-8):.0f} times its early median"
                )
                messages.append(
                    f"{name} = {value:.4g} {reason}: the loop may be diverging. Lower the learning rate, or control "
                    "the state (norm_penalty, inter_loop_norm, injection='diagonal', residual_scaling)."
                )
                self.warned.add(name)
            elif not (too_large or grown):
                self.warned.discard(name)
            if len(early) < EARLY:
                early.append(value)
        return messages
