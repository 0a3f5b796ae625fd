"""Trainers of other libraries with the model's own loss.

    class Finetuning(OwnLoss, trl.SFTTrainer): ...

TRL runs the trunk and multiplies its last state with the head, so that losses over loops, of states and of gates would
be left out. This passes the labels to the model instead; what TRL measures beside the loss is not logged.

There is none for GRPO and its like: their labels are the policy's own samples, also the bad ones, and cross-entropies
of earlier loops would teach the model to repeat them. They train the last loop, from which they sample.
"""

from transformers import Trainer

from .checks import refuse_if


class OwnLoss:
    def compute_loss(self, model, inputs, return_outputs: bool = False, num_items_in_batch=None):
        assert isinstance(self, Trainer)  # it is mixed into one
        refuse_if(
            self.label_smoother is not None,
            f"label_smoothing_factor={self.args.label_smoothing_factor} smooths the last loop's logits and would "
            "replace the model's own loss: set it to 0",
        )
        refuse_if(
            self.args.use_liger_kernel,
            "use_liger_kernel=True replaces layers of the families that Liger knows, which looped models are not: "
            "leave it out",
        )
        inputs = {**inputs, "use_cache": False}
        return Trainer.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
