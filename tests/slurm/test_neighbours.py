"""Two jobs on the same nodes at once: neither takes a port, a folder or a Ray of the other."""

import re

from tests import cohort
from tests.slurm import jobs


def test_two_jobs_share_their_nodes(slurm):
    jobs.write_experiment(slurm, cohort.raw(slurm.shared, **{"cluster": {"nodes": 2, "gpus_per_node": 2}}, steps=40))
    nodes = ["--ask", 'options=["--nodelist=n0,n1"]']
    both = [jobs.launch(slurm, name, *nodes) for name in ("left", "right")]
    for job in both:
        assert job.end() == "COMPLETED", job.said
        assert "n0, n1 are fit" in job.said and job.rows() == 40
    heads = [re.search(r"Ray's head is at (\S+)", job.said)[1] for job in both]
    assert len(set(heads)) == 2
    logs = [file.read_text() for job in both for file in job.folder.rglob("node-*.log")]
    assert len(logs) == 4 and not any("Ray ended" in text for text in logs)  # none was started a second time
