"""A question about some documents: the best passages go to the model, and the answer comes with its sources.

    antiphon serve                          # or any other server of the Responses API
    python examples/rag_question.py --model NAME --folder docs "How long are responses kept?"

The passages are found by the words they share with the question, which is enough to show how it works; anything that
finds better ones takes the place of `search`. The request is built, sent, and the answer mapped to an envelope, which
lists as `sources` what the model was given. The endpoint `/v1/agent/execute` does all of this on the server.
"""

import argparse
import os
import re
import urllib.request
from pathlib import Path

import msgspec

from antiphon.agent.builder import ResponsesRequestBuilder
from antiphon.agent.envelope import AgentExecuteRequest, AgentExecuteResponse, ConversationContext
from antiphon.agent.mapper import map_response
from antiphon.agent.rag import Chunk, build_context, count_candidates

MOST_CHUNKS = 4
SYSTEM = "Answer from the chunks in [CONTEXT] alone, and cite each that you use by its Id. Say so if they do not tell."


def split(path: Path, name: str) -> list[Chunk]:
    """The passages of a file: what stands between empty lines, with the numbers of its lines."""
    passages: list[Chunk] = []
    lines: list[str] = []
    for number, line in enumerate([*path.read_text("utf-8").splitlines(), ""], start=1):
        if line.strip():
            lines.append(line)
        elif lines:
            start = number - len(lines)
            passages.append(
                Chunk(
                    id=f"{name}:{start}",
                    path=name,
                    start_line=start,
                    end_line=number - 1,
                    text="\n".join(lines),
                    symbol=f"line {start}",  # of each symbol of a file, only the best chunk is taken
                )
            )
            lines = []
    return passages


def search(folder: Path, question: str) -> list[Chunk]:
    """The passages that share the most words with the question."""
    wanted = set(re.findall(r"\w{3,}", question.lower()))
    found: list[Chunk] = []
    for path in sorted(folder.rglob("*.md")):
        for passage in split(path, str(path.relative_to(folder))):
            shared = wanted & set(re.findall(r"\w{3,}", passage.text.lower()))
            if shared:
                found.append(msgspec.structs.replace(passage, score=len(shared)))
    return sorted(found, key=lambda chunk: -chunk.score)[: count_candidates(MOST_CHUNKS)]


def ask(question: str, hits: list[Chunk], *, url: str, model: str, key: str | None) -> AgentExecuteResponse:
    context = build_context(hits, top_k=MOST_CHUNKS)
    asked = AgentExecuteRequest(mode="ask", instruction=question)
    conversation = ConversationContext(model_name=model, temperature=0.0, system=SYSTEM)
    body = ResponsesRequestBuilder.build(conversation, asked, context.block)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/responses", msgspec.json.encode(body), headers)
    with urllib.request.urlopen(request) as answer:
        return map_response(answer.read(), asked, sources=context.sources)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--url", default="http://127.0.0.1:8484/v1")
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    envelope = ask(
        given.question,
        search(given.folder, given.question),
        url=given.url,
        model=given.model,
        key=os.environ.get("OPENAI_API_KEY"),
    )
    print(envelope.text)
    for source in envelope.sources:
        print(f"  {source.tag}: {source.path}, lines {source.start} to {source.end}")
