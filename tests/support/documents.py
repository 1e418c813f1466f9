"""Small PDF and docx files."""

import io
import zipfile

_DOCUMENT = (
    '<?xml version="1.0"?><w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
    "{}</w:body></w:document>"
)
_RELATIONS = (
    '<?xml version="1.0"?><Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">'
    '<Relationship Id="r1" Type="http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument" '
    'Target="word/document.xml"/></Relationships>'
)
_TYPES = (
    '<?xml version="1.0"?><Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
    '<Default Extension="xml" ContentType="application/xml"/></Types>'
)


def make_pdf(text: str, *, trailer: str = "") -> bytes:
    """Return a PDF with one line of text on its page."""
    content = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 /MediaBox [0 0 612 792] >>",
        b"<< /Type /Page /Parent 2 0 R /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%b\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    body = b"%PDF-1.4\n"
    offsets = []
    for number, each in enumerate(objects, 1):
        offsets.append(len(body))
        body += b"%d 0 obj\n%b\nendobj\n" % (number, each)
    start = len(body)
    body += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    return body + b"trailer << /Size 6 /Root 1 0 R %b >>\nstartxref\n%d\n%%%%EOF\n" % (trailer.encode(), start)


def make_encrypted_pdf() -> bytes:
    """Return a PDF whose text needs a password."""
    hidden = "<" + "00" * 32 + ">"
    encrypt = f"/Encrypt << /Filter /Standard /V 1 /R 2 /O {hidden} /U {hidden} /P -4 >> /ID [<00> <00>]"
    return make_pdf("secret", trailer=encrypt)


def make_docx(*paragraphs: str, padding: int = 0) -> bytes:
    """Return a docx document. With `padding`, it has another part of so many bytes, which is small when packed."""
    text = "".join(f"<w:p><w:r><w:t>{each}</w:t></w:r></w:p>" for each in paragraphs)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("[Content_Types].xml", _TYPES)
        archive.writestr("_rels/.rels", _RELATIONS)
        archive.writestr("word/document.xml", _DOCUMENT.format(text))
        if padding:
            archive.writestr("word/comments.xml", b" " * padding)
    return file.getvalue()
