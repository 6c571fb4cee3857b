"""Hooks of mkdocs.

README and decision records are added to the navigation. Pages get mermaid, if they have a diagram, and the
worker that searches in files from the site itself; the theme would fetch them from elsewhere. Tables get more width
than in the theme.

Links that leave docs/ lead to the repository;
TANDEM_REPOSITORY=https://example.com/tandem/blob/main names it. Without it they become plain text.
"""
import os
import posixpath
import re

from mkdocs.structure.files import File

MERMAID = "assets/javascripts/mermaid.min.js"
WORKER = "assets/javascripts/iframe-worker.js"
UNPKG = "https://unpkg.com/iframe-worker/shim"  # where the theme's plugin "offline" fetches it
STYLE = "assets/stylesheets/wider.css"  # named in mkdocs.yml
WIDER = """.md-grid { max-width: 84rem; }
.md-typeset table:not([class]) th, .md-typeset table:not([class]) td { min-width: 0; padding: .6em .9em; }
"""
README = "readme.md"  # of the site
LINK = re.compile(r"\[([^\]]*)\]\(((?:\.\./)+[^)#\s]+)(#[^)]*)?\)")


def on_config(config):
    pages = sorted(os.listdir(os.path.join(config.docs_dir, "adr")))
    config.nav.insert(1, {"What it is for": README})
    config.nav.append({"Decision records": [posixpath.join("adr", page) for page in pages]})


def on_files(files, config):
    with open("README.md", encoding="utf-8") as file:
        text = file.read()
    # its links lead from the root, and those of pages from docs/
    text = re.sub(r"\]\((?!https?:|#)", "](../", text).replace('src="docs/', 'src="')
    files.append(File.generated(config, README, content=text))
    for script in MERMAID, WORKER:
        source = os.path.abspath(".tools/" + posixpath.basename(script))
        files.append(File.generated(config, script, abs_src_path=source))
    files.append(File.generated(config, STYLE, content=WIDER))


def on_post_page(output, page, **_):
    here = posixpath.dirname(page.file.dest_uri) or "."
    assert UNPKG in output, "the theme fetches its worker from another place"
    output = output.replace(UNPKG, posixpath.relpath(WORKER, here))
    if 'class="mermaid"' not in output:
        return output
    return output.replace("</head>", f'<script src="{posixpath.relpath(MERMAID, here)}"></script></head>')


def on_post_template(output_content, template_name, **_):
    # a server answers any path with 404.html, so its links begin at the root
    return output_content.replace(UNPKG, "/" + WORKER) if template_name == "404.html" else output_content


def on_page_markdown(markdown, page, **_):
    here = posixpath.dirname(page.file.src_uri)
    repository = os.environ.get("TANDEM_REPOSITORY", "").rstrip("/")

    def outside(match):
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join("docs", here, target))
        if path == "README.md":
            path = "docs/" + README
        if path.startswith("docs/") and not os.path.isdir(path) and not path.endswith(".go"):
            return f"[{text}]({posixpath.relpath(path, posixpath.join('docs', here))}{anchor})"
        return f"[{text}]({repository}/{path}{anchor})" if repository else f"{text} (`{path}`)"

    return LINK.sub(outside, markdown)
