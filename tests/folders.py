"""Run folders made by hand, for tests of what reads them; and a small study, for tests of what trains them."""

import json
from dataclasses import asdict, replace

from balnorm.bench.recipes import get_recipe
from balnorm.bench.training.run import Run

SMALL = {"epochs": 3, "train_limit": 200, "test_limit": 60, "width": 4, "batch_size": 10}
STUDY = ["compare", "digits", "--norms", "balnorm", "batchnorm", "--seeds", "2"]
STUDY += [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def results(study):
    """What came out of every run, without what time it took."""
    return {
        path.parent.name: [
            {name: value for name, value in record.items() if name not in ("seconds", "peak_memory")}
            for record in Run(path.parent).read()
        ]
        for path in sorted(study.glob("runs/*/metrics.jsonl"))
    }


def make_run(
    study, norm="balnorm", seed=0, accuracies=(0.5, 0.8), losses=None, epochs=None, diverged=False, name=None, **changed
):
    """A run of the digits recipe with these test accuracies, epoch by epoch."""
    recipe = replace(get_recipe("digits"), norm=norm, seed=seed, epochs=epochs or len(accuracies), **changed)
    varied = "".join(f"-{key}={value}" for key, value in changed.items())
    run = Run(study / "runs" / (name or f"{norm}{varied}-seed{seed}"))
    run.folder.mkdir(parents=True)
    run.config.write_text(json.dumps(asdict(recipe)))
    start = {"started": "2026-01-01T00:00:00+00:00", "command": ["balnorm", "compare", "digits"], "torch": "2.13.0"}
    run.environment.write_text(json.dumps([start]))
    for epoch, accuracy in enumerate(accuracies, 1):
        loss = 2 * (1 - accuracy) if losses is None else losses[epoch - 1]
        record = {"epoch": epoch, "lr": 0.1, "momentum": 0.9, "train_loss": loss, "train_accuracy": accuracy}
        record |= {"test_loss": loss, "test_accuracy": accuracy, "seconds": 1.5, "peak_memory": 300 * 2**20}
        run.add_record(record)
    if diverged:
        run.add_record({"epoch": len(accuracies) + 1, "diverged": True, "seconds": 1.0, "peak_memory": 1})
    return run
