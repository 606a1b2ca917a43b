"""Writes a trained model in the form that Hugging Face's transformers load, without code of ours.

python -m nanosam.export --workdir=DIR --out=DIR [--step=...] [--weights=raw|average] [--format=hf]

AutoModelForCausalLM reads it as GPT-2, AutoTokenizer as a fast tokenizer with SentencePiece's ids.
Every text begins with bos, as each document does in training: tokenizer(text) is what the model
expects, and lm_eval needs no setting. add_special_tokens=False gives the text's ids alone; "<s>" in
a text stays text. --out must be new or empty: it is complete, or it is not there.
"""

from nanosam.run import hugging_face
from nanosam.run.restore import open_run
from nanosam.system import errors
from nanosam.system.command_line import RunParser


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  hugging_face.check_installed()
  out = hugging_face.target_folder(args.out)
  run = open_run(args.workdir, args.step, args.weights)
  with hugging_face.whole_folder(out) as folder:
    tokenizer = hugging_face.write_gpt2(run, folder)
  print(f"written: {out}, step {run.step}; {tokenizer}")


def parser() -> RunParser:
  p = RunParser("export", __doc__)
  p.add_argument("--out", required=True, help="folder to write, new or empty")
  p.add_argument("--format", choices=("hf",), default="hf", help="hf: Hugging Face (default)")
  return p


if __name__ == "__main__":
  errors.run(main)
