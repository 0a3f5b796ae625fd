"""Layouts that are not ours: published looped models, and dense ones that are made to loop.

    model = LoopedForCausalLM.from_pretrained("ByteDance/Ouro-1.4B")          # a folder works too
    model.save_pretrained("ouro")                                             # in our layout, which opens anywhere
    save_public(model, "back", "ouro")                                        # and in that of the release

    register_public_formats()                                                 # AutoModelForCausalLM, pipeline, lm_eval
From the command line:

    looped convert ByteDance/Ouro-1.4B ouro
    looped convert ouro back --to ouro

What opens: Ouro, Huginn, Llama models that were retrofitted in its form, Parcae, Nanbeige. A layout is one small file:
how its config.json reads, and one table of names for both directions. What a layout cannot say is refused by name.

The model files never import this folder, so that what is saved beside a model stays lean; they find it in
`package_only.OF_PACKAGE`.
"""

from ..configuration_looped import LoopedConfig
from ..package_only import OF_PACKAGE
from .auto import register_public_formats
from .dense import from_dense
from .reading import open_public, read_public_config
from .registry import LAYOUTS
from .saved_code import write_code
from .writing import save_public


OF_PACKAGE["public"] = open_public
OF_PACKAGE["config"] = read_public_config
OF_PACKAGE["dense"] = from_dense
OF_PACKAGE["code"] = write_code
LoopedConfig._auto_class = None  # or transformers would copy the files of this package, one by one

__all__ = ["LAYOUTS", "register_public_formats", "save_public"]
