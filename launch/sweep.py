"""Runs a sweep: skips what is finished, resumes what is not, starts the rest.

python launch/sweep.py --sweep=FILE.py[:arg] --out=DIR [--backend=local] [--jobs=1] [--dry_run]

FILE.py is a Python file like launch/sweeps/example.py (see nanosam/study/sweeps.py). Each run has
the workdir OUT/ID, where ID is a readable name with a hash of all settings that matter: the same
run has the same place in every sweep. Its output goes to OUT/ID/train.log.

--backend=local  trains here. By default one run at a time uses all devices and cores; `--jobs=4`
                 trains four at a time, the longest first, and gives each its share of the cores and
                 of CUDA_VISIBLE_DEVICES. On CPUs, one core a run is fastest.
--backend=slurm  submits each run as a job of launch/slurm.sbatch, whose header sets its resources,
                 and exits; the same command later shows what became of them.
--backend=tpu    trains each run on a slice of its own with launch/tpu_pod.sh, `--jobs` at a time.
                 Workdirs are NANOSAM_REMOTE/ID (gs://...); records are copied to OUT/ID.

ctrl-C (or SIGTERM, or closing the terminal) is passed on: the runs save and stop, and the same
command resumes them. Under nohup, closing the terminal changes nothing. A run that saves and stops
without having been asked (exit 75) is started again.
Exit 0: all finished, or submitted. 75: interrupted. 1: some run failed or diverged; the others were
still trained.
"""

import pathlib
import shlex

from nanosam.study import sweeps
from nanosam.study.backends import add_backend_arguments, execute, state
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UsageError
from nanosam.system.files import disk_errors


def main(argv: list[str]) -> None:
  p = Parser("python launch/sweep.py", __doc__)
  p.add_argument("--sweep", required=True, help="FILE.py[:arg]")
  p.add_argument("--out", required=True, type=pathlib.Path, help="folder of the workdirs")
  add_backend_arguments(p)
  args = p.parse_args(argv[1:])
  if args.jobs < 1:
    raise UsageError(f"--jobs={args.jobs} must be at least 1")
  jobs = sweeps.make_jobs(sweeps.load(args.sweep), args.out)
  if not jobs:
    raise UsageError(f"{args.sweep} has no runs")
  if args.dry_run:
    for job in jobs:
      print(f"# {job.id}  {job.tokens:.3g} tokens  {state(job)}\n{shlex.join(job.command)}")
    return print(f"# {len(jobs)} runs, {sum(job.tokens for job in jobs):.3g} tokens")
  with disk_errors(args.out):
    args.out.mkdir(parents=True, exist_ok=True)
  execute(jobs, args.backend, args.jobs, argv)


if __name__ == "__main__":
  errors.run(main)
