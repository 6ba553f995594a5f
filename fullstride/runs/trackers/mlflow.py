"""MLflow, through its own client."""

import importlib
import time

from fullstride.runs.trackers.tracked_run import TrackedRun
from fullstride.settings.overrides import flat

STATUS = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MLflow:
    """track=mlflow: a run of an MLflow experiment named as the project.

    `MLFLOW_TRACKING_URI` says where, such as `file:mlruns` or a server's address. Settings are its parameters. A
    resumed run goes on under its identifier; a second value of a step is left out.
    """

    def __init__(self, run: TrackedRun):
        """Start the run, or, if it has made steps before, go on with it."""
        tracking = importlib.import_module("mlflow.tracking")
        self._metric = importlib.import_module("mlflow.entities").Metric
        self._client = client = tracking.MlflowClient()
        self._there: set[tuple[str, int]] = set()
        if identifier := run.known_as("mlflow"):
            self._id = identifier
            client.set_terminated(identifier, STATUS["running"])
            for name in client.get_run(identifier).data.metrics:
                self._there |= {(name, point.step) for point in client.get_metric_history(identifier, name)}
            return
        experiment = client.get_experiment_by_name(run.project)
        where = experiment.experiment_id if experiment else client.create_experiment(run.project)
        self._id = client.create_run(where, run_name=run.name).info.run_id
        for key, value in flat(run.config):
            client.log_param(self._id, key, value)
        run.remember("mlflow", self._id)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values, save those that are there."""
        now = int(1000 * time.time())
        new = {name: value for name, value in values.items() if (name, step) not in self._there}
        if new:
            self._client.log_batch(self._id, metrics=[self._metric(n, v, now, step) for n, v in new.items()])

    def close(self, state: str = "finished") -> None:
        """Set how the run ended."""
        self._client.set_terminated(self._id, STATUS[state])
