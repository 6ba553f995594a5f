"""trackio, whose store is local."""

from fullstride.runs.trackers.tracked_run import TrackedRun


class Trackio:
    """track=trackio: a local SQLite store, `~/.cache/huggingface/trackio` or $TRACKIO_DIR.

    `trackio list runs --project P` and `trackio get metric --project P --run R --metric train/loss` read it. Trackio
    writes from a thread of its own, which warns of its failures and raises none. A run that starts afresh under a used
    name is a second run of that name, and commands mean the newest.
    """

    def __init__(self, run: TrackedRun):
        """Start the run, or, if it has made steps before, go on with the one of that name."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        self._finish, self._storage = trackio.finish, SQLiteStorage
        self._run = trackio.init(run.project, run.name, config=run.config, resume="allow" if run.step else "never")
        self._recorded = SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=self._run.id) or 0

    def log(self, step: int, values: dict[str, float]) -> None:
        """Record the values, save those that are there: a resumed run repeats the steps after its checkpoint."""
        if step <= self._recorded:
            there, run = self._storage.get_metric_values, self._run
            taken = {name for name in values if there(run.project, run.name, name, step=step, run_id=run.id)}
            values = {name: value for name, value in values.items() if name not in taken}
        if values:
            self._run.log(values, step=step)

    def close(self, state: str = "finished") -> None:
        """Wait until trackio has written everything; it keeps no state."""
        self._finish()
