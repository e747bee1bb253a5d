"""A small study on a Ray cluster of two nodes on this machine, to which something happens meanwhile.

``python ray_study.py FOLDER nothing|worker|node`` exits as the study does. It is a program of its own because a cluster
leaves threads and processes behind, which have no place in the process of the tests.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from ray.cluster_utils import Cluster

from balnorm.cli import main
from folders import trainers

STUDY = ["digits", "--epochs", "25", "--train-limit", "200", "--test-limit", "60", "--width", "4", "--batch-size", "20"]
STUDY += ["--norms", "balnorm", "none", "--seeds", "2"]


def disturb(folder, what, cluster, node):
    """When two runs are in the middle, kill one's process, or take a node away."""
    while True:
        lengths = [len(path.read_text().splitlines()) for path in folder.glob("runs/*/metrics.jsonl")]
        if sum(2 <= length < 20 for length in lengths) >= 2:
            break
        time.sleep(0.05)
    if what == "worker":
        os.kill(trainers(folder)[0], signal.SIGKILL)
    else:
        cluster.remove_node(node, allow_graceful=False)
    print(f"the {what} is gone", flush=True)


if __name__ == "__main__":
    folder, what = Path(sys.argv[1]).absolute(), sys.argv[2]
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = cluster.add_node(num_cpus=1)
    if what != "nothing":
        threading.Thread(target=disturb, args=(folder, what, cluster, node), daemon=True).start()
    code = main(["compare", *STUDY, "--out", str(folder), "--ray", cluster.address])
    cluster.shutdown()
    os._exit(code)
