"""Layouts that are not ours: published looped models, and dense ones that are made to loop.

The model files never import this folder, so that what is saved beside a model stays lean; they find it in
`loading.OPENERS`.
"""

from ..loading import OPENERS
from .dense import from_dense


OPENERS["dense"] = from_dense
