"""Scripts and notebooks that are not ours, run unchanged, must differ from stock in the tokens they forward only.

What this does not exercise: accelerate's own launchers for TPUs and DeepSpeed, which start the same command.
"""

import importlib
import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import harness
import pytest
import torch
import trl
from datasets import Dataset

import trl_padmin
from trl_padmin import PadminGRPOConfig, PadminGRPOTrainer, install, installed, launcher, uninstall
from trl_padmin.__main__ import main as command


GRPOTrainer = trl.GRPOTrainer  # installing must reach this module too
STOCK = {name: getattr(trl, name) for name in launcher.REPLACED}
OWN = [getattr(trl_padmin, name) for name in launcher.REPLACED.values()]


@pytest.fixture(autouse=True)
def process_put_back(monkeypatch, tmp_path):
    """The launcher takes over a process; each test gets it back."""
    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("RANK", raising=False)
    before = set(sys.modules)
    yield
    launcher._uninstall()
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def python(*arguments, cwd=None):
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60)


LOOKUPS = {
    "from import": "from trl import GRPOTrainer as Trainer",
    "attribute": "import trl\nTrainer = trl.GRPOTrainer",
    "star import": "from trl import *\nTrainer = GRPOTrainer",
    "subpackage": "from trl.trainer import GRPOTrainer as Trainer",
    "defining module": "from trl.trainer.grpo_trainer import GRPOTrainer as Trainer",
    "subclass": """
import trl
class Trainer(trl.GRPOTrainer):
    def __init__(self, model, reward_funcs, args, **kwargs):
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
""",
    "keywords to the class's own __init__": """
from trl import GRPOTrainer
class Trainer(GRPOTrainer):
    def __init__(self, **kwargs):
        GRPOTrainer.__init__(self, **kwargs)
""",
    "module of the script": "from recipe import Trainer",
}

SCRIPT = """
{lookup}
import sys
from harness import make_rows, run, tiny_model

if __name__ == "__main__":
    result = run(Trainer, make_rows(), tiny_model(), optimizer_steps=2)
    sys.modules["{results}"].append(result)
"""


def policy_shapes(result):
    return [tuple(forward["ids"].shape) for forward in result.forwards if forward["grad"]]


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_every_way_to_look_a_trainer_up(lookup, tmp_path, monkeypatch, float64_head):
    results = []
    monkeypatch.setitem(sys.modules, "collected_results", results)
    write(tmp_path / "recipe.py", "from trl import GRPOTrainer\nclass Trainer(GRPOTrainer):\n    pass\n")
    script = write(tmp_path / "train.py", SCRIPT.format(lookup=LOOKUPS[lookup], results="collected_results"))
    runpy.run_path(script, run_name="__main__")
    sys.modules.pop("recipe", None)
    assert command(["run", "--token_budget", "70", "--overhead_tokens", "20", script]) == 0
    stock, ours = results
    assert not isinstance(stock.trainer, PadminGRPOTrainer) and isinstance(ours.trainer, PadminGRPOTrainer)
    assert len(ours.gradients) == len(stock.gradients) == 2
    for mine, theirs in zip(ours.gradients, stock.gradients, strict=True):
        assert harness.relative_error(mine, theirs) <= 1e-9
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6, abs=1e-6)  # TRL logs float32
    tokens = [sum(rows * width for rows, width in policy_shapes(result)) for result in results]
    assert 0 < tokens[1] < 0.75 * tokens[0]
    assert max(rows * width for rows, width in policy_shapes(ours) if rows > 1) <= 70
    assert max(rows * width for rows, width in policy_shapes(stock) if rows > 1) > 70


REPORT_ITSELF = """
import json, os, sys
print(json.dumps({
    "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path[0], "package": __package__ or "",
    "is_main": sys.modules["__main__"].__dict__ is globals(), "spec": __spec__ and __spec__.name,
}))
"""


@pytest.mark.parametrize("kind", ["script", "module", "package"])
def test_the_script_sees_what_it_would_see_alone(kind, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "folder"
    monkeypatch.chdir(tmp_path)
    script = write(folder / "tool.py", ("" if kind == "script" else "from . import sibling") + REPORT_ITSELF)
    write(folder / "sibling.py", "")
    write(folder / "__init__.py", "")
    write(folder / "__main__.py", "from . import sibling" + REPORT_ITSELF)
    program = {"script": [script], "module": ["-m", "folder.tool"], "package": ["-m", "folder"]}[kind]
    arguments = ["--token_budget", "7", "-m", "--", "last"]
    alone = python(*program, *arguments, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert command(["run", "--overhead_tokens=5", *program, *arguments]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert seen == json.loads(alone.stdout)
    assert seen["argv"][1:] == arguments and seen["is_main"]


FAILURES = {
    "exception": "def f():\n    raise ValueError('of the script')\nf()\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError from e\n",
    "syntax": "x = 1\ny = = 2\n",
    "import": "import no_such_module_of_mine\n",
}


@pytest.mark.parametrize("failure", FAILURES)
def test_tracebacks_are_the_scripts(failure, tmp_path, capsys):
    script = write(tmp_path / "fails.py", FAILURES[failure])
    alone = python(script)
    assert alone.returncode == 1 and script in alone.stderr
    with pytest.raises(Exception) as caught:
        command(["run", script])
    capsys.readouterr()
    sys.excepthook(caught.type, caught.value, caught.tb)  # as the interpreter does
    assert capsys.readouterr().err == alone.stderr


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("'stopped'", "stopped"), ("None", 0), ("0", 0), ("", 0)])
def test_exit_codes_are_the_scripts(code, status, tmp_path):
    script = write(tmp_path / "exits.py", f"import sys\nsys.exit({code})\n")
    if status:
        with pytest.raises(SystemExit) as caught:
            command(["run", script])
        assert caught.value.code == status
    else:
        assert command(["run", script]) == 0


def test_says_when_no_trainer_was_made(tmp_path, capsys, monkeypatch):
    idle = write(tmp_path / "idle.py", "from trl import GRPOTrainer, DPOTrainer\n")
    assert command(["run", "--token_budget", "4096", idle]) == 0
    started, ended = capsys.readouterr().err.splitlines()
    assert "GRPOTrainer" in started and "token_budget=4096" in started
    assert "the script made none of them" in ended

    failing = write(tmp_path / "failing.py", "raise SystemExit(1)\n")
    with pytest.raises(SystemExit):
        command(["run", failing])
    assert "made none" not in capsys.readouterr().err

    monkeypatch.setenv("RANK", "1")
    assert command(["run", idle]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.delenv("RANK")

    monkeypatch.setitem(sys.modules, "collected_results", [])
    made = write(tmp_path / "made.py", SCRIPT.format(lookup=LOOKUPS["attribute"], results="collected_results"))
    assert command(["run", made]) == 0
    assert "made none" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_script.py"], "there is no script `no_such_script.py`"),
        (["--token_budget", "0", "script.py"], "`token_budget`=0"),
        (["--token_budgt", "9", "script.py"], "--token_budgt"),
        (["--padding_minimization", "script.py"], "script.py"),
        ([], "script"),
    ],
)
def test_wrong_use_is_refused_before_the_script_runs(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "script.py", "raise AssertionError('ran')\n")
    with pytest.raises(SystemExit) as caught:
        command(["run", *arguments])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert launcher._installed is None


def holders():
    """Every loaded module that holds a stock trainer, or what stands in for it; not ours."""
    watched = {id(c) for pair in launcher._stand_ins() for c in pair}
    found = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "trl_padmin":
            held = {k: v for k, v in (getattr(module, "__dict__", None) or {}).items() if id(v) in watched}
            found |= {(name, key): value for key, value in held.items()}
    return found


def test_install_is_complete_idempotent_and_undone_completely(tmp_path, capsys):
    elsewhere = ModuleType("elsewhere")
    elsewhere.GRPOTrainer = STOCK["GRPOTrainer"]
    sys.modules["elsewhere"] = elsewhere
    try:
        before = holders()
        assert {("trl", name) for name in STOCK} <= before.keys()
        assert all(value in STOCK.values() for value in before.values())
        install(token_budget=512)
        replaced = holders()
        aliases = {key for key in before if key[1] not in STOCK}
        assert all(value not in STOCK.values() for key, value in replaced.items() if key not in aliases)
        assert replaced.keys() == before.keys()
        assert elsewhere.GRPOTrainer is GRPOTrainer is trl.GRPOTrainer is not STOCK["GRPOTrainer"]
        install(token_budget=512)
        assert holders() == replaced
        assert [getattr(trl_padmin, name) for name in launcher.REPLACED.values()] == OWN
        write(tmp_path / "imported_meanwhile.py", "from trl import GRPOTrainer\n")
        import imported_meanwhile

        uninstall()
        assert holders() == before | {("imported_meanwhile", "GRPOTrainer"): STOCK["GRPOTrainer"]}
        assert imported_meanwhile.GRPOTrainer is STOCK["GRPOTrainer"]
        uninstall()
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4 and all(line.startswith("trl_padmin: ") for line in lines)
        assert "token_budget=512" in lines[0] and "stock again" in lines[2] and "nothing" in lines[3]
    finally:
        del sys.modules["elsewhere"]


def test_stand_ins_are_the_package_trainers_with_the_stock_signature():
    import inspect

    expected = inspect.signature(STOCK["GRPOTrainer"])
    with installed():
        assert inspect.signature(trl.GRPOTrainer) == expected
        assert trl.GRPOTrainer.__name__ == "GRPOTrainer"
        assert issubclass(trl.GRPOTrainer, PadminGRPOTrainer) and issubclass(trl.GRPOTrainer, STOCK["GRPOTrainer"])
        assert trl_padmin.GRPOTrainer is PadminGRPOTrainer


def trained(trainer_class, **options):
    return harness.run(trainer_class, harness.make_rows(), harness.tiny_model(), **options)


def test_options_of_the_config_come_first():
    with installed(token_budget=70, overhead_tokens=20):
        of_launcher = trained(trl.GRPOTrainer)
        of_config = trained(trl.GRPOTrainer, config_class=PadminGRPOConfig, token_budget=100_000)
    assert max(rows * width for rows, width in policy_shapes(of_launcher) if rows > 1) <= 70
    assert max(rows * width for rows, width in policy_shapes(of_config)) > 70


def test_with_blocks_nest_and_end_with_an_error():
    stand_in = launcher._stand_ins()[0][1]
    with installed(token_budget=100):
        with pytest.raises(KeyError), installed(token_budget=200):
            assert stand_in.padding_defaults.token_budget == 200
            raise KeyError
        assert trl.GRPOTrainer is stand_in and stand_in.padding_defaults.token_budget == 100
    assert trl.GRPOTrainer is STOCK["GRPOTrainer"]


def test_a_class_derived_while_installed_follows():
    with installed():

        class Derived(trl.GRPOTrainer):
            pass

        ours = trained(Derived)
    after, stock = trained(Derived), trained(trl.GRPOTrainer)
    assert policy_shapes(after) == policy_shapes(stock) != policy_shapes(ours)
    assert after.losses == stock.losses


def test_a_class_derived_before_is_named_as_stock(capsys):
    class DerivedEarlier(trl.GRPOTrainer):
        pass

    class WithMixin(trl_padmin.PaddingMinimizationMixin, trl.GRPOTrainer):
        pass

    install()
    line = capsys.readouterr().out
    assert "still stock: " in line and DerivedEarlier.__name__ in line and WithMixin.__name__ not in line


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="token_budgt"):
        install(token_budgt=1)
    with pytest.raises(ValueError, match="`overhead_tokens`=-1"):
        install(overhead_tokens=-1)
    assert trl.GRPOTrainer is STOCK["GRPOTrainer"]


def test_a_trainer_that_something_else_replaced_is_refused(monkeypatch):
    monkeypatch.setattr(launcher, "_stand_ins", launcher._stand_ins.__wrapped__)
    monkeypatch.setattr(trl, "GRPOTrainer", type("PatchedTrainer", (GRPOTrainer,), {}))
    with pytest.raises(RuntimeError, match="PatchedTrainer"):
        install()
    monkeypatch.undo()


def test_importing_changes_nothing_and_loads_nothing():
    code = "import sys, trl_padmin; assert trl_padmin.__all__; print({'trl', 'torch', 'IPython'} & set(sys.modules))"
    assert python("-c", code).stdout.strip() == "set()"
    assert launcher.__name__ in sys.modules and trl.GRPOTrainer is STOCK["GRPOTrainer"]


def test_notebook_extension(capsys, monkeypatch):
    interactive = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython")
    history = pytest.importorskip("IPython.core.history", reason="needs IPython")
    monkeypatch.setattr(history.HistoryManager, "enabled", False)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    shell = interactive.InteractiveShell()

    def cell(code):
        shell.run_cell(code).raise_error()

    cell("from trl import GRPOTrainer\nimport trl")
    cell("%load_ext trl_padmin")
    assert "GRPOTrainer" in capsys.readouterr().out
    assert issubclass(shell.user_ns["GRPOTrainer"], PadminGRPOTrainer)
    cell("import trl_padmin\ntrl_padmin.install(token_budget=64)\nassert trl.GRPOTrainer is GRPOTrainer")
    cell("%unload_ext trl_padmin")
    assert shell.user_ns["GRPOTrainer"] is STOCK["GRPOTrainer"]


# TRL's own script, as installed. Its reward function is the one place of ours that both runs load, so it counts.
REWARDS = """
import json, os
import torch

counted = {"world_size": int(os.environ.get("WORLD_SIZE", 1)), "tokens": 0}

def count(module, args):
    if isinstance(module, torch.nn.Embedding) and torch.is_grad_enabled():
        counted["tokens"] += args[0].numel()
        with open(os.environ["COUNTS"] + os.environ.get("RANK", "0"), "w") as file:
            json.dump(counted, file)

handle = torch.nn.modules.module.register_module_forward_pre_hook(count)

def reward(completion_ids, **kwargs):
    return [float((sum(ids) + 3 * len(ids)) % 7) for ids in completion_ids]
"""

OPTIONS = {
    "dtype": "float32",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_steps": 1,
    "save_steps": 2,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-3,
}
ONLINE = {
    "reward_funcs": "rewards_of_test.reward",
    "num_generations": 4,
    "max_completion_length": 64,
    "beta": 0.1,
    "num_iterations": 2,
}


@pytest.fixture
def script_arguments(tmp_path, monkeypatch):
    """Arguments for TRL's scripts, with a model, data and a reward function in the working directory."""
    monkeypatch.chdir(tmp_path)
    harness.tiny_model(dtype=torch.float32).save_pretrained("model")
    harness.tokenizer().save_pretrained("model")
    write(tmp_path / "rewards_of_test.py", REWARDS)
    pick = random.Random(0)

    def texts(*lengths):
        return [" ".join(str(pick.randrange(2, harness.VOCAB)) for _ in range(length)) for length in lengths]

    prompts = texts(3, 30, 5, 8, 12, 4, 20, 6)
    columns = {
        "online": {"prompt": prompts},
        "sft": {"text": texts(3, 60, 5, 8, 12, 4, 20, 6, 40, 5, 3, 9, 30, 7, 14, 4)},
        "dpo": {
            "prompt": prompts,
            "chosen": texts(5, 9, 60, 3, 6, 12, 4, 8),
            "rejected": texts(4, 12, 50, 7, 3, 9, 5, 6),
        },
    }
    for name, data in columns.items():
        Path(name).mkdir()
        Dataset.from_dict(data).to_json(f"{name}/train.jsonl")

    def arguments(script, output_dir, **changed):
        is_online = script not in columns
        options = {
            "model_name_or_path": "model",
            "dataset_name": "online" if is_online else script,
            "output_dir": output_dir,
            **OPTIONS,
            **(ONLINE if is_online else {}),
        }
        return [part for name, value in (options | changed).items() for part in (f"--{name}", str(value))]

    return arguments


def trainer_state(output_dir):
    return json.loads(Path(output_dir, "checkpoint-3", "trainer_state.json").read_text(encoding="utf-8"))


def logged(output_dir, name):
    return [log[name] for log in trainer_state(output_dir)["log_history"] if name in log]


def counts(output_dir):
    files = sorted(Path().glob(f"{output_dir}-counts*"))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


# Pooled over the tokens of a window, where stock takes the plain mean over its micro-batches; a time; or sums of
# floats, of which the loss and the gradients are compared.
DIFFER = (
    *("clip_ratio/", "entropy", "kl", "logits/", "mean_token_accuracy"),
    "step_time",
    *("loss", "grad_norm", "logps/", "rewards/chosen", "rewards/rejected", "rewards/margins"),
    "padding/",
)


def assert_same_training(stock, ours):
    """Same losses and same everything else in `trainer_state.json`, on fewer tokens."""
    assert len(logged(stock, "loss")) == 3 and len(set(logged(stock, "loss"))) == 3
    for name in ("loss", "grad_norm"):
        assert logged(ours, name) == pytest.approx(logged(stock, name), rel=2e-6)  # float32
    states = [trainer_state(stock), trainer_state(ours)]
    histories = [state.pop("log_history") for state in states]
    assert states[0] == states[1]
    for one, other in zip(*histories, strict=True):
        assert {key for key in other if not key.startswith("padding/")} == one.keys()
        same = {key for key in one if not key.startswith(DIFFER)}
        assert {"learning_rate", "epoch", "step"} <= same
        assert {key: one[key] for key in same} == {key: other[key] for key in same}
    tokens = [sum(each["tokens"] for each in counts(output_dir)) for output_dir in (stock, ours)]
    assert 0 < tokens[1] < 0.8 * tokens[0]
    assert tokens[1] == sum(logged(ours, "padding/forwarded_tokens"))
    return tokens


@pytest.fixture
def run(script_arguments, monkeypatch):
    """Runs a script of TRL in this process, with the launcher unless its output is called stock."""

    def run_script(script, output_dir, **changed):
        monkeypatch.setenv("COUNTS", f"{output_dir}-counts")
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *script_arguments(script, output_dir, **changed)])
        counter = importlib.import_module("rewards_of_test")
        try:
            if output_dir.startswith("stock"):
                runpy.run_module(f"trl.scripts.{script}", run_name="__main__", alter_sys=True)
            else:
                assert command(["run", "-m", f"trl.scripts.{script}", *sys.argv[1:]]) == 0
        finally:
            counter.handle.remove()
            del sys.modules[counter.__name__]

    return run_script


def test_trls_own_script(run):
    run("grpo", "stock")
    run("grpo", "ours")
    assert_same_training("stock", "ours")
    run("grpo", "stock-seed", seed=1)
    with pytest.raises(AssertionError):  # control: the comparison sees other rows
        assert_same_training("stock-seed", "ours")

    def files(output_dir):
        return sorted(str(path.relative_to(output_dir)) for path in Path(output_dir).rglob("*"))

    assert files("ours") == files("stock")
    cards = [Path(name, "README.md").read_text(encoding="utf-8").replace(name, "NAME") for name in ("stock", "ours")]
    lines = [sorted(card.splitlines()) for card in cards]
    assert lines[1] == sorted([*lines[0], "- trl-padmin"])

    for ours, theirs in (("ours-resumed", "stock"), ("stock-resumed", "ours")):
        run("grpo", ours, resume_from_checkpoint=f"{theirs}/checkpoint-2")
    assert logged("ours-resumed", "loss") == pytest.approx(logged("stock-resumed", "loss"), rel=2e-6)
    assert len(logged("ours-resumed", "loss")) == 3
    assert len(logged("ours-resumed", "padding/pad_frac")) == 1


@pytest.mark.parametrize("script", ["rloo", "sft", "dpo"])
def test_other_scripts_of_trl(script, run, capfd):
    run(script, "stock")
    run(script, "ours")
    assert_same_training("stock", "ours")
    assert "- trl-padmin" in Path("ours", "README.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
@pytest.mark.distributed
def test_trls_own_script_on_two_ranks(script_arguments):
    """Stock through `torchrun`, ours through `accelerate launch -m trl_padmin`."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m"]
    accelerate = "accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0"
    accelerate = [*accelerate.split(), "--mixed_precision", "no", "--dynamo_backend", "no", "-m", "trl_padmin", "run"]
    for output_dir, launch in (("stock", torchrun), ("ours", [*accelerate, "--overhead_tokens", "64", "-m"])):
        result = subprocess.run(
            [sys.executable, "-m", *launch, "trl.scripts.grpo", *script_arguments("grpo", output_dir)],
            env=os.environ | {"COUNTS": f"{output_dir}-counts", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert result.returncode == 0, result.stderr[-3000:]
        assert [each["world_size"] for each in counts(output_dir)] == [2, 2]
        assert result.stderr.count("forward almost no padding now (overhead_tokens=64)") == (output_dir == "ours")
    assert_same_training("stock", "ours")
