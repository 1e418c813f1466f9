"""Text of files: plain text in three encodings, Markdown, source code, JSON, CSV, HTML, PDF and docx."""

import codecs
import csv
import io
import re
import zipfile
from pathlib import Path, PurePath

UNSUPPORTED = "unsupported_file"
INVALID = "invalid_file"

# Formats that are known, but not read. Their names give a better message than their content.
_UNSUPPORTED_SUFFIXES_TEXT = (
    ".7z .avi .bmp .doc .exe .gif .gz .ico .jpeg .jpg .mov .mp3 .mp4 .odt .ogg .png .ppt .pptx .rar .rtf"
    " .tar .tiff .wav .webp .xls .xlsx .zip"
)
_UNSUPPORTED_SUFFIXES = frozenset(_UNSUPPORTED_SUFFIXES_TEXT.split())
# In these formats, a file that is not text is invalid. In other ones, it is of an unknown format.
_TEXT_SUFFIXES_TEXT = (
    ".c .cc .cpp .cs .css .go .h .hpp .ini .java .js .json .jsonl .kt .log .lua .md .markdown .php .py"
    " .rb .rs .rst .scala .sh .sql .swift .tex .toml .ts .tsv .tsx .txt .xml .yaml .yml"
)
_TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES_TEXT.split())
# Formats that need a parser.
PARSED_SUFFIXES = frozenset({".pdf", ".docx", ".html", ".htm", ".xhtml", ".csv", ".tsv"})
_HTML_SUFFIXES = frozenset({".html", ".htm", ".xhtml"})
_HIDDEN_ELEMENTS = ("script", "style", "noscript", "template", "svg", "head")
_CHARSET = re.compile(rb"""<meta[^>]+charset=["']?([A-Za-z0-9_-]+)""", re.IGNORECASE)
# Not the escape character, which colours the text of logs.
_CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
_SPACES = re.compile(r"[^\S\n]+")
_EMPTY_LINES = re.compile(r"\n{3,}")
_MAX_DOCX_FILES = 10_000
_OLE_HEADER = bytes.fromhex("d0cf11e0a1b11ae1")
# The share of control characters from which decoded bytes are not text.
_MAX_CONTROL_SHARE = 0.01


class Unreadable(Exception):
    """A file cannot be read as text. `code` is the code of the error of a vector store file."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def extract_text(path: Path, filename: str, *, max_text_bytes: int) -> str:
    """Return the text of a file. Raises Unreadable, or MemoryError if the file needs too much memory."""
    with path.open("rb") as file:
        head = file.read(8)
    suffix = PurePath(filename).suffix.lower()
    if head.startswith(b"%PDF") or suffix == ".pdf":
        text = _read_pdf(path, max_text_bytes)
    elif suffix == ".docx":
        text = _read_docx(path, max_text_bytes)
    elif suffix in _UNSUPPORTED_SUFFIXES:
        raise Unreadable(UNSUPPORTED, f"Files of type '{suffix}' are not supported.")
    else:
        text = _read_text_format(path, suffix, max_text_bytes)
    if len(text) > max_text_bytes:
        raise Unreadable(INVALID, _too_long(max_text_bytes))
    if not text.strip():
        raise Unreadable(INVALID, "The file has no text.")
    return text


def _read_text_format(path: Path, suffix: str, max_text_bytes: int) -> str:
    if path.stat().st_size > 2 * max_text_bytes:  # utf-16 has two bytes per character
        raise Unreadable(INVALID, _too_long(max_text_bytes))
    data = path.read_bytes()
    if suffix in _HTML_SUFFIXES:
        return _read_html(data)
    text = decode_text(data)
    if text is None:
        if suffix in _TEXT_SUFFIXES or suffix == ".csv":
            raise Unreadable(INVALID, "The file is not text in utf-8, utf-16 or ascii.")
        kind = f"type '{suffix}'" if suffix else "this type"
        raise Unreadable(UNSUPPORTED, f"Files of {kind} are not supported: the file is not text.")
    return _read_csv(text) if suffix in (".csv", ".tsv") else text


def decode_text(data: bytes) -> str | None:
    """Decode utf-8, utf-16 or ascii. Return None if the bytes are not text."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encodings = ["utf-16"]
    elif data.count(b"\0") > len(data) // 4:
        # Text of mostly ASCII characters in utf-16: every other byte is 0.
        encodings = ["utf-16-le" if data[1::2].count(0) > data[::2].count(0) else "utf-16-be"]
    else:
        encodings = ["utf-8-sig"]
    for encoding in encodings:
        try:
            text = data.decode(encoding)
        except UnicodeDecodeError:
            continue
        if len(_CONTROL.findall(text[:65536])) <= _MAX_CONTROL_SHARE * min(len(text), 65536):
            return text
    return None


def _read_html(data: bytes) -> str:
    from selectolax.lexbor import LexborHTMLParser

    text = decode_text(data)
    if text is None:
        found = _CHARSET.search(data[:4096])
        try:
            text = data.decode(found[1].decode() if found else "utf-8")
        except (LookupError, UnicodeError):
            raise Unreadable(INVALID, "The file is not text in utf-8, utf-16 or ascii.") from None
    tree = LexborHTMLParser(text)
    title = tree.css_first("title")
    lines = [title.text(strip=True)] if title is not None else []
    for name in _HIDDEN_ELEMENTS:
        for node in tree.css(name):
            node.decompose()
    if tree.body is not None:
        lines.append(tree.body.text(separator="\n"))
    return _normalize("\n\n".join(lines))


def _normalize(text: str) -> str:
    lines = [_SPACES.sub(" ", line).strip() for line in text.splitlines()]
    return _EMPTY_LINES.sub("\n\n", "\n".join(lines)).strip()


def _read_csv(text: str) -> str:
    """Return one line per row with the names of the columns, so that each chunk can be understood alone."""
    try:
        dialect: type[csv.Dialect] | str = csv.Sniffer().sniff(text[:8192], delimiters=",;\t|")
    except csv.Error:
        dialect = "excel"
    try:
        rows = [row for row in csv.reader(io.StringIO(text), dialect) if any(cell.strip() for cell in row)]
    except csv.Error:
        return text
    if len(rows) < 2 or len(rows[0]) < 2:
        return text
    names = [name.strip() for name in rows[0]]
    lines = []
    for row in rows[1:]:
        named = [f"{name}: {cell.strip()}" for name, cell in zip(names, row, strict=False) if cell.strip()]
        lines.append("; ".join([*named, *(cell.strip() for cell in row[len(names) :] if cell.strip())]))
    return "\n".join(lines)


def _read_pdf(path: Path, max_text_bytes: int) -> str:
    import pypdfium2

    try:
        document = pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable(INVALID, "The PDF is encrypted. Upload it without a password.") from None
        raise Unreadable(INVALID, "The file is not a valid PDF.") from None
    pages: list[str] = []
    size = 0
    try:
        for page in document:
            text_page = page.get_textpage()
            text = text_page.get_text_bounded().replace("\r\n", "\n")
            text_page.close()
            page.close()
            size += len(text)
            if size > max_text_bytes:
                raise Unreadable(INVALID, _too_long(max_text_bytes))
            pages.append(text.strip())
    except pypdfium2.PdfiumError:
        raise Unreadable(INVALID, "The PDF has a page that cannot be read.") from None
    finally:
        document.close()
    if not any(pages):
        raise Unreadable(INVALID, "The PDF has no text. Scanned pages are not recognized.")
    return "\n\n".join(pages)


def _read_docx(path: Path, max_text_bytes: int) -> str:
    import mammoth

    with path.open("rb") as file:
        if file.read(8) == _OLE_HEADER:
            raise Unreadable(INVALID, "The file is encrypted, or a .doc file. Save it as .docx without a password.")
        file.seek(0)
        try:
            with zipfile.ZipFile(file) as archive:
                _check_archive(archive, max_text_bytes)
            file.seek(0)
            result: str = mammoth.extract_raw_text(file).value
        except Unreadable:
            raise
        except MemoryError:
            raise
        except Exception:  # mammoth raises errors of all kinds for an invalid document
            raise Unreadable(INVALID, "The file is not a valid .docx document.") from None
    return result


def _check_archive(archive: zipfile.ZipFile, max_text_bytes: int) -> None:
    """Raise Unreadable if the archive is too large when unpacked. The reader stops at the sizes that it declares."""
    members = archive.infolist()
    if len(members) > _MAX_DOCX_FILES:
        raise Unreadable(INVALID, f"The document has more than {_MAX_DOCX_FILES} parts.")
    if any(member.flag_bits & 1 for member in members):
        raise Unreadable(INVALID, "The document is encrypted. Upload it without a password.")
    # Images are not unpacked.
    unpacked = sum(member.file_size for member in members if member.filename.endswith((".xml", ".rels")))
    if unpacked > 2 * max_text_bytes:
        raise Unreadable(INVALID, f"The document has {unpacked} bytes when unpacked, which is too much.")


def _too_long(limit: int) -> str:
    return f"The file has more than {limit} characters of text."
