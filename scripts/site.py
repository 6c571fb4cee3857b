"""Hooks of mkdocs.

Decision records and laboratory notes are added to the navigation. Links that leave docs/ lead to the repository;
TANDEM_REPOSITORY=https://example.com/tandem/blob/main names it. Without it they become plain text.
"""
import os
import posixpath
import re

LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_config(config):
    for title, folder in (("Decision records", "adr"), ("Laboratory notes", "lab")):
        pages = sorted(os.listdir(os.path.join(config.docs_dir, folder)))
        config.nav.append({title: [posixpath.join(folder, page) for page in pages]})


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
