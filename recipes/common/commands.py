"""The commands of `looped`, by name: the module of each, and a description."""

COMMANDS = {
    "demo": ("looped_recipes.demo", "what loops are for, in five to fifteen minutes: three small models, and a page"),
    "own-text": ("looped_recipes.own_text", "a looped and a plain model of your own text, in ten minutes"),
    "pretrain": ("looped_recipes.pretrain", "train a model as a recipe says"),
    "prepare": ("looped_recipes.prepare", "tokenize and pack the data of a recipe"),
    "plan": ("looped_recipes.plan", "what a recipe or a sweep would cost"),
    "sweep": ("looped_recipes.sweep", "many training runs from one file"),
    "export": ("looped_recipes.export", "make a model of a checkpoint"),
    "average": ("looped_recipes.average", "the mean of several saved models"),
    "convert": ("looped_recipes.convert", "a published checkpoint to our layout, or a model to that of a release"),
    "chat": ("looped_eval.chat", "talk to a model, or let it complete text"),
    "serve": ("looped_eval.serve", "answer many clients at a time, each at its own depth"),
    "show": ("looped_eval.show_loops", "a page where every token is coloured by its loops"),
    "eval": ("looped_eval.harness", "lm-eval at every depth from one pass"),
    "budget": ("looped_eval.budget", "models and seeds side by side over depth"),
    "core": ("looped_eval.core", "CORE and CORE-extended"),
    "statistics": ("looped_eval.statistics", "two models over the same questions"),
    "halting": ("looped_eval.halting", "thresholds of early exit for a budget of perplexity or loops"),
    "benchmark": ("looped_eval.benchmark", "speed and memory as ratios"),
    "gpu": ("looped_eval.gpu", "tests, benchmarks and trainings on a GPU, and what fell short"),
    "diagnose": ("looped_eval.diagnose", "the papers' measurements on one model"),
    "report": ("looped_eval.report", "training runs on one page"),
    "laws": ("looped_eval.laws", "scaling laws of many runs"),
    "optimum": ("looped_eval.optimum", "best learning rates and their intervals"),
    "readout-table": ("looped_eval.readout_table", "perplexity and norm of the state over seeds"),
    "claims": ("looped_eval.claims", "the papers' claims, measured again, and the verdict on each"),
}


GROUPS = {"demo": "begin", "pretrain": "train", "chat": "use", "eval": "measure", "diagnose": "look inside"}
