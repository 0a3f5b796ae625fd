"""Serves a model: chat, completions and streaming for many clients, each at its own depth and by its own exits.

    looped serve runs/demo/final --port 8000
    curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
        -d '{"prompt": "def read(", "max_tokens": 32, "num_loops": 4, "exit_criterion": "kl", "exit_threshold": 0.01}'

It is made of the parts of `transformers serve`, an OpenAI-compatible server, and needs
`pip install 'modeling-looped[serve]'`. A request takes the fields of depth that generate takes beside its own. The
answer has `token_loops`, the loops of each of its tokens, and `saved_percent`, by how much these are fewer than all; a
stream has both in its last chunk. Requests share every pass of the model; those for which there is no room wait. A
`seed` is that of its request alone.
"""

import argparse

from looped_recipes.common.command_line import Parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("looped serve", __doc__)
    parser.add_argument("model", help="a saved model, or the folder of its training run")
    parser.add_argument("--name", help="what clients call the model; default: as given here")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-rows", type=int, default=8, help="sequences that are decoded at a time")
    tokens = "tokens, prompts and to come, that they may have together; default: all positions of the model for each"
    parser.add_argument("--max-tokens", type=int, help=tokens)
    parser.add_argument("--num-loops", type=int, help="depth where a request asks for none; default: the model's")
    parser.add_argument("--max-loops", type=int, help="the deepest that a request may ask for; default: 4 times that")
    grace = "seconds that running answers still have after SIGTERM; default: until they are done"
    parser.add_argument("--grace", type=int, help=grace)
    parser.add_argument("--tokenizer", help="folder or name, for a model that comes without one")
    ways, text = ["sdpa", "eager", "flex_attention"], "default: the model's; flex_attention keeps all keys in pages"
    parser.add_argument("--attn-implementation", choices=ways, help=text)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_device()
    parser.add_trust()
    args = parser.parse_args(arguments)
    for name in ("max_rows", "max_tokens", "num_loops", "max_loops", "grace"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= args.port < 2**16:  # higher ones would wrap around to other ports
        parser.error(f"--port {args.port} is no port: choose one below {2**16}")
    return args
