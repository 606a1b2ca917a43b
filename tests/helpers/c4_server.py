"""A local server of a few shards of C4 that breaks off, serves rubbish, or cannot resume."""

import contextlib
import gzip
import http.server
import json
import random
import threading


def shard(seed):
  rng = random.Random(seed)
  texts = (" ".join(str(rng.random()) for _ in range(200)) for _ in range(50))
  return gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in texts).encode())


NAMES = ["c4-validation.00000-of-00008.json.gz"]
NAMES += [f"c4-train.{i:05d}-of-01024.json.gz" for i in range(3)]
FILES = {name: shard(i) for i, name in enumerate(NAMES)}


class Server(http.server.ThreadingHTTPServer):
  """Serves FILES; `misbehave` maps a name to what to do at the next requests for it."""

  def __init__(self):
    super().__init__(("127.0.0.1", 0), Handler)
    self.misbehave: dict[str, list[str]] = {}
    self.requests: list[tuple[str, str | None]] = []
    self.ranges = True

  @classmethod
  @contextlib.contextmanager
  def started(cls):
    server = cls()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
      yield server
    finally:
      server.shutdown()
      server.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
  server: Server

  def do_GET(self):
    name = self.path.rpartition("/")[2]
    self.server.requests.append((name, self.headers["Range"]))
    what = self.server.misbehave.get(name, [])
    action = what.pop(0) if what else "serve"
    if name not in FILES or action == "404":
      self.send_error(404)
      return
    data = FILES[name] if action != "rubbish" else b"<html>sorry</html>"
    start = 0
    if (wanted := self.headers["Range"]) and self.server.ranges:
      start = int(wanted.removeprefix("bytes=").rstrip("-"))
      if start >= len(data):
        self.send_error(416)
        return
      self.send_response(206)
      self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
    else:
      self.send_response(200)
    self.send_header("Content-Length", str(len(data) - start))
    self.end_headers()
    with contextlib.suppress(OSError):
      if action == "break":
        self.wfile.write(data[start : start + (len(data) - start) // 2])
        self.wfile.flush()
        self.connection.close()
      else:
        self.wfile.write(data[start:])

  def log_message(self, *args):
    pass
