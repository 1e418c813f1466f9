"""Answer a question from a folder of documents, and print the answer with its sources.

    antiphon serve                          # or any other Responses API server
    python examples/rag_question.py --model NAME --folder docs "How long are responses stored?"

`search` ranks passages by the number of words they share with the question. Replace it with a better search for real
use. The example builds the request, sends it, and maps the answer to an envelope, whose `sources` list the passages
that the model received. The endpoint `/v1/agent/execute` does the same on the server.

For real use it needs a model that follows instructions and reads some thousand tokens, such as gpt-5-mini, Claude Haiku
4.5 or Qwen3-8B. It calls no tools. The embedded model gets facts wrong.
"""

import argparse
import os
import re
import urllib.request
from pathlib import Path

import msgspec

from antiphon.agent.execute.builder import ResponsesRequestBuilder
from antiphon.agent.execute.envelope import AgentExecuteRequest, AgentExecuteResponse, ConversationContext
from antiphon.agent.execute.mapper import map_response
from antiphon.agent.execute.rag import Chunk, build_context, count_candidates

MAX_CHUNKS = 4
SYSTEM = "Answer only from the chunks in [CONTEXT], and cite each chunk by its Id. Say so if they have no answer."


def split(path: Path, name: str) -> list[Chunk]:
    """Return the passages of a file, separated by empty lines, with their line numbers."""
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
                    symbol=f"line {start}",  # only the best chunk of each symbol is used
                )
            )
            lines = []
    return passages


def search(folder: Path, question: str) -> list[Chunk]:
    """Return the passages that share the most words with the question."""
    wanted = set(re.findall(r"\w{3,}", question.lower()))
    found: list[Chunk] = []
    for path in sorted(folder.rglob("*.md")):
        for passage in split(path, str(path.relative_to(folder))):
            shared = wanted & set(re.findall(r"\w{3,}", passage.text.lower()))
            if shared:
                found.append(msgspec.structs.replace(passage, score=len(shared)))
    return sorted(found, key=lambda chunk: -chunk.score)[: count_candidates(MAX_CHUNKS)]


def ask(question: str, hits: list[Chunk], *, url: str, model: str, key: str | None) -> AgentExecuteResponse:
    context = build_context(hits, top_k=MAX_CHUNKS)
    execute_request = AgentExecuteRequest(mode="ask", instruction=question)
    conversation = ConversationContext(model_name=model, temperature=0.0, system=SYSTEM)
    body = ResponsesRequestBuilder.build(conversation, execute_request, context.block)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(f"{url}/responses", msgspec.json.encode(body), headers)
    with urllib.request.urlopen(request) as answer:
        return map_response(answer.read(), execute_request, sources=context.sources)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("question")
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--url", default="http://127.0.0.1:8484/v1")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    envelope = ask(
        arguments.question,
        search(arguments.folder, arguments.question),
        url=arguments.url,
        model=arguments.model,
        key=os.environ.get("OPENAI_API_KEY"),
    )
    print(envelope.text)
    for source in envelope.sources:
        print(f"  {source.tag}: {source.path}, lines {source.start} to {source.end}")
