"""metrics.jsonl: one JSON object a line, with its step; and the same to trackers."""

import json
from pathlib import Path

from .files import write_whole


class MetricsLog:
    def __init__(self, path: Path, accelerator):
        self.path, self.accelerator = Path(path), accelerator

    def start(self, step: int):
        """Continue at `step`: what an interrupted run wrote beyond its checkpoint is written again."""
        if not self.accelerator.is_main_process:
            return
        kept = [record for record in read_metrics(self.path) if record["step"] < step]
        write_whole(self.path, "".join(json.dumps(record) + "\n" for record in kept))

    def write(self, step: int, metrics: dict):
        if self.accelerator.is_main_process:
            with open(self.path, "a") as file:
                file.write(json.dumps({"step": step, **metrics}) + "\n")
        self.accelerator.log(metrics, step=step)


def read_metrics(path: str | Path) -> list[dict]:
    """The records of a metrics.jsonl; a last line cut off by an interruption is left out."""
    records = []
    if not Path(path).exists():
        return records
    for line in Path(path).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
