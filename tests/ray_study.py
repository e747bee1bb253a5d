"""One small study after the other on a Ray cluster of two nodes on this machine, to which something happens meanwhile.

``python ray_study.py FOLDER`` leaves ``FOLDER/nothing``, ``FOLDER/worker`` and ``FOLDER/node``, named for what died,
and exits with the sum of their exit codes. It is a program of its own because a cluster leaves threads and processes
behind, which have no place in the process of the tests.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from ray.cluster_utils import Cluster

import held
from balnorm.bench import cli
from folders import STUDY
from held import gate, trainers, wait_until, waiting


def disturb(study, cluster, node):
    """When two runs are in the middle, kill one's process, or take a node away; then let the other one go on."""
    wait_until(lambda: len(waiting(study)) == 2)
    if study.name == "worker":
        os.kill(trainers(study)[0], signal.SIGKILL)
    else:
        cluster.remove_node(node, allow_graceful=False)
    wait_until(lambda: len(trainers(study)) == 1)
    print(f"the {study.name} is gone", flush=True)
    gate(study).unlink()


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    cli.Resources = held.Resources
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    code = 0
    for what in ("nothing", "worker", "node"):
        study = folder / what
        if what != "nothing":
            gate(study).touch()
            threading.Thread(target=disturb, args=(study, cluster, node), daemon=True).start()
        code += cli.main([*STUDY, "--out", str(study), "--ray", cluster.address])
    cluster.shutdown()
    os._exit(code)
