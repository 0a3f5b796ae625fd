"""What each pipeline must answer: what the model says without one. transformers' own checks are not in its sdist."""

import torch
from transformers import pipeline


EXAMPLES = ["a b c", "d e f g h"]
TOLERANCE = {"float32": 1e-5, "float16": 2e-3}


class PipelineTests:
    """The form in which `PipelineTesterMixin` wants a task: a pipeline with examples, and a check of its answers."""

    task: str
    arguments: dict = {}

    def get_test_pipeline(self, model, tokenizer, dtype="float32"):
        self.tolerance = TOLERANCE[dtype]
        model = model.to(getattr(torch, dtype))
        return pipeline(self.task, model=model, tokenizer=tokenizer, dtype=dtype, **self.arguments), EXAMPLES

    def run_pipeline_test(self, pipe, examples):
        for batch_size in (1, len(examples)):  # the second one pads
            for example, answer in zip(examples, pipe(examples, batch_size=batch_size), strict=True):
                self.check(pipe, answer, example)

    def check(self, pipe, answer, example: str):
        raise NotImplementedError

    def assert_close(self, actual, expected):
        actual = torch.as_tensor(actual, dtype=torch.float32)
        torch.testing.assert_close(actual, expected.float(), atol=self.tolerance, rtol=self.tolerance)

    @torch.no_grad()
    def run(self, pipe, *texts: str):
        return pipe.model(**pipe.tokenizer(*texts, return_tensors="pt", return_token_type_ids=False))


def __getattr__(name: str):
    """Tasks that are not for language models; transformers 5.17 imports them all."""
    if name.endswith("PipelineTests"):
        return PipelineTests
    raise AttributeError(name)


class FeatureExtractionPipelineTests(PipelineTests):
    task = "feature-extraction"

    def check(self, pipe, answer, example):
        expected = self.run(pipe, example).last_hidden_state
        self.assert_close(torch.tensor(answer)[:, : expected.shape[1]], expected)


class TextGenerationPipelineTests(PipelineTests):
    task = "text-generation"
    options = {"min_new_tokens": 5, "max_new_tokens": 5, "do_sample": False}  # so that none is padded at its end
    arguments = {**options, "return_tensors": True}

    def check(self, pipe, answer, example):
        inputs = pipe.tokenizer(example, return_tensors="pt", return_token_type_ids=False)
        expected = pipe.model.generate(**inputs, **self.options)[0].tolist()
        length = len(answer[0]["generated_token_ids"]) - len(expected)  # of the padding before a shorter prompt
        padding = [pipe.tokenizer.pad_token_id] * length
        assert answer[0]["generated_token_ids"] == padding + expected


class TextClassificationPipelineTests(PipelineTests):
    task = "text-classification"
    arguments = {"top_k": None}

    def check(self, pipe, answer, example):
        scores = {found["label"]: found["score"] for found in answer}
        expected = self.run(pipe, example).logits[0].softmax(-1)
        self.assert_close([scores[label] for label in pipe.model.config.label2id], expected)


class TokenClassificationPipelineTests(PipelineTests):
    task = "token-classification"
    arguments = {"ignore_labels": []}

    def check(self, pipe, answer, example):
        scores, labels = self.run(pipe, example).logits[0].softmax(-1).max(-1)
        assert [found["word"] for found in answer] == example.split()
        assert [found["entity"] for found in answer] == [pipe.model.config.id2label[int(label)] for label in labels]
        self.assert_close([found["score"] for found in answer], scores)


class ZeroShotClassificationPipelineTests(PipelineTests):
    task = "zero-shot-classification"
    arguments = {"candidate_labels": ["x", "y z"], "hypothesis_template": "w {}"}

    def check(self, pipe, answer, example):
        scores = dict(zip(answer["labels"], answer["scores"]))
        hypotheses = {label: f"w {label}" for label in self.arguments["candidate_labels"]}
        entailed = [self.run(pipe, example, hypothesis).logits[0, -1] for hypothesis in hypotheses.values()]
        self.assert_close([scores[label] for label in hypotheses], torch.stack(entailed).softmax(-1))
