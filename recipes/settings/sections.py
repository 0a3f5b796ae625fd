"""The sections of a recipe and their defaults: one dataclass for each."""

from dataclasses import dataclass, field
from typing import Literal


class RecipeError(ValueError):
    """A recipe that can not be run as it is written."""


@dataclass
class DataConfig:
    source: str = "embedded"  # embedded | a `datasets` name | a file, folder or glob of txt, jsonl or parquet
    source_config: str | None = None  # configuration of a `datasets` name, e.g. sample-10BT
    split: str = "train"  # of a `datasets` name
    text_field: str = "text"  # the column or key that holds a document
    token_field: str | None = None  # of data that is tokenised already: the column of token ids, taken as they are
    document_start: str | None = None  # rows are lines, joined to documents that begin where this pattern matches
    joined_by: str | None = None  # rows that are not empty are one text, joined by this white space, no bos or eos
    streaming: bool = False  # read a `datasets` name while it is downloaded
    max_documents: int | None = None  # only the first of them; None is all
    validation_source: str | None = None  # its own source; otherwise documents are held out of `source`
    validation_split: str | None = None  # of a `datasets` name: what is held out
    validation_fraction: float = 0.01  # of the documents, if nothing else says what is held out
    tokenizer: str = "bpe"  # bpe | word | symbols: trained on the training documents; otherwise a name or folder
    tokenizer_vocab_size: int = 32768  # of one that is trained
    tokenizer_max_characters: int | None = None  # how much text a tokenizer is trained on; None is 2 billion
    # special tokens that a document has; one where the tokenizer has no bos of its own. start: it ends the one before
    document_tokens: Literal["both", "start", "end", "none"] = "both"
    start_token: str | None = None  # of a tokenizer that is brought along: what begins documents instead of its bos
    # documents in rows: one after the other, or so that few are cut
    packing: Literal["concatenate", "best_fit"] = "concatenate"
    # best_fit: what is cut off comes back as a document if it is more than a token, or is lost (Parcae)
    cropped: Literal["keep", "drop"] = "keep"
    sequence_length: int = 1024  # tokens of a row
    stride: int | None = None  # concatenate: distance between starts of rows; None is sequence_length
    document_masking: bool = False  # position_ids restart at every document, so attention stays inside it
    expected_tokens: float | None = None  # for training: what a plan in epochs reckons with, nothing else
    num_proc: int | None = None  # processes that tokenize; None is one
    cache_dir: str = ".shards"  # folder of prepared data

    def expected_rows(self) -> int | None:
        """Rows of an epoch, as far as `expected_tokens` tells."""
        if self.expected_tokens is None:
            return None
        return int(self.expected_tokens - self.sequence_length) // (self.stride or self.sequence_length) + 1


@dataclass
class DenseConfig:
    """A dense model that is made to loop, instead of a new one; `model` says its sections, loops and injection."""

    path: str | None = None  # a folder or name of transformers, of a family that from_dense knows
    layers: list[int] | None = None  # those to keep, counted from 0; by default all
    core_init: Literal["copy", "lower", "stepwise", "average"] = "copy"  # see LoopedForCausalLM.from_dense


@dataclass
class DepthConfig:
    # how depths are drawn: fixed (always `mean`), poisson, poisson_lognormal, uniform, or one that training.model_file
    # adds to SAMPLERS
    sampler: str = "fixed"
    mean: float | None = None  # None is the model's num_loops
    maximum: int | None = None  # the deepest that is drawn
    per: Literal["batch", "micro_batch", "sequence"] = "batch"  # batch: one draw for all rows of the step
    # micro_batch: this many neighbouring rows of the step share a draw; training.micro_batch_size does not change it
    rows_per_draw: int | None = None
    # gradients through this many last loops; "half" is half the mean depth, rounded up; None is all
    backprop_loops: int | Literal["half"] | None = None
    # total: T is drawn, then split (Huginn, Parcae); prefix: n is drawn, T = n + k (Parcae, algorithm 3)
    split: Literal["total", "prefix"] = "total"
    # the mean grows over the first `curriculum_steps` steps: that of the loops without gradients (forward), of those
    # with gradients (backward), of both, or of all loops, the last `backprop_loops` of which have gradients (total)
    curriculum: Literal["linear", "sqrt"] | None = None
    curriculum_steps: int | None = None  # steps until the mean is reached
    # which loops become more
    curriculum_target: Literal["forward", "backward", "both", "total"] = "forward"


@dataclass
class OptimizerConfig:
    # muon, normuon (Parcae): for matrices of the blocks; the rest stays with AdamW
    name: Literal["adamw", "muon", "normuon"] = "adamw"
    lr: float = 3e-4  # of AdamW
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    eps: float = 1e-8  # of AdamW
    weight_decay: float = 0.0  # of AdamW
    update_clipping: bool = False  # of AdamW, see stable_adamw.py
    # update_clipping as in codes where gate and up of a block are one tensor (mlp), or also q, k and v, and the biases
    # of these (attention_and_mlp); None: every parameter alone
    clip_as_one: Literal["mlp", "attention_and_mlp"] | None = None
    atan2: bool = False  # AdamW without epsilon
    decay_all: bool = True  # false: no decay of AdamW for norms, biases and other vectors, nor for Parcae's B and C
    keep_decay_product: bool = False  # lr * weight_decay stays what it is at the base rate
    decay_product: float | None = None  # sets weight_decay to this over lr
    correct_for_depth: bool = True  # residual_scaling "factored": rate and eps of the blocks times (L / L_ref)^(-1/2)
    embedding_lr: float | None = None  # None is lr
    head_lr: float | None = None  # None is lr
    reference_width: int | None = None  # embedding and head rates times sqrt(reference_width / hidden_size)
    muon_lr: float = 0.02  # of the matrices of the blocks
    muon_momentum: float = 0.95  # after its first steps
    muon_momentum_start: float = 0.85  # at step 0, from where it grows
    muon_momentum_steps: int = 300  # for this many steps
    muon_weight_decay: float = 0.0  # of the matrices of the blocks
    muon_weight_decay_end: float | None = None  # where it would be, linearly, after the last step; None stays constant
    muon_value_gates: bool = False  # gates of value embeddings too
    clip: float | None = 1.0  # the largest norm of all gradients; None leaves them as they are


@dataclass
class ScheduleConfig:
    name: Literal["constant", "cosine", "wsd"] = "cosine"  # wsd: warm up, stay, decay
    warmup_steps: int = 0  # in which rates grow from 0
    decay_steps: int | None = None  # wsd: in which rates fall to final_ratio, at the end
    decay_fraction: float | None = None  # wsd: the same, as a part of all steps
    final_ratio: float = 0.0  # last rate over the base rate: cosine, wsd


@dataclass
class TrainingConfig:
    output_dir: str = "runs/default"  # from the folder where the command is typed
    seed: int = 0  # of weights, rows, depths and noise
    steps: int | None = None  # length of the run, or one of the next four instead
    tokens: float | None = None  # length of the run
    epochs: float | None = None  # length of the run, in passes over the data
    flops: float | None = None  # length of the run, in training operations, see flops.py
    tokens_per_parameter: float | None = None  # length of the run
    count_embedding: bool = True  # the token embedding's table, among the parameters of tokens_per_parameter
    rows_per_step: int = 64  # sequences per optimizer step, over all processes
    micro_batch_size: int = 8  # sequences per process and forward pass
    # compile blocks, once for all loops, injection and loss; cuda_graphs: and record what blocks do, for a GPU that
    # waits for the CPU
    compile: bool | Literal["cuda_graphs"] = False
    # a kernel of another package, on a GPU; None is our own, which works on a chunk of logits at a time
    cross_entropy: Literal["cut_cross_entropy", "liger_kernel"] | None = None
    # norms and gated activations of another package, on a GPU, for blocks that are not compiled
    kernels: Literal["liger_kernel"] | None = None
    # a kernel of attention, on a GPU: with no mask in memory where documents share a row; None is that of torch
    attention: Literal["flex_attention", "flash_attention_2", "flash_attention_3"] | None = None
    # products of the blocks in float8 by torchao, on a GPU: with one scale for a tensor, or for each row of it
    float8: Literal["tensorwise", "rowwise"] | None = None
    # compute activations again instead of keeping them: all but the input of every block, or the state of every loop;
    # selective: keep what costs most; offload: keep inputs of blocks in the memory of the host
    gradient_checkpointing: bool | Literal["loops", "selective", "offload"] = False
    initialize_from: str | None = None  # a saved model to start from
    model_file: str | None = None  # a Python file with a subclass of LoopedForCausalLM, which is trained in its place
    freeze_all_but_gate: bool = False  # Ouro's stage II
    taper_start: float = 0.05  # model.readout_norm taper: where the norm begins to go, as a part of all steps
    taper_end: float = 1.0  # model.readout_norm taper: where it is gone
    save_every: int = 500  # steps between checkpoints
    # write checkpoints while the training goes on, from a copy in the memory of the host
    save_in_background: bool = False
    keep_last: int = 2  # checkpoints that are kept
    # steps between models that stay, step-00000500 beside final/, to measure how a model changes while it learns
    export_every: int | None = None
    keep_best: bool = True  # beside them the best of the checkpoints at whose step the model was evaluated
    # continue from the newest whole checkpoint in output_dir; changed: also with other rates and another schedule
    resume: bool | Literal["changed"] = True
    stop_after: int | None = None  # leave off after this step, as if interrupted: the schedule stays that of the run
    # how many steps with a NaN or infinite loss or gradient are skipped, without an update; the next such step ends
    # the run. Above 0 a GPU is waited for in every step
    skip_nonfinite_steps: int = 0
    # minutes that processes of a launch wait for one that hangs; None is torch's time: 10 on GPUs, 30 on CPUs
    timeout_minutes: float | None = None
    max_loss: float | None = None  # a run that ends above this validation loss counts as diverged: sweeps leave it out
    push_to_hub: str | None = None  # owner/name: what is in final/ goes there at the end
    license: str | None = None  # of what is trained, as the Hub spells it, e.g. apache-2.0; for the model card


@dataclass
class EvaluationConfig:
    every: int = 250  # steps
    rows: int = 128  # of the held-out text, at equal distances
    loops: list[int] | None = None  # None: 1..num_loops, one pass for all


@dataclass
class LoggingConfig:
    every: int = 10  # steps between lines of metrics.jsonl
    # steps between measurements: norms of states and of blocks' gradients, state change, spectral radius
    monitor_every: int = 50
    # where metrics go besides
    trackers: list[Literal["tensorboard", "wandb", "trackio"]] = field(default_factory=list)
    project: str = "looped"  # name of trackers
    # this many steps are traced into profile/ of output_dir: what CPU and GPU do when; 0 is none
    profile_steps: int = 0
    profile_from: int = 5  # the first of them, counted from where the run begins or goes on


LENGTHS = ("steps", "tokens", "epochs", "flops", "tokens_per_parameter")  # of a run: the recipe sets one of them
OF_LENGTH = (*LENGTHS, "count_embedding")  # settings of `training` that set the length of a run
COMPARED_TRAINING = (  # settings of `training` that affect the computation of a step or the number of steps
    "seed",
    "rows_per_step",
    "initialize_from",
    "freeze_all_but_gate",
    "float8",
    "taper_start",
    "taper_end",
    *OF_LENGTH,
)
SECTIONS = {
    "dense": DenseConfig,
    "data": DataConfig,
    "depth": DepthConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "training": TrainingConfig,
    "evaluation": EvaluationConfig,
    "logging": LoggingConfig,
}


def deciding(recipe: dict) -> dict:
    """Return the sections of a recipe without the settings that affect the final loss by rounding at most."""
    return {
        section: {key: value for key, value in (values or {}).items() if decides_loss(section, key)}
        for section, values in recipe.items()
    }


def decides_loss(section: str, key: str) -> bool:
    if section == "data":
        return key not in ("cache_dir", "num_proc", "expected_tokens")
    if section == "training":
        return key in COMPARED_TRAINING or key == "model_file"
    return key in ("rows", "loops") if section == "evaluation" else section != "logging"
