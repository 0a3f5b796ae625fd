"""Self-speculation against decoding at full depth, with the model of the real training."""

from collections.abc import Iterator

from looped_eval.benchmark.decoding import speculation
from looped_eval.benchmark.options import parse

from .pieces import Measurement, Setting
from .real_training import model_folder


def measurements(setting: Setting) -> Iterator[Measurement]:
    for drafts in (2,) if setting.tiny else (2, 4, 6):
        yield Measurement(f"draft_tokens_{drafts}", lambda drafts=drafts: measure(drafts, setting))


def measure(drafts: int, setting: Setting) -> dict:
    folder = model_folder(setting)
    if not (folder / "final" / "config.json").is_file():
        raise FileNotFoundError(f"{folder} holds no trained model: the piece `real` trains it")
    args = parse(["speculation", "--model", str(folder), "--draft-tokens", str(drafts)])
    lengths = {"prompt": 8, "new_tokens": 8, "repeats": 1} if setting.tiny else {"new_tokens": 96, "repeats": 3}
    vars(args).update(device=setting.device, dtype=setting.dtype, batch_sizes=[1], **lengths)
    found = speculation(args)["rows_1"]
    best = max((name for name in found if name.startswith("draft_loops")), key=lambda name: found[name]["speedup"])
    return {"best": best, "best_speedup": found[best]["speedup"], **found}
