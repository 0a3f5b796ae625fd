"""Pages of the site that lie elsewhere in the repository: READMEs, results, and the notebooks as text; and tables of
settings and fields, which are made of the source."""

import ast
import json
import posixpath
import re
import sys
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from recipes.settings.help import config_class, meanings  # noqa: E402


CONFIG = config_class()  # now: mkdocs takes ROOT out of the path afterwards


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


def settings() -> str:
    """A table of each section of a recipe."""
    parts = []
    for section, keys in meanings().items():
        rows = [f"| `{key}` | `{default}` | {in_cell(meaning)} |" for key, (default, meaning) in keys.items()]
        parts.append("\n".join([f"## {section}", "", "| key | default | what |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def fields() -> str:
    """A table of the fields of `LoopedConfig`."""
    # but for format_version, a call, which tells of the file
    own = [node for node in CONFIG.body if isinstance(node, ast.AnnAssign) and not isinstance(node.value, ast.Call)]
    rows = [
        f"| `{node.target.id}` | {in_cell(words_of(node.annotation))} | `{ast.unparse(node.value)}` |" for node in own
    ]
    return "\n".join(["| field | values | default |", "|---|---|---|", *rows])


def words_of(annotation: ast.expr) -> str:
    said = ast.unparse(annotation)
    return ", ".join(f"`{word}`" for word in re.findall(r"'(.*?)'", said)) or f"`{said}`"


def in_cell(text: str) -> str:
    return text.replace("|", "\\|")


TABLES = {"SETTINGS": settings, "FIELDS": fields}


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

    for name, table in TABLES.items():
        if f"<!-- {name} -->" in markdown:
            markdown = markdown.replace(f"<!-- {name} -->", table())
    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", mend, markdown)
