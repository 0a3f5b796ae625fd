"""A mix-in that gives trainers of other libraries the model's own loss, and randomly drawn depths.

    class Finetuning(OwnLoss, trl.SFTTrainer):
        depths = DrawnDepths("poisson_lognormal", mean=32, backprop_loops=8)

TRL runs the trunk and multiplies its last state with the head, so that losses over loops, of states and of gates would
be left out. `OwnLoss` passes the labels to the model instead; TRL's metrics beside the loss are not logged.

There is no mix-in for GRPO and similar methods: their labels are the policy's samples, bad ones included, and
cross-entropies of earlier loops would teach the model to repeat them. They train the last loop, from which they
sample.
"""

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from transformers import Trainer
from transformers.integrations import is_deepspeed_zero3_enabled

from .checks import check_inputs
from .depth import read_depth_per_row
from .loop_parameters import count_in_a_loop
from .modeling_looped import LoopedModel
from .samplers import depths_of_step, initial_state_of_step


@dataclass(frozen=True)
class DrawnDepths:
    """How deep each training step runs, and how many of its loops have gradients: see `depths_of_step`.

    mean: None means the model's num_loops. per: "batch" draws one depth for all rows of a step, in all processes. A
    model whose `state_init` is "normal" starts from noise. Evaluation runs at the model's num_loops, without noise.
    """

    sampler: str = "poisson_lognormal"  # a name of SAMPLERS
    mean: float | None = None
    backprop_loops: int | None = None
    per: Literal["batch", "sequence"] = "batch"
    split: Literal["total", "prefix"] = "total"
    maximum: int | None = None

    def of_step(self, model, seed: int, step: int, rows: list[int], length: int, device) -> dict[str, Any]:
        """Return arguments for `forward`. rows: numbers of the rows in the step."""
        mean = model.config.num_loops if self.mean is None else self.mean
        if self.maximum is not None and self.maximum < mean:
            raise ValueError(
                f"maximum={self.maximum} is below the mean depth {mean}, so that most depths would be the maximum: "
                "raise it, or leave it out"
            )
        drawn = depths_of_step(
            self.sampler, mean, seed, step, rows, self.per, self.backprop_loops, self.split, self.maximum
        )
        num_loops = drawn[0] if self.per == "batch" else drawn
        arguments: dict[str, Any] = {"num_loops": num_loops, "backprop_loops": self.backprop_loops}
        if model.config.state_init == "normal":
            arguments["initial_state"] = initial_state_of_step(model, seed, step, rows, length, device)
        return arguments


class OwnLoss:
    depths: DrawnDepths | None = None  # for training; None means the model's num_loops
    # the Trainer's state, the step, and how many of its rows all processes have trained on
    _place: tuple[Any, int, int] = (None, -1, 0)
    _ran: tuple[Any, int | None] = (None, None)  # num_loops and backprop_loops of the last pass

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        owner = next(base for base in cls.__mro__ if "compute_loss" in vars(base))
        bases = sorted(cls.__bases__, key=lambda base: not issubclass(base, OwnLoss))
        if issubclass(owner, Trainer) and not issubclass(owner, OwnLoss):
            raise ValueError(
                f"{cls.__name__} would train the loss of {owner.__name__}, which stands before OwnLoss: write "
                f"class {cls.__name__}({', '.join(base.__name__ for base in bases)})"
            )

    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        assert isinstance(self, Trainer)  # this class is mixed into one
        refuse_other_losses(self)
        inputs = {**inputs, "use_cache": False}
        if self.depths is not None and model.training:
            inputs |= self._drawn(model, inputs)
        self._ran = inputs.get("num_loops"), inputs.get("backprop_loops")
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)

    def floating_point_ops(self: Any, inputs: dict) -> float:
        """Return what the Trainer sums up in `total_flos`: for every token 6 operations with each parameter that is no
        embedding, and with those of a loop as many in every loop of the last pass, or 2 in loops without gradients.

        Coda and head count once, also in losses over loops, which read them several times. What a loop computes once
        for all tokens, embeddings of the loop or of the time and modulation, does not count."""
        operations = Trainer.floating_point_ops(self, inputs)  # with every parameter once; 0 without input_ids
        trunks = [part for part in self.model.modules() if isinstance(part, LoopedModel)]
        for trunk in trunks if operations else []:
            num_loops, backprop_loops = self._ran
            tokens, rows = inputs["input_ids"].numel(), len(inputs["input_ids"])
            depths = read_depth_per_row(trunk.config.num_loops if num_loops is None else num_loops, rows)
            with_gradient = [depth if backprop_loops is None else min(depth, backprop_loops) for depth in depths]
            per_parameter = (2 * sum(depths) + 4 * sum(with_gradient)) / rows
            in_loops = per_parameter * (count_in_a_loop(trunk) + count(trunk.injection))
            counted_once = count(trunk.core) + count(trunk.injection) + count(trunk.loop_embedding)
            operations += tokens * (in_loops - 6 * counted_once)
        return operations

    def _drawn(self: Any, model, inputs: dict) -> dict[str, Any]:
        """Draw by seed, step and row numbers, so that a resumed run draws the same as an uninterrupted one."""
        if not hasattr(self.depths, "of_step"):
            raise ValueError(f"depths={self.depths!r} must be DrawnDepths, such as DrawnDepths(mean=4), or None")
        step, given = self.state.global_step, check_inputs(inputs.get("input_ids"), inputs.get("inputs_embeds"))
        state, last_step, trained_on = self._place  # the Trainer makes a new state where it begins anew
        before = trained_on if state is self.state and last_step == step else 0
        self._place = self.state, step, before + self.args.world_size * len(given)
        first = before + self.args.process_index * len(given)
        rows = list(range(first, first + len(given)))
        plain = self.accelerator.unwrap_model(model)
        method = getattr(plain, "active_peft_config", None)
        if getattr(method, "is_prompt_learning", False) and (
            getattr(method, "peft_type", None) == "PREFIX_TUNING" or plain.config.state_init == "normal"
        ):
            raise ValueError(
                f"{type(method).__name__} does not go with DrawnDepths here: virtual tokens have no noise to start "
                "from, and a prefix has the depth that it was made at: use LoRA and its like, or leave out `depths`"
            )
        per = getattr(self.depths, "per", None)
        if per == "sequence" and self.args.world_size > 1 and gathers_in_loops(self.accelerator):
            raise ValueError(
                f"{per=} lets {self.args.world_size} processes run different numbers of loops, in which ZeRO-3, or "
                "FSDP with blocks as units, gathers weights from all of them: draw depths per='batch', or take ZeRO-2 "
                "or fsdp_auto_wrap_policy NO_WRAP"
            )
        return self.depths.of_step(plain, self.args.seed, step, rows, given.shape[1], given.device)


def refuse_other_losses(trainer: Trainer):
    """Refuse settings, and trainers, by which another loss than the model's own would be trained."""
    if trainer.label_smoother is not None:
        raise ValueError(
            f"label_smoothing_factor={trainer.args.label_smoothing_factor} smooths the last loop's logits and would "
            "replace the model's own loss: set it to 0"
        )
    if trainer.args.use_liger_kernel:
        raise ValueError(
            "use_liger_kernel=True replaces layers of the families that Liger knows, which looped models are not: "
            "leave it out"
        )
    loss_type = getattr(trainer.args, "loss_type", "nll")
    others = [cls.__name__ for cls in type(trainer).__mro__ if has_loss_of_trl(cls) and cls.__name__ != "SFTTrainer"]
    if loss_type != "nll" and "SFTConfig" not in [cls.__name__ for cls in type(trainer.args).__mro__]:
        others.append(type(trainer).__name__)
    if others:
        raise ValueError(
            f"OwnLoss is for a Trainer and for TRL's SFTTrainer; {others[0]} computes a loss of its "
            "own: take it as it is"
        )
    if loss_type != "nll":
        raise ValueError(
            f"loss_type={loss_type!r} would be replaced by the model's own loss: leave it out, or take the "
            "trainer without OwnLoss"
        )
    if trainer.compute_loss_func is not None:
        raise ValueError(
            "compute_loss_func would replace the model's own loss: leave it out, or take the trainer without OwnLoss"
        )


def gathers_in_loops(accelerator) -> bool:
    """Whether weights are gathered from all processes in every loop."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return is_deepspeed_zero3_enabled() or getattr(plugin, "auto_wrap_policy", None) is not None


def count(part: nn.Module | None) -> int:
    return 0 if part is None else sum(parameter.numel() for parameter in part.parameters())


def has_loss_of_trl(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "trl" and "compute_loss" in vars(cls)
