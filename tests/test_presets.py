import subprocess
import sys
from itertools import pairwise

from diloco.presets import METHODS, PRESETS, own_settings
from diloco.wire import CODECS


def test_every_method_with_an_outer_step_has_a_preset():
    assert tuple(PRESETS) == METHODS[1:]
    assert all(preset.wire in CODECS for preset in PRESETS.values())


def test_the_first_is_diloco_and_each_of_the_others_changes_one_thing():
    presets = [own_settings(method) for method in PRESETS]
    assert presets[0] == {"fragments": "whole", "overlap_steps": 0, "mixing": 0.0, "wire": "fp32"}
    changes = [{name: b[name] for name in a if a[name] != b[name]} for a, b in pairwise(presets)]
    assert changes == [{"fragments": "strided"}, {"overlap_steps": 1, "mixing": 0.5}, {"wire": "e3m0"}]


def test_presets_formats_and_simulator_need_no_torch():
    modules = "diloco.presets, diloco.simulator.planner, diloco.simulator.timeline, diloco.simulator.wall_clock"
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert process.stdout == "False\n", process.stderr
