"""Hook of mkdocs: links that leave docs/ lead to the repository, or become plain text where none is named.

TANDEM_REPOSITORY=https://example.com/tandem/blob/main names it.
"""
import os
import posixpath
import re

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_page_markdown(markdown, page, **_):
    here = posixpath.dirname(page.file.src_uri)
    repository = os.environ.get("TANDEM_REPOSITORY", "").rstrip("/")

    def outside(match):
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join("docs", here, target))
        if path.startswith("docs/") and not os.path.isdir(path) and not path.endswith(".go"):
            return match.group(0)
        return f"[{text}]({repository}/{path}{anchor})" if repository else f"{text} (`{path}`)"

    return LINK.sub(outside, markdown)
