"""A stand-in for Modal's service, on this machine: it takes what the real client sends, and serves a volume's files."""

import asyncio
import pickle
import threading
from collections.abc import Callable
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpclib
from grpclib.const import Handler, Status
from grpclib.server import Server
from modal_proto import api_grpc, api_pb2

SUCCESS = api_pb2.GenericResult(status=api_pb2.GenericResult.GENERIC_STATUS_SUCCESS)
IDS = {
    "app_id": "ap-1",
    "environment_id": "en-1",
    "function_call_id": "fc-1",
    "function_id": "fu-1",
    "image_id": "im-1",
    "mount_id": "mo-1",
    "secret_id": "st-1",
}


class _Quiet(SimpleHTTPRequestHandler):
    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Say nothing."""


class ModalService:
    """Takes every call; answers with identities alone, unless it knows better.

    Attributes:
        calls: the name and the request of each, in their order.
        volumes: a folder for each volume, by name.
        address: for MODAL_SERVER_URL.
        returned: what a function that is waited for returns.

    """

    def __init__(self) -> None:
        """Listen on this machine alone."""
        self.calls: list[tuple[str, Any]] = []
        self.volumes: dict[str, Path] = {}
        self.returned: object = 0
        self._loop, ready = asyncio.new_event_loop(), threading.Event()
        self._files = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory="/"))
        threading.Thread(target=self._files.serve_forever, daemon=True).start()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def requests(self, name: str) -> list[Any]:
        """Requests that one method received."""
        return [request for called, request in self.calls if called == name]

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen(ready))
        self._loop.close()

    async def _listen(self, ready: threading.Event) -> None:
        server = Server([self])
        await server.start("127.0.0.1", 0)
        bound: Any = server._server
        self.address = f"http://127.0.0.1:{bound.sockets[0].getsockname()[1]}"
        ready.set()
        self._stopped = asyncio.Event()
        await self._stopped.wait()
        server.close()
        await server.wait_closed()

    def close(self) -> None:
        """Listen no more."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()
        self._files.shutdown()
        self._files.server_close()

    def __mapping__(self) -> dict[str, Handler]:
        """Every method of Modal's API, as grpclib asks for them."""
        names = api_grpc.ModalClientBase.__abstractmethods__
        all_of_them = type("All", (api_grpc.ModalClientBase,), dict.fromkeys(names, lambda *_: None))()
        return {
            path: self._handler(path.rpartition("/")[2], method) for path, method in all_of_them.__mapping__().items()
        }

    def _handler(self, name: str, method: Handler) -> Handler:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            self.calls.append((name, request))
            answer: Callable[[Any], Any] = getattr(self, f"_{name}", lambda _: _identities(method.reply_type()))
            await stream.send_message(answer(request))

        return Handler(handle, method.cardinality, method.request_type, method.reply_type)

    def _EnvironmentGetOrCreate(self, _: Any) -> Any:  # noqa: N802, the API's names
        reply = _identities(api_pb2.EnvironmentGetOrCreateResponse())
        reply.metadata.settings.image_builder_version = "2025.06"
        return reply

    def _VolumeGetOrCreate(self, request: Any) -> Any:  # noqa: N802
        creates = request.object_creation_type == api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING
        if request.deployment_name not in self.volumes and not creates:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"Volume '{request.deployment_name}' not found")
        reply = api_pb2.VolumeGetOrCreateResponse(volume_id=f"vo-{request.deployment_name}")
        reply.metadata.version = reply.version = api_pb2.VOLUME_FS_VERSION_V2
        return reply

    def _ImageJoinStreaming(self, _: Any) -> Any:  # noqa: N802
        return api_pb2.ImageJoinStreamingResponse(result=SUCCESS)

    def _AppGetLogs(self, _: Any) -> Any:  # noqa: N802
        return api_pb2.TaskLogsBatch(app_done=True)

    def _MountPutFile(self, _: Any) -> Any:  # noqa: N802
        return api_pb2.MountPutFileResponse(exists=True)

    def _FunctionCreate(self, request: Any) -> Any:  # noqa: N802
        reply = _identities(api_pb2.FunctionCreateResponse())
        reply.handle_metadata.function_name = request.function.function_name
        reply.function_data.ranked_functions.add(function=request.function)
        return reply

    def _FunctionMap(self, _: Any) -> Any:  # noqa: N802
        taken = api_pb2.FunctionPutInputsResponseItem(input_id="in-1")
        return api_pb2.FunctionMapResponse(function_call_id="fc-1", pipelined_inputs=[taken])

    def _FunctionGetOutputs(self, _: Any) -> Any:  # noqa: N802
        result = api_pb2.GenericResult(status=SUCCESS.status, data=pickle.dumps(self.returned))
        item = api_pb2.FunctionGetOutputsItem(result=result, data_format=api_pb2.DATA_FORMAT_PICKLE, input_id="in-1")
        return api_pb2.FunctionGetOutputsResponse(outputs=[item])

    def _VolumeListFiles2(self, request: Any) -> Any:  # noqa: N802
        folder = self.volumes[request.volume_id.removeprefix("vo-")]
        start = folder / request.path.strip("/")
        if not start.exists():
            raise grpclib.GRPCError(Status.NOT_FOUND, "no such file or directory")
        reply = api_pb2.VolumeListFiles2Response()
        for path in sorted(start.rglob("*")):
            kind = api_pb2.FileEntry.FILE if path.is_file() else api_pb2.FileEntry.DIRECTORY
            state = path.stat()
            at = str(path.relative_to(folder))
            reply.entries.add(path=at, type=kind, mtime=int(state.st_mtime), size=state.st_size)
        return reply

    def _VolumeGetFile2(self, request: Any) -> Any:  # noqa: N802
        path = self.volumes[request.volume_id.removeprefix("vo-")] / request.path
        if not path.exists():
            raise grpclib.GRPCError(Status.NOT_FOUND, "no such file")
        size = path.stat().st_size
        urls = [f"http://127.0.0.1:{self._files.server_port}{path}"] if size else []
        return api_pb2.VolumeGetFile2Response(get_urls=urls, size=size, start=0, len=size)


def _identities(reply: Any) -> Any:
    for field in reply.DESCRIPTOR.fields:
        if field.name in IDS:
            setattr(reply, field.name, IDS[field.name])
    return reply
