"""Every kind of page in a real browser: on a phone and on a desk, by day and in the dark."""

import json
import math
import warnings
from pathlib import Path

import pytest
import torch

from looped_eval.claims.ledger import ledger, said, sections
from looped_eval.claims.papers import PAPERS
from looped_eval.common.page import to_html
from looped_eval.diagnose import command as diagnose
from looped_eval.gpu.ledger import Ended, Ledger
from looped_eval.gpu.pieces import Setting
from looped_eval.gpu.verdict import write_page
from looped_eval.halting import command as halting
from looped_eval.laws import command as laws
from looped_eval.laws.run_table import write_table
from looped_eval.report import command as report
from looped_eval.show_loops import command as show_loops
from looped_recipes.demo import page as demo
from tests.helpers import random_ids, tiny_model, tiny_tokenizer
from tests.helpers_browser import CHROMIUM, photographed, seen
from tests.test_demo import FOUND as MEASURED_DEMO
from tests.test_laws import SMALL, TRUE_FORMS, curve_rows, isoflop_rows, training_rows
from tests.test_report import add_results, make_run


RESULTS = Path(__file__).parent.parent / "results"


def a_report(folder):
    first, second = make_run(folder / "first"), make_run(folder / "a second run with a long name", loops=4, lr=0.02)
    for depth in (1, 2, 3):
        add_results(first, depth, 0.2 * depth)
    return report.main([str(first), str(second)])


def a_model(folder):
    torch.manual_seed(0)
    model = tiny_model(vocab_size=30, num_loops=4, loop_loss="per_loop", eos_token_id=None, injection="diagonal")
    model.save_pretrained(folder / "final")
    tiny_tokenizer().save_pretrained(folder / "final")
    ids = model.generate(random_ids(48, 1, 30), max_new_tokens=10, do_sample=True, top_k=0)
    (folder / "text.txt").write_text(" ".join(tiny_tokenizer().batch_decode(ids)))
    return folder / "final"


def a_diagnosis(folder):
    quick = {"loops": [1, 2, 3], "seeds": 1, "steps": 1, "num_tokens": 8}
    with pytest.MonkeyPatch.context() as patch:
        for name in ("residual_norm", "update_size"):
            patch.setitem(diagnose.MEASURES, name, diagnose.MEASURES[name]._replace(quick=quick))
        sizes = ["--text", str(folder / "text.txt"), "--rows", "2", "--length", "16"]
        diagnose.main(["all", str(a_model(folder)), *sizes, "--output", str(folder)])
    return folder / "index.html"


def a_halting(folder):
    sizes = ["--sequences", "12", "--length", "10", "--repeats", "1", "--output", str(folder)]
    halting.run(halting.parse([str(a_model(folder)), str(folder / "text.txt"), *sizes]))
    return folder / "halting.html"


def a_text(folder):
    rule = ["--exit-criterion", "logit_margin", "--exit-threshold", "0.5", "--max-new-tokens", "40"]
    show_loops.main([str(a_model(folder)), "a b c", *rule, "--output", str(folder / "loops.html")])
    return folder / "loops.html"


def a_law(name, rows):
    def made(folder):
        rows_of = [{**row, "loss": row["loss"] * (1 + 5e-4 * math.sin(i))} for i, row in enumerate(rows())]
        write_table(rows_of, folder / "runs.csv")
        laws.main([name, str(folder / "runs.csv"), "--output", str(folder), "--restarts", "12", "--bootstrap", "5"])
        return folder / f"{name}.html"

    return made


def a_demo(folder):
    (folder / "demo.html").write_text(demo.page(MEASURED_DEMO, folder), encoding="utf-8")
    return folder / "demo.html"


def a_ledger(folder):
    rows = ledger(PAPERS, RESULTS)
    charts = sections(PAPERS, rows, RESULTS)
    (folder / "claims.html").write_text(to_html("The papers' claims, measured again", charts, [said(rows)]))
    return folder / "claims.html"


def a_gpu_check(folder):
    found = Ledger(folder)
    found.write_result("memory", "narrow", {"per_loop_over_terminal": 1.2})
    found.write_end("memory", Ended("done", 3.0))
    write_page(Setting(folder, tiny=True), found, "looped gpu")
    return folder / "index.html"


PAGES = {
    "claims": a_ledger,
    "gpu": a_gpu_check,
    "demo": a_demo,
    "report": a_report,
    "diagnose": a_diagnosis,
    "halting": a_halting,
    "loops": a_text,
    "isoflop": a_law("isoflop", isoflop_rows),
    "parametric": a_law("parametric", lambda: training_rows(SMALL)),
    "test_time": a_law("test_time", lambda: curve_rows(TRUE_FORMS["exponential"], depths=(4, 8))),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAGES)
def test_a_page_is_legible(tmp_path, kind):
    if CHROMIUM is None:
        warnings.warn("no page was looked at: there is no chromium on this machine", stacklevel=1)
        pytest.skip("no page was looked at: install chromium")
    page = PAGES[kind](tmp_path)
    for width in (400, 1280):
        for theme in ("light", "dark"):
            problems, height = seen(page, tmp_path, width, theme)
            assert problems == [], f"{kind} at {width}, {theme}: {json.dumps(problems[:10], indent=1)}"
            photo = photographed(page, tmp_path, width, min(height, 8000), theme)
            picture = pytest.importorskip("PIL.Image").open(photo).convert("L")
            corner, colors = picture.getpixel((1, 1)), picture.getcolors()
            assert (corner > 200) == (theme == "light")  # the reader's colours
            assert picture.size[0] == width and len(colors) > 20


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
@pytest.mark.parametrize(
    "body, problem",
    [
        ('<div style="width: 600px">x</div>', "the page is 608 wide"),
        ('<p style="color: #aaa; background: #fff">faint</p>', "contrast of"),
        ('<svg viewBox="0 0 300 90"><text x="9" y="30">one</text><text x="12" y="32">two</text></svg>', "overlap"),
        ('<svg viewBox="0 0 300 90"><text x="280" y="30">a long word</text></svg>', "is cut off"),
        ('<svg viewBox="0 0 300 90"></svg>', "is empty"),
        ('<svg viewBox="0 0 3000 90"><text x="9" y="30">tiny</text></svg>', "is too small"),
    ],
)
def test_what_is_not_legible_is_found(tmp_path, body, problem):
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><html><head></head><body>{body}</body></html>")
    problems, _ = seen(page, tmp_path, 400, "light")
    assert any(problem in words for words in problems), problems
