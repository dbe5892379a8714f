"""Every guarantee has a saboteur: plant one fault at a time in a test build, and its test must fail.

A build with -DPYSSD_FAULTS=ON compiles the faults in (cpp/hook/pyssd-fault.h); PYSSD_FAULT names the one that is active.
The guarding tests first run without a fault, where all must pass, and then once for every fault, where all must fail.

    make sabotage        (python tests/sabotage.py [--build DIR])
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# fault -> what it breaks, and the tests that guard against it (more tests than these may notice)
FAULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "plan-id": (
        "a graph is reused under another plan",
        (
            "tests/test_reuse.py::test_plan_id_takes_part_in_reuse_on_one_context",
            "tests/test_reuse.py::test_plan_id_takes_part_in_reuse_of_the_scout",
        ),
    ),
    "draft-cells": (
        "the draft's cells stay in KV before verify",
        (
            "tests/test_core_session.py::test_output_equals_plain_decoding_with_any_skip_set",
            "tests/test_reuse.py::test_verify_after_a_draft_of_the_same_width_is_the_target",
        ),
    ),
    "accept-wrong": (
        "a wrong token is accepted",
        ("tests/test_core_session.py::test_output_equals_plain_decoding_with_any_skip_set",),
    ),
    "noise-index": (
        "draft and target see the noise of different positions",
        (
            "tests/test_core_session.py::test_every_draft_is_accepted_with_an_empty_skip_set[gumbel]",
        ),
    ),
    "cost-table": (
        "a pass over several tokens is believed to cost twice what it does",
        ("tests/test_cost.py::test_measurement_reproduces_verify_passes",),
    ),
    "plain-arm": (
        "plain decoding is never chosen",
        (
            "tests/test_controller.py::test_where_nothing_pays_two_percent_are_lost_at_most",
            "tests/test_controller.py::test_free_drafts_come_within_two_percent_of_the_best_fixed_choice[0.05-3.0-constant]",
        ),
    ),
    "guard-cells": (
        "a near-tie is settled behind the cells of wide passes",
        ("tests/test_guard.py::test_cells_of_wide_passes_are_written_again",),
    ),
    "recycle-stale": (
        "the recycling table keeps what it learnt first",
        ("tests/test_core_recycle.py::test_entries_follow_the_target",),
    ),
    "kept-graphs": (
        "no graph is kept for a width",
        (
            "tests/test_reuse.py::test_builds_with_rejections_and_changing_widths[draft_lens1]",
            "tests/test_reuse.py::test_rows_do_not_depend_on_which_graph_is_kept[20]",
        ),
    ),
    "guard-off": (
        "the option of the near-tie guard does not reach verification",
        ("tests/test_guard_option.py::test_every_pick_within_the_margin_is_settled[greedy-skip]",),
    ),
    "graph-counter": (
        "the counter of built graphs is frozen",
        ("tests/test_reuse.py::test_one_build_per_context_and_window_of_cells",),
    ),
}

# A plugin for pytest that puts the fault build in front of the installed libraries and core.
PLUGIN = """
import glob, importlib.util, os, sys
BUILD = os.environ["PYSSD_SABOTAGE_BUILD"]
class FaultCore:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "pyssd._core":
            return importlib.util.spec_from_file_location(name, glob.glob(BUILD + "/_core*.so")[0])
sys.meta_path.insert(0, FaultCore)
FAULT = os.environ["PYSSD_FAULT"]
if FAULT == "cost-table":
    from pyssd.cost import CostModel
    stock_table = CostModel.table
    CostModel.table = lambda self, n: [s * (2.0 if w > 1 else 1.0) for w, s in enumerate(stock_table(self, n))]
if FAULT == "guard-off":
    import pyssd.planning
    stock_plan = pyssd.planning.DraftPlan
    pyssd.planning.DraftPlan = lambda *given, **named: stock_plan(*given, **{**named, "guard": 0.0})
if FAULT == "plain-arm":
    import pyssd.controller
    stock_choose = pyssd.controller.Controller.choose
    def choose(self, n_past, drafts, max_len):
        self._always = True
        return stock_choose(self, n_past, drafts, max_len)
    pyssd.controller.Controller.choose = choose
"""


def build(folder: Path) -> None:
    """Build libllama, ggml and the core with the faults compiled in."""
    folder.mkdir(parents=True, exist_ok=True)
    configure = [
        "cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
        "-DPYSSD_FAULTS=ON", f"-DPython_EXECUTABLE={sys.executable}",
    ]  # fmt: skip
    # the environment's own cmake, ninja and pybind11 come first
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ.get('PATH', '')}"
    for command in (configure, ["cmake", "--build", str(folder)]):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
        )
        if done.returncode != 0:
            sys.exit(f"the test build failed:\n{(done.stdout + done.stderr)[-3000:]}")


def run_tests(folder: Path, tests: list[str], fault: str) -> tuple[set[str], set[str], str]:
    """Run tests under a fault ("" = none); returns the passed and the failed ones and pytest's output."""
    (folder / "sabotage_plugin.py").write_text(PLUGIN, encoding="utf-8")
    env = {
        **os.environ,
        "PYSSD_FAULT": fault,
        "PYSSD_SABOTAGE_BUILD": str(folder),
        "PYSSD_LIB_DIR": str(folder / "bin"),
        "PYTHONPATH": str(folder),
        "OMP_WAIT_POLICY": "passive",
    }
    plugins = ["-p", "sabotage_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, "-q", "-rA", "--tb=no", *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    results: dict[str, set[str]] = {"PASSED": set(), "FAILED": set()}
    for kind, name in re.findall(r"^(PASSED|FAILED) (\S+)", done.stdout, flags=re.MULTILINE):
        results[kind].add(name)
    return results["PASSED"], results["FAILED"], done.stdout + done.stderr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "sabotage")
    folder = parser.parse_args().build.resolve()
    print(f"building with faults in {folder.name} ...")
    build(folder)

    guards = sorted({test for _, tests in FAULTS.values() for test in tests})
    passed, failed, said = run_tests(folder, guards, "")
    if failed or not passed:
        print(said[-3000:])
        print(f"without a fault {len(failed)} of the guarding tests fail; nothing can be concluded")
        return 1
    print(f"no fault: {len(passed)} guarding tests pass")

    missed = 0
    for fault, (what, tests) in FAULTS.items():
        _, failed, said = run_tests(folder, list(tests), fault)
        for test in tests:
            caught = [name for name in failed if name == test or name.startswith(test + "[")]
            missed += not caught
            verdict = f"caught by {len(caught)} x" if caught else "NOT CAUGHT by"
            print(f"{fault:14} ({what}): {verdict} {test.split('::')[1]}")
            if not caught:
                print(said[-1500:])
    print(
        f"{len(FAULTS)} faults, {missed} guards failed"
        if missed
        else f"all {len(FAULTS)} faults were caught"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
