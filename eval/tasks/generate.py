"""Text of the generated tasks to train on:

    python -m looped_eval.tasks.generate p_hop --documents 40000 --output FILE

Documents of another split than what is evaluated, whatever the seed. Settings as key=value: `p_hop hops=4 symbols=8
questions=10`, `permutation swaps=8 symbols=5 questions=1`, `row moves=4 questions=4`, `addition digits=4`,
`story relations=4 questions=8`.
"""

import argparse
import json
from pathlib import Path
from typing import BinaryIO

from looped_recipes.common.files import write_whole

from .generators import DEFAULTS, check, documents


def main(arguments: list[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=DEFAULTS)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    parser.add_argument("--documents", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_intermixed_args(arguments)
    settings = read_settings(options)

    def write(file: BinaryIO):
        for text in documents(options.task, options.documents, options.seed, **settings):
            file.write(json.dumps({"text": text}).encode() + b"\n")

    write_whole(options.output, write)
    print(f"{options.documents:,} documents of {options.task} in {options.output}")
    return options.output


def read_settings(options) -> dict[str, int]:
    settings = dict(DEFAULTS[options.task])
    for setting in options.settings:
        key, _, value = setting.partition("=")
        if key not in settings or not value.isdigit():
            known = " ".join(f"{name}={number}" for name, number in DEFAULTS[options.task].items())
            raise SystemExit(f"{setting!r} is no setting of {options.task}, whose settings are {known}")
        settings[key] = int(value)
    try:
        check(**settings)
    except ValueError as error:
        raise SystemExit(f"{options.task}: {error}") from None
    return settings


if __name__ == "__main__":
    main()
