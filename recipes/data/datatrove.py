"""datatrove's pipelines end in shards that a training reads as they are:

    pipeline = [JsonlReader("crawl"), GopherQualityFilter(), LoopedShards("my_recipe.yaml")]
    LocalPipelineExecutor(pipeline, tasks=8).run()   # or SlurmPipelineExecutor

writes to the recipe's `data.source`, with the tokenizer and packing of the recipe. Then comes
`looped pretrain my_recipe.yaml`.
"""

from datatrove.pipeline.base import PipelineStep

from looped_recipes.settings.recipe import load_recipe

from .shards import shard_writer


class LoopedShards(PipelineStep):
    """Writes the documents of a task to shards, and passes them on."""

    name = "Looped shards"
    type = "writer"

    def __init__(self, recipe: str, *overrides: str):
        super().__init__()
        self.recipe, self.overrides = str(recipe), overrides

    def run(self, data, rank: int = 0, world_size: int = 1):
        with shard_writer(load_recipe(self.recipe, list(self.overrides)).data, rank, world_size) as writer:
            for document in data:
                writer.add(document.text)
                self.stat_update("documents")
                yield document
