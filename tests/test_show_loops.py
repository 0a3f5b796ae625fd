"""The page and the terminal show each token with the loops that generate says it took, and nothing else."""

import json
import re
import shutil
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from looped_eval.show_loops import command as show_loops
from looped_eval.show_loops.page import Piece, Shown, Token, color, finding, ink, page, visible
from modeling_looped import ExitRule
from tests.helpers import logits_alive, tiny_model, tiny_tokenizer


VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags close in order and that nothing is fetched; collects the text and the tokens."""

    def __init__(self, html: str):
        super().__init__()
        self.open, self.shown, self.tokens, self.points = [], "", [], []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        assert tag not in ("script", "link", "img", "iframe") and "src" not in attributes
        assert attributes.get("href", "#").startswith("#")
        assert not any(name.startswith("on") for name in attributes)
        if tag not in VOID:
            self.open.append((tag, attributes.get("class")))
        if attributes.get("class") == "t":
            self.tokens.append("")
        if tag == "polyline":
            self.points.append((attributes["class"], len(attributes["points"].split())))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        kinds = [kind for _, kind in self.open]
        if "text" in kinds and "card" not in kinds and self.open[-1][0] != "i":
            self.shown += data
            if "t" in kinds:
                self.tokens[-1] += data


def a_shown(*texts: str, prompt: str = "", loops: int = 2, num_loops: int = 4) -> Shown:
    token = Token(loops, [0.5 * k for k in range(1, num_loops + 1)])
    return Shown(prompt, [Piece(text, [token]) for text in texts], num_loops, "a rule", None, {"model": "<m>"})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token for every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("text", ["plain words", "é", "naïve – 日本 🙂!", "🙂🙂", "a\n b\t"])
@pytest.mark.parametrize("prompt", ["", "x", "日"])
def test_tokens_that_share_a_character_stay_together(text, prompt):
    tokenizer = byte_tokenizer()
    new = tokenizer(text)["input_ids"]
    pieces = show_loops.split(tokenizer, tokenizer(prompt)["input_ids"], new)
    assert "".join(piece for piece, _ in pieces) == text and "\ufffd" not in text
    assert [number for _, numbers in pieces for number in numbers] == list(range(len(new)))
    assert [len(numbers) for _, numbers in pieces] == [len(character.encode()) for character in text]


def test_bytes_that_are_no_character_are_shown_all_the_same():
    tokenizer = byte_tokenizer()
    euro = tokenizer("€")["input_ids"]
    broken = euro[1:] * 4 + tokenizer("ab")["input_ids"] + euro[:2]
    pieces = show_loops.split(tokenizer, [], broken)
    assert [number for _, numbers in pieces for number in numbers] == list(range(len(broken)))
    assert "ab" in "".join(piece for piece, _ in pieces)


def test_a_character_behind_such_bytes_is_shown():
    tokenizer = byte_tokenizer()
    euro = tokenizer("€")["input_ids"]
    assert show_loops.split(tokenizer, [], [*euro[1:], euro[1], *euro]) == [("\ufffd\ufffd\ufffd€", [*range(6)])]
    assert show_loops.split(tokenizer, 16 * euro[1:2], euro[1:2]) == [(4 * "\ufffd", [0])]  # the prompt's are pending


def test_the_page_escapes_and_stands_alone():
    nasty = ["<script>alert(1)</script>", '"&amp;', "</span>", "a\n", "\x1b[31m", " ", "'", "-->"]
    html = page(a_shown(*nasty, prompt="<b>&\x07"))
    read = Page(html)
    assert not re.search(r"https?://|@import|url\(|<script", html) and "\x1b" not in html
    assert read.tokens == [visible(text) for text in nasty]
    assert read.shown == "<b>&␇" + "".join(map(visible, nasty)) and "&lt;m&gt;" in html
    assert visible("\x1b\x7f\n\t") == "␛␡\n␉"


def test_the_curve_is_solid_as_far_as_the_token_ran():
    read = Page(page(a_shown("a", loops=3)))
    assert read.points == [("ahead", 2), ("run", 3)]  # the exit is on both
    assert "1 loop of 1" in page(a_shown("a", loops=1, num_loops=1)).replace("</span>", " ")
    assert "No token was written." in page(a_shown())
    Page(page(a_shown()))


def test_the_first_sentence_says_how_long_tokens_took():
    """Without the first, which is read from the prompt's pass."""
    shown = a_shown("a", "b", "c", loops=2)
    first, other = a_shown("p", loops=3).pieces, a_shown("d", loops=4).pieces
    shown = shown._replace(pieces=first + shown.pieces)
    assert finding(shown) == "Every token after the first took 2 loops of 4."
    mixed = shown._replace(pieces=shown.pieces + other)
    assert finding(mixed) == "A token after the first took 2.50 of 4 loops in the mean; 3 of 4 took 2 loops."
    alone = shown._replace(pieces=first)
    assert finding(alone) == "The only new token took the prompt's 3 loops of 4: exits begin with the second."
    one_character = Piece("é", [token for piece in mixed.pieces for token in piece.tokens])
    assert shown._replace(pieces=[one_character]).mean_loops == 2.5


def test_colours_run_over_the_scale_and_stay_readable():
    assert color(1, 4) == color(1, 1) == (0xFF, 0xF1, 0xCC) and color(4, 4) == (0x6B, 0x22, 0x6E)
    assert color(2, 3) == (0xF0, 0xA0, 0x4B) and color(1.5, 3) == (0xFB, 0xD0, 0x7F)

    def luminance(rgb):
        linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    shades = [color(1 + i / 10, 11) for i in range(101)]
    lights = [luminance(shade) for shade in shades]
    assert lights == sorted(lights, reverse=True)
    for shade, light in zip(shades, lights):
        bright, dark = sorted([light, luminance(ink(shade))], reverse=True)
        assert (bright + 0.05) / (dark + 0.05) > 4  # nearly the 4.5 that text of this size should have


def test_the_terminal_shows_the_same_text(monkeypatch):
    shown = a_shown("a", " b\n", "\x1b[2J", prompt="p")
    painted = show_loops.painted(shown)
    bare = re.sub(r"\x1b\[[\d;]*m", "", painted)
    assert "\x1b" not in bare and bare.startswith("pa b\n␛[2J\n\n")
    for line in painted.split("\n"):  # no background runs on
        assert len(re.findall(r"\x1b\[(?:48|2m)", line)) == line.count("\x1b[0m")
    assert show_loops.plain(shown).startswith("pa b\n␛[2J\n\n") and "\x1b" not in show_loops.plain(shown)

    class Stream:
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert show_loops.has_colors(Stream())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not show_loops.has_colors(Stream())


@pytest.fixture
def folder(tmp_path):
    model = tiny_model(vocab_size=30, num_loops=4, loop_loss="per_loop", eos_token_id=None)
    model.save_pretrained(tmp_path / "final")
    tiny_tokenizer().save_pretrained(tmp_path / "final")
    return tmp_path / "final"


@torch.no_grad()
def test_loops_and_margins_are_those_of_the_model(folder, tmp_path, capsys):
    options = ["--exit-criterion", "logit_margin", "--exit-threshold", "0.5", "--max-new-tokens", "20"]
    output = tmp_path / "made" / "page.html"
    shown = show_loops.main([str(folder), "a b c", *options, "--min-loops", "2", "--output", str(output)])
    said = capsys.readouterr().out
    assert "\x1b" not in said

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), tiny_tokenizer()
    ids = tokenizer("a b c", return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True, "min_loops": 2}
    outputs = model.generate(ids, exit_criterion="logit_margin", exit_threshold=0.5, **settings)
    loops = [token.loops for token in shown.tokens]
    assert loops == outputs.token_loops[0].tolist() and len(set(loops)) > 1
    assert loops[0] == 4  # those of the prompt, whatever the rule
    assert shown.mean_loops == pytest.approx(sum(loops[1:]) / 19)
    assert f"On average a token after the first took {sum(loops[1:]) / 19:.2f} of 4 loops" in said
    assert sum(shown.counts().values()) == 19 and shown.counts()[2] == loops[1:].count(2)
    for depth in range(1, 5):  # each in a run of its own
        best = model(outputs.sequences, num_loops=depth).logits[0, 2:-1].topk(2).values
        found = torch.tensor([token.margins[depth - 1] for token in shown.tokens])
        torch.testing.assert_close(found, best[:, 0] - best[:, 1], atol=1e-4, rtol=1e-4)
    read = Page(output.read_text(encoding="utf-8"))
    assert read.shown == tokenizer.decode(outputs.sequences[0]) and len(read.tokens) == 20


def test_logits_of_one_loop_after_the_other_are_in_memory(monkeypatch):
    model = tiny_model(num_loops=4)
    alive = logits_alive(monkeypatch, model)
    assert len(show_loops.margins(model, torch.tensor([[1, 2, 3, 4]]), 2, 4)[0]) == 4
    assert len(alive) == 4 and max(alive) == 1


def test_of_a_single_loop_nothing_is_calibrated_next(folder, tmp_path, capsys):
    options = ["--max-new-tokens", "1", "--output", str(tmp_path / "page.html")]
    for depth in ("2", "1"):
        show_loops.main([str(folder), "a b", "--num-loops", depth, *options])
        assert ("looped halting" in capsys.readouterr().out) == (depth == "2")


def test_a_seed_samples_the_same_text_again(folder):
    options = ["--temperature", "1", "--max-new-tokens", "8", "--seed", "1", "--output", str(folder / "page.html")]
    first, again = (show_loops.main([str(folder), "a b", *options]) for _ in range(2))
    assert first == again


def test_another_tokenizer_may_be_that_of_a_run(folder, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copytree(folder, tmp_path / "run/final")
    (folder / "tokenizer_config.json").unlink()
    options = ["--max-new-tokens", "1", "--output", str(tmp_path / "page.html")]
    shown = show_loops.main([str(folder), "a b", "--tokenizer", str(tmp_path / "run"), *options])
    assert len(shown.tokens) == 1


def test_saved_drafts_and_selections_leave_the_exits(folder):
    options = ["--max-new-tokens", "8", "--output", str(folder / "page.html")]
    expected = show_loops.main([str(folder), "a b", *options])
    stored = GenerationConfig.from_pretrained(folder)
    stored.draft_loops, stored.exit_selection, stored._from_model_config = 1, "after", False
    stored.save_pretrained(folder)
    assert show_loops.main([str(folder), "a b", *options]) == expected


def test_the_rule_is_that_of_generation_config_unless_told(folder):
    def rule(*options):
        args = show_loops.parse([str(folder), "a", *options])
        return show_loops.rule_of(args, *show_loops.open_config(str(folder))), args.num_loops

    assert rule()[0] == ExitRule("kl") and rule()[1] == 4
    stored = GenerationConfig.from_pretrained(folder)
    stored.exit_criterion, stored.exit_threshold, stored.min_loops, stored.num_loops = "entropy", 0.25, 2, 6
    stored._from_model_config = False
    stored.save_pretrained(folder)
    assert rule()[0] == ExitRule("entropy", 0.25, 2) and rule()[1] == 6
    assert rule("--exit-threshold", "0.5")[0] == ExitRule("entropy", 0.5, 2)
    assert rule("--exit-criterion", "kl", "--num-loops", "5") == (ExitRule("kl"), 5)


@pytest.mark.parametrize(
    "options, words",
    [
        (["--exit-criterion", "margin"], "'margin' is not known"),
        (["--exit-criterion", "gate"], "exit_gate='none'"),
        (["--exit-criterion", "logit_margin"], "no published threshold"),
        (["--exit-threshold", "1"], "without --exit-criterion"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be at least 0, got -1"),
        (["--min-loops", "5"], "min_loops=5"),
    ],
)
def test_bad_input_is_refused_before_the_model_is_loaded(folder, options, words):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=re.escape(words)):
        show_loops.main([str(folder), "a", *options])
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        show_loops.main([str(folder), "a", "--output", str(folder)])


def test_models_and_prompts_that_cannot_be_shown_are_refused(folder):
    with pytest.raises(ValueError, match="the prompt '' holds no tokens"):
        show_loops.main([str(folder), ""])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "position_embedding": "learned"}))
    with pytest.raises(ValueError, match="max_position_embeddings=64"):
        show_loops.main([str(folder), "a", "--max-new-tokens", "64"])
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type='llama' in its config.json, which is no looped model"):
        show_loops.main([str(folder), "a"])
    with pytest.raises(ValueError, match="there is no folder 'nowhere'"):
        show_loops.main(["nowhere", "a"])
