"""The page of the demo, made from what is in demo.json alone."""

from html import escape

from looped_recipes.demo.picture import accuracy_chart, depth_chart, exits_chart, hardest, svg


STYLE = """
:root { --ink: #1d2329; --soft: #5a636c; --ground: #fff; --panel: #f4f6f7; --edge: #dfe3e6; --mark: #0b57c2 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8ebee; --soft: #a3adb6; --ground: #14181c; --panel: #1d2329; --edge: #363e46; --mark: #8ec2ff }
}
body { font: 17px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink); background: var(--ground);
       max-width: 50rem; margin: 0 auto; padding: 1.5rem 1rem 3rem }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.2rem 0 } .charts svg { flex: 1 1 20rem; min-width: 0;
          max-width: 24rem; height: auto }
.wide { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 15px }
th, td { text-align: right; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid var(--edge) }
pre, code { font: 14px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; background: var(--panel);
            border-radius: 6px } code { padding: .1rem .3rem; overflow-wrap: anywhere }
pre { padding: .8rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere }
footer { color: var(--soft); font-size: 14px; border-top: 1px solid var(--edge); margin-top: 3rem; padding-top: .8rem }
.right { color: var(--mark); font-weight: 600 }
"""


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share in (0, 1) or 0.01 <= share < 0.995 else f"{100 * share:.1f} %"


def plural(count, word: str) -> str:
    return f"{count} {word}{'s' * (str(count) != '1')}"


def listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def finding(found: dict) -> str:
    """What was seen of the questions, from the numbers."""
    hops = hardest(found)
    after = found["accuracy"][hops]
    answered = listed([f"{percent(value)} after {plural(loop, 'loop')}" for loop, value in after.items()])
    exits = found["exit_loops"]
    taken = listed([f"{exits[each]:.1f} for {plural(each, 'hop')}" for each in exits])
    return (
        f"A model with one loop answers questions of {plural(hops, 'hop')} least, {percent(found['control'][hops])}; "
        f"the looped model, with as many parameters and the same training questions, answers {answered}. "
        f"Where a question stops as soon as its answer is {percent(found['certainty'])} sure, it takes "
        f"{taken} on average, and {percent(found['exit_accuracy'][hops])} of those of {plural(hops, 'hop')} are right."
    )


def text_finding(found: dict) -> str:
    bits, trained = found["bits_per_byte"], str(found["loops"])
    best = min(bits, key=bits.get)
    return (
        f"On text the model of {plural(trained, 'loop')} needs {bits['1']:.3f} bits per byte after the first loop and "
        f"{bits[trained]:.3f} after the last; the least is {bits[best]:.3f}, after {plural(best, 'loop')}."
    )


def example(found: dict) -> str:
    told = found["example"]
    rows = "".join(
        f"<tr><td>{loop}</td><td{' class=right' * (answer == told['right'])}>{escape(answer)}</td>"
        f"<td>{percent(sure)}</td><td>{'stops here' * (loop == told['exit'])}</td></tr>"
        for loop, (answer, sure) in enumerate(told["answers"], start=1)
    )
    head = "<tr><th>loops</th><th>answer</th><th>sure</th><th></th></tr>"
    return (
        f"<p>One that it has not seen, <code>{escape(told['question'])}</code>, whose answer is "
        f'<span class="right">{escape(told["right"])}</span>:</p>\n<div class="wide"><table>{head}{rows}</table></div>'
    )


def accuracy_table(found: dict) -> str:
    loops = list(next(iter(found["accuracy"].values())))
    head = "".join(f"<th>{plural(loop, 'loop')}</th>" for loop in loops)
    rows = "".join(
        f"<tr><td>{hops}</td>{''.join(f'<td>{at[loop]:.2f}</td>' for loop in loops)}"
        f"<td>{found['control'][hops]:.2f}</td><td>{found['exit_loops'][hops]:.2f}</td>"
        f"<td>{found['exit_accuracy'][hops]:.2f}</td></tr>"
        for hops, at in found["accuracy"].items()
    )
    return (
        f'<div class="wide"><table><tr><th>hops</th>{head}<th>one-loop model</th><th>loops with exits</th>'
        f"<th>right with exits</th></tr>{rows}</table></div>"
    )


def page(found: dict) -> str:
    hops, text = found["hops"], found["text"]
    charts = svg([accuracy_chart(hops)], "Right answers over loops") + svg([exits_chart(hops)], "Loops over hops")
    samples = "".join(
        f"<p>Written with {plural(depth, 'loop')}:</p>\n<pre>{escape(words)}</pre>\n"
        for depth, words in text["samples"].items()
    )
    body = f"""<h1>What loops are for</h1>
<p>{escape(finding(hops))}</p>
<div class="charts">{charts}</div>
<h2>The questions</h2>
<p><code>cd</code> says that d follows c; <code>h2</code> asks what stands two steps after h. Every hop needs the one
before it, and the model has {plural(1, "layer")}, applied up to {plural(hops["loops"], "time")}.</p>
{example(hops)}
<p>Accuracy on {hops["questions"]} questions of each kind; guessing scores 0.14. Both models have
{hops["parameters"]:,} parameters and were trained for {hops["steps"]:,} steps; with one loop that takes
{percent(hops["control_flops"] / hops["training_flops"])} of the operations.</p>
{accuracy_table(hops)}
<h2>Text</h2>
<p>{escape(text_finding(text))} It has {text["parameters"]:,} parameters and was trained for {text["steps"]:,} steps:
what it writes looks like Python and means nothing.</p>
<div class="charts">{svg([depth_chart(text)], "Bits per byte over loops")}</div>
{samples}<footer>{escape(f"{found['command']} · commit {found['commit']} · {found['hardware']}")}</footer>"""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>What loops are for</title><style>{STYLE}</style></head>\n<body>{body}</body></html>\n"
    )
