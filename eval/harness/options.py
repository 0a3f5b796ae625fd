"""lm-eval at every depth, from one pass of the model. The arguments are lm-eval's own, and its models are there too:

    looped eval --model looped --model_args pretrained=DIR --num-loops 1..8 --tasks piqa --output results

--model looped                 one pass for all depths; `looped eval run --help` lists what lm-eval takes besides
--model_args pretrained=DIR    a saved model, or one of the Hub; with commas, further arguments:
    num_loops=1,2,4            depths, or 1..4, or one; the same as --num-loops; default: the model's own
    exit_criterion=kl          tokens exit early: logit_margin, max_prob, entropy, entropy_diff, kl, minp_kl,
                               latent_diff, cosine, argmax_stability or gate; the mean loops are reported
    exit_threshold=0.01        of the criterion; default: the published one, where there is one. Several, as 0.3,0.5,
                               are evaluated one after the other, each in its folder: threshold_0.3, ...
    min_loops=2                the fewest loops of a token; default: 1
    exit_selection=after       all tokens run all loops, and only the loop from which an answer's token is read is that
                               of its exit: one pass for all depths, but no compute is saved. default: stop, a token's
                               loops end at its exit, in the context too, as with the exit_rule of a pass
    state_seed=0               draws the first state of models that start from noise; default: zeros
    dtype=bfloat16             and all that lm-eval's model `hf` takes
--num-loops 1..8               depths
--tasks a,b                    lm-eval's (`looped eval ls tasks`), and the project's own: looped_offline, which needs
                               no download, looped_corpus, looped_p_hop, looped_permutation, looped_story, ...
--batch-size 8, --device cpu, --limit 100, --num_fewshot 5, --log_samples       as lm-eval has them
--output FOLDER                the results of each depth, as lm-eval would have written them, in loops_1, loops_2, ...;
                               beside them depth.md and depth.svg, and exits.csv if tokens exit: every metric beside
                               its exits and mean loops; default: eval/lm_eval of the training run, if any
--use_cache FILE               keeps the answers of all depths in FILE_rank0.db. They are recalled for the same
                               question, depth and exits, with the same files of the model, the tokenizer and the
                               adapter (weights, config.json, ...), the same dtype, max_length and all other
                               --model_args but those of speed and place, such as parallelize

Underscores and hyphens are the same in names.
"""


def parse(arguments: list[str]):
    """Print the help of this command; lm-eval prints the help of its commands run, ls and validate."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0 if arguments else 2)
