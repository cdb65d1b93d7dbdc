"""Launches on this machine, and what each engine would be sent."""

import json
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tests.fleets.cases import wait

from diloco.cli.main import main
from diloco.errors import DilocoError, FileError, UserError
from diloco.fleets.engine import as_yaml
from diloco.fleets.fleet_file import Fleet, read_launch
from diloco.fleets.launch import planned, resize, start, states, stop
from diloco.simulator.fleet import read_fleet

STORE = "launch.command = 'diloco train laptop --rendezvous s3://bucket/run'"
MACHINES = """
    [[machines]]
    name = "a100"
    count = 2
    launch.spot = true
    launch.arguments = "--own"
    launch.slurm = { partition = "gpu", gres = "gpu:a100:8", time = "12:00:00", qos = "low" }
    launch.skypilot = { accelerators = "A100:8", cloud = "aws", region = "us-east-1" }
    launch.kubernetes = { resources = { "nvidia.com/gpu" = "8" }, node_selector = { gpu = "a100" } }
    launch.ray = { resources = { CPU = 8.0, GPU = 1.0, disk = 1.0 } }
    [[machines]]
    name = "4090"
    count = 1
    """


def fleet_of(folder: Path, text: str) -> Fleet:
    """The fleet of a file with this text."""
    path = folder / "fleet.toml"
    path.write_text(text)
    return read_launch(path)


def started(folder: Path, *, program: str, count: int = 3) -> Fleet:
    """A fleet of machines that run a program of bash."""
    (folder / "program").write_text(program)
    command = f"bash {folder}/program --rendezvous /store"
    text = f"launch = {{ command = '{command}' , directory = '{folder}' }}\n"
    return fleet_of(folder, f"{text}[[machines]]\nname = 'a'\ncount = {count}")


def test_a_launch_is_looked_at_made_larger_and_smaller_and_ended(tmp_path, capsys):
    program = """
        trap 'echo left > $DILOCO_NAME.left; exit 143' TERM
        touch $DILOCO_NAME.here
        while [ $DILOCO_NAME != a-1 ]; do sleep 0.02; done
        exit 3
        """
    directory = tmp_path / "launch"
    fleet = started(tmp_path, program=program)

    def printed(*words: str) -> list[str]:
        main(["launch", *words])
        return capsys.readouterr().out.splitlines()

    def here(*names: str) -> bool:
        return all((tmp_path / f"{name}.here").exists() for name in names)

    *_, hint = printed(str(tmp_path / "fleet.toml"), "--on", "local", "--output", str(directory))
    assert hint == f"next: diloco launch status {directory}"
    wait(lambda: here("a-0", "a-2") and states(directory)["a-1"] == "failed")
    assert states(directory) == {"a-0": "running", "a-1": "failed", "a-2": "running"}
    with pytest.raises(UserError, match="a-0 has not ended: stop the launch"):
        start(fleet, "local", directory)
    assert resize(directory, {"a": 4}) == (("a-3",), ())
    wait(lambda: here("a-3"))
    assert printed("resize", str(directory), "a=1") == ["a-1  stops", "a-2  stops", "a-3  stops"]
    assert {path.stem for path in tmp_path.glob("*.left")} == {"a-2", "a-3"}
    assert printed("status", str(directory)) == ["a-0  running"]
    (tmp_path / "a-2.here").unlink()
    assert printed("resize", str(directory), "a=3") == ["a-1  starts", "a-2  starts"]
    wait(lambda: here("a-2"))
    assert {*stop(directory)} >= {"a-0", "a-2"}
    assert states(directory)["a-0"] == states(directory)["a-2"] == "stopped"
    start(started(tmp_path, program="exit 0", count=1), "local", directory)
    wait(lambda: states(directory) == {"a-0": "finished"})


def test_a_machine_whose_process_was_killed_is_lost_and_one_whose_setup_fails_has_failed(tmp_path):
    directory = tmp_path / "launch"
    fleet = started(tmp_path, program="kill -9 $PPID", count=1)
    start(fleet, "local", directory)
    wait(lambda: states(directory) == {"a-0": "lost"})
    (tmp_path / "fleet.toml").write_text(
        (tmp_path / "fleet.toml").read_text().replace(" ,", ", setup = ['false'],")
    )
    start(read_launch(tmp_path / "fleet.toml"), "local", directory)
    wait(lambda: states(directory) == {"a-0": "failed"})


def test_a_dry_run_leaves_a_launch_that_runs_alone(tmp_path):
    directory, lines = tmp_path / "launch", ["touch here", "until [ -e go ]; do sleep 0.02; done"]
    fleet = started(tmp_path, program="exit 0", count=1)

    def prepared(*lines: str) -> Fleet:
        return replace(fleet, launch=replace(fleet.launch, setup=lines))

    start(prepared(*lines), "local", directory)
    wait((tmp_path / "here").exists)
    planned(prepared(*lines, "touch no", "exit 1"), "local", directory)
    (tmp_path / "go").touch()
    wait(lambda: states(directory) == {"a-0": "finished"}, explain=lambda: states(directory))
    assert not (tmp_path / "no").exists()


def test_a_dry_run_writes_what_would_be_submitted_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fleet_of(tmp_path, STORE + MACHINES)
    main(["launch", "fleet.toml", "--on", "slurm", "--dry-run"])
    lines = capsys.readouterr().out.splitlines()
    directory = Path("launches", "fleet")
    assert lines[:2] == [str(directory / "a100.sbatch"), str(directory / "4090.sbatch")]
    log, batch = (str((directory / name).absolute()) for name in ("a100-%a.log", "a100.sbatch"))
    assert lines[2] == shlex.join(["sbatch", "--parsable", "--array=0-1", f"--output={log}", batch])
    assert {path.name for path in directory.iterdir()} == {"a100.sbatch", "4090.sbatch"}
    for words, sentence in (
        ("status fleet", "fleet holds no launch: "),
        ("stauts fleet", "diloco launch has no 'stauts': did you mean status?"),
        ("other.toml --on slurm", "diloco: other.toml can't be read: No such file"),
        ("fleet.toml", "diloco launch start needs --on"),
        ("resize fleet 4090", "'4090' is not KIND=COUNT"),
    ):
        with pytest.raises(SystemExit):
            main(["launch", *words.split()])
        assert sentence in capsys.readouterr().err


def directives(batch: str) -> dict[str, str]:
    """The options of a batch script, by name."""
    lines = [line.removeprefix("#SBATCH --") for line in batch.splitlines() if line.startswith("#SBATCH ")]
    return dict(line.partition("=")[::2] for line in lines)


def test_slurms_scripts_ask_for_the_machine_and_are_requeued(tmp_path):
    plan = planned(fleet_of(tmp_path, STORE + MACHINES), "slurm", tmp_path / "launch")
    options = directives(plan.files["a100.sbatch"])
    assert {name: options[name] for name in ("partition", "gres", "time", "qos")} == {
        "partition": "gpu",
        "gres": "gpu:a100:8",
        "time": "12:00:00",
        "qos": "low",
    }
    assert options["requeue"] == "" and options["open-mode"] == "append" and options["signal"] == "B:USR1@60"
    assert "partition" not in directives(plan.files["4090.sbatch"])
    group = MACHINES.replace("launch.spot = true", "")
    fleet = fleet_of(tmp_path, f"launch = {{command = 'diloco train laptop', address = 'host:29500'}}\n{group}")
    plan = planned(fleet, "slurm", tmp_path / "group")
    options = directives(plan.files["a100.sbatch"])
    assert options["nodes"] == "2" and "no-requeue" in options and "requeue" not in options
    assert "srun " in plan.files["a100.sbatch"] and not any("--array" in word for c in plan.commands for word in c)


@pytest.mark.parametrize("engine", ["local", "slurm", "kubernetes"])
def test_scripts_are_bash(engine, tmp_path):
    image = 'launch.image = "image"\n' if engine == "kubernetes" else ""
    text = f"{image}launch.setup = ['echo $(hostname) $$']\n{STORE}{MACHINES}"
    plan = planned(fleet_of(tmp_path, text), engine, tmp_path / "launch")
    for name, content in plan.files.items():
        script = content
        if name.endswith(".yaml"):
            script = yaml.safe_load(content)["spec"]["template"]["spec"]["containers"][0]["args"][0]
            # Kubernetes replaces $$ by $, from left to right.
            assert "echo $$(hostname) $$$" in script
            script = script.replace("$$", "$")
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=10)
        assert "echo $(hostname) $$" in script


def test_skypilots_tasks_ask_for_the_machine_and_name_the_replica(tmp_path):
    plan = planned(fleet_of(tmp_path, STORE + MACHINES), "skypilot", tmp_path / "launch")
    task = yaml.safe_load(plan.files["a100.yaml"])
    assert task["resources"] == {"use_spot": True, "accelerators": "A100:8", "infra": "aws/us-east-1"}
    assert task["run"].splitlines()[-1] == (
        'exec diloco train laptop --rendezvous s3://bucket/run --own --name "$DILOCO_NAME"'
    )
    assert yaml.safe_load(plan.files["4090.yaml"])["resources"] == {"use_spot": False}
    names = [shlex.join(command[5:9]) for command in plan.commands]
    assert names == [f"--name launch-{name} --env DILOCO_NAME={name}" for name in ("a100-0", "a100-1", "4090-0")]


def test_kubernetes_jobs_have_an_index_per_replica(tmp_path):
    plan = planned(
        fleet_of(tmp_path, 'launch.image = "image"\n' + STORE + MACHINES), "kubernetes", tmp_path / "run"
    )
    job = yaml.safe_load(plan.files["a100.yaml"])
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert job["metadata"]["name"] == "run-a100" and spec["completionMode"] == "Indexed"
    assert spec["parallelism"] == spec["completions"] == 2
    assert spec["podFailurePolicy"]["rules"][0]["action"] == "Ignore", "a preemption is no failure"
    assert pod["nodeSelector"] == {"gpu": "a100"} and pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["image"] == "image" and container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert 'DILOCO_NAME="a100-$JOB_COMPLETION_INDEX"' in container["args"][0]


def test_a_fixed_group_on_kubernetes_meets_at_its_first_pod(tmp_path):
    machines = MACHINES.replace("launch.spot = true", "launch.processes = 8").replace(
        "count = 1", "count = 1\nlaunch.processes = 8"
    )
    command = "python3 -m diloco train laptop --num-replicas $REPLICAS"
    text = f"launch = {{ command = '{command}', image = 'image', environment = {{ REPLICAS = '3' }} }}\n{machines}"
    plan = planned(fleet_of(tmp_path, text), "kubernetes", tmp_path / "run")
    service = yaml.safe_load(plan.files["service.yaml"])
    assert service["spec"]["clusterIP"] == "None"
    template = yaml.safe_load(plan.files["4090.yaml"])["spec"]["template"]
    assert template["spec"]["subdomain"] == service["metadata"]["name"] == "run"
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    # The shell's own arithmetic, with a torchrun that shows its arguments.
    script = template["spec"]["containers"][0]["args"][0].replace("$$", "$").replace("torchrun ", "echo ")
    variables = {"JOB_COMPLETION_INDEX": "0", "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        ["bash", "-c", script], env=variables, capture_output=True, text=True, timeout=10, check=True
    )
    assert run.stdout.split() == shlex.split(
        "--nnodes 3 --nproc-per-node 8 --node-rank 2 --master-addr run-a100-0.run --master-port 29500 "
        "-m diloco train laptop --num-replicas 3"
    )


def test_sites_of_a_program_of_ones_own_are_joined_by_connect(tmp_path):
    text = "launch = { command = 'python sites.py --leader', address = 'host:29500' }\n"
    machines = MACHINES.replace("launch.spot = true", "launch.processes = 4")
    plan = planned(fleet_of(tmp_path, text + machines), "local", tmp_path / "run")
    meeting = "--master-addr 127.0.0.1 --master-port"
    for name, index, replica, arguments in (
        ("a100", "1", "0", f"--nnodes 2 --nproc-per-node 4 --node-rank 1 {meeting} 29400 sites.py --leader --own"),
        ("4090", "0", "1", f"--nnodes 1 --nproc-per-node 1 --node-rank 0 {meeting} 29401 sites.py --leader"),
    ):
        shown = "echo $DILOCO_ADDRESS $DILOCO_REPLICA $DILOCO_NUM_REPLICAS "
        script = plan.files[f"{name}.sh"].replace("torchrun ", shown)
        command = ["bash", "-c", script, "bash", index]
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, cwd=tmp_path)
        assert run.stdout.split() == ["host:29500", replica, "2", *arguments.split()]


KUBECTL = """#!{python}
import json, sys
from pathlib import Path
with Path("calls").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
PREFIX = "batch.kubernetes.io/job-"
is_applied = '["apply"' in Path("calls").read_text()
deleted = [json.loads(line)[2] for line in Path("calls").read_text().splitlines() if '["delete"' in line]
if sys.argv[1:3] == ["get", "job"]:  # run-4090 has ended before
    ended = dict(type="Failed", status="True")
    print(json.dumps(dict(status=dict(conditions=[ended]))) if sys.argv[3] == "run-4090" else "")
elif sys.argv[1] == "get":
    pods = [("0", "1", "Running"), ("0", "2", "Failed"), ("1", "1", "Succeeded")]
    items = [
        dict(
            kind="Pod",
            metadata=dict(
                labels={{PREFIX + "name": "run-a100", PREFIX + "completion-index": index}},
                creationTimestamp=time,
            ),
            status=dict(phase=phase),
        )
        for index, time, phase in pods
    ]
    jobs = [] if "run-a100" in deleted else ["run-a100", "run-4090"] if is_applied else ["run-4090"]
    items = items if is_applied and jobs else []
    status = dict(conditions=[] if is_applied else [dict(type="Failed", status="True")])
    items += [dict(kind="Job", metadata=dict(name=name), status=status) for name in jobs]
    print(json.dumps(dict(items=items)))
"""
SKY = """#!{python}
import json, sys
from pathlib import Path
with Path("calls").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["jobs", "queue"]:
    rows = [(3, "run-a100-0", "RECOVERING"), (1, "run-a100-0", "FAILED"), (2, "run-a100-1", "RUNNING")]
    if '"launch"' not in Path("calls").read_text():  # as SkyPilot 0.14 does before its first job
        sys.exit("sky.exceptions.ClusterNotUpError: No in-progress managed jobs.")
    print(json.dumps([dict(job_id=i, job_name=name, status=status) for i, name, status in rows]))
"""


@pytest.mark.parametrize(
    ("engine", "program", "script"), [("kubernetes", "kubectl", KUBECTL), ("skypilot", "sky", SKY)]
)
def test_the_engines_programs_are_called_and_their_answers_read(engine, program, script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bin" / program
    path.parent.mkdir()
    path.write_text(script.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=":")
    image = 'launch.image = "image"\n'
    start(fleet_of(tmp_path, image + STORE + MACHINES), engine, tmp_path / "run")
    seen = states(tmp_path / "run")
    expected = {
        "kubernetes": {"a100-0": "failed", "a100-1": "finished", "4090-0": "waiting"},
        "skypilot": {"a100-0": "waiting", "a100-1": "running", "4090-0": "lost"},
    }
    assert seen == expected[engine]
    with pytest.raises(UserError, match=f"{engine} runs a launch of this name, run, from another directory"):
        start(fleet_of(tmp_path, image + STORE + MACHINES), engine, tmp_path / "another" / "run")
    assert resize(tmp_path / "run", {"a100": 3}) == (("a100-2",), ())
    assert resize(tmp_path / "run", {"a100": 1}) == ((), ("a100-1", "a100-2"))
    stop(tmp_path / "run")
    calls = [json.loads(line) for line in Path("calls").read_text().splitlines()]
    if engine == "kubernetes":
        sizes = [json.loads(call[-1])["spec"] for call in calls if call[0] == "patch"]
        assert sizes == [{"parallelism": size, "completions": size} for size in (3, 1)]
        assert [call[2] for call in calls if call[0] == "delete"] == ["run-4090", "run-a100", "run-4090"]
        assert set(states(tmp_path / "run").values()) == {"lost"}, "it may be launched again"
    else:
        cancelled = [call[-1] for call in calls if call[1] == "cancel"]
        assert cancelled == ["run-a100-1", "run-a100-2", "run-a100-0", "run-4090-0"]


def test_an_engine_that_refuses_or_is_not_there_says_so_and_what_was_accepted_is_known(tmp_path, monkeypatch):
    fleet = fleet_of(tmp_path, STORE + MACHINES)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="sbatch is not installed here: launch where Slurm is"):
        start(fleet, "slurm", tmp_path / "run")
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        '#!/bin/bash\ncase "$3" in *a100*) echo 7;; *) echo "no such partition" >&2; exit 1;; esac\n'
    )
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "squeue").write_text("#!/bin/bash\n")
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(Exception, match="Slurm refuses sbatch --parsable --array=0: no such partition"):
        start(fleet, "slurm", tmp_path / "run")
    assert states(tmp_path / "run") == {"a100-0": "lost", "a100-1": "lost"}
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        '#!/bin/bash\n[ "$1 $2" != "get jobs,pods" ] || echo \'{"items": []}\'\n'
        'case "$1 $3" in apply*4090*) exit 1;; esac\n'
    )
    kubectl.chmod(0o755)
    with pytest.raises(DilocoError, match="Kubernetes refuses kubectl apply --filename"):
        start(fleet_of(tmp_path, 'launch.image = "i"\n' + STORE + MACHINES), "kubernetes", tmp_path / "pods")
    assert stop(tmp_path / "pods") == ("a100-0", "a100-1")


@pytest.mark.parametrize(
    ("launch", "machines", "engine", "sentence"),
    [
        (
            "diloco train laptop",
            "launch.spot = true",
            "slurm",
            "a fixed group ends when one of its machines is taken",
        ),
        ("diloco train laptop", "", "skypilot", "machines of several regions meet in a store"),
        ("diloco train laptop", "", "ray", "TorchTrainers of your own"),
        (
            "diloco train laptop --rendezvous store",
            "",
            "skypilot",
            "no other machine of SkyPilot's sees: take a bucket",
        ),
        ("diloco train laptop --rendezvous s3://b/r", "", "kubernetes", "every program runs in a container"),
        ("diloco train laptop --rendezvous s3://b/r --name a", "", "local", "gives all replicas one name"),
        ("diloco train laptop --rendezvous s3://b/r", "launch.processes = 8", "slurm", "processes=8 is for"),
        ("cd there && diloco train laptop", "", "local", "must be one program"),
        ("python", "", "local", "must be diloco train …, or python PROGRAM …"),
        ("diloco train laptop\n--rendezvous s3://b/r", "", "local", "must be one line"),
        ("A=1 diloco train laptop --rendezvous s3://b/r", "", "ray", "A=1 belongs to environment"),
        (
            "diloco train laptop --rendezvous s3://b/r",
            "launch.skypilot = { region = 'us-east-1' }",
            "skypilot",
            "of which cloud",
        ),
        ("diloco train laptop --rendezvous s3://b/r", 'launch.arguments = "a\\nb"', "local", "must be one line"),
        ("./program", "", "local", "must be diloco train …, or python PROGRAM …"),
        ("diloco train 'laptop", "", "local", "command.*can't be read"),
    ],
)
def test_what_can_not_work_is_refused(launch, machines, engine, sentence, tmp_path):
    text = f"launch.command = {json.dumps(launch)}\n[[machines]]\nname = 'a'\ncount = 2\n{machines}"
    with pytest.raises(UserError, match=sentence):
        planned(fleet_of(tmp_path, text), engine, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (STORE + "\n[[machines]]\nname = 'a'\ncount = 1\nstep_second = 1", "unknown field machines.0.step_second"),
        (STORE + "\nlaunch.comand = 'x'" + MACHINES, "unknown field launch.comand"),
        (STORE + "\nnum_param = 3" + MACHINES, "unknown field num_param"),
        (
            STORE + MACHINES + "launch.slurm = { partitions = 'a' }",
            "unknown field machines.1.launch.slurm.partitions",
        ),
        (STORE + MACHINES.replace("4090", "a100"), "two replicas would have the name a100-0"),
        (STORE + "\n[[machines]]\nname = 'a'", "missing required field count"),
        ("num_params = 1e9" + MACHINES, r"add \[launch\] with command"),
        (STORE, "machines"),
    ],
)
def test_a_file_that_is_no_fleet_is_refused_with_the_keys_name(text, sentence, tmp_path):
    with pytest.raises(UserError, match=sentence):
        fleet_of(tmp_path, text)


def test_the_simulator_reads_the_same_file(tmp_path):
    hardware = "step_seconds = 1.0\nup_mbit_s = 100\ndown_mbit_s = 100"
    machines = MACHINES.replace("count = ", f"{hardware}\ncount = ")
    text = f"num_params = 1e9\nstep_tokens = 4096\n{STORE}\n{machines}"
    fleet = fleet_of(tmp_path, text)
    simulated = read_fleet(tmp_path / "fleet.toml")
    assert [(kind.name, kind.count) for kind in simulated.machines] == [
        (kind.name, kind.count) for kind in fleet.machines
    ]
    (tmp_path / "fleet.toml").write_text("machines = 3")
    for read in (read_fleet, read_launch):
        with pytest.raises((FileError, UserError)):
            read(tmp_path / "fleet.toml")


def test_yaml_is_what_any_parser_reads():
    value = {
        "a": [],
        "b": {},
        "c": [[1, 2], {"d": None}],
        "e": "a: b\n#c\n\n  d\n",
        "f": "x\ny",
        "4": True,
        "g": "\t",
    }
    assert yaml.safe_load(as_yaml(value)) == value
    # PyYAML reads it as a text without quotes, too; kubectl, as a number.
    assert as_yaml({"a": "1e3"}) == '"a": "1e3"\n'
