"""The SLURM of the tests does what a user's SLURM does."""

from __future__ import annotations

import pytest
from cluster.slurm import NODES

from tools.cluster.netns import wait_until

TWO_NODES = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=two.txt
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed 's/^/node /'
srun bash -c 'echo "task $SLURM_PROCID of $SLURM_NTASKS on $(hostname) ($SLURM_JOB_NUM_NODES nodes)"'
exit 75
"""

FORWARDING = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=signal.txt --open-mode=append
bash -c 'trap "echo process got USR2; exit 75" USR2; echo ready; while :; do sleep 0.1; done' &
child=$!
trap 'echo batch step got USR2; kill -USR2 $child' USR2
while kill -0 $child 2>/dev/null; do wait $child; code=$?; done
exit $code
"""

REQUEUED = """#!/bin/bash
#SBATCH --nodes=1 --requeue --output=requeue.txt --open-mode=append
echo "start ${SLURM_RESTART_COUNT:-0} of $SLURM_JOB_ID"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] && scontrol requeue $SLURM_JOB_ID && sleep 1000
"""


def text(slurm, name):
    path = slurm.shared / name
    return path.read_text() if path.exists() else ""


def test_a_job_runs_a_task_on_each_of_two_nodes(slurm):
    job = slurm.wait_for(slurm.sbatch(TWO_NODES), "COMPLETED", "FAILED")
    assert sorted(text(slurm, "two.txt").splitlines()) == [
        "node n1",
        "node n2",
        "task 0 of 2 on n1 (2 nodes)",
        "task 1 of 2 on n2 (2 nodes)",
    ]
    assert (job["JobState"], job["ExitCode"], job["BatchHost"]) == ("FAILED", "75:0", "n1")


def test_srun_of_the_user_reaches_both_nodes(slurm):
    said = slurm.run("srun", "--nodes=2", "--ntasks=2", "--label", "hostname", timeout=60).stdout
    assert sorted(said.splitlines()) == ["0: n1", "1: n2"]
    # It is listed until both nodes have said that nothing is left of it.
    wait_until(lambda: slurm.run("squeue", "--noheader").stdout == "", "an empty queue")


@pytest.mark.parametrize("by", ["limit", "scancel"])
def test_a_signal_reaches_the_batch_step_and_is_passed_on(slurm, by):
    options = ["--signal=B:USR2@57", "--time=1"] if by == "limit" else []
    job = slurm.sbatch(FORWARDING, *options)
    if by == "scancel":
        wait_until(lambda: "ready" in text(slurm, "signal.txt"), f"job {job}")
        slurm.run("scancel", "--batch", "--signal=USR2", str(job))
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT")
    assert ended["ExitCode"] == "75:0"
    assert text(slurm, "signal.txt").splitlines() == ["ready", "batch step got USR2", "process got USR2"]


def test_a_requeued_job_starts_again_and_counts_it(slurm):
    job = slurm.sbatch(REQUEUED)
    wait_until(lambda: slurm.job(job)["Restarts"] == "1", "the requeue")
    slurm.start_now(job)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", timeout=90)
    lines = [line for line in text(slurm, "requeue.txt").splitlines() if not line.startswith("slurmstepd")]
    assert lines == [f"start 0 of {job}", f"start 1 of {job}"], slurm.logs()
    assert (ended["Restarts"], ended["Requeue"]) == ("1", "1")


def test_a_cancelled_job_leaves_nothing_on_its_nodes(slurm):
    script = "#!/bin/bash\n#SBATCH --nodes=2 --output=none.txt\nsrun sleep 1001\n"
    job = slurm.sbatch(script)

    def running():
        found = {node: [words.split("/")[-1] for words in slurm.processes(node).values()] for node in NODES}
        return [node for node in NODES if "sleep 1001" in found[node]]

    wait_until(lambda: running() == list(NODES), f"job {job} on both nodes")
    slurm.run("scancel", str(job))
    slurm.wait_for(job, "CANCELLED")
    wait_until(lambda: not any(slurm.processes(node) for node in NODES), "the end of what ran on the nodes")
