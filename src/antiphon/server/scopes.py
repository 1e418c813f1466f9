"""The scopes of API keys, and the scope that each route needs.

A scope includes the ones before it: `admin` allows everything that `inference` allows, and `inference` everything that
`read` allows.
"""

from collections.abc import Iterable, Mapping
from enum import IntEnum


class Scope(IntEnum):
    READ = 1
    INFERENCE = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """The name as users write it."""
        return self.name.lower()


READ, INFERENCE, ADMIN = Scope.READ, Scope.INFERENCE, Scope.ADMIN

ROUTE_SCOPES: Mapping[str, Scope] = {
    "POST /v1/responses": INFERENCE,
    "POST /v1/responses/input_tokens": INFERENCE,
    "POST /v1/responses/compact": INFERENCE,
    "GET /v1/responses/{response_id}": READ,
    "DELETE /v1/responses/{response_id}": INFERENCE,
    "POST /v1/responses/{response_id}/cancel": INFERENCE,
    "GET /v1/responses/{response_id}/input_items": READ,
    "GET /v1/responses": INFERENCE,
    "POST /v1/conversations": INFERENCE,
    "GET /v1/conversations/{conversation_id}": READ,
    "POST /v1/conversations/{conversation_id}": INFERENCE,
    "DELETE /v1/conversations/{conversation_id}": INFERENCE,
    "POST /v1/conversations/{conversation_id}/items": INFERENCE,
    "GET /v1/conversations/{conversation_id}/items": READ,
    "GET /v1/conversations/{conversation_id}/items/{item_id}": READ,
    "DELETE /v1/conversations/{conversation_id}/items/{item_id}": INFERENCE,
    "POST /v1/prompts": INFERENCE,
    "GET /v1/prompts": READ,
    "GET /v1/prompts/{prompt_id}": READ,
    "DELETE /v1/prompts/{prompt_id}": INFERENCE,
    "POST /v1/agent/execute": INFERENCE,
    "POST /v1/files": INFERENCE,
    "GET /v1/files": READ,
    "GET /v1/files/{file_id}": READ,
    "DELETE /v1/files/{file_id}": INFERENCE,
    "GET /v1/files/{file_id}/content": READ,
    "POST /v1/uploads": INFERENCE,
    "POST /v1/uploads/{upload_id}/parts": INFERENCE,
    "POST /v1/uploads/{upload_id}/complete": INFERENCE,
    "POST /v1/uploads/{upload_id}/cancel": INFERENCE,
    "POST /v1/vector_stores": INFERENCE,
    "GET /v1/vector_stores": READ,
    "GET /v1/vector_stores/{vector_store_id}": READ,
    "POST /v1/vector_stores/{vector_store_id}": INFERENCE,
    "DELETE /v1/vector_stores/{vector_store_id}": INFERENCE,
    "POST /v1/vector_stores/{vector_store_id}/search": INFERENCE,
    "POST /v1/vector_stores/{vector_store_id}/files": INFERENCE,
    "GET /v1/vector_stores/{vector_store_id}/files": READ,
    "GET /v1/vector_stores/{vector_store_id}/files/{file_id}": READ,
    "POST /v1/vector_stores/{vector_store_id}/files/{file_id}": INFERENCE,
    "DELETE /v1/vector_stores/{vector_store_id}/files/{file_id}": INFERENCE,
    "GET /v1/vector_stores/{vector_store_id}/files/{file_id}/content": READ,
    "POST /v1/vector_stores/{vector_store_id}/file_batches": INFERENCE,
    "GET /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}": READ,
    "POST /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}/cancel": INFERENCE,
    "GET /v1/vector_stores/{vector_store_id}/file_batches/{batch_id}/files": READ,
    "POST /v1/containers": INFERENCE,
    "GET /v1/containers": READ,
    "GET /v1/containers/{container_id}": READ,
    "DELETE /v1/containers/{container_id}": INFERENCE,
    "POST /v1/containers/{container_id}/files": INFERENCE,
    "GET /v1/containers/{container_id}/files": READ,
    "GET /v1/containers/{container_id}/files/{file_id}": READ,
    "GET /v1/containers/{container_id}/files/{file_id}/content": READ,
    "DELETE /v1/containers/{container_id}/files/{file_id}": INFERENCE,
    "GET /v1/organization/projects": ADMIN,
    "POST /v1/organization/projects": ADMIN,
    "GET /v1/organization/projects/{project_id}": ADMIN,
    "POST /v1/organization/projects/{project_id}": ADMIN,
    "POST /v1/organization/projects/{project_id}/archive": ADMIN,
    "GET /v1/organization/projects/{project_id}/api_keys": ADMIN,
    "POST /v1/organization/projects/{project_id}/api_keys": ADMIN,
    "GET /v1/organization/projects/{project_id}/api_keys/{api_key_id}": ADMIN,
    "DELETE /v1/organization/projects/{project_id}/api_keys/{api_key_id}": ADMIN,
    "GET /v1/organization/usage/completions": ADMIN,
    "GET /v1/organization/costs": ADMIN,
    "GET /metrics": ADMIN,
    "GET /v1/models": READ,
    "GET /v1/models/{model...}": READ,
}
"""The scope of each route that needs a key. A route that is missing here needs `admin`."""


LIMITED_ROUTES = frozenset(
    {
        "POST /v1/responses",
        "POST /v1/responses/input_tokens",
        "POST /v1/responses/compact",
        "POST /v1/agent/execute",
    }
)
"""The routes that count as requests for rate limits: those that use a model."""


def find_highest_scope(labels: Iterable[str]) -> Scope | None:
    """Return the scope that includes all others of a key, or None if the key has no known scope."""
    known = (Scope.__members__.get(label.upper()) for label in labels)
    return max((scope for scope in known if scope is not None), default=None)
