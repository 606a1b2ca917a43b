"""The plan against what is known: closed counts, a real compiler, the paper's sizes on TPUs."""

import json
import os
import subprocess
import sys

import jax
import pytest
from helpers.training import CONFIG, ROOT

from nanosam import config as config_lib
from nanosam import plan
from nanosam.model import sharding
from nanosam.run import flops, footprint, gpus, hlo
from nanosam.run.step import TrainStep
from nanosam.system.errors import UsageError

GIB = 2**30
PAPER = "--config=configs/fixed_length.py"

PROGRAM = """HloModule jit_update, is_scheduled=true

%cond.1 (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %limit = s32[]{:T(128)} constant(5)
  ROOT %lt = pred[] compare(%i, %limit), direction=LT
}

%all-reduce-scatter.2 (x: bf16[16,4]) -> bf16[2,4] {
  %x = bf16[16,4]{1,0} parameter(0)
  %all-reduce.1 = bf16[16,4]{1,0:T(8,128)(2,1)} all-reduce(%x), channel_id=2, to_apply=%add
  ROOT %s = bf16[2,4]{1,0} dynamic-slice(%all-reduce.1), dynamic_slice_sizes={2,4}
}

%body.1 (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %g = (bf16[4]{0}, bf16[32]{0:T(256)}) all-gather-start(%y), channel_id=1, dimensions={0}
  %f = bf16[2,4]{1,0} fusion(%g), kind=kCustom, calls=%all-reduce-scatter.2
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %z)
}

%small (p: f32[2]) -> f32[2] {
  ROOT %r = f32[2]{0} all-reduce(%p), channel_id=3, to_apply=%add
}

%large (p: f32[2]) -> f32[2] {
  ROOT %s.1 = f32[2]{0} reduce-scatter(%p), channel_id=4, replica_groups=[1,8]<=[8], to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %w = (s32[], f32[8]{0}) while(%t.0), condition=%cond.1, body=%body.1
  %c = f32[2]{0} conditional(%b, %x, %x), branch_computations={%small, %large}
  %start = (bf16[4]{0}, bf16[32]{0}) fusion(%x.2), kind=kCustom, calls=%fused_computation.5
  %done = bf16[32]{0} fusion(%start), kind=kCustom, calls=%fused_computation.5
  %d = f32[8]{0} collective-permute(%q), channel_id=6, source_target_pairs={{0,1}}
  ROOT %e = f32[8]{0} collective-permute(%d), channel_id=6, source_target_pairs={{0,1}}
}

%fused_computation.5 (x: bf16[4]) -> bf16[32] {
  ROOT %ag = bf16[32]{0} all-gather(%x), channel_id=5, dimensions={0}
}
"""


def test_collectives_count_as_often_as_their_loops_run():
  assert hlo.collective_bytes(PROGRAM) == {
    "all-gather": 5 * 32 * 2 + 32 * 2,  # in the loop, and one in two parts
    "reduce-scatter": 5 * 16 * 4 * 2 + 8 * 2 * 4,  # and the larger branch, whole
    "collective-permute": 2 * 8 * 4,  # two of them, though they share a channel
  }
  with pytest.raises(ValueError, match="how often"):
    hlo.collective_bytes(PROGRAM.replace("constant(5)", "parameter(1)"))


def test_scanned_layers_gather_their_parameters_each_time(tiny_config):
  def gathered(layers):
    tiny_config.model.update(N=layers, scan_layers=True)
    compiled = TrainStep(tiny_config, 96, sharding.make_mesh(1, 8)).trace().lower().compile()
    return hlo.collective_bytes(compiled.as_text())["all-gather"]

  D, F = tiny_config.model.D, tiny_config.model.F
  layer = 4 * (4 * D * D + 2 * D * F)  # bytes
  more = gathered(4) - gathered(2)
  assert more in (2 * layer, 2 * 2 * layer)  # in the pass forward, and perhaps on the way back


def test_a_plan_of_this_machine(commands):
  words = [f"--config={CONFIG}:method=sam", "--config.grad_accumulation_steps=2"]
  found = commands("plan", *words, "--topology=cpu:4", "--peak=1e9", "--utilization=0.5", "--json")
  assert found.code == 0, found.err
  facts = json.loads(found.out)
  c = config_lib.load(f"{CONFIG}:method=sam")
  c.grad_accumulation_steps = 2
  train_step = TrainStep(c, c.data.vocab_size, sharding.make_mesh(1, 4, jax.devices()[:4]))
  assert facts["method"] == "sam" and facts["topology"] == "cpu:4" and facts["fits"] is True
  assert facts["flops_per_device"] == flops.count(train_step.trace().jaxpr) / 4
  state = sum(map(footprint.shard_bytes, jax.tree.leaves(train_step.abstract_state)))
  batch = 8 // 4 * 32 * 3 * 4  # rows, length, three arrays of four bytes
  assert facts["argument_bytes_per_device"] == state + batch
  m = train_step.trace().lower().compile().memory_analysis()
  assert facts["temp_bytes_per_device"] >= m.temp_size_in_bytes > 0
  both = facts["argument_bytes_per_device"] + facts["temp_bytes_per_device"]
  assert facts["peak_bytes_per_device"] == both
  assert facts["hbm_bytes_per_device"] > 0 and facts["collective_bytes_per_device"] > 0
  seconds = 16 * facts["flops_per_device"] / 0.5e9
  assert facts["hours"] == pytest.approx(seconds / 3600)
  assert facts["chip_hours"] == pytest.approx(4 * seconds / 3600)
  text = plan.report(c, facts)
  assert ": fits" in text and "16 steps at 50% of 1e+09 FLOP/s" in text
  assert "DOES NOT FIT; try" in plan.report(c, {**facts, "fits": False})


def test_a_gpu_is_estimated_and_says_so(commands):
  words = [f"--config={CONFIG}", "--config.workdir=x"]
  here = json.loads(commands("plan", *words, "--topology=cpu:1", "--json").out)
  outcome = commands("plan", *words, "--topology=gpu:RTX4090", "--json")
  assert outcome.code == 0, outcome.err
  there = json.loads(outcome.out)
  low, high = there["peak_bytes_range"]
  assert there["estimate"] and there["device_kind"] == "NVIDIA RTX4090" and there["fits"]
  for same in ("argument_bytes_per_device", "flops_per_device", "parameters"):
    assert there[same] == here[same]
  assert here["argument_bytes_per_device"] < low <= there["peak_bytes_per_device"] <= high
  assert high < here["peak_bytes_per_device"]
  assert there["hbm_bytes_per_device"] == int(0.75 * 24_564) << 20
  hours = there["num_train_steps"] * there["flops_per_device"] / (165e12 * 0.4) / 3600
  assert there["hours"] == pytest.approx(hours)


def test_of_a_gpus_memory_jax_takes_a_share(monkeypatch):
  gpu = gpus.GPUS["A100-80GB"]
  assert gpus.pool_bytes(gpu) == 60 * GIB
  monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
  assert gpus.pool_bytes(gpu) == 72 * GIB


def test_rematerialization_widens_the_estimate(tiny_config):
  plain = gpus.estimate(tiny_config, 100, 1100)["peak_bytes_range"]
  tiny_config.model.remat = True
  low, high = gpus.estimate(tiny_config, 100, 1100)["peak_bytes_range"]
  assert plain == [510, 580] and low < plain[0] and plain[1] <= high


def test_what_does_not_fit_is_read_from_the_compilers_words():
  words = "Ran out of memory on HBM, the total memory required for HLO temporaries (20.00G) exceeds"
  assert footprint.bytes_needed(f"RESOURCE_EXHAUSTED: {words} available HBM (15.75G).") == 20 * GIB
  assert footprint.bytes_needed("memory space hbm. Used 38.50G of 15.75G hbm.") == 38.5 * GIB
  assert footprint.bytes_needed("INTERNAL: something else") is None


@pytest.mark.parametrize(
  "words, message",
  [
    (["--topology=v9:2x4"], "unknown topology 'v9:2x4': .* v5e:2x4, .* cpu:8"),
    (["--topology=v5e:many"], "unknown topology 'v5e:many'"),
    (["--topology=cpu:8", "--config.mesh.data=3"], "does not cover 8 .* product 8"),
    (["--topology=cpu:8", "--config.batch_size=20"], "multiple of 8, with batch_size=16 or 24"),
    (["--topology=cpu:8", "--config.model.D=17"], "model.H=2 heads: 16 or 18 would be"),
    (["--topology=cpu:8", "--utilization=2"], "--utilization must be"),
    (["--topology=cpu:8", "--config.opt.roh=1"], "did you mean opt.rho"),
    ([], "--topology"),
  ],
)
def test_bad_requests_are_refused(monkeypatch, words, message):
  monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # which a plan may add to
  with pytest.raises(UsageError, match=message):
    plan.main(["plan", f"--config={CONFIG}", *words])


def test_classes_of_images():
  def known(spec):
    return plan.outputs(config_lib.load(f"configs/vit.py:{spec}"))

  assert (known(""), known("classes=2"), known("source=images:x,classes=5")) == (10, 2, 5)
  with pytest.raises(UsageError, match=r"how many classes images:x has .*--vocab_size=CLASSES"):
    known("source=images:x")


def test_without_libtpu_it_says_what_to_install(commands, tmp_path, monkeypatch):
  (tmp_path / "libtpu.py").write_text("raise ImportError")
  monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)  # set where JAX found libtpu
  monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
  found = commands("plan", f"--config={CONFIG}", "--topology=v5e:2x2")
  assert found.code == 1
  found.says_in_one_line("libtpu", "pip install -e '.[plan]'")


def test_an_impossible_grid_is_refused(monkeypatch):
  def refuse(*_, **__):
    raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: not divisible\nby two")

  monkeypatch.setattr(footprint.topologies, "get_topology_desc", refuse)
  monkeypatch.setattr(jax.config, "update", lambda *_: None)
  monkeypatch.setattr(os, "environ", dict(os.environ))
  with pytest.raises(UsageError, match="'v5e:3x3': not divisible by two; write a grid"):
    footprint.devices_of("v5e:3x3")


def planned(*words):
  """What the command says of a TPU program; the compiler may be slow, so there is time."""
  command = [sys.executable, "-m", "nanosam.plan", *words, "--json"]
  found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
  assert found.returncode == 0, found.stderr
  return json.loads(found.stdout)


@pytest.mark.full
def test_a_paper_size_fits_its_chips():
  facts = planned(f"{PAPER}:size=2M,method=precond_func_sam", "--topology=v5e:2x2")
  assert facts["fits"] and facts["hbm_bytes_per_device"] == 15.75 * GIB
  assert facts["device_kind"] == "TPU v5 lite" and facts["devices"] == 4
  # Twice the parameters in bf16 for each of two passes: forward, and back.
  assert facts["collective_bytes_by_kind"]["all-gather"] <= 1.15 * 2 * 2 * 2 * facts["parameters"]


@pytest.mark.full
def test_the_largest_size_fits_eight_chips_and_a_second_pass_takes_hardly_more():
  adamw, twice = (
    planned(f"{PAPER}:size=1208M,method={method}", "--topology=v5e:2x4")
    for method in ("adamw", "precond_func_sam")
  )
  assert twice["fits"] and twice["peak_bytes_per_device"] <= 9.5 * GIB
  assert twice["peak_bytes_per_device"] <= 1.15 * adamw["peak_bytes_per_device"]
  assert twice["flops_per_device"] <= 2.05 * adamw["flops_per_device"]
  for facts, passes in ((adamw, 1), (twice, 2)):
    moved = facts["collective_bytes_by_kind"]
    assert moved["all-reduce"] < 1e6  # metrics and norms; the embedding's gradient is scattered
    # The parameters in bf16, for each pass: gathered forward and back, their gradient scattered.
    least = passes * 3 * 2 * facts["parameters"]
    assert least <= sum(moved.values()) <= 1.10 * least


def test_what_a_method_remembers_is_counted_by_device(tiny_config):
  c = tiny_config
  found = {}
  for c.opt.method in ("sam", "look_sam"):
    step = TrainStep(c, 96, sharding.make_mesh(1, 8))
    found[c.opt.method] = footprint.remembered(step)
  shards = map(footprint.shard_bytes, jax.tree.leaves(step.abstract_state.params))
  assert found == {"sam": 0, "look_sam": sum(shards)}
