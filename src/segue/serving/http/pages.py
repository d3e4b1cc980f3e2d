"""The routes of the page: the files in `page/`, served from memory by name."""

from __future__ import annotations

from importlib.resources import files
from typing import Annotated, Any

from litestar import Request, Response, get
from litestar.exceptions import NotFoundException
from litestar.handlers import BaseRouteHandler
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.params import PathParameter

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

# Name → (content, media type) of every file, so that no request reads a path.
FILES = {
    file.name: (file.read_bytes(), MEDIA_TYPES[suffix])
    for file in files("segue.serving").joinpath("page").iterdir()
    if (suffix := "." + file.name.rpartition(".")[2]) in MEDIA_TYPES
}


def _file(name: str) -> Response[bytes]:
    if name not in FILES:
        raise NotFoundException
    content, media_type = FILES[name]
    return Response(content, media_type=media_type)


@get("/", include_in_schema=False)
async def index() -> Response[bytes]:
    return _file("index.html")


@get("/page/{name:str}", include_in_schema=False)
async def page_file(name: Annotated[str, PathParameter()]) -> Response[bytes]:
    return _file(name)


PAGE_ROUTES: list[BaseRouteHandler] = [index, page_file]


class SchemaPage(OpenAPIRenderPlugin):
    """The page on which the OpenAPI document can be read and tried."""

    def __init__(self) -> None:
        super().__init__(path="/", favicon="")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:  # noqa: ARG002
        """The page, which fetches the document itself."""
        return FILES["schema.html"][0]
