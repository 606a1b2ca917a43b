"""inspect tells the truth about a source."""

import json

import pytest

from nanosam.data import inspect, prepare
from nanosam.data.store import StoreReader
from nanosam.data.tokenizer import train_tokenizer
from nanosam.system.errors import UsageError, UserError

TEXTS = [f"Document {i} says: {'word ' * (i % 23)}and café {i * i}.\n" for i in range(300)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  (folder / "a.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
  (folder / "t.model").write_bytes(train_tokenizer(TEXTS, 320).model_bytes)
  args = [f"--input={folder}/a.jsonl", "--validation_fraction=0.1", "--workers=1"]
  args += [f"--tokenizer={folder}/t.model", f"--output={folder}/out"]
  prepare.prepare(prepare.parse(args))
  return folder / "out"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
  monkeypatch.setattr(inspect, "_SECONDS", 0.05)


def facts(capsys, *args):
  capsys.readouterr()
  inspect.main(["inspect", *args, "--json"])
  return json.loads(capsys.readouterr().out)


SMALL = ("--length=32", "--batch_size=8")


def test_numbers_are_those_of_the_store(directory, capsys):
  found = facts(capsys, f"--source=tokens:{directory}", *SMALL)
  split = StoreReader(directory).split("train")
  assert found["documents"] == split.num_documents
  assert found["tokens"] == split.num_tokens
  assert found["bytes_per_token"] == pytest.approx(split.num_bytes / split.num_tokens)
  assert found["tokens_per_sec"] > 0
  assert len(found["rows"]) == 5
  assert all("word" in row or "Document" in row for row in found["rows"])
  assert not found["is_estimate"]
  estimate = facts(capsys, f"--source=tfds:{directory}", *SMALL)
  assert estimate["documents"] == split.num_documents
  assert estimate["tokens"] == pytest.approx(split.num_tokens, rel=0.1)
  assert estimate["is_estimate"]


def test_it_reads_well(directory, capsys):
  inspect.main(["inspect", f"--source=tokens:{directory}", *SMALL, "--rows=2", "--verify"])
  said = capsys.readouterr().out
  tokens = StoreReader(directory).split("train").num_tokens
  assert f"{tokens:,} of a vocabulary of 320" in said
  assert said.count('\n    "') == 2


def test_epochs_that_a_config_would_use(directory, capsys, tmp_path):
  (tmp_path / "c.py").write_text(
    "from nanosam import config\n"
    "def get_config(arg):\n"
    "  c = config.default(**config.arguments(arg, size='mini'))\n"
    "  c.batch_size = 4\n  c.model.L = 16\n  c.opt.num_train_steps = 1000\n"
    f"  c.data.source = 'tokens:{directory}'\n"
    "  return c\n"
  )
  found = facts(capsys, f"--config={tmp_path}/c.py")
  assert (found["length"], found["batch_size"]) == (16, 4)
  assert found["config_tokens"] == 64_000
  assert found["config_epochs"] == pytest.approx(64_000 / found["tokens"])


def replace(path, data):
  """Another file in its place: somebody may still read the old one through a memory map."""
  new = path.with_name("new")
  new.write_bytes(data)
  new.rename(path)


@pytest.mark.parametrize("name", ["train-00000.tokens", "text/1.0.0/text-train.array_record-0*"])
def test_verify_finds_a_flipped_bit(directory, capsys, name):
  (path,) = directory.glob(name)
  data = bytearray(path.read_bytes())
  data[len(data) // 3] ^= 1
  good = path.read_bytes()
  replace(path, data)
  try:
    with pytest.raises(UserError, match=rf"{path.name} does not match its checksum"):
      inspect.main(["inspect", f"--source=tokens:{directory}", *SMALL, "--verify"])
  finally:
    replace(path, good)


def test_bad_requests(directory):
  with pytest.raises(UsageError, match="nothing to inspect"):
    inspect.main(["inspect"])
  with pytest.raises(UsageError, match="unrecognized arguments: --sorce"):
    inspect.main(["inspect", "--sorce=x"])
  for flag in ("--length=0", "--batch_size=-4", "--workers=-1", "--rows=-1"):
    with pytest.raises(UsageError, match="must be at least"):
      inspect.main(["inspect", f"--source=tokens:{directory}", flag])
  with pytest.raises(UsageError, match="--verify is for token stores"):
    inspect.main(["inspect", f"--source=tfds:{directory}", "--verify"])
  with pytest.raises(UserError, match=r"no store\.json"):
    inspect.main(["inspect", f"--source=tokens:{directory}/text"])
