"""W&B in a process of its own, fed through a pipe.

Inside the training process wandb would replace sys.exit, delay the exit with its own hooks while it
uploads, and take the interpreter lock when imported. A child has none of these effects, outlives a
killed parent long enough to save what it was given, and can be killed when it hangs.

This file is also the child's program, so it imports neither JAX nor wandb at the top.
"""

import functools
import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from nanosam.system.errors import first_line
from nanosam.system.files import write_atomically
from nanosam.system.processes import exit_with_parent

RUN_ID_FILE = "wandb_run_id"
X_AXES = ("step", "tokens", "compute", "time")


class WandbProcess:
  """The training process's end of the pipe. Its calls may block: wrap it in Background."""

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    mode: str,
    config: dict[str, Any],
    run: Mapping[str, Any],
    say: Callable[[str], None],
    close_timeout: float,
  ):
    workdir = pathlib.Path(workdir).resolve()
    (workdir / "wandb").mkdir(parents=True, exist_ok=True)
    self._error = ""
    # -P: the modules beside this file must not hide others of the same name. Without their folder
    # the child may need to be told where nanosam is.
    package = pathlib.Path(__file__).parents[2]
    path = filter(None, (str(package), os.environ.get("PYTHONPATH")))
    with open(workdir / "wandb" / "nanosam.log", "ab") as log:
      self._process = subprocess.Popen(
        [sys.executable, "-P", __file__],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        bufsize=0,  # a buffer's lock, held by a daemon thread, can crash the interpreter's exit
        start_new_session=True,  # ctrl-C is not for the child
      )
    self._relay = threading.Thread(target=self._relay_messages, args=(say,), daemon=True)
    self._relay.start()
    self._send(
      workdir=str(workdir),
      mode=mode,
      config=config,
      run=dict(run),
      argv=sys.argv,
      run_id=_run_id(workdir),
      parent=os.getpid(),
      grace=close_timeout,
    )

  def _relay_messages(self, say: Callable[[str], None]) -> None:
    assert self._process.stdout
    for line in self._process.stdout:
      message = json.loads(line)
      self._error = message.get("error", self._error)
      if "say" in message:
        say(message["say"])

  def _send(self, **message: Any) -> None:
    data = memoryview(json.dumps(message, default=str).encode() + b"\n")
    assert self._process.stdin
    try:
      while data:
        data = data[self._process.stdin.write(data) :]
    except BrokenPipeError:
      self._relay.join(1.0)
      raise RuntimeError(self._error or "its process ended") from None

  def write(self, step: int, values: Mapping[str, float | int | str]) -> None:
    self._send(write={**values, "step": step})

  def close(self, exit_code: int = 0, summary: Mapping[str, float] | None = None) -> None:
    self._send(close=exit_code, summary=dict(summary or {}))
    assert self._process.stdin
    self._process.stdin.close()
    if self._process.wait() != 0:
      self._relay.join(1.0)
      raise RuntimeError(self._error or "its process ended early")

  def kill(self) -> None:
    """Ends a child that hangs; what it wrote to disk stays, for `wandb sync`."""
    self._process.kill()


def _run_id(workdir: pathlib.Path) -> str:
  """The same id at every start in this workdir, so that a restart continues the same curves."""
  path = workdir / RUN_ID_FILE
  if path.exists() and (run_id := path.read_text().strip()):
    return run_id
  run_id = secrets.token_hex(4)
  write_atomically(path, f"{run_id}\n".encode())
  return run_id


# --- from here on: the child ---


def _choose_mode(wandb: Any, mode: str) -> str:
  """auto: WANDB_MODE if set, else online if W&B finds credentials, without prompt or network."""
  if mode != "auto":
    return mode
  if chosen := os.environ.get("WANDB_MODE"):
    return chosen
  from wandb.sdk.lib import wbauth  # W&B's own order: environment, netrc, settings

  host = wandb.setup().settings.base_url
  auth = wbauth.authenticate_session(
    host=host, source="nanosam", prompt=False, update_session=False
  )
  return "online" if auth else "offline"


def _start_run(wandb: Any, spec: dict[str, Any], say: Callable[[str], None]) -> Any:
  settings = wandb.Settings(
    console="off",
    use_dot_wandb=False,
    x_stats_pid=spec["parent"],
    init_timeout=spec["grace"] / 2,  # a run that ends at once still has time to go offline
    stop_fn=lambda: say("W&B asks to stop this run; ignored: stop it with ctrl-C"),
  )
  keys = ("name", "group", "tags", "project", "entity")
  options = {key: spec["run"].get(key) or None for key in keys}
  options |= {"dir": spec["workdir"], "id": spec["run_id"], "config": spec["config"]}
  init = functools.partial(wandb.init, resume="allow", settings=settings, **options)
  try:
    mode = _choose_mode(wandb, spec["mode"])
    run = init(mode=mode)
  except Exception as e:
    traceback.print_exc()
    say(f"W&B cannot be reached ({first_line(e)}); recording offline")
    wandb.teardown()  # the service still holds the run id
    mode = "offline"
    run = init(mode=mode)
  say(
    f"W&B: {run.url}"
    if mode == "online"
    else f"W&B: offline; upload with `wandb sync {spec['workdir']}/wandb/*run-*`"
  )
  return run


def _serve(messages: Any, say: Callable[[str], None]) -> None:
  spec = json.loads(next(messages))
  sys.argv = spec["argv"]  # what W&B shows as the command is the training command
  # A parent that was killed can no longer kill a child that hangs.
  exit_with_parent(spec["parent"], grace=spec["grace"])
  import wandb

  run = _start_run(wandb, spec, say)
  for axis in X_AXES:
    run.define_metric(axis)
  run.define_metric("*", step_metric="step")
  run.define_metric("eval/loss", step_metric="step", summary="min,last")
  # W&B drops rows whose own step does not grow, so it cannot be the training step, which goes back
  # when a run resumes from a checkpoint. And it must keep growing across restarts: offline, each
  # start leaves a folder, and all of them are uploaded into one run later. So it is on disk.
  counter = os.open(f"{spec['workdir']}/wandb/next_row", os.O_RDWR | os.O_CREAT, 0o644)
  stored = os.pread(counter, 32, 0).strip()
  row = max(int(stored) if stored.isdigit() else 0, run.step)
  exit_code = 1  # unless the parent says close, it died
  for line in messages:
    if not line.endswith(b"\n"):
      break  # the parent died in the middle of it
    message = json.loads(line)
    if "write" in message:
      run.log(message["write"], step=row, commit=True)
      row += 1
      os.pwrite(counter, b"%020d\n" % row, 0)
    else:
      run.summary.update(message["summary"])
      exit_code = message["close"]
  run.finish(exit_code=exit_code)


def _main() -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the parent decides when to end
  status = os.dup(1)
  os.dup2(2, 1)  # anything printed goes to the log; `status` carries messages only

  def tell(**message: str) -> None:
    try:
      os.write(status, json.dumps(message).encode() + b"\n")
    except OSError:  # the parent is gone
      pass

  try:
    _serve(iter(sys.stdin.buffer.readline, b""), lambda text: tell(say=text))
  except BaseException as e:
    traceback.print_exc()
    tell(error=first_line(e))
    sys.exit(1)


if __name__ == "__main__":
  _main()
