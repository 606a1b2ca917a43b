"""Creates a W&B dashboard of a project's runs: eval loss by method, rho, taus, guards, speed.

python scripts/wandb_dashboard.py [--entity=NAME] [--project=nanosam] [--dry_run]

Runs are grouped by method and rho, so a line is a mean over seeds and its band their range; every
method has the same colour as in our figures. --dry_run prints the specification as JSON and needs
neither network nor account.
"""

import json

from nanosam import config as config_lib
from nanosam.study.dashboard import workspace
from nanosam.system import errors
from nanosam.system.command_line import Parser
from nanosam.system.errors import UserError, first_line


def main(argv: list[str]) -> None:
  p = Parser("scripts/wandb_dashboard.py", __doc__)
  p.add_argument("--entity", default="", help="user or team (default: your own)")
  p.add_argument("--project", default=config_lib.default().wandb.project)
  p.add_argument("--dry_run", action="store_true", help="print the specification")
  args = p.parse_args(argv[1:])
  if args.dry_run:
    # What save() sends; the package has no public way to see it.
    return print(json.dumps(workspace(args.entity, args.project)._spec, indent=2))
  import wandb

  try:
    entity = args.entity or wandb.Api().default_entity or ""
    url = workspace(entity, args.project).save().url
  except (wandb.Error, ValueError, OSError) as e:
    raise UserError(f"W&B did not take the dashboard ({first_line(e)}); try `wandb login`") from e
  print(f"saved: {url}")


if __name__ == "__main__":
  errors.run(main)
