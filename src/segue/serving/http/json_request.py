"""A request as the route handlers read it: its body as a struct, the id in its path, and the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_from_bytes

import msgspec
from litestar import Request
from litestar.exceptions import ClientException

from segue.serving.http.guard import path_pieces

if TYPE_CHECKING:
    from segue.serving.service import Service

PATHS_WITH_ID = (b"users", b"items")  # the first piece of the paths whose second piece is an id
PLACEHOLDER = b"-"
PATH_ID = "segue_path_id"  # in the scope


class JsonRequest(Request[Any, Any, Any]):
    """A request whose JSON body is decoded straight into the handler's type.

    The framework would decode it untyped and then convert it leniently, with the text "10" as a number.
    """

    @property
    def service(self) -> Service:
        """The service, an attribute of the application: as a dependency it would cost more than routing."""
        service: Service = self.app.service  # type: ignore[attr-defined]  # of `app.Application`
        return service

    @property
    def path_params(self) -> dict[str, Any]:
        """The parameters of the path, with the id that `hide_id` took out of it."""
        scope: Any = self.scope
        if PATH_ID not in scope:
            return super().path_params
        try:
            return {"id": scope[PATH_ID].decode()}
        except UnicodeDecodeError:
            raise ClientException("The id in the path must be percent-encoded UTF-8, and it is not.") from None

    async def json(self) -> Any:
        field = self.route_handler.parsed_data_field
        return decode_body(await self.body(), Any if field is None else field.annotation)


def decode_body(body: bytes, type: Any) -> Any:
    """Decode a JSON body into a type; raise a ClientException that says what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise ClientException(f"The body cannot be used: {error}.") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClientException(f"The body cannot be read as JSON: {error}.") from None


def hide_id(scope: Any) -> None:
    """Move the id in the path to the scope and leave a placeholder.

    The framework caches the paths that it routes. This way it caches no user's id, and an encoded slash stays part of
    its id.
    """
    pieces = path_pieces(scope)
    if len(pieces) > 1 and pieces[0] in PATHS_WITH_ID:
        scope[PATH_ID], pieces[1] = pieces[1], PLACEHOLDER
    scope["path"] = encoded_path(pieces)


def encoded_path(pieces: Sequence[bytes]) -> str:
    """A path of these pieces, percent-encoded."""
    return "/" + "/".join(quote_from_bytes(piece, safe="") for piece in pieces)
