"""Memory of the cache: `python -m looped_recipes.cache.memory ouro huginn`, presets, at the depth that they publish.

KiB per token in 16 bits: every loop with keys and values of its own, every second one, the first alone (and so much
with `cache_sharing="last"`); and of all loops in 8 bits.
"""

from looped_recipes.common.command_line import print_help, run_command
from looped_recipes.common.flops import cache_numbers_per_token
from modeling_looped import LoopedConfig
from modeling_looped.int8_cache import SIZE_BYTES


POLICIES = {"all loops": {}, "every second": {"key_value_interval": 2}, "the first": {"num_key_value_loops": 1}}


def row_of(preset: str) -> dict[str, str]:
    configs = {name: LoopedConfig.from_preset(preset, **fields) for name, fields in POLICIES.items()}
    kib = {name: 2 * cache_numbers_per_token(config) / 1024 for name, config in configs.items()}
    config = configs["all loops"]
    kib["all loops, int8"] = kib["all loops"] / 2 * (1 + SIZE_BYTES / config.head_dim)
    return {
        "preset": f"`{preset}`",
        "loops": str(config.num_loops),
        **{name: f"{x:,.4g} KiB" for name, x in kib.items()},
    }


def main(arguments: list[str]):
    print_help(arguments, __doc__)
    rows = [row_of(preset) for preset in arguments]
    for cells in (rows[0], ["---"] * len(rows[0]), *(row.values() for row in rows)):
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    run_command(main)
