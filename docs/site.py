"""Pages of the site that lie elsewhere in the repository: READMEs, results, and the notebooks as text."""

import json
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "MODEL_CARD.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/*.md", "examples/README.md"]
PAGES += ["recipes/*/README.md", "recipes/parcae/RUN_1.3B.md", "examples/*.ipynb"]


def pages() -> dict[str, str]:
    """{address in the site: text}"""
    found = {}
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            text = path.read_text(encoding="utf-8")
            address = path.relative_to(ROOT).as_posix()
            found[address.replace(".ipynb", ".md")] = as_markdown(text) if path.suffix == ".ipynb" else text
    return found


def as_markdown(notebook: str) -> str:
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(notebook)["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def on_files(files, config):
    for address, text in pages().items():
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links to what is no page of the site, such as code, become the words alone; docs/ is the site's own root."""
    here = Path(page.file.src_uri).parent

    def mend(match):
        bang, words, target = match.groups()
        if re.match(r"\w+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        path = path.replace(".ipynb", ".md")
        path = path.removeprefix("docs/") if here == Path(".") else path
        address = Path(*[part for part in (ROOT / here / path).resolve().relative_to(ROOT.resolve()).parts]).as_posix()
        if address not in files.src_uris:
            return words
        return f"{bang}[{words}]({path}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", mend, markdown)
