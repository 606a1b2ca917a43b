"""A real browser without a window: what a page shows, asks for and complains about.

Speaks the DevTools protocol over two pipes (--remote-debugging-pipe): no port, no package.
"""

import base64
import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
  *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
  *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
  *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
TIMEOUT = 120  # seconds for any answer: the machine may be busy


def find() -> str:
  found = next(filter(None, map(shutil.which, NAMES)), None)
  assert found, "these tests need Chromium: apt-get install chromium (as .ci/run does)"
  return found


class Browser:
  """One tab, as a context; `problems` and `requests` fill up while a page loads."""

  def __init__(self, profile: pathlib.Path):
    self._profile = profile
    self.problems: list[str] = []
    self.requests: list[str] = []

  def __enter__(self):
    theirs_in, self._out = os.pipe()
    self._in, theirs_out = os.pipe()
    # The browser reads 3 and writes 4; far from them, so that no copy overwrites the other.
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (theirs_in, theirs_out)]
    redirect = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
    with open(self._profile.with_suffix(".log"), "wb") as log:
      self._process = subprocess.Popen(
        ["bash", "-c", redirect, "-", find(), *FLAGS, f"--user-data-dir={self._profile}"],
        pass_fds=theirs,
        stdout=log,
        stderr=log,
      )
    for fd in (theirs_in, theirs_out, *theirs):
      os.close(fd)
    self._answers, self._session, self._count, self._rest = {}, None, 0, b""
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.call(f"{domain}.enable")
    return self

  def __exit__(self, *_):
    self._process.kill()
    self._process.wait()
    os.close(self._in)
    os.close(self._out)

  def call(self, method: str, **params):
    self._count += 1
    message = {"id": self._count, "method": method, "params": params}
    if self._session:
      message["sessionId"] = self._session
    os.write(self._out, json.dumps(message).encode() + b"\0")
    self._read_until(lambda: self._count in self._answers, method)
    answer = self._answers.pop(self._count)
    assert "error" not in answer, (method, answer)
    return answer["result"]

  def _read_until(self, condition, what: str) -> None:
    os.set_blocking(self._in, False)
    deadline = time.monotonic() + TIMEOUT
    while not condition():
      log = self._profile.with_suffix(".log")
      assert time.monotonic() < deadline, f"no answer to {what}; see {log}"
      assert self._process.poll() is None, f"the browser has ended: {log.read_text()[-2000:]}"
      try:
        self._rest += os.read(self._in, 1 << 20)
      except BlockingIOError:
        time.sleep(0.01)
        continue
      *messages, self._rest = self._rest.split(b"\0")
      for message in messages:
        self._take(json.loads(message))

  def _take(self, message) -> None:
    if "id" in message:
      self._answers[message["id"]] = message
      return
    event, params = message["method"], message["params"]
    if event == "Network.requestWillBeSent":
      self.requests.append(params["request"]["url"])
    elif event == "Runtime.exceptionThrown":
      self.problems.append(str(params["exceptionDetails"]))
    elif event == "Runtime.consoleAPICalled":
      self.problems.append(str(params["args"]))
    elif event == "Log.entryAdded":
      self.problems.append(str(params["entry"]))
    elif event == "Page.loadEventFired":
      self._loaded = True

  def open(self, url: str, width: int, dark: bool = False) -> None:
    self.problems, self.requests, self._loaded = [], [], False
    phone = width < 600
    self.call(
      "Emulation.setDeviceMetricsOverride",
      width=width,
      height=844 if phone else 900,
      deviceScaleFactor=2 if phone else 1,
      mobile=phone,
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    self.call("Emulation.setEmulatedMedia", features=[scheme])
    self.call("Page.navigate", url=url)
    self._read_until(lambda: self._loaded, f"the load of {url}")

  def evaluate(self, expression: str):
    answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
    assert "exceptionDetails" not in answer, answer
    return answer["result"].get("value")

  def screenshot(self, path: pathlib.Path) -> None:
    """Of the whole page."""
    size = self.call("Page.getLayoutMetrics")["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
    shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
    path.write_bytes(base64.b64decode(shot["data"]))
