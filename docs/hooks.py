"""What mkdocs builds beside the pages of this folder: those made of records, and the gallery."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from from_records import generated
from veriformer.reports.site.gallery_page import gallery_page, lead
from veriformer.reports.site.source_links import for_the_site

GALLERY = Path(__file__).parent.parent / "reports" / "gallery"
SHOWN = (".md", ".html", ".png", ".csv")  # of the gallery; its JSON is for programs, and stays in the repository
LARGE = 20_000  # bytes of Markdown; tables so long would fill the search
_LEAD = re.compile(r"<!-- lead: (\S+) -->")
_LOADING = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\"?https?://[^>]*>")
_NAMING = re.compile(r"\brel=\"?(?:canonical|prev|next)\b")  # of links: nothing is fetched for them


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made of records."""
    for place, text in generated().items():
        files.append(File.generated(config, place, content=text))
    for path in sorted(p for p in GALLERY.rglob("*") if p.suffix in SHOWN):
        place = str(Path("gallery") / path.relative_to(GALLERY))
        if path.suffix == ".md":
            text = path.read_text(encoding="utf-8")
            files.append(File.generated(config, place, content=gallery_page(text, is_large=len(text) > LARGE)))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put in the place of `<!-- lead: FILE -->` what a file of the gallery says first: its numbers stay its own.

    Links of pages that lie in docs/ work in a clone; here they go to the pages that are made.
    """
    return _LEAD.sub(lambda found: _quoted(found[1]), for_the_site(markdown) if page.file.abs_src_path else markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that fetches something from elsewhere: it is to be read without a network.

    Raises:
        PluginError: it does.
    """
    for tag in _LOADING.findall(output):
        if not _NAMING.search(tag):
            raise PluginError(f"{page.file.src_uri} fetches from elsewhere: {tag}; keep it in docs/assets/")
    return output


def _quoted(name: str) -> str:
    words = lead((GALLERY / name).read_text(encoding="utf-8"))
    return "\n".join(f"> {line}".rstrip() for line in words.splitlines())
