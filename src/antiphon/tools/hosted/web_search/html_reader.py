"""Extraction of text from HTML with the standard library, for servers without selectolax."""

from html.parser import HTMLParser

from antiphon.tools.hosted.web_search.pages import BLOCK_TAGS, HIDDEN_TAGS


class HtmlReader(HTMLParser):
    """Collects the title and the visible text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.text: list[str] = []
        self._hidden: list[str] = []
        self._is_title = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "title":
            self._is_title = True
        elif tag == "body":
            self._hidden.clear()  # an unclosed head
        elif tag in HIDDEN_TAGS:
            self._hidden.append(tag)
        elif tag in BLOCK_TAGS:
            self.text.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._is_title = False
        elif tag in self._hidden:
            # An unclosed element inside a hidden one ends with it.
            while self._hidden.pop() != tag:
                pass
        elif tag in BLOCK_TAGS:
            self.text.append("\n")

    def handle_data(self, data: str) -> None:
        if self._is_title:
            self.title.append(data)
        elif not self._hidden:
            self.text.append(data)
