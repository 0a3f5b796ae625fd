"""Language modelling: documents of the corpus that every Python installation contains, and their metrics.

The documents are those that a recipe with `source: embedded` holds out if its data.validation_fraction is `fraction`;
a larger fraction holds out these and more.
"""

import re

from datasets import Dataset, DatasetDict


def held_out(fraction: float, characters: int, **_) -> DatasetDict:
    """Return the beginning of each document, to the first blank line after `characters` characters."""
    from looped_recipes.data.embedded import embedded_documents
    from looped_recipes.data.part_files import HeldOut
    from looped_recipes.data.sources import cut_at_blank_lines

    kept = HeldOut(fraction=fraction)
    texts = [cut_at_blank_lines(text, characters)[0] for text in embedded_documents() if text in kept]
    return DatasetDict(test=Dataset.from_dict({"text": texts}))


def process_results(document: dict, results: tuple[float]) -> dict:
    """Return the log-likelihood with the number of words, or of UTF-8 bytes, by which a metric divides it."""
    (log_likelihood,) = results
    text = document["text"] if "text" in document else document["page"]
    words, length = len(re.split(r"\s+", text)), len(text.encode())
    return {
        "word_perplexity": (log_likelihood, words),
        "byte_perplexity": (log_likelihood, length),
        "bits_per_byte": (log_likelihood, length),
    }
