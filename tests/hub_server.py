"""A hub for tests: the parts of the Hugging Face hub's HTTP API that huggingface_hub calls, on loopback."""

import asyncio
import base64
import contextlib
import hashlib
import json
import threading

from aiohttp import web

TOKEN = "hf_secretTokenOfTheTests"


class Repository:
    """A repository of the hub: files by commit, and commits by branch."""

    def __init__(self):
        self.commits = {}
        self.branches = {}
        self.is_gated = self.is_private = False

    def commit(self, files, branch="main"):
        """Move the branch to a new commit that has these files too, and return the commit."""
        files = self.files(branch) | {name: data if isinstance(data, bytes) else data.encode() for name, data in files}
        commit = hashlib.sha1(repr((sorted(files.items()), len(self.commits))).encode()).hexdigest()
        self.commits[commit], self.branches[branch] = files, commit
        return commit

    def files(self, revision):
        return self.commits.get(self.branches.get(revision, revision), {})


class HubServer:
    """A hub on a thread. ``requests`` has the method and path of each request, ``tokens`` the tokens that came."""

    def __init__(self):
        self.repositories, self.requests, self.tokens = {}, [], set()
        self.endpoint = ""
        self._loop = asyncio.new_event_loop()

    def put(self, kind, name, files, branch="main"):
        """Commit files to the repository ``name`` of kind "models" or "datasets", and return the commit."""
        repository = self.repositories.setdefault((kind, name), Repository())
        return repository.commit(files.items(), branch)

    def gate(self, kind, name):
        self.repositories[kind, name].is_gated = True

    def environment(self, cache, **more):
        """The variables with which a process uses this hub, and the folder ``cache`` as its cache."""
        found = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
        return found | {"HF_HUB_OFFLINE": "0", "HF_TOKEN": ""} | more

    @contextlib.contextmanager
    def running(self, address="127.0.0.1"):
        app = web.Application(middlewares=[self._note], client_max_size=1 << 30)
        app.add_routes(
            [
                web.post("/api/validate-yaml", self._take_card),
                web.post("/api/repos/create", self._create),
                web.get("/api/{kind}/{org}/{repo}/revision/{revision}", self._info),
                web.get("/api/{kind}/{org}/{repo}", self._info),
                web.get("/api/{kind}/{org}/{repo}/tree/{revision}", self._tree),
                web.post("/api/{kind}/{org}/{repo}/preupload/{revision}", self._preupload),
                web.post("/api/{kind}/{org}/{repo}/commit/{revision}", self._commit),
                web.get("/datasets/{org}/{repo}/resolve/{revision}/{file:.+}", self._file),
                web.get("/{org}/{repo}/resolve/{revision}/{file:.+}", self._file),
            ]
        )
        ready = threading.Event()

        async def serve():
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, address, 0)
            await site.start()
            self.endpoint = f"http://{address}:{site._server.sockets[0].getsockname()[1]}"
            self._stop = asyncio.Event()
            ready.set()
            await self._stop.wait()
            await runner.cleanup()

        thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),))
        thread.start()
        assert ready.wait(10.0)
        try:
            yield self
        finally:
            self._loop.call_soon_threadsafe(self._stop.set)
            thread.join()
            self._loop.close()

    # --- answers ---

    @web.middleware
    async def _note(self, request, handler):
        self.requests.append(f"{request.method} {request.path}")
        self.tokens.add(request.headers.get("Authorization", "").removeprefix("Bearer "))
        return await handler(request)

    def _find(self, request, *, content=False):
        """The repository and the commit of a request, or an answer that says what is wrong."""
        kind = request.match_info.get("kind") or ("datasets" if request.path.startswith("/datasets/") else "models")
        found = self.repositories.get((kind, f"{request.match_info['org']}/{request.match_info['repo']}"))
        may_read = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        if found is None or (found.is_private and not may_read):
            return None, _refused(401, "RepoNotFound", "Repository not found")
        if content and found.is_gated and not may_read:
            return None, _refused(401, "GatedRepo", "Access to this repository is restricted")
        revision = request.match_info.get("revision", "main")
        commit = found.branches.get(revision, revision)
        if commit not in found.commits and found.commits:
            return None, _refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found, commit

    async def _info(self, request):
        found, commit = self._find(request)
        if found is None:
            return commit
        files = [{"rfilename": name, "size": len(data)} for name, data in found.files(commit).items()]
        name = f"{request.match_info['org']}/{request.match_info['repo']}"
        return web.json_response(
            {
                "_id": "1",
                "id": name,
                "modelId": name,
                "sha": commit,
                "siblings": files,
                "private": found.is_private,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }
        )

    async def _tree(self, request):
        found, commit = self._find(request)
        if found is None:
            return commit
        return web.json_response(
            [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in found.files(commit).items()
            ]
        )

    async def _file(self, request):
        found, commit = self._find(request, content=True)
        if found is None:
            return commit
        data = found.files(commit).get(request.match_info["file"])
        if data is None:
            return _refused(404, "EntryNotFound", "Entry not found")
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
        return web.Response(body=data, headers=headers)

    async def _take_card(self, request):
        return web.json_response({"errors": [], "warnings": []})

    async def _create(self, request):
        body = await request.json()
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _refused(401, "", "Invalid username or password.")
        name = f"{body['organization']}/{body['name']}"
        if ("models", name) in self.repositories:
            return web.json_response({"error": "exists", "url": f"{self.endpoint}/{name}"}, status=409)
        made = self.repositories["models", name] = Repository()
        made.is_private = body.get("private", False) or body.get("visibility") == "private"
        made.commit([(".gitattributes", "")])
        return web.json_response({"url": f"{self.endpoint}/{name}", "name": name, "id": "1"})

    async def _preupload(self, request):
        body = await request.json()
        files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in body["files"]]
        return web.json_response({"files": files})

    async def _commit(self, request):
        found, answer = self._find(request)
        if found is None:
            return answer
        lines = [json.loads(line) for line in (await request.text()).splitlines()]
        files = [
            (line["value"]["path"], base64.b64decode(line["value"]["content"]))
            for line in lines
            if line["key"] == "file"
        ]
        commit = found.commit(files)
        url = f"{self.endpoint}/{request.match_info['org']}/{request.match_info['repo']}/commit/{commit}"
        return web.json_response({"success": True, "commitOid": commit, "commitUrl": url})


def _refused(status, code, text):
    return web.json_response({"error": text}, status=status, headers={"X-Error-Code": code, "X-Error-Message": text})
