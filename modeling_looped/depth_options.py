"""Options of `generate` beyond the arguments of transformers, and checks of which options go together."""

from dataclasses import dataclass, fields

import torch

from .cache import LoopedCache, loops_with_slots, sharing_of
from .checks import check_starts_from_noise
from .depth import check_count, numpy_as_python, read_depth_per_row
from .exit_criteria import ExitRule, ExitSelection


FIELDS_OF_CHECKS = ("exit_threshold", "min_loops", "exit_interval", "exit_read_interval")
FIELDS_BESIDE_CRITERION = (*FIELDS_OF_CHECKS, "exit_selection", "prompt_loops")
EXIT_FIELDS = ("exit_criterion", *FIELDS_BESIDE_CRITERION)


@dataclass(frozen=True)
class DepthOptions:
    """Depth options: arguments of `generate` and fields of `generation_config`."""

    num_loops: int | torch.Tensor | None = None  # the most loops of a token; a tensor has one number per row
    cache_sharing: str = "none"
    cache_dtype: str | None = None  # "int8": keys and values of past tokens in 8 bits; by default the model's
    exit_criterion: str | None = None
    exit_threshold: float | None = None
    min_loops: int = 1  # exits are checked from this loop on
    exit_interval: int = 1  # and at every n-th loop after min_loops
    exit_read_interval: int = 1  # only every n-th check is read back: same exits, and the host waits less for a GPU
    # "stop" ends loops; "after" runs all and then reads out one, also for the prompt; "weighted" reads out all (Ouro)
    exit_selection: ExitSelection = "stop"
    prompt_loops: int | None = None  # depth of the prompt, by default num_loops
    warm_start: bool = False  # the next token's loops start from the last token's state
    state_seed: int | None = None  # seed of h_0 of every position; without one, h_0 is zeros
    draft_loops: int | str | None = None  # or "auto": the fastest number, measured during decoding
    draft_tokens: int | None = None  # the most drafts in flight per row; by default as many as pay

    @classmethod
    def merged(cls, saved, config, arguments: dict) -> tuple["DepthOptions", dict]:
        """Merge the saved generation config, the one passed in the call, and the arguments of the call; later ones
        win. Return the options and the fields that the call sets. None undoes an earlier value. If the call sets
        num_loops, saved exits apply only if the call sets exit fields too."""
        before = set_fields(saved)
        # a pipeline passes a copy of the saved config: fields equal to saved ones do not count as set by the call
        passed = {
            name: value
            for name, value in set_fields(config).items()
            if name not in before or differ(value, before[name])
        }
        asked = overridden(passed, {name: numpy_as_python(value) for name, value in arguments.items()})
        is_assistant = getattr(config, "is_assistant", False)  # it drafts without its saved exits
        if (is_assistant or asked.get("num_loops") is not None) and all(
            asked.get(name) is None for name in EXIT_FIELDS
        ):
            before = {name: value for name, value in before.items() if name not in EXIT_FIELDS}
        held = {name: value for name, value in overridden(before, asked).items() if value is not None}
        if "num_loops" in held:
            held["num_loops"] = depth_argument(held["num_loops"])
        return cls(**held), asked

    @property
    def change_of_decoding(self) -> str | None:
        """The first field that plain decoding at some depth does not support, e.g. "warm_start=True", or None."""
        stopping = None if self.runs_all_loops else self.exit_criterion
        changes = {"exit_criterion": stopping, "draft_loops": self.draft_loops, "warm_start": self.warm_start}
        changes["cache_dtype"] = self.cache_dtype
        return next((f"{name}={value!r}" for name, value in changes.items() if value not in (None, False)), None)

    @property
    def changes_decoding(self) -> bool:
        return self.change_of_decoding is not None

    def change_of_samples(self, model_config, arguments: dict) -> dict:
        """Return the fields outside the call's arguments that lead to other tokens than plain decoding. Fields of a
        passed generation config are included, because trainers pass one that contains the saved fields."""
        plain = {**DEPTH_FIELDS, "num_loops": model_config.num_loops}
        names = "exit_criterion num_loops prompt_loops warm_start cache_sharing cache_dtype state_seed".split()
        held = {name: getattr(self, name) for name in names if arguments.get(name) is None}
        return {name: value for name, value in held.items() if value is not None and differ(value, plain[name])}

    @property
    def shares_passes(self) -> bool:
        """True if rows can run beside rows of other calls: loop by loop, without drafts or seeded states."""
        return self.draft_loops is None and self.state_seed is None and not self.runs_all_loops

    @property
    def runs_all_loops(self) -> bool:
        """True if exits only choose which loops are read out, and stop none."""
        return self.exit_criterion is not None and self.exit_selection != "stop"

    @property
    def is_int8(self) -> bool:
        return self.cache_dtype == "int8"

    def deepest(self, model_config) -> int:
        if self.num_loops is None:
            return model_config.num_loops
        return self.num_loops if isinstance(self.num_loops, int) else max(self.num_loops.tolist(), default=1)

    def exit_rule(self, model_config) -> ExitRule | None:
        if self.exit_criterion is None:
            return None
        depth = self.deepest(model_config)
        rule = ExitRule(
            self.exit_criterion,
            self.exit_threshold,
            self.min_loops,
            self.exit_interval,
            selection=self.exit_selection,
            read_interval=self.exit_read_interval,
        ).checked(model_config, depth)
        if self.runs_all_loops and self.prompt_loops is not None:
            raise ValueError(
                f"prompt_loops={self.prompt_loops} says where the loops of the prompt end, but with "
                f"exit_selection={self.exit_selection!r} all run: leave one out"
            )
        if self.prompt_loops is not None and check_count("prompt_loops", self.prompt_loops) > depth:
            raise ValueError(f"prompt_loops={self.prompt_loops} must be between 1 and num_loops={depth}")
        return rule

    def check(self, model_config, asked: dict):
        """Refuse options that exclude each other or do not fit this model. asked: the fields that the call sets."""
        has_depths = torch.is_tensor(self.num_loops)
        if self.exit_criterion is None:
            alone = [name for name in FIELDS_BESIDE_CRITERION if asked.get(name) not in (None, DEPTH_FIELDS[name])]
            if alone:
                criterion = "gate" if self.exit_selection == "weighted" else "kl"
                raise ValueError(f"{', '.join(alone)} without exit_criterion: name the criterion, e.g. {criterion!r}")
        elif self.exit_selection == "weighted":
            if unread := [name for name in FIELDS_OF_CHECKS if asked.get(name) not in (None, DEPTH_FIELDS[name])]:
                raise ValueError(
                    f"exit_selection='weighted' reads out every loop and has no use for {', '.join(unread)}: leave out"
                )
        if self.cache_dtype not in (None, "int8"):
            raise ValueError(
                f"cache_dtype={self.cache_dtype!r} is not known: choose 'int8', or leave it out for the model's own"
            )
        if self.draft_loops is not None:
            self.check_draft(model_config, has_depths)
        elif asked.get("draft_tokens") is not None:
            raise ValueError(f"draft_tokens={self.draft_tokens} without draft_loops: say at how many loops to draft")
        if not isinstance(self.warm_start, bool):
            raise TypeError(f"warm_start must be True or False, got {self.warm_start!r}")
        if self.runs_all_loops and self.changes_decoding:
            raise ValueError(
                f"exit_selection={self.exit_selection!r} goes with plain decoding, and not with "
                f"{self.change_of_decoding}: leave one out"
            )
        if self.state_seed is not None:
            self.check_state_seed(model_config)
        if self.warm_start:
            if self.draft_loops is not None:
                raise ValueError("warm_start cannot be drafted: leave out draft_loops")
            if has_depths:
                raise ValueError("warm_start needs one num_loops for all rows")
            reason = "warm_start needs a state that does not begin as the input: this model has state_init='embedding'"
            if model_config.state_init == "embedding":
                raise ValueError(reason)

    def check_state_seed(self, model_config):
        if isinstance(self.state_seed, bool) or not isinstance(self.state_seed, int):
            raise TypeError(f"state_seed must be an integer, got {self.state_seed!r}")
        check_starts_from_noise(model_config)
        if self.changes_decoding:
            raise ValueError(
                f"state_seed={self.state_seed} goes with plain decoding, and not with exits that stop loops, "
                "draft_loops, warm_start or cache_dtype: leave one out"
            )

    def check_draft(self, model_config, has_depths: bool):
        draft_loops, depth = self.draft_loops, self.deepest(model_config)
        least = 1 if draft_loops == "auto" else check_count("draft_loops", draft_loops)
        if self.draft_tokens is not None:
            check_count("draft_tokens", self.draft_tokens)
        if least >= depth:
            raise ValueError(
                f"draft_loops={draft_loops} must be below num_loops={depth}, or a draft costs a full run: lower it, "
                "or pass draft_loops=None"
            )
        if has_depths:
            raise ValueError("draft_loops needs one num_loops for all rows")
        if self.exit_criterion is not None:
            raise ValueError(
                f"draft_loops={draft_loops} gives the output of full depth and exit_criterion={self.exit_criterion!r} "
                "that of early exits: pass one of the two as None"
            )
        if model_config.reads_run_depth is not None:
            raise ValueError(
                f"with {model_config.reads_run_depth} the first loops of a deep run are not a shallow run, so it "
                "cannot be drafted"
            )

    def check_cache(self, model_config, cache, config):
        """Refuse caches that these options exclude, and options that shared slots exclude. cache: the one that was
        passed, or None; config: the generation config."""
        if self.runs_all_loops and model_config.num_coda_layers > 0 and config.use_cache is not False:
            raise ValueError(
                f"exit_selection={self.exit_selection!r} runs the {model_config.num_coda_layers} layers of the coda "
                "after every loop, for which a cache has no room: pass use_cache=False, or exit_selection='stop'"
            )
        sharing = sharing_of(cache) if self.cache_sharing == "none" else self.cache_sharing
        is_shared = loops_with_slots(sharing) is not None
        asked = [f"cache_sharing={sharing!r}"] * is_shared + [f"cache_dtype={self.cache_dtype!r}"] * self.is_int8
        if not asked:
            return
        reads_late = self.exit_read_interval > 1 and self.exit_criterion is not None and not self.runs_all_loops
        if is_shared and reads_late:
            raise ValueError(
                f"with exit_read_interval={self.exit_read_interval} tokens run past their exits and would overwrite "
                f"keys that cache_sharing={sharing!r} shares between loops: leave one out"
            )
        is_another = sharing_of(cache) != sharing or (self.is_int8 and not isinstance(cache, LoopedCache))
        contradictions = {
            "a cache": cache is not None and is_another,
            f"cache_implementation={config.cache_implementation!r}": config.cache_implementation is not None,
            "use_cache=False": config.use_cache is False,
        }
        for name, stands in contradictions.items():
            if stands:
                raise ValueError(f"{' and '.join(asked)} makes its own cache, which {name} contradicts: leave one out")
        if self.draft_loops is not None and is_shared:
            refuse_sharing(sharing, f"draft_loops={self.draft_loops}")

    def refuse_for(self, mode: str):
        """Refuse options that `mode`, another way of decoding, does not support."""
        if (change := self.change_of_decoding) is not None:
            raise ValueError(
                f"{change} goes with greedy decoding and sampling, and not with {mode}: leave one out, or pass "
                f"{change.partition('=')[0]}=None"
            )


DEPTH_FIELDS = {field.name: field.default for field in fields(DepthOptions)}


def set_fields(generation_config) -> dict:
    """Return the depth fields of a generation config that are not None, numpy's numbers as Python's."""
    values = {name: numpy_as_python(getattr(generation_config, name, None)) for name in DEPTH_FIELDS}
    return {name: value for name, value in values.items() if value is not None}


def listed(fields: dict) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in fields.items())


def differ(value, other) -> bool:
    """Return whether two values of a field differ; depths may be tensors."""
    return as_python(value) != as_python(other)


def as_python(value):
    return value.tolist() if torch.is_tensor(value) else numpy_as_python(value)


def overridden(before: dict, by: dict) -> dict:
    """Return `before` updated by `by`. A threshold belongs to one criterion: a new criterion does not inherit it."""
    criterion, lost = before.get("exit_criterion"), ()
    if by.get("exit_criterion", criterion) != criterion:
        lost = FIELDS_BESIDE_CRITERION if by["exit_criterion"] is None else ("exit_threshold",)
    return {**{name: value for name, value in before.items() if name not in lost}, **by}


def depth_argument(num_loops) -> int | torch.Tensor:
    """Return one depth, or a tensor of one per prompt: transformers repeats tensors for beams, but not lists."""
    is_one = not isinstance(num_loops, (list, tuple)) and not (torch.is_tensor(num_loops) and num_loops.ndim > 0)
    depths = read_depth_per_row(num_loops, 1 if is_one else len(num_loops))
    return depths[0] if is_one else torch.tensor(depths, dtype=torch.long)


def refuse_sharing(sharing: str, mode: str):
    if sharing != "none":
        raise ValueError(
            f"with cache_sharing={sharing!r} the result depends on which tokens run in one pass, and {mode} changes "
            "that: use one of the two"
        )
