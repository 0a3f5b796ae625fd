"""Checks the depths and exits of an evaluation against a model's config.json before the model is loaded."""

import re
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedConfig

from looped_eval.common.model_folder import import_own_class
from looped_recipes.common.checksums import check_folder
from looped_recipes.common.command_line import parse_depths
from looped_recipes.common.hub import check_source, model_inside
from modeling_looped import LoopedConfig
from modeling_looped.depth_options import DEPTH_FIELDS
from modeling_looped.exit_criteria import ExitRule
from modeling_looped.formats.registry import is_published


class Question(NamedTuple):
    """Depths and exit rule of an evaluation, checked as far as config.json allows."""

    depths: list[int]
    rule: ExitRule | None


def join_depths(argument: str) -> str:
    """Replace num_loops=1,2,4 by num_loops=1+2+4, because lm-eval splits arguments at commas. So with thresholds."""
    several = r"\b(?:num_loops|exit_threshold)=[^,={}]*(,[^,={}]*)+(?=,|$)"
    return re.sub(several, lambda values: values[0].replace(",", "+"), argument)


def parse_thresholds(written) -> list:
    """Return the thresholds in 0.3+0.5+0.9; what is no text is one threshold, or None."""
    if not isinstance(written, str):
        return [written]
    try:
        return sorted({float(threshold) for threshold in written.split("+")})
    except ValueError:
        raise ValueError(f"exit_threshold={written}: write a number, or several, as 0.3+0.5+0.9") from None


def refuse_depths_in(gen_kwargs: dict, where: str):
    """Refuse depths and exits among the generation arguments of the command or of a task."""
    ours = [name for name in gen_kwargs if name in DEPTH_FIELDS]
    if ours:
        raise ValueError(
            f"{', '.join(ours)}: what is generated has the depths and exits of --model_args num_loops=...,"
            f"exit_criterion=..., as what is scored: leave it out of {where}"
        )


def check_question(
    pretrained,
    num_loops=None,
    exit_criterion=None,
    exit_threshold=None,
    min_loops: int = 1,
    exit_selection: str = "stop",
    revision: str = "main",
    trust_remote_code: bool = False,
    subfolder: str = "",
) -> Question:
    """Check the arguments against config.json only, so that mistakes are found before the weights are loaded."""
    depths = None if num_loops is None else parse_depths(num_loops)
    if isinstance(pretrained, str):
        pretrained = model_inside(pretrained)
        check_source(pretrained)
        try:
            fields, _ = PreTrainedConfig.get_config_dict(pretrained, revision=revision, subfolder=subfolder)
        except OSError as error:
            raise ValueError(f"pretrained={pretrained!r} is not a model folder: no config.json was found") from error
        if is_published(fields) and "model_type" not in fields:
            raise ValueError(
                f"pretrained={pretrained!r} is a published model whose config.json has no model_type, by which "
                "lm-eval would open it: `looped convert` makes a folder of it that opens"
            )
        if "model_type" not in fields:
            raise ValueError(f"pretrained={pretrained!r} is not a model folder: no config.json was found")
        if fields["model_type"] != LoopedConfig.model_type and not is_published(fields):
            raise ValueError(
                f"pretrained={pretrained!r} has model_type {fields['model_type']!r}, which has no loops: use "
                "--model hf"
            )
        check_folder(Path(pretrained, subfolder))
        if trust_remote_code:
            import_own_class(pretrained, revision, subfolder)
        config = LoopedConfig.from_pretrained(pretrained, revision=revision, subfolder=subfolder)
    else:
        config = pretrained.config
    depths = depths or [config.num_loops]
    if len(depths) > 1 and config.reads_run_depth:
        raise ValueError(
            f"num_loops={num_loops}: with {config.reads_run_depth} the first loops of a deeper run are not a "
            "shallower run, so these depths cannot share a pass: evaluate one depth at a time"
        )
    if exit_criterion is None:
        if exit_threshold is not None or min_loops != 1 or exit_selection != "stop":
            raise ValueError(
                "exit_threshold, min_loops and exit_selection go with an exit_criterion, e.g. "
                "exit_criterion=logit_margin"
            )
        return Question(depths, None)
    if exit_selection not in ("stop", "after"):
        raise ValueError(
            f"exit_selection={exit_selection!r} cannot be evaluated: 'stop' ends a token's loops at its exit, 'after' "
            "runs them all and then chooses which to read out"
        )
    rule = ExitRule(exit_criterion, exit_threshold, min_loops, selection=exit_selection)
    return Question(depths, rule.checked(config, depths[0]))
