"""What mkdocs has to know about this repository: which files are pages, and how formulas and scripts become pages.

The site has the layout of the repository, so that every link between documents works here as it does in a clone.
"""

import ast
import html
import json
import re
import subprocess
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SOURCES = ("README.md", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "docs", "benchmarks/*.md", "examples")


def on_files(files, config):
    ours = [file for file in files if file.src_dir != config.docs_dir]  # of the theme
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    for name in listed:
        if name.startswith("examples/"):
            text = (ROOT / name).read_text()
            page = notebook_as_page(json.loads(text)) if name.endswith(".ipynb") else as_page(text)
            ours.append(File.generated(config, str(Path(name).with_suffix(".md")), content=page))
        elif not name.endswith(".py"):
            ours.append(File(name, str(ROOT), config.site_dir, use_directory_urls=False))
    for name in re.findall(r"api/(balnorm[\w.]*)\.md", str(config.nav)):
        page = f"# `{name}`\n\n::: {name}\n"
        ours.append(File.generated(config, f"api/{name}.md", content=page))
    return Files(ours)


def on_page_markdown(markdown, **_):
    """Links to a script or a notebook lead to its page."""
    return re.sub(r"(\]\((?:\.\./)*examples/\w+)\.(?:py|ipynb)\)", r"\1.md)", markdown)


def on_page_content(content, page, **_):
    """Formulas as MathML, which browsers set by themselves."""

    def as_mathml(found):
        formula = html.unescape(found["formula"]).strip()
        return to_mathml(formula, found["tag"] == "div", page.file.src_uri)

    return re.sub(
        r'<(?P<tag>span|div) class="arithmatex">\s*\\[(\[](?P<formula>.*?)\\[)\]]\s*</(?P=tag)>',
        as_mathml,
        content,
        flags=re.DOTALL,
    )


def to_mathml(formula, block, where):
    mathml = convert(formula, display="block" if block else "inline")
    unknown = re.search(r">\\\w*<", mathml)
    if unknown:
        raise PluginError(f"{where}: the formula {formula!r} has a command that cannot be set: {unknown[0][1:-1]}")
    # Raised once more, as MathML wants it, a prime all but vanishes in fonts that were not made for formulas.
    prime = r"<mi>(?P<prime>&#x0203[23];)</mi>"
    primed = r"<mrow>\g<base><mo lspace='0' rspace='0'>\g<prime></mo></mrow>"
    base = r"(?P<base><mi>\w</mi>)"
    mathml = re.sub(rf"<msup>{base}{prime}</msup>", primed, mathml)
    mathml = re.sub(rf"<msubsup>{base}(?P<low><mi>\w</mi>){prime}</msubsup>", rf"<msub>{primed}\g<low></msub>", mathml)
    return f'<div class="formula">{mathml}</div>' if block else mathml


def as_page(script):
    """A script as a page: the docstring and the comments that follow a blank line are text, the rest is code."""
    docstring, body = re.fullmatch(r'"""(.*?)"""\n(.*)', script, re.DOTALL).groups()
    title, _, introduction = docstring.partition("\n")
    parts, codes = [f"# {title.rstrip('.')}", introduction.strip()], []
    for block in re.split(r"\n\n+(?=# )", body.strip("\n")):
        text, code = re.fullmatch(r"((?:#[^\n]*(?:\n|$))*)(.*)", block, re.DOTALL).groups()
        parts.append(re.sub(r"^# ?", "", text, flags=re.MULTILINE).strip())
        if code.strip():
            codes.append(code.strip())
            parts.append(f"```python\n{codes[-1]}\n```")
    if ast.dump(ast.parse("\n".join(codes))) != ast.dump(ast.parse(body)):
        raise PluginError(f"the page {title!r} does not have all the code of its script")
    return "\n\n".join(part for part in parts if part) + "\n"


def notebook_as_page(notebook):
    """What each cell says, prints and draws."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            if output["output_type"] == "stream":
                parts.append(f"```text\n{''.join(output['text']).strip()}\n```")
            else:
                picture = "".join(output["data"]["image/png"]).strip()
                parts.append(f'<p><img alt="figure" src="data:image/png;base64,{picture}"></p>')
    return "\n\n".join(parts) + "\n"
