"""Samples text from a trained model.

python -m nanosam.sample --workdir=DIR --prompt="..." [--temperature=0.8] [--top_k=40] [--num=3]
"""

from nanosam.run.restore import load_run
from nanosam.run.sampling import Sampler
from nanosam.system import errors
from nanosam.system.command_line import RunParser


def main(argv: list[str]) -> None:
  args = parser().parse_args(argv[1:])
  run = load_run(args.workdir, args.step, weights=args.weights)
  sampler = Sampler(run, temperature=args.temperature, top_k=args.top_k)
  tokenizer = sampler.tokenizer
  prompt = [tokenizer.bos_id, *tokenizer.encode(args.prompt)]
  texts = sampler(prompt, num=args.num, length=args.length, seed=args.seed)
  for number, ids in enumerate(texts, 1):
    if args.num > 1:
      print(f"--- {number} ---")
    print(tokenizer.decode(ids))


def parser() -> RunParser:
  add = (p := RunParser("sample", __doc__)).add_argument
  add("--prompt", default="", help="what the text begins with (default: nothing)")
  add("--temperature", type=float, default=0.8, help="0 = always the likeliest token (default 0.8)")
  add("--top_k", type=int, default=0, help="choose among the k likeliest tokens (default 0 = all)")
  add("--num", type=int, default=1, help="texts (default 1)")
  add("--length", type=int, default=128, help="tokens to add at most (default 128)")
  add("--seed", type=int, default=0, help="the same seed gives the same text (default 0)")
  return p


if __name__ == "__main__":
  errors.run(main)
