"""Pages of the site that lie elsewhere in the repository: READMEs, results, and the notebooks as text."""

import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "MODEL_CARD.md", "CONTRIBUTING.md", "CHANGELOG.md", "results/*.md", "examples/README.md"]
PAGES += ["recipes/*/*.md", "examples/*.ipynb"]


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
    """Links are those of the repository; what leads to no page of the site, such as code, becomes the words alone."""
    written_in = page.file.src_uri if page.file.generated_by else f"docs/{page.file.src_uri}"

    def mend(match):
        bang, words, target = match.groups()
        if re.match(r"\w+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        # docs/ is the root of the site
        address = posixpath.normpath(posixpath.join(posixpath.dirname(written_in), path)).removeprefix("docs/")
        address = address.replace(".ipynb", ".md")
        if address not in files.src_uris:
            return words
        path = posixpath.relpath(address, posixpath.dirname(page.file.src_uri))
        return f"{bang}[{words}]({path}{'#' * bool(anchor)}{anchor})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", mend, markdown)
