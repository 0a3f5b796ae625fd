"""Loading that refuses a checkpoint which does not fit, instead of filling gaps with fresh weights."""


class StrictLoadingMixin:
    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, strict: bool = True, **kwargs):
        """As `PreTrainedModel.from_pretrained`, but a tensor of the trunk that is missing from the checkpoint or
        unknown to the model is an error. Heads may differ: a causal LM's checkpoint opens as a classifier.
        `strict=False` (or `ignore_mismatched_sizes=True`) gives transformers' own behaviour: a report, fresh weights.
        So does `output_loading_info=True`, since that report is then in the caller's hands.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        # without a path the caller gave a state_dict, and with it the responsibility
        has_path = pretrained_model_name_or_path is not None
        if strict and has_path and not wants_info and not kwargs.get("ignore_mismatched_sizes"):
            cls._refuse_gaps(pretrained_model_name_or_path, model, info)
        return (model, info) if wants_info else model

    @classmethod
    def _refuse_gaps(cls, path, model, info: dict):
        prefix = cls.base_model_prefix + "."
        own_heads = {name.split(".")[0] for name, _ in model.named_parameters() if not name.startswith(prefix)}
        is_trunk = not any(name.startswith(prefix) for name, _ in model.named_parameters())

        def belongs_to_trunk(name: str) -> bool:
            return name.startswith(prefix) or (is_trunk and name.split(".")[0] in dict(model.named_children()))

        missing = sorted(name for name in info["missing_keys"] if belongs_to_trunk(name))
        extra = sorted(
            name for name in info["unexpected_keys"] if belongs_to_trunk(name) or name.split(".")[0] in own_heads
        )
        same_head = cls.__name__ in (model.config.architectures or [cls.__name__])
        if same_head:
            missing = sorted(info["missing_keys"])
        if missing or extra:
            raise ValueError(
                f"the checkpoint {path} does not fit {cls.__name__}: "
                + "; ".join(
                    f"{len(names)} tensors {what}: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
                    for names, what in ((missing, "are missing from it"), (extra, "are not in the model"))
                    if names
                )
                + ". Check that config.json belongs to these weights; pass strict=False to load what fits."
            )
