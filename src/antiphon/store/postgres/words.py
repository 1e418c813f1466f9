"""Text search in PostgreSQL with the same words and ranks as SQLite's FTS5.

A text is split into words here, because PostgreSQL's parser has other rules (`e-mail`, `a/b`). PostgreSQL reduces them
to stems. Ranks are BM25. PostgreSQL has no function for it, but the number of times that a word is in a chunk can be
computed from `ts_rank`: with equal weights, that is the sum of 1/n² over its n occurrences, divided by its limit.
"""

import re
import unicodedata

_WORD = re.compile(r"[^\W_]+")
# Longer lexemes are not stored, but each is reported in the log of the database.
_MAX_WORD = 500

# The parameters of BM25 in FTS5. A word in more than half of the chunks has a weight near 0 instead of a negative one.
_SATURATION, _LENGTH_SHARE, _MIN_WEIGHT = 1.2, 0.75, 1e-6

INSERT_WORDS = """
INSERT INTO chunk_words (chunk_id, entry, length, words)
VALUES (?, ?, ?, to_tsvector('antiphon_words', ?::text) || array_to_tsvector(ARRAY[?::text]))
"""

# The number of chunks of a scope that can be searched, and the average number of their words.
COUNT_WORDS = """
SELECT count(*), coalesce(avg(length), 1)::float8 FROM chunk_words
JOIN entries ON entries.position = chunk_words.entry AND entries.status = 'completed' WHERE words @@ $1::tsquery
"""

# Parameters: the words, each split like a text, the query for the scope, and the number at which counting stops.
COUNT_MATCHES = """
SELECT CASE WHEN term = '' THEN 0 ELSE (
    SELECT count(*) FROM (
        SELECT 1 FROM chunk_words WHERE words @@ ($2::text || ' & ( ' || term || ' )')::tsquery LIMIT $3
    ) AS found
) END
FROM unnest($1::text[]) WITH ORDINALITY AS given (word, position),
    LATERAL (SELECT plainto_tsquery('antiphon_words', word)::text AS term) AS terms
ORDER BY position
"""

# Parameters: the maximum number of matches, the words, the query for the scope, the entries or NULL, and the result of
# COUNT_WORDS.
MATCH_WORDS = f"""
WITH terms AS MATERIALIZED (
    SELECT DISTINCT plainto_tsquery('antiphon_words', word)::text AS term FROM unnest($2::text[]) AS word
), query AS MATERIALIZED (
    SELECT ($3 || ' & ( ' || string_agg(term, ' | ') || ' )')::tsquery AS query FROM terms WHERE term <> ''
), found AS MATERIALIZED (
    SELECT chunk_id, entry, length, term,
        round(1 / (1.6449340668482264 * (1 - ts_rank('{{1,1,1,1}}', words, term::tsquery)::float8)) - 0.5) AS count
    FROM chunk_words JOIN entries ON entries.position = chunk_words.entry AND entries.status = 'completed', terms
    WHERE words @@ (SELECT query FROM query) AND words @@ term::tsquery AND term <> ''
), weights AS MATERIALIZED (
    SELECT term, greatest({_MIN_WEIGHT}, ln(($5::float8 - count(*) + 0.5) / (count(*) + 0.5))) AS weight
    FROM found GROUP BY term
)
SELECT chunk_id, sum(weight * count * {_SATURATION + 1} / (
    count + {_SATURATION} * ({1 - _LENGTH_SHARE} + {_LENGTH_SHARE} * found.length / $6::float8)
)) AS rank
FROM found JOIN weights USING (term)
WHERE $4::bigint[] IS NULL OR entry = ANY($4)
GROUP BY chunk_id ORDER BY rank DESC, chunk_id LIMIT $1
"""


def split_text(text: str) -> list[str]:
    """Return the words of a text: in lower case, without diacritics."""
    decomposed = unicodedata.normalize("NFD", text.lower())
    plain = "".join(letter for letter in decomposed if not unicodedata.combining(letter))
    return [word[:_MAX_WORD] for word in _WORD.findall(unicodedata.normalize("NFC", plain))]


def make_scope_word(scope: str) -> str:
    """Return the lexeme that all chunks of a scope have. No word of a text begins with this character."""
    return f"#{scope}"
