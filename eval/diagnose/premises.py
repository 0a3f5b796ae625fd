"""Measures on any model what the theorems of On the Residual Scaling of Looped Transformers assume.

A branch (attention or MLP) ends in a matrix W, which all loops share: the outputs r_n = W u_n add up to W U with
U = sum_n u_n. So the sum grows as N if the activations u_n agree and W does not shrink U. The theorems prove the
agreement for ReLU, whose outputs are not negative (the positive cone). Models of this family have other activations,
so the agreement is measured here.
"""

from dataclasses import dataclass

import torch

from looped_eval.common.hooks import depth_of, hooks, of_counted, trace
from looped_recipes.common.measures import increment_products, spectral_norm
from modeling_looped.evaluating import evaluating
from modeling_looped.tensors import at_least_fp32


def overlap(total: torch.Tensor, squares: torch.Tensor, count: int) -> float:
    """Return ||sum of vectors||^2 / (count * sum of ||vector||^2): 1 if all are equal, 1 / count if orthogonal."""
    least = torch.finfo(squares.dtype).tiny
    return (total.square().sum(-1) / (count * squares).clamp(min=least)).mean().item()


def cone_gain(matrix: torch.Tensor, starts: int = 16, steps: int = 300, seed: int = 0) -> tuple[float, float]:
    """Search the least and largest ||W x|| / ||x|| over x with no negative entry (c_W and C_W of theorem 1).

    Both searches are local, from `starts` random x. So the least value found is an upper bound of c_W, and the largest
    a lower bound of C_W.
    """
    gram = matrix.T @ matrix
    top = torch.linalg.eigvalsh(gram)[-1]
    x = torch.randn(starts, len(gram), generator=torch.Generator().manual_seed(seed), dtype=matrix.dtype).abs()
    ends = []
    for map_of in (2 * top * torch.eye(len(gram), dtype=gram.dtype) - gram, gram):  # semidefinite: each step gains
        at = x
        for _ in range(steps):
            at = torch.nn.functional.normalize((at @ map_of).clamp(min=0), dim=-1)
        ends.append((at @ matrix.T).norm(dim=-1))
    return ends[0].min().item(), ends[1].max().item()


@dataclass
class Branch:
    """Sums over loops, for each token, of the inputs and outputs of a branch's last matrix."""

    name: str
    linear: torch.nn.Linear
    batch: dict
    activations: torch.Tensor | float = 0.0  # U
    outputs: torch.Tensor | float = 0.0  # W U
    activation_squares: torch.Tensor | float = 0.0  # sum of ||u_n||^2
    output_squares: torch.Tensor | float = 0.0
    negative: float = 0.0

    def add(self, _, arguments, output):
        u, r = (at_least_fp32(of_counted(values.detach(), self.batch)) for values in (arguments[0], output))
        self.activations = self.activations + u
        self.outputs = self.outputs + r
        self.activation_squares = self.activation_squares + u.square().sum(-1)
        self.output_squares = self.output_squares + r.square().sum(-1)
        self.negative += (u < 0).float().mean().item()

    def result(self, loops: int) -> dict:
        total, inputs = self.activations, self.linear.in_features
        gain = self.outputs.norm(dim=-1) / total.norm(dim=-1).clamp(min=torch.finfo(total.dtype).tiny)
        return {
            "mass": total.mean().item() / loops,  # m_-, where no entry is negative
            "negative": self.negative / loops,  # share of entries outside the positive cone
            "scale": self.activation_squares.mean().item() / inputs / loops,  # q_+
            "activation_overlap": overlap(total, self.activation_squares, loops),
            "residual_overlap": overlap(self.outputs, self.output_squares, loops),
            "gain": gain.mean().item(),  # ||W U|| / ||U||, between c_W and C_W
            "least_gain": gain.min().item(),
            "spectral_norm": spectral_norm(at_least_fp32(self.linear.weight.detach())),
            "Y_squared": (self.outputs / loops).square().mean().item(),  # a_- and a_+ of theorem 3
        }


def branches(model, batch: dict) -> list[Branch]:
    return [
        Branch(f"core_{i}.{name}", linear, batch)
        for i, block in enumerate(model.model.core)
        for name, linear in (("attention", block.self_attn.o_proj), ("mlp", block.mlp.down_proj))
    ]


def premises(model, batch: dict, *, num_loops: int | None = None) -> dict:
    """Mass, scale, overlap and gain of every branch, and how layers and loops add up (theorems 1 and 3).

    An overlap is ||sum||^2 / (count * sum of squares): 1 if all loops (layers) give the same vector, 1/count if their
    vectors are orthogonal. Theorem 1 needs residuals of loops that overlap at every N, theorem 3 residuals of layers
    that do not (1/count). If the model norms what a branch adds, that norm comes after what is measured here.
    """
    depth = depth_of(model, batch, num_loops)
    if depth < 2:
        raise ValueError(f"an overlap of loops needs at least 2 of them, got num_loops={depth}")
    config, watched = model.config, branches(model, batch)
    if config.loop_lora_rank is not None:
        raise ValueError(
            f"premises are of layers that all loops share, but with loop_lora_rank={config.loop_lora_rank} each loop "
            "adds to them; they are not measured for this model"
        )
    if len({branch.linear for branch in watched}) < len(watched):
        raise ValueError("premises tell layers apart, but layers of this core are tied; they are not measured for it")
    with hooks(*(branch.linear.register_forward_hook(branch.add) for branch in watched)), evaluating(model):
        states = trace(model, batch, depth).trajectory
    _, products = increment_products(states)
    of_layers = torch.stack([branch.outputs / depth for branch in watched])
    found = {branch.name: branch.result(depth) for branch in watched}
    squares = [of_branch["Y_squared"] for of_branch in found.values()]
    eps = model.model.residual_factor(depth)
    return {
        "num_loops": depth,
        "eps": eps,
        "beta": eps * depth,
        "increment_overlap": (products.sum() / (depth * products.trace())).item(),
        "loops_orthogonal": 1 / depth,
        "layer_overlap": overlap(of_layers.sum(0), of_layers.square().sum((0, -1)), len(watched)),
        "layers_orthogonal": 1 / len(watched),
        "a_min": min(squares),
        "a_max": max(squares),
        "branches": found,
    }
