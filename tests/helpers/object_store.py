"""A stand-in for Google's object store: enough of its JSON API for gcsfs, tensorstore and Google's
own client, served from memory over HTTP."""

import base64
import dataclasses
import datetime
import email
import hashlib
import http.server
import itertools
import json
import pathlib
import re
import threading
import urllib.parse

import google_crc32c

BUCKET = "bucket"


@dataclasses.dataclass
class Object:
  content: bytes
  generation: int
  content_type: str = "application/octet-stream"
  updated: str = dataclasses.field(
    default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
  )


class Refused(Exception):
  def __init__(self, status: int, message: str):
    super().__init__(message)
    self.status, self.message = status, message


class ObjectStore:
  """One bucket. `trouble(method, object)` is called before each request: it may wait, or refuse."""

  def __init__(self):
    self.objects: dict[str, Object] = {}
    self.uploads: dict[str, str] = {}  # resumable ones: id -> name
    self.trouble = lambda method, name: None
    self.lock = threading.Lock()
    self.generations = itertools.count(1000)
    self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    self._server.handle_error = lambda *_: None  # a client that was killed
    self._server.daemon_threads = True
    self._server.store = self  # type: ignore[attr-defined]
    self.url = f"http://127.0.0.1:{self._server.server_port}"
    threading.Thread(target=self._server.serve_forever, daemon=True).start()

  def close(self) -> None:
    self._server.shutdown()
    self._server.server_close()

  def environment(self) -> dict[str, str]:
    """For processes that shall use it."""
    return {
      "STORAGE_EMULATOR_HOST": self.url,
      "TENSORSTORE_GCS_HTTP_URL": self.url,
      "GOOGLE_AUTH_TOKEN_FOR_TESTING": "abc",  # tensorstore looks no further for credentials
      "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # gcsfs would ask Google what kind of bucket
    }

  def download(self, prefix: str, folder: pathlib.Path) -> pathlib.Path:
    """The objects below a prefix as files."""
    with self.lock:
      found = {n: o.content for n, o in self.objects.items() if n.startswith(f"{prefix}/")}
    for name, content in found.items():
      if not name.endswith("/"):
        path = folder / name.removeprefix(f"{prefix}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder

  def put(self, name: str, content: bytes, query: dict[str, str], content_type: str) -> Object:
    with self.lock:
      self._check(name, query)
      self.objects[name] = Object(content, next(self.generations), content_type)
      return self.objects[name]

  def get(self, name: str, query: dict[str, str]) -> Object:
    with self.lock:
      if name not in self.objects:
        raise Refused(404, f"No such object: {BUCKET}/{name}")
      self._check(name, query)
      return self.objects[name]

  def delete(self, name: str, query: dict[str, str]) -> None:
    self.get(name, query)
    with self.lock:
      self.objects.pop(name, None)

  def _check(self, name: str, query: dict[str, str]) -> None:
    now = self.objects[name].generation if name in self.objects else 0
    if "ifGenerationMatch" in query and int(query["ifGenerationMatch"]) != now:
      raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
    if "ifGenerationNotMatch" in query and int(query["ifGenerationNotMatch"]) == now:
      raise Refused(304, "")

  def list(self, query: dict[str, str]) -> dict:
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    items, prefixes = [], set()
    with self.lock:
      for name in sorted(self.objects):
        if not name.startswith(prefix):
          continue
        if not query.get("startOffset", "") <= name < query.get("endOffset", "\U0010ffff"):
          continue
        head, found, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
        if found:
          prefixes.add(prefix + head + delimiter)
        else:
          items.append(resource(name, self.objects[name]))
    return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


def resource(name: str, o: Object) -> dict:
  return {
    "kind": "storage#object",
    "id": f"{BUCKET}/{name}/{o.generation}",
    "name": name,
    "bucket": BUCKET,
    "generation": str(o.generation),
    "metageneration": "1",
    "contentType": o.content_type,
    "storageClass": "STANDARD",
    "size": str(len(o.content)),
    "md5Hash": base64.b64encode(hashlib.md5(o.content).digest()).decode(),
    "crc32c": base64.b64encode(google_crc32c.value(o.content).to_bytes(4, "big")).decode(),
    "etag": str(o.generation),
    "timeCreated": o.updated,
    "updated": o.updated,
  }


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"

  def log_message(self, *_):
    pass

  def _serve(self):
    store: ObjectStore = self.server.store  # type: ignore[attr-defined]
    url = urllib.parse.urlsplit(self.path)
    query = dict(urllib.parse.parse_qsl(url.query))
    body = self._body()
    try:
      self._answer(*self._route(store, url.path, query, body))
    except Refused as e:
      error = {"error": {"code": e.status, "message": e.message, "errors": []}}
      self._answer(e.status, b"" if e.status == 304 else json.dumps(error).encode(), {})

  do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _serve

  def _body(self) -> bytes:
    if self.headers.get("Transfer-Encoding") == "chunked":
      parts = []
      while size := int(self.rfile.readline().split(b";")[0], 16):
        parts.append(self.rfile.read(size))
        self.rfile.readline()
      self.rfile.readline()
      return b"".join(parts)
    return self.rfile.read(int(self.headers.get("Content-Length") or 0))

  def _answer(self, status: int, content: bytes, headers: dict[str, str]):
    self.send_response(status)
    for key, value in {"Content-Type": "application/json", **headers}.items():
      self.send_header(key, value)
    self.send_header("Content-Length", str(len(content)))
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(content)

  def _route(self, store, path, query, body):
    if path.startswith("/batch/"):
      return self._batch(store, body)
    match = re.fullmatch(r"(/upload|/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", path)
    if match is None:
      raise Refused(404, f"Not Found: {path}")
    kind, bucket, name = match[1], match[2], urllib.parse.unquote(match[3] or "")
    if bucket != BUCKET:
      raise Refused(404, "The specified bucket does not exist.")
    if kind == "/upload":
      return self._upload(store, query, body)
    store.trouble(self.command, name)
    if copy := re.fullmatch(r"(.*)/(rewriteTo/b/[^/]+|moveTo)/o/(.*)", match[3] or ""):
      return self._copy(store, *map(urllib.parse.unquote, copy.groups()), query)
    if not path.endswith("/o") and not name:
      return 200, json.dumps({"kind": "storage#bucket", "name": bucket, "id": bucket}).encode(), {}
    if not name:
      return 200, json.dumps(store.list(query)).encode(), {}
    if self.command == "DELETE":
      store.delete(name, query)
      return 204, b"", {}
    o = store.get(name, query)
    if query.get("alt") != "media":
      return 200, json.dumps(resource(name, o)).encode(), {}
    return self._media(o)

  def _media(self, o: Object):
    headers = {"Content-Type": o.content_type, "X-Goog-Generation": str(o.generation)}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
    if match is None or not o.content:
      return 200, o.content, headers
    size = len(o.content)
    if match[1]:
      start, stop = int(match[1]), min(int(match[2] or size - 1) + 1, size)
    else:
      start, stop = max(size - int(match[2]), 0), size
    if start >= size:
      raise Refused(416, "The requested range cannot be satisfied.")
    return (
      206,
      o.content[start:stop],
      {
        **headers,
        "Content-Range": f"bytes {start}-{stop - 1}/{size}",
      },
    )

  def _upload(self, store: ObjectStore, query, body):
    kind = query["uploadType"]
    content_type = self.headers.get("Content-Type", "application/octet-stream")
    if kind == "resumable" and "upload_id" not in query:
      upload = f"upload{next(store.generations)}"
      store.uploads[upload] = query.get("name") or json.loads(body)["name"]
      place = f"{store.url}{self.path}&upload_id={upload}"
      return 200, b"", {"Location": place}
    if kind == "resumable":
      name = store.uploads[query["upload_id"]]
    elif kind == "multipart":
      head = f"Content-Type: {content_type}\r\n\r\n".encode()
      meta, media = email.message_from_bytes(head + body).get_payload()
      name = json.loads(meta.get_payload())["name"]
      # The parser would change line ends: the bytes are cut out of the body itself.
      boundary = re.search(r"boundary=\"?'?([^\"';]+)", content_type)[1].encode()
      part = body.split(b"--" + boundary)[2]
      content_type = media.get_content_type()
      body = re.split(rb"\r?\n\r?\n", part, maxsplit=1)[1]
      body = body.removesuffix(b"\n").removesuffix(b"\r")
    else:
      name = query["name"]
    store.trouble(self.command, name)
    o = store.put(name, body, query, content_type)
    return 200, json.dumps(resource(name, o)).encode(), {}

  def _copy(self, store: ObjectStore, source: str, how: str, target: str, query):
    o = store.get(source, {})
    answer = resource(target, store.put(target, o.content, query, o.content_type))
    if how == "moveTo":
      store.delete(source, {})
    else:
      answer = {"kind": "storage#rewriteResponse", "done": True, "resource": answer}
    return 200, json.dumps(answer).encode(), {}

  def _batch(self, store: ObjectStore, body: bytes):
    head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
    parts = []
    for part in email.message_from_bytes(head + body).get_payload():
      request = part.get_payload()
      match = re.match(r"DELETE (\S+)", request if isinstance(request, str) else str(part))
      url = urllib.parse.urlsplit(match[1])
      name = urllib.parse.unquote(url.path.partition("/o/")[2])
      try:
        store.delete(name, {})
        status = "204 No Content"
      except Refused:
        status = "404 Not Found"
      parts.append(
        "--batch\r\nContent-Type: application/http\r\nContent-ID: <response-"
        f"{(part['Content-ID'] or '').strip('<>')}>\r\n\r\nHTTP/1.1 {status}\r\n\r\n\r\n"
      )
    content = ("".join(parts) + "--batch--\r\n").encode()
    return 200, content, {"Content-Type": "multipart/mixed; boundary=batch"}
