"""Docstrings as Markdown: Sphinx's roles and links become links, formulas and examples become blocks of code.

Signatures show every option in the place of ``**options``.
"""

import re
import textwrap

import griffe

OPTIONS = {"OptionKeywords": "Options", "LayerKeywords": "LayerOptions"}  # where the defaults are


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg, **_):
        for each in objects(pkg):
            if each.docstring is not None:
                each.docstring.value = to_markdown(each.docstring.value, each)
            if each.is_function:
                each.parameters = griffe.Parameters(*spelt_out(each, pkg["_core.options"]))


def spelt_out(function, options):
    """The parameters, with every option. ``convert`` takes those that it is not given from the network."""
    for parameter in function.parameters:
        keywords = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
        if parameter.kind is griffe.ParameterKind.var_keyword and keywords in OPTIONS:
            for field in options[OPTIONS[keywords]].all_members.values():
                if field.is_attribute and "instance-attribute" in field.labels:
                    yield griffe.Parameter(
                        field.name,
                        kind=griffe.ParameterKind.keyword_only,
                        annotation=field.annotation,
                        default="..." if function.name == "convert" else field.value,
                    )
        else:
            yield parameter


def objects(parent):
    yield parent
    for member in parent.members.values():
        if not member.is_alias:
            yield from objects(member)


def to_markdown(text, owner):
    def link(found):
        short, name = found.groups()
        shown = f"<code>{name.rpartition('.')[2] if short else name}</code>"
        try:
            path = name if name.startswith("balnorm.") else owner.resolve(name)
        except griffe.NameResolutionError:
            return shown
        # Optional: internal names and those of other packages have no page here.
        return f'<autoref optional identifier="{path}">{shown}</autoref>'

    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":\w+:`(~?)([\w.]+)`", link, text)
    text = re.sub(r"`([^`<]+?)\s*<(https?:[^>]+)>`_", r"[\1](\2)", text)
    text = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
    text = re.sub(r"^Shape:\n((?:    .*\n?)+)", shape, text, flags=re.MULTILINE)
    text = re.sub(r"^\.\. math::\n((?: +.*\n)+)", r"```math\n\1```\n", text, flags=re.MULTILINE)
    # A session outside a section would be taken for quotations.
    return re.sub(r"^>>> .*(?:\n(?!\s*$).+)*", r"```pycon\n\g<0>\n```", text, flags=re.MULTILINE)


def shape(found):
    return f"**Shape:**\n\n{textwrap.dedent(found[1])}"
