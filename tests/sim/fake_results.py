# SPDX-License-Identifier: Apache-2.0
"""Made-up results of an experiment's runs."""

from __future__ import annotations

from pathlib import Path

from fastagg_sim.config import Config
from fastagg_sim.job_folder import (
    DISTANCE_COLUMNS,
    JOB_COLUMNS,
    MEMORY_COLUMNS,
    METRIC_COLUMNS,
    TIME_COLUMNS,
    TIMING_COLUMNS,
)


def write_fake_results(folder: Path, config: Config) -> None:
    """Write results of every job; accuracy grows with rounds to a level per method and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    timed = config.task.latency is not None
    metrics = [",".join(JOB_COLUMNS + METRIC_COLUMNS + (TIME_COLUMNS if timed else ()))]
    distances = [",".join(JOB_COLUMNS + DISTANCE_COLUMNS)]
    timings = [",".join(JOB_COLUMNS + TIMING_COLUMNS)]
    memory = [",".join(JOB_COLUMNS + MEMORY_COLUMNS)]
    for number, job in enumerate(config.jobs()):
        head = f"{job.method.label},{job.method.rule},{job.dropout.label},{job.seed}"
        for t in range(12):
            accuracy = 0.1 + 0.02 * t + 0.001 * number
            time = f",{(t + 1) * (config.task.max_seconds or 0) / 12},0,0" if timed else ""
            metrics.append(f"{head},{t},{20 * (t + 1)},5,{accuracy:.4f},1.0,,0,{40 - t}{time}")
            distances.append(f"{head},{t},0.5,1.5")
            timings.append(f"{head},{t},0.4,0.1,0.2")
            memory.append(f"{head},{t},{300 + t + 10 * number:.6f}")
        if job.method.rule == "fdms":
            path = folder / "jobs" / job.key
            path.mkdir(parents=True)
            rows = ["client,group,0,1,2", "0,0,,0.9,0.4", "1,0,0.9,,0.5", "2,1,0.4,0.5,"]
            (path / "scores.csv").write_text("\n".join(rows) + "\n")
    (folder / "metrics.csv").write_text("\n".join(metrics) + "\n")
    (folder / "distances.csv").write_text("\n".join(distances) + "\n")
    (folder / "timings.csv").write_text("\n".join(timings) + "\n")
    (folder / "memory.csv").write_text("\n".join(memory) + "\n")
