"""Text of files in all supported formats, and the errors of others."""

from pathlib import Path

import pytest

from antiphon.retrieval.extract import Unreadable, extract_text
from support.documents import make_docx, make_encrypted_pdf, make_pdf

pytest.importorskip("pypdfium2")

HTML = b"<html><head><title>Rivers</title><style>p {}</style></head><body><script>x()</script><h1>Danube</h1>\
<p>It flows  through\nVienna.</p></body></html>"


def extract(tmp_path: Path, name: str, content: bytes, *, limit: int = 1_000_000) -> str:
    path = tmp_path / "content"
    path.write_bytes(content)
    return extract_text(path, name, max_text_bytes=limit)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", b"Plain text.", "Plain text."),
        ("a.txt", "Grüße".encode(), "Grüße"),
        ("a.txt", "\ufeffGrüße".encode(), "Grüße"),
        ("a.txt", "Grüße".encode("utf-16"), "Grüße"),
        ("a.txt", "Plain text".encode("utf-16-le"), "Plain text"),
        ("a.txt", "Plain text".encode("utf-16-be"), "Plain text"),
        ("a.log", b"\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("a.md", b"# Title\n\nText", "# Title\n\nText"),
        ("a.py", b"def f():\n    return 1\n", "def f():\n    return 1\n"),
        ("a.json", b'{"a": [1, 2]}', '{"a": [1, 2]}'),
        ("notes", b"A name without a suffix.", "A name without a suffix."),
        ("a.csv", b"name,born\nAda,1815\nAlan,\n", "name: Ada; born: 1815\nname: Alan"),
        ("a.csv", b"name;born\nAda;1815\n", "name: Ada; born: 1815"),
        ("a.html", HTML, "Rivers\n\nDanube\nIt flows through\nVienna."),
        ("a.htm", '<meta charset="latin1"><p>Grüße'.encode("latin1"), "Grüße"),
        ("a.pdf", make_pdf("Hello PDF"), "Hello PDF"),
        ("wrong.txt", make_pdf("Hello PDF"), "Hello PDF"),
        ("a.docx", make_docx("First.", "Second."), "First.\n\nSecond.\n\n"),
    ],
)
def test_text_is_extracted(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    assert extract(tmp_path, name, content) == text


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("a.bin", bytes(range(256)), "unsupported_file", "not text"),
        ("a.png", b"\x89PNG", "unsupported_file", ".png"),
        ("a.pptx", b"PK", "unsupported_file", ".pptx"),
        ("a.txt", b"Gr\xfc\xdfe", "invalid_file", "utf-8"),
        ("a.txt", b" \n ", "invalid_file", "no text"),
        ("a.txt", b"", "invalid_file", "no text"),
        ("a.pdf", b"%PDF-1.4 broken", "invalid_file", "not a valid PDF"),
        ("a.pdf", b"no pdf at all", "invalid_file", "not a valid PDF"),
        ("a.pdf", make_encrypted_pdf(), "invalid_file", "encrypted"),
        ("a.pdf", make_pdf(""), "invalid_file", "no text"),
        ("a.docx", b"no archive", "invalid_file", "docx"),
        ("a.docx", bytes.fromhex("d0cf11e0a1b11ae1") + b"x" * 100, "invalid_file", "encrypted"),
        ("a.docx", make_docx("Text", padding=5_000_000), "invalid_file", "unpacked"),
        ("a.docx", make_docx("Text")[:-40], "invalid_file", "docx"),
        ("a.txt", b"a" * 1_000_001, "invalid_file", "1000000 characters"),
    ],
)
def test_unreadable_file_has_a_code_and_a_reason(
    tmp_path: Path, name: str, content: bytes, code: str, message: str
) -> None:
    with pytest.raises(Unreadable, match=message) as caught:
        extract(tmp_path, name, content)
    assert caught.value.code == code
