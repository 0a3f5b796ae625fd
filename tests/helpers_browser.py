"""Pages in a real browser: what they look like, and what a reader could not read."""

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless --no-sandbox --disable-gpu --no-first-run --hide-scrollbars --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
THEMES = {"dark": 0, "light": 1}

# A window is never narrower than 500 pixels, so the page stands in a frame of its width. This looks at the page when
# it is laid out, and tells the frame's owner, whose attributes then hold the findings. Texts are compared
# as drawn; contrast is that of WCAG, against the nearest background that is painted.
PROBE = """
<script>
const problems = [], root = document.documentElement, height = root.scrollHeight, width = innerWidth;
document.querySelectorAll("details").forEach(each => each.open = true);
if (root.scrollWidth > innerWidth) problems.push(`the page is ${root.scrollWidth} wide in a window of ${innerWidth}`);
const numbers = color => color.match(/[0-9.]+/g).map(Number);
const light = color => {
  const [r, g, b] = numbers(color).map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = node => {
  for (; node; node = node.parentElement) {
    const color = getComputedStyle(node).backgroundColor;
    if (numbers(color)[3] !== 0) return color;
  }
  return "rgb(255, 255, 255)";
};
const legible = (node, color, text) => {
  const [a, b] = [light(color), light(ground(node))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) problems.push(`contrast of ${JSON.stringify(text)}: ${color} on ${ground(node)}`);
};
const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (words.nextNode()) {
  const node = words.currentNode.parentElement, text = words.currentNode.data.trim();
  if (!text || node.closest("svg, script, style") || !node.getClientRects().length) continue;
  legible(node, getComputedStyle(node).color, text);
}
document.querySelectorAll("svg").forEach((svg, number) => {
  const whole = svg.getBoundingClientRect();
  if (!whole.width) return;
  const texts = [...svg.querySelectorAll("text")].map(node => [node.textContent, node.getBoundingClientRect(), node]);
  for (const [text, box, node] of texts) {
    legible(svg, getComputedStyle(node).fill, text);
    if (box.left < whole.left - 1 || box.right > whole.right + 1 || box.bottom > whole.bottom + 1)
      problems.push(`${JSON.stringify(text)} is cut off in picture ${number}`);
    if (parseFloat(getComputedStyle(node).fontSize) * whole.width / svg.viewBox.baseVal.width < 9)
      problems.push(`${JSON.stringify(text)} is too small in picture ${number}`);
  }
  texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
    if (p.left < q.right - 1 && q.left < p.right - 1 && p.top < q.bottom - 3 && q.top < p.bottom - 3)
      problems.push(`${JSON.stringify(a)} and ${JSON.stringify(b)} overlap in picture ${number}`);
  }));
  if (!svg.querySelector("polyline, circle, rect")) problems.push(`picture ${number} is empty`);
});
document.querySelectorAll("table, figure, section, .charts").forEach(each => {
  if (!each.getBoundingClientRect().height) problems.push(`an empty ${each.tagName}`);
});
parent.postMessage({height, width, problems: JSON.stringify(problems)}, "*");
</script>
"""
FRAME = """<!DOCTYPE html><meta name="color-scheme" content="light dark"><style>body { margin: 0 }</style>
<script>addEventListener("message", event => Object.assign(document.documentElement.dataset, event.data))</script>
<iframe src="%s" style="border: 0; width: %dpx; height: %dpx; display: block"></iframe>
"""


def chromium(folder: Path, page: Path, width: int, height: int, theme: str, *action: str) -> str:
    frame = folder / "frame.html"
    frame.write_text(FRAME % (page.resolve().as_uri(), width, height))
    command = [CHROMIUM, *QUIET, f"--user-data-dir={folder}/profile", f"--window-size={width},{height}"]
    command += [f"--blink-settings=preferredColorScheme={THEMES[theme]}", *action, frame.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def seen(page: Path, folder: Path, width: int, theme: str) -> tuple[list[str], int]:
    """What is wrong with a page of this width, and its height."""
    probed = folder / f"probed_{page.name}"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    html = chromium(folder, probed, width, 900, theme, "--dump-dom")
    found = {name: unescape(value) for name, value in re.findall(r'data-(\w+)="([^"]*)"', html[: html.index("<head")])}
    assert int(found["width"]) == width
    return json.loads(found["problems"]), int(found["height"])


def photographed(page: Path, folder: Path, width: int, height: int, theme: str) -> Path:
    picture = folder / f"{page.stem}_{width}_{theme}.png"
    chromium(folder, page, width, height, theme, f"--screenshot={picture}")
    return picture
